"""`lockrouter drain`: a primary that grants nothing any more, so that a planned switchover meets no holder.

1. `lock_meta.drained` names this very server: routers grant nothing on it and reserve nothing more of its clock.
2. When the clock has passed what was reserved, no grant can come any more, also of a router that has yet to notice.
3. Every row that is held then is taken once: its holder has let go.

The next primary is another server, so it opens by itself. The mark stays until `undo` or the next drain, and would
meet the drained server again if that became the primary unplanned: undo it when the switchover is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from lockrouter.admin.connect import administrator, connected, error_code, fetch, run
from lockrouter.admin.meta import buckets_of, check, read_meta
from lockrouter.config import RouterConfig, ShardConfig
from lockrouter.errors import ConfigError, ShardUnavailable
from lockrouter.sql import admin as sql

__all__ = ["Drained", "drain", "undo"]

_BUSY = frozenset({1205, 3572})
_LOOK_EVERY = 0.1


@dataclass(frozen=True, slots=True)
class Drained:
    """What `drain` came to."""

    shard: str
    server: str
    """The identity of the drained server, as `lock_meta` has it."""
    seconds: float
    """How long it took, waiting for holders included."""
    held: int
    """Rows that were held when the last grant was over, and have been let go since, or are in `still_held`."""
    still_held: tuple[int, ...]
    """Slots whose holders have not let go in time. Empty: nobody holds a row of this server any more."""
    leases: int
    """Leases that are held: they are kept, and renewed meanwhile."""


def drain(
    config: RouterConfig,
    admin: RouterConfig | None,
    shard: str,
    *,
    timeout: float = 60.0,
    tell: Callable[[str], None] = lambda _: None,
) -> Drained:
    """The shard's primary grants nothing, and, unless `still_held` names some, none of its rows is held. Repeatable.

    The server stays drained, also after an error or an interrupt, until `undo`, or until it is primary no more.

    Args:
        timeout: seconds to wait for the reserved window to pass, and for the holders.
        tell: called with a line for people at each step.

    Raises:
        ConfigError: the file has no such shard, or the administrator's leads to another server.
        ShardUnavailable: not exactly one of its hosts is writable, the window did not pass in time, or somebody else
            undid the drain meanwhile.
    """
    until = time.monotonic() + timeout
    began = time.monotonic()
    chosen = _chosen(config, shard)
    with connected(*administrator(config, admin, chosen)) as connection:
        identity = _identity(connection)
        _require_same_server(config, admin, chosen, identity)
        check(read_meta(connection), config.topology, shard)
        run(connection, sql.DRAIN, {"identity": identity})
        tell("marked: routers grant nothing more here")
        _await_window(connection, shard, until)
        tell("the reserved window has passed: no grant can come any more")
        tables = range(config.topology.tables)
        held = [(table, slot) for table in tables for slot in _held(connection, config, chosen, table)]
        if held:
            tell(f"{len(held)} rows are held: waiting for their holders")
        still = tuple(slot for table, slot in held if not _take_once(connection, table, slot, until))
        leases = sum(fetch(connection, sql.count_leases(table))[0][0] for table in tables)
        if not _is_drained(connection, identity):
            raise ShardUnavailable("the drain was undone by somebody else meanwhile", shard=shard)
    name = identity.decode("utf-8", "replace")
    return Drained(shard, name, time.monotonic() - began, len(held), still, leases)


def undo(config: RouterConfig, admin: RouterConfig | None, shard: str) -> bool:
    """The shard's primary grants again, within `role_check` of each router; False: it was not drained.

    Raises:
        ConfigError: the file has no such shard, or the administrator's leads to another server.
        ShardUnavailable: not exactly one of its hosts is writable.
    """
    chosen = _chosen(config, shard)
    with connected(*administrator(config, admin, chosen)) as connection:
        _require_same_server(config, admin, chosen, _identity(connection))
        check(read_meta(connection), config.topology, shard)
        return run(connection, sql.UNDRAIN) > 0


def _chosen(config: RouterConfig, shard: str) -> ShardConfig:
    found = next((each for each in config.shards if each.id == shard), None)
    if found is None:
        listed = ", ".join(each.id for each in config.shards)
        raise ConfigError(f"lists no shard {shard!r}; it has {listed}", file=config.path, field="shard")
    return found


def _require_same_server(config: RouterConfig, admin: RouterConfig | None, shard: ShardConfig, found: bytes) -> None:
    """Refuse an administrator's file of another environment, which would say of its servers that all is well."""
    if admin is None:
        return
    with connected(config, shard) as connection:
        if _identity(connection) != found:
            text = f"leads to another server for {shard.id!r} than the application's file"
            raise ConfigError(text, file=admin.path, field="url")


def _identity(connection: Connection) -> bytes:
    value = fetch(connection, sql.read_identity(mariadb=_is_mariadb(connection)))[0][0]
    return value if isinstance(value, bytes) else str(value).encode()


def _is_mariadb(connection: Connection) -> bool:
    return bool(connection.dialect.is_mariadb)  # type: ignore[attr-defined]


def _is_drained(connection: Connection, identity: bytes) -> bool:
    meta = read_meta(connection)
    return meta is not None and meta.drained == identity


def _await_window(connection: Connection, shard: str, until: float) -> None:
    """Wait until the server's clock has passed `clock_high`, which nobody may raise while the mark stands."""
    while (left := float(fetch(connection, sql.WINDOW_LEFT)[0][0])) >= 0:
        if time.monotonic() >= until:
            text = f"drained, but its clock has {left:.1f} s to go to what was reserved"
            raise ShardUnavailable(text, shard=shard)
        time.sleep(min(max(left, 0.01), _LOOK_EVERY))


def _held(connection: Connection, config: RouterConfig, shard: ShardConfig, table: int) -> Iterator[int]:
    """The slots of one table that somebody has locked just now."""
    rows = config.topology.rows_per_bucket
    for bucket in buckets_of(shard):
        if bucket % config.topology.tables == table:
            bounds = {"low": bucket * rows, "high": (bucket + 1) * rows}
            there = {row.slot for row in fetch(connection, sql.list_slots(table), bounds)}
            yield from sorted(there - {row.slot for row in fetch(connection, sql.list_unlocked(table), bounds)})


def _take_once(connection: Connection, table: int, slot: int, until: float) -> bool:
    """Lock a row and let it go: whoever held it before does not any more. False: not by `until`."""
    while True:
        try:
            fetch(connection, sql.take_row(table), {"slot": slot})
            return True
        except DBAPIError as error:
            if error_code(error) not in _BUSY:
                raise
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK_EVERY)
