"""Every error this package raises on purpose; all descend from `LockRouterError`.

"Somebody else holds it" is an answer (`None`, or `LockTimeout` where waiting was asked for); an outage is a
`ShardError`; a lock that ended under its holder is `LockLost`. The three never stand for one another.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

__all__ = [
    "ConfigError",
    "CrossShard",
    "Frozen",
    "InProgress",
    "InvalidKey",
    "KeyCollision",
    "LockLost",
    "LockRouterError",
    "LockTimeout",
    "LossReason",
    "MaintenanceStall",
    "NoToken",
    "NotHeld",
    "NotSeeded",
    "OutcomeUnknown",
    "Overloaded",
    "PoolTimeout",
    "RouterClosed",
    "ShardError",
    "ShardUnavailable",
    "Stale",
    "TopologyMismatch",
    "WouldDeadlock",
]


class LossReason(StrEnum):
    """Why a holder no longer holds, as far as this process can tell."""

    CLOSED = "closed"
    """The connection ended, cause unknown: a server's KILL looks like that."""
    OPERATOR = "operator"
    """An audit row of the shard names this connection: somebody released it by force."""
    KILLED = "killed"
    """This router ended the session at `max_hold`."""
    SILENT = "silent"
    """The server answered nothing for so long that it may have freed the row."""
    DEMOTED = "demoted"
    """The server is no longer the writable primary, or cannot commit any more."""
    TRANSACTION_ENDED = "transaction_ended"
    """The server ended the transaction (DDL, deadlock, COMMIT) while the session lived on."""
    EXPIRED = "expired"
    """A lease passed its own deadline."""
    STOLEN = "stolen"
    """A lease is owned by somebody else."""
    FORKED = "forked"
    """This is a child process: the parent holds the lock."""
    ROUTER_CLOSED = "router_closed"
    """`LockRouter.close()` ran out of patience with the holder."""


class LockRouterError(Exception):
    """The root of every error of this package."""


class ConfigError(LockRouterError, ValueError):
    """A shard file or an argument that configures something is wrong; names the file, the field and the value."""

    def __init__(self, message: str, *, file: str | None = None, field: str | None = None) -> None:
        where = ": ".join(part for part in (file, field) if part)
        super().__init__(f"{where}: {message}" if where else message)
        self.file = file
        self.field = field


class InvalidKey(LockRouterError, ValueError):
    """The lock key is not 1 to 255 bytes of `bytes` or UTF-8 encodable `str`."""


class RouterClosed(LockRouterError):
    """The router was closed; it takes no more calls."""


class NotHeld(LockRouterError):
    """The handle was released already."""


class NoToken(LockRouterError):
    """A degraded lock has no fencing token: it excludes this process only."""


class WouldDeadlock(LockRouterError):
    """Waiting would close a cycle inside this process, or the owner already holds the row in a way that excludes it."""


class CrossShard(LockRouterError):
    """The keys of one transaction live on different shards."""


class KeyCollision(LockRouterError):
    """Two keys share one digest."""


class Overloaded(LockRouterError):
    """`max_waiters` callers of this process already wait for the row."""


class Frozen(LockRouterError):
    """The key's prefix is frozen: the operators' emergency stop."""


class InProgress(LockRouterError):
    """Another caller is computing the result right now."""


class Stale(LockRouterError):
    """A higher fencing token was seen: the caller's lock is of the past."""


class LockTimeout(LockRouterError, TimeoutError):
    """The row stayed busy for the whole timeout. Nothing of the attempt is left on the server."""

    def __init__(self, message: str, *, key: bytes, address: Any, waited: float, holder: str) -> None:
        super().__init__(message)
        self.key = key
        self.address = address
        self.waited = waited
        self.holder = holder


class LockLost(LockRouterError):
    """The lock ended before its holder released it."""

    def __init__(self, message: str, *, key: bytes, reason: LossReason) -> None:
        super().__init__(message)
        self.key = key
        self.reason = reason


class ShardError(LockRouterError):
    """Something about one shard; the driver's error, where there is one, is the `__cause__`."""

    def __init__(self, message: str, *, shard: str) -> None:
        super().__init__(f"shard {shard}: {message}")
        self.shard = shard


class ShardUnavailable(ShardError):
    """The shard does not answer, its breaker is open, or it answers that it may not grant."""


class PoolTimeout(ShardError, TimeoutError):
    """No connection became free, or could be opened, in time. Says nothing about the row."""


class MaintenanceStall(ShardError):
    """A metadata lock (ALTER, a backup) holds the tables: neither busy nor a fault."""


class OutcomeUnknown(ShardError):
    """A reply was lost after sending and what happened could not be settled."""


class TopologyMismatch(ShardError):
    """This process's map, fingerprint or protocol is not the database's."""


class NotSeeded(ShardError):
    """The lock row or its table is missing."""
