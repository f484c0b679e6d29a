"""What this process knows of one lease it holds, from the answer of the server to the release or the loss."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from lockrouter.errors import LossReason
from lockrouter.sql.leases import Wanted

if TYPE_CHECKING:
    from lockrouter.leases.handle import Lease
    from lockrouter.shard import Shard

__all__ = ["TELL_EARLIER", "Entry"]

TELL_EARLIER = 0.1
"""Seconds before its deadline that a lease counts as lost, so that its holder has been told when it comes; a twentieth
of its ttl at most."""


class Entry:
    """One acquisition; keyed by its owner id, never by its key. Everything is changed under the mutex of the leases."""

    __slots__ = (
        "deadline",
        "doubtful",
        "granted_at",
        "handle",
        "keep_alive",
        "key",
        "kill_at",
        "lost",
        "next_at",
        "overdue_at",
        "released",
        "renewing",
        "row",
        "shard",
        "table",
        "thing",
        "ttl",
    )

    def __init__(
        self,
        row: Wanted,
        *,
        table: int,
        shard: Shard,
        key: bytes,
        ttl: float,
        deadline: float,
        granted_at: float,
        keep_alive: bool,
        thing: object,
    ) -> None:
        # The row as it is asked for from now on, owner and token included.
        self.row = row
        self.table = table
        self.shard = shard
        self.key = key
        self.ttl = ttl
        # On this process's clock: from before the request that granted or renewed it.
        self.deadline = deadline
        self.granted_at = granted_at
        self.keep_alive = keep_alive
        self.thing = thing
        # Whoever drops it has given the lease up, whether or not its finaliser could say so.
        self.handle: weakref.ref[Lease] | None = None
        self.lost: LossReason | None = None
        self.released = False
        # A reply was lost on the way here: the request may still be carried out once more.
        self.doubtful = False
        self.renewing = False
        # The only moment the keeper's heap is right about.
        self.next_at = 0.0
        self.overdue_at: float | None = None
        self.kill_at: float | None = None

    @property
    def name(self) -> tuple[int, bytes]:
        """Kind and key: what callers of this process queue for."""
        return self.row.kind, self.row.key

    @property
    def over_at(self) -> float:
        """When it counts as lost unless it is renewed before."""
        return self.deadline - min(TELL_EARLIER, self.ttl / 20)

    @property
    def held(self) -> bool:
        """True while it is neither released nor known to be lost."""
        return not self.released and self.lost is None
