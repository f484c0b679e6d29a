"""SQLAlchemy over sessions that are lent: one engine per shard, which opens no connections of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, event
from sqlalchemy.engine import Engine, ExceptionContext, create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from lockrouter.errors import ConfigError
from lockrouter.guarded import GuardedConnection
from lockrouter.session import Gone

if TYPE_CHECKING:
    from lockrouter.lent import LentSession
    from lockrouter.shard import Shard

__all__ = ["prepare", "wrap"]


def wrap(engine: Engine, session: LentSession) -> Connection:
    """A SQLAlchemy connection on the very connection of a session, in the transaction that is open there."""
    raw: Any = session.connection
    pool = NullPool(lambda: raw, dialect=engine.dialect, reset_on_return=None)
    connection = Connection(engine, pool.connect())
    connection.begin()
    return connection


class _Nobody:
    """The guard of a connection that holds nothing."""

    lost = lost_already = False

    def refuse(self) -> None:
        """Let everything pass."""

    def ended(self, cause: BaseException | None) -> None:
        """Nothing is lost."""


def prepare(shard: Shard, session: LentSession) -> None:
    """Make the shard's engine, and have SQLAlchemy look at the server through a session that holds nothing.

    SQLAlchemy rolls back at the first use of an engine; at the second the row would still be there, at the first not.
    """
    engine = _engine(session.connection)
    session.connection.lend(_Nobody(), ending=True)
    try:
        with engine.connect():
            pass
    except DBAPIError as error:
        raise Gone(str(error.orig)) from error
    finally:
        session.connection.take_back()
    shard.engine = engine


def _engine(first: GuardedConnection) -> Engine:
    connections = [first]

    def creator() -> Any:
        if not connections:
            raise ConfigError("the engine of a transaction opens no connections of its own")
        return connections.pop()

    engine = create_engine("mysql+pymysql://", creator=creator, poolclass=NullPool, pool_reset_on_return=None)
    event.listen(engine, "handle_error", _stay)
    return engine


def _stay(context: ExceptionContext) -> None:
    """Have SQLAlchemy keep a connection that ended: its guard answers whatever is asked of it with `LockLost`."""
    context.is_disconnect = False
