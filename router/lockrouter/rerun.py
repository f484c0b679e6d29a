"""Work under a transaction that is repeated as a whole, and the marker that settles an unknown COMMIT.

The marker is a row that the transaction itself writes last, before its COMMIT. Reading it with a lock waits until the
transaction that wrote it has ended, however late its COMMIT arrives: the row is there if and only if it committed.
"""

from __future__ import annotations

import secrets
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy import Connection

from lockrouter.backoff import jittered
from lockrouter.deadline import GRACE, now
from lockrouter.errors import LockLost, LossReason, OutcomeUnknown, ShardError
from lockrouter.pool import Borrower, Exhausted, PoolClosed
from lockrouter.protocol.effects import Operation, drive
from lockrouter.protocol.packets import Err, Rows
from lockrouter.session import Answered, Gone, Silent
from lockrouter.sql.callers import DROP_MARKER, WRITE_MARKER
from lockrouter.sql.statements import read_marker
from lockrouter.transaction import Keys, Transaction

if TYPE_CHECKING:
    from lockrouter.core import Core
    from lockrouter.shard import Shard

__all__ = ["run"]

Result = TypeVar("Result")

_PAUSE = 0.01
_SETTLE_EVERY = 0.1
_LOOK_FOR = 1.0


def run(
    core: Core, keys: Keys, work: Callable[[Connection], Result], *, attempts: int, timeout: float | None
) -> Result:
    """As `LockRouter.run`."""
    if isinstance(attempts, bool) or not isinstance(attempts, int):
        raise TypeError(f"attempts: expected an int, got {attempts!r}")
    if attempts < 1:
        raise ValueError(f"attempts: at least 1, got {attempts}")
    keys = keys if isinstance(keys, str | bytes) else list(keys)
    for number in range(1, attempts):
        transaction = Transaction(core, keys, timeout)
        try:
            return _attempt(transaction, work)
        except LockLost:
            block = transaction.block
            if not block.lost or block.reason() in (LossReason.FORKED, LossReason.ROUTER_CLOSED):
                raise
        time.sleep(jittered(_PAUSE * number))
    return _attempt(Transaction(core, keys, timeout), work)


def _attempt(transaction: Transaction, work: Callable[[Connection], Result]) -> Result:
    """One whole transaction; LockLost where nothing of it was committed.

    Raises:
        OutcomeUnknown: the COMMIT could not be settled.
    """
    shard, marker = transaction.block.shard, secrets.token_bytes(16)
    spent = shard.spent_markers.popleft() if shard.spent_markers else None
    try:
        with transaction as connection:
            result = work(connection)
            if spent is not None:
                connection.execute(DROP_MARKER, {"id": spent})
            connection.execute(WRITE_MARKER, {"id": marker})
        spent = None
    except OutcomeUnknown as unknown:
        if not _committed(transaction, marker, unknown):
            raise transaction.block.never_committed() from unknown
        spent = None
    finally:
        if spent is not None:
            shard.spent_markers.append(spent)
    shard.spent_markers.append(marker)
    return result


def _committed(transaction: Transaction, marker: bytes, unknown: OutcomeUnknown) -> bool:
    """Whether the marker is there, asked of the shard's primary until it answers.

    Raises:
        OutcomeUnknown: it did not, for as long as a server may take to free what a dead session held, and a bit.
    """
    shard = transaction.block.shard
    until = now() + shard.config.router.ghost_timeout + 2.0
    while True:
        try:
            return drive(_find(shard, marker, min(until, now() + _LOOK_FOR)))
        except PoolClosed:
            raise unknown from None
        except (Gone, Silent, Answered, Exhausted, ShardError):
            if now() >= until:
                raise unknown from None
        shard.poke_control()
        time.sleep(_SETTLE_EVERY)


def _find(shard: Shard, marker: bytes, until: float) -> Operation[bool]:
    borrower = Borrower()
    session = yield from shard.pool.check_out(until, beyond=True, borrower=weakref.ref(borrower))
    try:
        rights = shard.rights
        if rights is None or rights.incarnation != session.incarnation:
            raise Answered(0, "not known to be the shard's primary")
        left = max(0.001, until - now())
        reply = yield from session.exchange(read_marker(session.dialect, marker, left), until + GRACE)
        yield from session.rollback(until + GRACE)
        if isinstance(reply, Err):
            raise Answered(reply.code, reply.message)
        return isinstance(reply, Rows) and len(reply.rows) == 1
    finally:
        shard.pool.give_back(session)
