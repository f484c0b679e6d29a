"""`once`: a result that is computed by one caller of many, stored, and returned to all others.

The steps of `once`:

1. Read the record. One that is alive is the result: a duplicate costs one plain SELECT.
2. Take the lease of the key, of the recipe's own kind. Held by another: `InProgress`.
3. Read the record again: it may have been stored between 1 and 2.
4. Call the function; the lease is kept alive meanwhile.
5. Store its result in one transaction with a share lock on the lease's row, which must still be ours: whoever takes the
   lease over later waits for that, and then sees the record. A record of another caller is never overwritten.
6. Release the lease, whatever happened: an error of the function stores nothing and frees the key at once.

With `transaction=True` there is no lease: the record's own row, locked inside the caller's transaction, excludes the
others, and commits or vanishes with the caller's rows.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lockrouter.errors import InProgress, LockRouterError, LockTimeout
from lockrouter.leases.handle import checked_ttl
from lockrouter.recipes.calling import arguments_of, refuse_coroutines
from lockrouter.recipes.own import Kind, Place, take
from lockrouter.recipes.record import Record
from lockrouter.rerun import run
from lockrouter.sql import recipes as sql

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from lockrouter.core import Core

__all__ = ["MAX_KEEP", "once"]

MAX_KEEP = 10 * 366 * 86400.0
"""Seconds that a result can be kept."""


def in_progress(record: Record) -> InProgress:
    """The error for callers who came while another one computes the result."""
    return InProgress(f"once({record.shown}): another caller is computing the result")


def once(core: Core, key: str | bytes, fn: Callable[..., Any], *, ttl: float, keep: float, transaction: bool) -> Any:
    """As `LockRouter.once`."""
    record = Record(core, key)
    ttl = checked_ttl(ttl)
    _check_keep(keep)
    refuse_coroutines("once", fn)
    core.ready()
    there = record.read()
    if there is not None:
        return json.loads(there.result)
    if transaction:
        return _in_transaction(record, fn, keep)
    return _under_lease(record, fn, ttl, keep)


def _check_keep(keep: float) -> None:
    if isinstance(keep, bool) or not isinstance(keep, int | float):
        raise TypeError(f"keep: expected seconds, got {keep!r}")
    if not 1 <= keep <= MAX_KEEP:
        raise ValueError(f"keep: expected 1 to {MAX_KEEP:.0f} seconds, got {keep!r}")


def _under_lease(record: Record, fn: Callable[[], Any], ttl: float, keep: float) -> Any:
    rule = record.core.config.class_of(record.raw)
    lease = take(Place(record.core, Kind.ONCE, record.key), ttl=ttl, rule=rule)
    if lease is None:
        raise in_progress(record)
    try:
        there = record.read()
        if there is not None:
            text = there.result
        else:
            text = record.encoded(fn, fn(*arguments_of(fn, lease)))
            record.store(lease, text, keep)
    except BaseException as error:
        lease.__exit__(type(error), error, error.__traceback__)
        raise
    # The result is stored: what becomes of the lease now changes nothing.
    with suppress(LockRouterError):
        lease.release()
    return json.loads(text)


def _in_transaction(record: Record, fn: Callable[[Connection], Any], keep: float) -> Any:
    if record.claimed():
        raise in_progress(record)
    values = {"k": record.digest, "key_text": record.raw}

    def work(connection: Connection) -> Any:
        connection.execute(sql.CLAIM_RESULT, values)
        there = connection.execute(sql.LOOK_AT_RESULT, {"k": record.digest}).one()
        record.refuse_collision(there.key_text)
        if there.alive and there.state == sql.DONE:
            return json.loads(there.result)
        text = record.encoded(fn, fn(connection))
        token = connection.info["lock"].tokens[record.key]
        filled = {"owner": secrets.token_bytes(16), "token": token, "keep": int(keep * 1e6), "result": text}
        connection.execute(sql.FILL_RESULT, {"k": record.digest, **filled})
        return json.loads(text)

    try:
        return run(record.core, record.key, work, attempts=3, timeout=None)
    except LockTimeout:
        # The row may be busy for another key that shares it.
        if record.claimed():
            raise in_progress(record) from None
        raise
