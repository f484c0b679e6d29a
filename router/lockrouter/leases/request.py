"""What one caller asks for: a lease of a key, for so long, within so much time."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from lockrouter.deadline import Deadline, now
from lockrouter.errors import LockTimeout
from lockrouter.leases.entry import Entry
from lockrouter.leases.rows import digest
from lockrouter.owners import describe, running
from lockrouter.protocol.effects import Waiter
from lockrouter.sql.leases import Wanted

if TYPE_CHECKING:
    from lockrouter.config import ResolvedClass
    from lockrouter.leases.handle import Lease
    from lockrouter.leases.service import Leases
    from lockrouter.routing import Address
    from lockrouter.shard import Shard

__all__ = ["Take"]


class Take:
    """One caller's request for one lease, from its first look at the queue to its entry."""

    def __init__(
        self,
        leases: Leases,
        kind: int,
        key: bytes,
        address: Address,
        *,
        ttl: float,
        deadline: Deadline,
        payload: bytes,
        keep_alive: bool,
        rule: ResolvedClass | None,
        until: float | None = None,
    ) -> None:
        self.leases = leases
        self.kind = kind
        self.key = key
        self.name = (kind, key)
        self.address = address
        self.k = digest(leases.topology, kind, key)
        self.ttl = ttl
        self.deadline = deadline
        self.payload = payload
        self.keep_alive = keep_alive
        self.rule = rule
        self.thing = running()
        self.wait = deadline.timeout > 0
        # The end of everything that is not waiting for another holder.
        self.until = deadline.at if self.wait else until or deadline.started + leases.config.pool.connect_timeout
        self.shard: Shard = leases.shards[address.shard]
        self.waiter = Waiter()
        # True once the lease is known to be held elsewhere: this caller looks again and again.
        self.polls = False
        # What the last answer says of somebody else's lease, or transaction: until when it is in the way.
        self.held_until = self.locked_until = 0.0
        self.entry: Entry | None = None
        self.handle: Lease | None = None
        # What the call consists of: it is over when that is.
        self.operation: weakref.ref[Generator[Any, Any, Any]] | None = None
        self.began()

    def began(self) -> None:
        """Begin a new acquisition: nothing that carries the old owner id can be on its way any more, or it is dead."""
        self.owner = self.leases.owner_ids.new()
        ttl_us = int(self.ttl * 1_000_000)
        # The row as it is asked for.
        self.row = Wanted(self.address.bucket, self.k, self.kind, self.key, self.owner, 0, ttl_us, self.payload)
        # Before the first request with this owner id whose outcome hangs in the air.
        self.since: float | None = None
        self.doubtful = False

    def settled(self) -> None:
        """The row is not the caller's: a request that may still be on its way must never make it the caller's."""
        if self.doubtful:
            self.leases.bury(self.shard, self.address.table, self.row, self.ttl)
            self.began()
        self.since = None

    @property
    def gone(self) -> bool:
        """True once the call that asks has ended, however it did."""
        operation = self.operation() if self.operation is not None else None
        return operation is None or inspect.getgeneratorstate(operation) == inspect.GEN_CLOSED

    def timed_out(self) -> LockTimeout:
        """The error of a lease that stayed held, naming who holds it where that is known."""
        held = self.leases.queues.holder(self.name)
        if held is not None:
            holder = f"{describe(held.thing)} of this process, for {now() - held.granted_at:.3f} s"
        else:
            holder = f"another process; ask: lockrouter holders {self.leases.config.path or 'FILE'} KEY"
        waited = self.deadline.waited()
        return LockTimeout(
            f"the lease of key {self.leases.shown(self.key)} on shard {self.shard.id} stayed held for {waited:.3f} s; "
            f"held by {holder}",
            key=self.key,
            address=self.address,
            waited=waited,
            holder=holder,
        )
