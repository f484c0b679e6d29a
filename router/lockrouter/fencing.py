"""Fencing: a protected database refuses what comes with an older token than it has seen."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.orm import Session, scoped_session

from lockrouter.errors import ConfigError, Stale
from lockrouter.sql.callers import RAISE_FENCE

__all__ = ["autocommits", "connection_of", "fence"]

Target = Connection | Session | scoped_session[Any]


def connection_of(target: Target) -> Connection:
    """The connection that a caller's ORM session uses, or the caller's own.

    Raises:
        TypeError: neither.
    """
    if isinstance(target, Connection):
        return target
    if isinstance(target, Session | scoped_session):
        return target.connection()
    raise TypeError(f"expected a SQLAlchemy Connection or Session, got {type(target).__name__}")


def autocommits(connection: Connection) -> bool:
    """True where each statement is known to be a transaction of its own; asks no server."""
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
        return True
    get_autocommit = getattr(connection.connection.dbapi_connection, "get_autocommit", None)
    return bool(get_autocommit is not None and get_autocommit())


def fence(topology: str, target: Target, key: bytes, token: int) -> None:
    """As `LockRouter.fence`."""
    if isinstance(token, bool) or not isinstance(token, int):
        raise TypeError(f"token: expected an int, got {token!r}")
    if not 0 < token < 1 << 63:
        raise ValueError(f"token: expected 1 to 2**63 - 1, got {token}")
    connection = connection_of(target)
    if autocommits(connection):
        raise ConfigError("fence needs a transaction: with autocommit the check says nothing of the next statement")
    digest = blake2b(key, digest_size=16, key=topology.encode()).digest()
    reply = connection.execute(RAISE_FENCE, {"k": digest, "key_text": key, "token": token})
    seen = int(reply.lastrowid or 0)
    if seen > token:
        raise Stale(f"token {token} is stale: {seen} was seen for this key")
