"""Sweeping: rows that nobody can need any more are deleted, a few at a time, without disturbing traffic.

The steps of `sweep_shard`, for each kind of row:

1. Read a page of rows in the order of the primary key, by a plain SELECT that locks nothing and says which are stale.
2. Delete the stale ones in small transactions, each row by its whole primary key, the condition repeated in the DELETE:
   a row that was taken again meanwhile stays. Rows are locked in the order in which leases lock them.
3. Who has a row locked for a second is given way to: its batch is left for the next time. Pause, and go on.

A lease is stale an hour after it expired, if its token was made as long ago: the row carries the highest token, and a
statement that still waits, or a server whose clock is behind, must not begin below it. A result is stale when its
`keep` is over, a marker of `run` after an hour.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from lockrouter.admin.connect import connected, error_code, fetch, run, translated
from lockrouter.config import RouterConfig, ShardConfig
from lockrouter.sql import recipes as sql

__all__ = ["AGE", "KINDS", "Swept", "sweep_shard"]

_log = logging.getLogger("lockrouter")

AGE = 3600.0
"""Seconds after which a lease or a marker is stale: above every wait of a statement, and every difference of clocks."""
KINDS = ("lease", "once", "marker")
_GIVE_WAY = frozenset({1205, 1213, 3024, 1969})


@dataclass
class Swept:
    """What one pass over a shard came to."""

    shard: str
    deleted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    busy: int = 0
    """Batches that met a locked row and were left for the next pass."""
    skipped: str | None = None
    """Why the shard was not swept."""
    failed: bool = False
    """It should have been, and could not be."""


@dataclass(frozen=True)
class _Kind:
    """One table, and how its stale rows are found and deleted."""

    what: str
    find: str
    delete: str
    first: Mapping[str, Any]
    key: Sequence[str]


def _kinds(tables: int) -> Iterator[_Kind]:
    for number in range(tables):
        first = {"bucket": 0, "k": b""}
        yield _Kind("lease", sql.stale_leases(number), sql.sweep_lease(number), first, ("bucket", "k"))
    yield _Kind("once", sql.STALE_RESULTS, sql.SWEEP_RESULT, {"k": b""}, ("k",))
    yield _Kind("marker", sql.STALE_MARKERS, sql.SWEEP_MARKER, {"k": b""}, ("k",))


def sweep_shard(
    config: RouterConfig,
    shard: ShardConfig,
    *,
    go_on: Callable[[], bool] = lambda: True,
    batch: int = 50,
    page: int = 1000,
    pause: float = 0.02,
) -> Swept:
    """Delete what is stale on one shard, and say what it was.

    Args:
        go_on: asked before each batch; False ends the pass.
        batch: rows deleted in one transaction.
        page: rows read by one statement.
        pause: seconds between two statements that read or batches that delete.

    Raises:
        ShardError: the shard does not answer, or the application's user may not delete there.
    """
    swept = Swept(shard.id)
    rest = threading.Event()
    with connected(config, shard) as connection:
        run(connection, text(sql.SWEEP_SESSION))
        for kind in _kinds(config.topology.tables):
            for stale in _pages(connection, kind, page):
                for at in range(0, len(stale), batch):
                    if not go_on():
                        return swept
                    with translated(shard.id):
                        _delete(connection, kind, stale[at : at + batch], swept)
                    rest.wait(pause)
                rest.wait(pause)
    return swept


def _pages(connection: Connection, kind: _Kind, page: int) -> Iterator[list[dict[str, Any]]]:
    """The keys of stale rows, as many at a time as one page has."""
    place = dict(kind.first)
    bounds = {"page": page, **_age(kind.find)}
    while True:
        rows = fetch(connection, text(kind.find), {**place, **bounds})
        stale = [{name: getattr(row, name) for name in kind.key} for row in rows if row.stale]
        if stale:
            yield stale
        if len(rows) < page:
            return
        place = {name: getattr(rows[-1], name) for name in kind.key}


def _age(statement: str) -> dict[str, int]:
    return {"age": int(AGE * 1e6)} if ":age" in statement else {}


def _delete(connection: Connection, kind: _Kind, keys: list[dict[str, Any]], swept: Swept) -> None:
    statement, bounds, deleted = text(kind.delete), _age(kind.delete), 0
    try:
        with connection.begin():
            for key in keys:
                deleted += connection.execute(statement, {**key, **bounds}).rowcount
    except DBAPIError as error:
        if error_code(error) not in _GIVE_WAY:
            raise
        swept.busy += 1
        return
    swept.deleted[kind.what] += deleted
