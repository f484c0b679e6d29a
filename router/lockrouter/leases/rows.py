"""What is said about rows of leases: by callers to the store, and by the store to them."""

from __future__ import annotations

import enum
from hashlib import blake2b
from typing import NamedTuple

from lockrouter.protocol.effects import Waiter
from lockrouter.session import Answered, Incarnation
from lockrouter.sql.leases import Wanted

__all__ = ["Answer", "Item", "Kind", "Said", "Seen", "Verb", "digest"]


class Kind(enum.IntEnum):
    """Whose lease a row is: no two kinds share a row, so no key of a user can meet one of a recipe."""

    LEASE = 1
    GUARD = 2
    ELECTION = 3
    PERMIT = 4
    SWEEPER = 5
    MIGRATOR = 6
    ONCE = 7


class Verb(enum.IntEnum):
    """What is asked of a row; a batch carries them out in this order."""

    RELEASE = 0
    RENEW = 1
    ACQUIRE = 2
    READ = 3


class Said(enum.Enum):
    """What a store says of a row without having read it."""

    DONE = "done"
    """Renewed or released, as asked."""
    LOCKED = "locked"
    """A transaction of somebody else has locked it; nothing was changed."""


class Seen(NamedTuple):
    """A row as it was read back; times in seconds of the server's clock, negative once they have passed."""

    owner: bytes
    token: int
    kind: int
    key: bytes
    left: float
    """Until it expires."""
    term_left: float
    """Until the term lets anybody but its holder have it."""
    open: bool
    """Its bucket is this shard's, and open."""

    def free_in(self, skew: float) -> float:
        """Seconds until somebody else may have it; 0.0: now."""
        return max(0.0, self.left + skew, self.term_left) if self.owner else 0.0


Answer = Seen | Said | Answered | None
"""None: there is no such row."""


def digest(topology: str, kind: int, key: bytes) -> bytes:
    """The 16 bytes that name a lease in its table."""
    return blake2b(bytes((kind,)) + key, digest_size=16, key=topology.encode()).digest()


class Item:
    """One row and what is asked of it, on its way through a lane; `answer` or `error` once `done`."""

    __slots__ = (
        "answer",
        "done",
        "error",
        "incarnation",
        "left",
        "next_to_wake",
        "row",
        "sent_at",
        "settled",
        "table",
        "verb",
        "waiter",
    )

    def __init__(self, verb: Verb, table: int, row: Wanted) -> None:
        self.verb = verb
        self.table = table
        self.row = row
        self.waiter = Waiter()
        # It has its answer; its batch may still be on its way for others.
        self.settled = False
        self.done = False
        # Its caller has gone: what it gets nobody will have.
        self.left = False
        # Who is to be woken by this caller, once it is awake.
        self.next_to_wake: Item | None = None
        self.answer: Answer = None
        self.error: Exception | None = None
        # Before the first byte was sent; None: certainly nothing was.
        self.sent_at: float | None = None
        self.incarnation: Incarnation | None = None
