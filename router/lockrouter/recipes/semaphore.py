"""`semaphore`: at most so many holders in the whole fleet, each with a permit that is a lease of its own.

A semaphore of N permits is N rows, `name/0` to `name/N-1`, and a queue of `PLACES` rows more, all of one bucket of one
shard, so that one plain SELECT shows all of it. The steps of `acquire`:

1. In the process, callers queue first-in first-out; only the head goes to the shard.
2. The head looks. It may take a permit when more permits are free than waiters of other processes are older than it.
3. Else it takes a place in the queue: a short lease, whose token, made of the server's clock, says since when it waits.
   It looks again with a jittered pause until it is its turn, and gives the place up with its permit, or its deadline.

So no waiter starves: whoever came later, in whatever process, comes later. A waiter that died holds its place for
`PLACE_TTL` seconds at most, a holder that died its permit for one ttl. Where `permits` was lowered, what is held beyond
the new number counts until it is released, so nobody comes in before.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from lockrouter.backoff import jittered
from lockrouter.deadline import Deadline, checked_timeout, now
from lockrouter.errors import InvalidKey, LockLost, LockRouterError, LockTimeout, LossReason
from lockrouter.leases.handle import checked_ttl
from lockrouter.protocol.effects import Waiter
from lockrouter.recipes.own import Held, Kind, OwnLease, Place, holders, take
from lockrouter.routing import MAX_KEY_BYTES, encode

if TYPE_CHECKING:
    from lockrouter.core import Core

__all__ = ["MAX_PERMITS", "PLACES", "PLACE_TTL", "Permit", "Semaphore"]

MAX_PERMITS = 1000
PLACES = 64
"""Processes that can queue for one semaphore in order; where there are more, the others try for a place at random."""
PLACE_TTL = 1.5

_POLL = 0.02
_SLOWEST_POLL = 0.25
_COUNT_AGAIN = 1.0

_lines: weakref.WeakValueDictionary[tuple[int, bytes], Line] = weakref.WeakValueDictionary()
_lines_lock = threading.Lock()


class Permit:
    """A permit that is held; a context manager, whose leaving releases it. Kept alive until then."""

    def __init__(self, line: Line, lease: OwnLease) -> None:
        self._line = line
        self._lease = lease
        self.key = line.name
        self.ttl = lease.ttl
        self.token = lease.token
        """Of the holders that one and the same permit had, the later one's is the higher."""

    @property
    def lost(self) -> bool:
        """True once the permit is known to be lost; no I/O."""
        return self._lease.lost

    def remaining(self) -> float:
        """Seconds the permit is certainly held without a further renewal; 0.0 when lost."""
        return self._lease.remaining()

    def check(self) -> None:
        """One round trip: the permit is held. Raises: LockLost, NotHeld."""
        self._lease.check()

    def on_lost(self, fn: Callable[[LossReason], object]) -> None:
        """Have `fn(reason)` called once when the permit is lost; at once if it is lost already."""
        self._lease.on_lost(fn)

    def release(self) -> None:
        """Give the permit back.

        Raises:
            LockLost: it was lost before.
            NotHeld: it was given back before.
        """
        try:
            self._lease.release()
        finally:
            self._line.hint()

    def __enter__(self) -> Self:
        self._lease.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._lease.__exit__(kind, error, trace)
        finally:
            self._line.hint()

    def __repr__(self) -> str:
        return f"<Permit of {self._line.shown}{' lost' if self.lost else ''}>"


