"""What callers' own transactions hold, and how their end is heard of: through events of SQLAlchemy's engine and pool.

The gate may open a moment before the server has freed the row, which is where the next caller then waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, event
from sqlalchemy.engine import Engine, ExceptionContext
from sqlalchemy.pool import Pool

from lockrouter.deadline import now
from lockrouter.errors import LossReason
from lockrouter.gate import Hold, Share
from lockrouter.owners import forget
from lockrouter.protocol.packets import IN_TRANSACTION

if TYPE_CHECKING:
    from lockrouter.acquire import Ask
    from lockrouter.core import Core

__all__ = ["Inside", "has_transaction", "inside_of", "watch"]

_INFO = "lockrouter_held"


class Inside:
    """What one transaction of a caller holds; in the `info` of its DBAPI connection until the transaction ends."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.generation = core.generation
        self.held: list[Share] = []
        self.over = False

    def enter(self, ask: Ask) -> Hold | None:
        """The hold of the same row in this same transaction, counted once more."""
        for share in self.held:
            hold = share.hold
            if hold.slot == ask.slot and hold.lost is None:
                again = Share(hold, ask.key, self.generation)
                self.held.append(again)
                self.core.gates.add_key(hold, ask.key, again)
                return hold
        return None

    def hold(self, hold: Hold, key: bytes) -> None:
        """A row was taken in this transaction: it ends with it."""
        share = Share(hold, key, self.generation)
        self.held.append(share)
        share.attached = True

    def end(self) -> None:
        """Open the gates; the rows themselves the server frees. Idempotent, and may be interrupted anywhere."""
        self.over = True
        core = self.core
        if core.generation is not self.generation:
            return
        for share in reversed(self.held):
            forget(share.hold)
            if share.attached:
                core.gates.uncount(share.hold, share.key, share)
        for hold in {share.hold: None for share in reversed(self.held)}:
            if hold.count:
                # Handles that were nested inside outlive the transaction: the last of them opens the gate.
                core.lose_hold(hold, LossReason.TRANSACTION_ENDED)
            else:
                core.gates.leave(hold)
                hold.shard.stats.transaction.released(now() - hold.granted_at)
        self.held = []


def inside_of(connection: Connection, core: Core) -> Inside:
    """What the present transaction of a connection holds; empty at first."""
    inside = connection.info.get(_INFO)
    if inside is None or inside.over or inside.generation is not core.generation:
        inside = connection.info[_INFO] = Inside(core)
    found: Inside = inside
    return found


def watch(connection: Connection) -> None:
    """Hear of every way in which a transaction of this engine's connections can end."""
    engine: Engine = connection.engine
    if not event.contains(engine, "commit", _on_end):
        event.listen(engine, "commit", _on_end)
        event.listen(engine, "rollback", _on_end)
        event.listen(engine, "commit_twophase", _on_end_twophase)
        event.listen(engine, "rollback_twophase", _on_end_twophase)
        event.listen(engine, "handle_error", _on_error)
    pool: Pool = engine.pool
    if not event.contains(pool, "checkin", _on_return):
        event.listen(pool, "checkin", _on_return)
        event.listen(pool, "close", _on_return)
        event.listen(pool, "invalidate", _on_invalidate)


def _on_end(connection: Connection) -> None:
    if not connection.closed and not connection.invalidated:
        _end(connection.info)


def _on_error(context: ExceptionContext) -> None:
    """An error may have ended the whole transaction (a deadlock, a timeout with `innodb_rollback_on_timeout`): ask."""
    connection = context.connection
    if connection is None or connection.closed or connection.invalidated or _INFO not in connection.info:
        return
    if context.is_disconnect or not has_transaction(connection):
        _end(connection.info)


def has_transaction(connection: Connection) -> bool:
    """Whether the server has a transaction open for a connection, in one round trip; True where that cannot be told."""
    raw: Any = connection.connection.dbapi_connection
    try:
        connection.dialect.do_ping(raw)
    except connection.dialect.loaded_dbapi.Error:
        return False
    status = getattr(raw, "server_status", None)
    return status is None or bool(status & IN_TRANSACTION)


def _on_end_twophase(connection: Connection, xid: object, is_prepared: bool) -> None:
    _on_end(connection)


def _on_return(dbapi_connection: object, record: Any) -> None:
    _end(record.info)


def _on_invalidate(dbapi_connection: object, record: Any, error: BaseException | None) -> None:
    _end(record.info)


def _end(info: dict[str, Any]) -> None:
    inside: Inside | None = info.get(_INFO)
    if inside is not None:
        inside.end()
        info.pop(_INFO, None)
