"""The queue for a semaphore's permits: in the process, and across processes.

A semaphore of N permits is N leases, and `PLACES` more for those who wait, all of one bucket of one shard: one plain
SELECT shows all of them. The steps of `Line.enter`:

1. In the process, callers queue first-in first-out; only the head goes to the shard.
2. The head looks. It may take a permit when more permits are free than waiters of other processes are older than it.
3. Else it takes a place in the queue: a short lease, whose token, made of the server's clock, says since when it waits.
   It looks again until it is its turn, and gives the place up with its permit, or its deadline. A permit that comes
   back in this process wakes it at once; between two looks it lets pass a part of the time it has waited already, more
   where many are before it, and never more than until a permit expires.

So no waiter starves: whoever came later, in whatever process, comes later. A waiter that died holds its place for
`PLACE_TTL` seconds at most, a holder that died its permit for one ttl. Where `permits` was lowered, what is held beyond
the new number counts until it is released, so nobody comes in before.
"""

from __future__ import annotations

import os
import random
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from lockrouter.backoff import jittered
from lockrouter.deadline import GRACE, Deadline, now
from lockrouter.errors import InvalidKey
from lockrouter.protocol.effects import Waiter
from lockrouter.recipes.own import Held, Kind, OwnLease, Place, holders, take
from lockrouter.routing import MAX_KEY_BYTES

if TYPE_CHECKING:
    from lockrouter.core import Core

__all__ = ["PLACES", "PLACE_TTL", "Line"]

PLACES = 64
"""Processes that can queue for one semaphore in order; where there are more, the others try for a place at random."""
PLACE_TTL = 1.5

_POLL = 0.004
_SLOWEST_POLL = 0.25
_AFTER_FREE = 0.002
_PART = 8
"""Of the time a caller has waited, this part may pass until it looks again."""
_COUNT_AGAIN = 1.0
_LOOK_AGAIN = 1.0
"""Seconds after which a caller looks whether it is the head of the queue: an interrupt may have cost it its wake-up."""

_lines: weakref.WeakValueDictionary[tuple[int, bytes], Line] = weakref.WeakValueDictionary()
_lines_lock = threading.Lock()


def _after_fork_in_child() -> None:
    global _lines_lock
    _lines_lock = threading.Lock()
    _lines.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


class _Waiting:
    """A caller in the process's queue, as long as its call lasts, however that ends."""

    __slots__ = ("__weakref__", "waiter")

    def __init__(self) -> None:
        self.waiter = Waiter()


class _Seen(NamedTuple):
    """What one look at the shard says to one caller."""

    permit: Place | None
    """One that is the caller's to take."""
    before: int
    """How many waiters are before it."""
    places: list[Place]
    """Those in the queue that are free."""
    expiry: float
    """Seconds until the first of the permits is to be had, unless it is renewed."""


