"""Mutual exclusion for high-traffic services on nothing but MySQL: hashed row locks over many databases."""

from __future__ import annotations

import logging

from lockrouter import optimistic
from lockrouter.claim import TransactionLock
from lockrouter.config import RouterConfig, load
from lockrouter.core import Overdue
from lockrouter.errors import (
    ConfigError,
    CrossShard,
    Frozen,
    InProgress,
    InvalidKey,
    KeyCollision,
    LockLost,
    LockRouterError,
    LockTimeout,
    LossReason,
    MaintenanceStall,
    NotHeld,
    NoToken,
    NotSeeded,
    OutcomeUnknown,
    Overloaded,
    PoolTimeout,
    RouterClosed,
    ShardError,
    ShardUnavailable,
    Stale,
    TopologyMismatch,
    WouldDeadlock,
)
from lockrouter.leases.handle import Lease
from lockrouter.lockin import LockIn
from lockrouter.lockset import LockSet
from lockrouter.recipes.election import Election
from lockrouter.recipes.guard import SKIPPED, Guard
from lockrouter.recipes.semaphore import Permit, Semaphore
from lockrouter.router import LockRouter
from lockrouter.routing import Address
from lockrouter.rowlock import RowLock
from lockrouter.transaction import Transaction

__all__ = [
    "SKIPPED",
    "Address",
    "ConfigError",
    "CrossShard",
    "Election",
    "Frozen",
    "Guard",
    "InProgress",
    "InvalidKey",
    "KeyCollision",
    "Lease",
    "LockIn",
    "LockLost",
    "LockRouter",
    "LockRouterError",
    "LockSet",
    "LockTimeout",
    "LossReason",
    "MaintenanceStall",
    "NoToken",
    "NotHeld",
    "NotSeeded",
    "OutcomeUnknown",
    "Overdue",
    "Overloaded",
    "Permit",
    "PoolTimeout",
    "RouterClosed",
    "RouterConfig",
    "RowLock",
    "Semaphore",
    "ShardError",
    "ShardUnavailable",
    "Stale",
    "TopologyMismatch",
    "Transaction",
    "TransactionLock",
    "WouldDeadlock",
    "load",
    "optimistic",
]

logging.getLogger("lockrouter").addHandler(logging.NullHandler())