class Semaphore:
    """So many permits in the fleet; see `LockRouter.semaphore`. Thread-safe."""

    def __init__(self, core: Core, name: str | bytes, *, permits: int, ttl: float) -> None:
        if isinstance(permits, bool) or not isinstance(permits, int):
            raise TypeError(f"permits: expected an int, got {permits!r}")
        if not 1 <= permits <= MAX_PERMITS:
            raise ValueError(f"permits: expected 1 to {MAX_PERMITS}, got {permits}")
        self._line = Line.of(core, encode(name))
        self.name = name
        self.permits = permits
        self.ttl = checked_ttl(ttl)

    def acquire(self, timeout: float | None = None) -> Permit:
        """Wait for a permit, take it, and return its handle.

        Args:
            timeout: seconds for the whole call; None: the configured default; 0: takes only what is free now.

        Raises:
            LockTimeout: no permit became free in time.
            ShardError: the semaphore's shard does not answer: nobody gets a permit then.
        """
        rule = self._line.core.config.class_of(self._line.name)
        deadline = Deadline(checked_timeout(timeout, rule.timeout))
        lease = self._line.enter(self.permits, self.ttl, deadline)
        if lease is None:
            raise LockTimeout(
                f"no permit of {self._line.shown} became free in {deadline.waited():.2f} s; {self.permits} may be held",
                key=self._line.name,
                address=self._line.base.address,
                waited=deadline.waited(),
                holder=f"{self.permits} holders",
            )
        return Permit(self._line, lease)

    def try_acquire(self) -> Permit | None:
        """A permit if one is free now and nobody waits for it; else None. An outage raises.

        Raises:
            ShardError: the semaphore's shard does not answer.
        """
        lease = self._line.enter(self.permits, self.ttl, Deadline(0.0))
        return None if lease is None else Permit(self._line, lease)


class _Waiting(NamedTuple):
    """A caller in the process's queue."""

    waiter: Waiter


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
        self._queue: deque[_Waiting] = deque()
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
        with self._lock:
            head = self._queue[0] if self._queue else None
        if head is not None:
            head.waiter.wake()

    def enter(self, permits: int, ttl: float, deadline: Deadline) -> OwnLease | None:
        """Take a permit in turn; None at the deadline."""
        self.core.ready()
        me = _Waiting(Waiter())
        with self._lock:
            if deadline.timeout <= 0 and self._queue:
                return None
            self._queue.append(me)
        try:
            while self._queue[0] is not me:
                if not me.waiter.wait(deadline.at) and deadline.left() <= 0:
                    return None
            return self._lead(me, permits, ttl, deadline)
        finally:
            with self._lock:
                self._queue.remove(me)
            self.hint()

    def _lead(self, me: _Waiting, permits: int, ttl: float, deadline: Deadline) -> OwnLease | None:
        """As the head of the process's queue: look, and take a permit when it is this process's turn."""
        ticket: OwnLease | None = None
        try:
            while True:
                if ticket is not None and ticket.lost:
                    ticket = None
                chosen, behind = self._look(permits, ticket)
                if chosen is not None:
                    lease = take(chosen, ttl=ttl, payload=b"")
                    if lease is not None:
                        return lease
                if deadline.left() <= 0:
                    return None
                if ticket is None:
                    ticket = self._queue_up()
                pause = jittered(min(_SLOWEST_POLL, _POLL * (1 + behind)))
                me.waiter.wait(min(deadline.at, now() + pause))
        finally:
            if ticket is not None:
                with suppress(LockRouterError):
                    ticket.release()

    def _look(self, permits: int, ticket: OwnLease | None) -> tuple[Place | None, int]:
        """The permit that is this caller's to take, if any, and how many waiters are before it."""
        while len(self._permits) < permits:
            self._permits.append(self.base.part(b"\0p%d" % len(self._permits)))
        wanted = self._permits[:permits]
        seen = holders(self.base, [*wanted, *self._places])
        free = [place for place in wanted if place.digest not in seen]
        before = sum(self._is_before(seen.get(place.digest), ticket) for place in self._places)
        free = free[: max(0, len(free) - self._held_beyond(permits))] if free else free
        return (free[before] if before < len(free) else None), before

    def _is_before(self, other: Held | None, ticket: OwnLease | None) -> bool:
        if other is None or (ticket is not None and other.owner == ticket.holder[0]):
            return False
        return ticket is None or other.token < ticket.token

    def _held_beyond(self, permits: int) -> int:
        """How many permits above `permits` are held: handed out when there were more; looked up once a second."""
        if self._counted_for != permits or now() - self._counted_at >= _COUNT_AGAIN:
            self._beyond = self.base.count_parts(b"\0p", permits)
            self._counted_for, self._counted_at = permits, now()
        return self._beyond

    def _queue_up(self) -> OwnLease | None:
        """Take the first free place in the queue across processes."""
        seen = holders(self.base, self._places)
        for place in self._places:
            if place.digest not in seen:
                with suppress(LockLost):
                    return take(place, ttl=PLACE_TTL, payload=b"")
        return None