class Line:
    """The callers of this process who want a permit of one semaphore; shared by all its `Semaphore` objects."""

    def __init__(self, core: Core, name: bytes) -> None:
        if len(name) > MAX_KEY_BYTES - 8:
            raise InvalidKey(f"a semaphore's name has 1 to {MAX_KEY_BYTES - 8} bytes, not {len(name)}")
        self.core = core
        self.name = name
        self.shown = core.shown(name)
        self.base = Place(core, Kind.PERMIT, name)
        self._generation = core.generation
        self._lock = threading.Lock()
        self._queue: deque[weakref.ref[_Waiting]] = deque()
        self._places = [self.base.part(b"\0q%d" % number) for number in range(PLACES)]
        self._permits: list[Place] = []
        self._beyond = 0
        self._counted_at = -_COUNT_AGAIN
        self._counted_for = 0

    @classmethod
    def of(cls, core: Core, name: bytes) -> Line:
        """The line of that name of this router."""
        with _lines_lock:
            found = _lines.get((id(core), name))
            if found is None or found.core is not core or found._generation is not core.generation:
                found = _lines[id(core), name] = cls(core, name)
            return found

    def hint(self) -> None:
        """A permit may be free: the head of the queue looks at once."""
        head = self._head()
        if head is not None:
            head.waiter.wake()

    def _head(self) -> _Waiting | None:
        with self._lock:
            while self._queue:
                head = self._queue[0]()
                if head is not None:
                    return head
                del self._queue[0]
            return None

    def enter(self, permits: int, ttl: float, deadline: Deadline) -> OwnLease | None:
        """Take a permit in turn; None at the deadline."""
        self.core.ready()
        if deadline.timeout <= 0 and self._head() is not None:
            return None
        me = _Waiting()
        place = weakref.ref(me)
        try:
            with self._lock:
                self._queue.append(place)
            while self._head() is not me:
                if deadline.left() <= 0:
                    return None
                me.waiter.wait(min(deadline.at, now() + _LOOK_AGAIN))
            return self._lead(me, permits, ttl, deadline)
        finally:
            with self._lock:
                if place in self._queue:
                    self._queue.remove(place)
            self.hint()

    def _lead(self, me: _Waiting, permits: int, ttl: float, deadline: Deadline) -> OwnLease | None:
        """As the head of the process's queue: look, and take a permit when it is this process's turn."""
        ticket: OwnLease | None = None
        began = now()
        try:
            looked = False
            while not looked or deadline.left() > 0:
                if ticket is not None and ticket.lost:
                    ticket = None
                until = self._patience(deadline)
                seen = self._look(permits, ticket, until)
                looked = True
                if seen.permit is not None:
                    lease = take(seen.permit, ttl=ttl, until=until + GRACE)
                    if lease is not None:
                        return lease
                if deadline.left() <= 0:
                    return None
                if ticket is None and seen.places:
                    # Its token, not its number, says who came first.
                    ticket = take(random.choice(seen.places), ttl=PLACE_TTL, until=until + GRACE)
                pause = max(_POLL, (now() - began) / _PART) * (1 + seen.before // permits)
                me.waiter.wait(min(deadline.at, now() + min(jittered(min(pause, _SLOWEST_POLL)), seen.expiry)))
            return None
        finally:
            if ticket is not None:
                ticket.drop()

    def _patience(self, deadline: Deadline) -> float:
        """The end of one question to the shard."""
        least = now() + self.core.config.pool.connect_timeout
        return deadline.at if deadline.timeout > 0 else least

    def _look(self, permits: int, ticket: OwnLease | None, until: float) -> _Seen:
        """What is free, and who is before this caller; one question to the shard."""
        while len(self._permits) < permits:
            self._permits.append(self.base.part(b"\0p%d" % len(self._permits)))
        wanted = self._permits[:permits]
        seen = holders(self.base, [*wanted, *self._places], until)
        free = [place for place in wanted if place.digest not in seen]
        before = sum(self._is_before(seen.get(place.digest), ticket) for place in self._places)
        free = free[: max(0, len(free) - self._held_beyond(permits, until))] if free else free
        left = [seen[place.digest].left for place in wanted if place.digest in seen]
        return _Seen(
            # Those who may have one take different ones, more often than not.
            permit=random.choice(free[before:]) if before < len(free) else None,
            before=before,
            places=[place for place in self._places if place.digest not in seen],
            expiry=min(left, default=_SLOWEST_POLL) + self.core.config.router.clock_skew + _AFTER_FREE,
        )

    def _is_before(self, other: Held | None, ticket: OwnLease | None) -> bool:
        if other is None or (ticket is not None and other.owner == ticket.holder[0]):
            return False
        return ticket is None or other.token < ticket.token

    def _held_beyond(self, permits: int, until: float) -> int:
        """How many permits above `permits` are held: handed out when there were more; looked up once a second."""
        if self._counted_for != permits or now() - self._counted_at >= _COUNT_AGAIN:
            self._beyond = self.base.count_parts(b"\0p", permits, until)
            self._counted_for, self._counted_at = permits, now()
        return self._beyond
