"""Who waits for a lease in this process: per key one asks the server, the others queue behind it, in order.

Every public method is one atomic block. After each: a key with a queue has a holder in this process, or a lead.

1. `enter`: a key nobody here holds or waits for makes its caller the lead; others queue.
2. The lead asks the server, then polls. `granted` makes its lease the holder; nobody polls while the holder is here.
3. `leave`, at a deadline, an error or an interruption: a lead passes the lead on to the head of the queue.
4. `freed`, when the holder's lease is released or lost: the head of the queue leads, at once.
5. `mend`, once in a while: who is here still, though an interrupt ended its call, or its hold, is not.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter, deque
from collections.abc import Container
from typing import TYPE_CHECKING, Protocol

from lockrouter.errors import Overloaded
from lockrouter.leases.entry import Entry
from lockrouter.protocol.effects import Waiter

if TYPE_CHECKING:
    from lockrouter.shard import Shard

__all__ = ["Place", "Queues", "Waiting"]


class Place(enum.Enum):
    """Where a caller stands."""

    LEAD = "lead"
    QUEUED = "queued"
    BUSY = "busy"
    """Known to be held, and the caller would not wait."""


class Waiting(Protocol):
    """What the queues know of a caller."""

    name: tuple[int, bytes]
    waiter: Waiter
    shard: Shard
    polls: bool

    @property
    def gone(self) -> bool:
        """True once its call has ended, however it did."""


class _Queue:
    __slots__ = ("held", "lead", "waiting")

    def __init__(self) -> None:
        self.held: Entry | None = None
        self.lead: Waiting | None = None
        self.waiting: deque[Waiting] = deque()


class Queues:
    """The callers of all leases of one router."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[tuple[int, bytes], _Queue] = {}

    def enter(self, caller: Waiting, *, wait: bool, max_waiters: int | None) -> Place:
        """Find the caller its place.

        Raises:
            Overloaded: `max_waiters` callers wait already.
        """
        with self._lock:
            queue = self._queues.get(caller.name)
            if queue is None:
                queue = self._queues[caller.name] = _Queue()
            if queue.held is None and queue.lead is None:
                queue.lead = caller
                return Place.LEAD
            if not wait:
                # A lead that does not poll yet knows no more than this caller: then both ask.
                known = queue.held is not None or (queue.lead is not None and queue.lead.polls)
                return Place.BUSY if known else Place.LEAD
            if max_waiters is not None and len(queue.waiting) >= max_waiters:
                raise Overloaded(f"{max_waiters} callers of this process already wait for this lease")
            queue.waiting.append(caller)
            return Place.QUEUED

    def leads(self, caller: Waiting) -> bool:
        """True once the caller is the one to ask the server."""
        with self._lock:
            queue = self._queues.get(caller.name)
            return queue is not None and queue.lead is caller

    def granted(self, caller: Waiting, entry: Entry) -> None:
        """The caller has the lease."""
        with self._lock:
            queue = self._queues.setdefault(caller.name, _Queue())
            queue.held = entry
            if queue.lead is caller:
                queue.lead = None

    def leave(self, caller: Waiting) -> None:
        """The caller is here no more, whatever it was; idempotent."""
        with self._lock:
            queue = self._queues.get(caller.name)
            if queue is None:
                return
            if queue.lead is caller:
                queue.lead = None
            elif caller in queue.waiting:
                queue.waiting.remove(caller)
            self._next(caller.name, queue)

    def freed(self, entry: Entry) -> None:
        """The lease is released, or lost: whoever is next may ask for it. Idempotent."""
        with self._lock:
            queue = self._queues.get(entry.name)
            if queue is not None and queue.held is entry:
                queue.held = None
                self._next(entry.name, queue)

    def _next(self, name: tuple[int, bytes], queue: _Queue) -> None:
        """Under `_lock`."""
        if queue.held is None and queue.lead is None and queue.waiting:
            # No call stands between the two: an interrupt finds both done, or neither.
            queue.lead = queue.waiting[0]
            del queue.waiting[0]
        if queue.held is None and queue.lead is not None:
            queue.lead.waiter.wake()
        elif queue.held is None and not queue.waiting:
            del self._queues[name]

    def mend(self, leaving: Container[Entry]) -> None:
        """Forget who is not there any more; `leaving`: released leases whose rows are being freed by their callers."""
        with self._lock:
            for name, queue in tuple(self._queues.items()):
                if queue.held is not None and not queue.held.held and queue.held not in leaving:
                    queue.held = None
                if queue.lead is not None and queue.lead.gone:
                    queue.lead = None
                queue.waiting = deque(caller for caller in queue.waiting if not caller.gone)
                self._next(name, queue)

    def holder(self, name: tuple[int, bytes]) -> Entry | None:
        """The lease of this key that this process holds."""
        with self._lock:
            queue = self._queues.get(name)
            return None if queue is None else queue.held

    def wake_all(self) -> None:
        """Have every caller look again: the router was closed."""
        with self._lock:
            for queue in self._queues.values():
                for caller in queue.waiting:
                    caller.waiter.wake()
                if queue.lead is not None:
                    queue.lead.waiter.wake()

    def count(self) -> dict[str, int]:
        """How many callers wait, by shard: those in the queues, and the leads that poll."""
        found: Counter[str] = Counter()
        with self._lock:
            for queue in self._queues.values():
                found.update(caller.shard.id for caller in queue.waiting)
                if queue.lead is not None and queue.lead.polls:
                    found[queue.lead.shard.id] += 1
        return found
