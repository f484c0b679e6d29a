"""The sessions of one shard: at most `size` of them, given out last-in first-out, waited for first-in first-out.

Row locks and transactions count together and use sessions of their own lane: an idle session of the other lane is
closed to make room. Connections are opened by the caller that needs one, outside every mutex; a session that comes back
goes to the longest waiter, who accepts or refuses it in one step, so that nothing is given to a caller that has left.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from lockrouter.deadline import now
from lockrouter.protocol.effects import WAIT, Operation, Waiter
from lockrouter.session import ROWS, Session, State

__all__ = ["Exhausted", "Pool", "PoolClosed"]

_KEPT = (State.IDLE, State.ROLLBACK_SENT)
_LOOK_AFTER = 0.2
"""Seconds a session may have been idle before a check-out looks at its socket first."""


class Exhausted(Exception):
    """No session became free in time, or the owner's allowance beyond the pool's size is used up."""


class PoolClosed(Exception):
    """The pool is closed."""


class _Claim:
    """A place in the queue: filled with a session, or with leave to open one (`session` None)."""

    __slots__ = ("filled", "lane", "session", "waiter")

    def __init__(self, lane: int) -> None:
        self.lane = lane
        self.waiter = Waiter()
        self.filled = False
        self.session: Session | None = None


class Pool:
    """Sessions of one shard. The openers, one per lane, open a session; they are called without any mutex held."""

    def __init__(self, size: int, *openers: Callable[[float], Operation[Session]]) -> None:
        self.size = size
        self._openers = openers
        self._lock = threading.Lock()
        self._idle: tuple[list[Session], ...] = tuple([] for _ in openers)
        self._queue: deque[_Claim] = deque()
        self._total = 0
        self._closed = False
        self.sessions: set[Session] = set()

    @property
    def closed(self) -> bool:
        """True once it gives out nothing any more."""
        return self._closed

    def check_out(
        self,
        until: float,
        *,
        wait: bool = True,
        beyond: bool = False,
        prefer: Session | None = None,
        fresh: bool = False,
        lane: int = ROWS,
        borrower: object = None,
    ) -> Operation[Session]:
        """Return a session for the caller alone, opening one where none is idle and the size permits.

        Args:
            until: the end of waiting and connecting, on the package's clock.
            wait: False: never wait for another caller's session.
            beyond: the caller holds a session of this pool already: it may exceed the size, by as much again, and
                never waits.
            prefer: taken if it is idle.
            fresh: never an idle one.
            lane: what for; see `Session.lane`.
            borrower: whose call this is, for `borrowed`.

        Raises:
            Exhausted: none in time.
            PoolClosed: the pool is closed.
            Whatever opening raises.
        """
        claim: _Claim | None = None
        # True while a place is counted for this call that has no session yet; an interrupt gives it back, too.
        place = False
        try:
            with self._lock:
                if self._closed:
                    raise PoolClosed
                session = None if fresh else self._take_idle(prefer, lane, borrower)
                if session is None:
                    limit = self.size * 2 if beyond else self.size
                    if self._total < limit and not (self._queue and not beyond):
                        self._total += 1
                        place = True
                    elif self._total <= limit and self._evict():
                        place = True  # nobody queues while a session is idle: the place is the caller's
                    elif beyond or not wait:
                        raise Exhausted
                    else:
                        claim = _Claim(lane)
                        self._queue.append(claim)
            if claim is not None:
                session = yield from self._wait(claim, until)
                place = session is None
            if session is None:
                session = yield from self._open(until, lane, borrower)
                place = False
        except BaseException:
            if place:
                self._vacate()
            raise
        session.borrower = borrower
        return session

    def take(self, prefer: Session | None, lane: int, borrower: object, at: float) -> Session | None:
        """Return an idle session at once, `prefer` if that is one; None: `check_out` has to say. `at` is now."""
        with self._lock:
            if self._closed:
                return None
            idle = self._idle[lane]
            if idle and (prefer is None or idle[-1] is prefer) and at - idle[-1].answered_at < _LOOK_AFTER:
                # No call stands between these: an interrupt finds the session in the list, or by its borrower.
                session = idle[-1]
                session.borrower = borrower
                del idle[-1]
                return session
            return self._take_idle(prefer, lane, borrower)

    def _take_idle(self, prefer: Session | None, lane: int, borrower: object) -> Session | None:
        """Under `_lock`: a live idle session, looked at when it has been idle for long."""
        idle = self._idle[lane]
        if prefer is not None and prefer in idle:
            at = idle.index(prefer)
            idle[at], idle[-1] = idle[-1], prefer
        while idle:
            # No call stands between these: an interrupt finds the session in the list, or by its borrower.
            session = idle[-1]
            session.borrower = borrower
            del idle[-1]
            # Looking never waits: it is one poll of the kernel, and only for sessions nobody used just now.
            if now() - session.answered_at < _LOOK_AFTER or session.drain():
                return session
            session.borrower = None
            self._total -= 1
            self.sessions.discard(session)
        return None

    def _evict(self) -> bool:
        """Under `_lock`: end an idle session of any lane, to open another on its place."""
        for idle in self._idle:
            if idle:
                session = idle.pop(0)
                self.sessions.discard(session)
                session.die()
                return True
        return False

    def borrowed(self, borrower: object) -> list[Session]:
        """The sessions that are out on this call."""
        return [session for session in tuple(self.sessions) if session.borrower is borrower]

    def _wait(self, claim: _Claim, until: float) -> Operation[Session | None]:
        try:
            yield (WAIT, claim.waiter, until)
        except BaseException:
            self._withdraw(claim, keep=False)
            raise
        if not self._withdraw(claim, keep=True):
            raise PoolClosed if self._closed else Exhausted
        return claim.session

    def _withdraw(self, claim: _Claim, *, keep: bool) -> bool:
        """Leave the queue; True when the claim had been filled. Without `keep` what it holds goes to the next."""
        with self._lock:
            if not claim.filled:
                if claim in self._queue:
                    self._queue.remove(claim)
                return False
        if not keep:
            if claim.session is not None:
                self.give_back(claim.session)
            else:
                self._vacate()
        return True

    def _open(self, until: float, lane: int, borrower: object) -> Operation[Session]:
        """Open a session on a place that is counted already."""
        session = yield from self._openers[lane](until)
        session.borrower = borrower
        with self._lock:
            closed = self._closed
            if not closed:
                self.sessions.add(session)
        if closed:
            session.close()
            raise PoolClosed
        return session

    def _vacate(self) -> None:
        """One place less is taken: the longest waiter may open a session on it."""
        with self._lock:
            if self._queue and self._total <= self.size:
                self._fill(None)
            else:
                self._total -= 1

    def _fill(self, session: Session | None) -> None:
        claim = self._queue.popleft()
        claim.session = session
        claim.filled = True
        claim.waiter.wake()

    def give_back(self, session: Session, lease: int | None = None) -> None:
        """Return a session: kept when it is idle or its ROLLBACK is on the way, closed in any other state.

        With `lease`, the number it had when it was taken, a second return of it changes nothing.
        """
        keep = session.state in _KEPT
        with self._lock:
            if lease is not None and session.lease != lease:
                return
            session.lease += 1
            session.borrower = None
            session.fresh = False
            if keep and not self._closed and self._total <= self.size:
                if not self._queue:
                    self._idle[session.lane].append(session)
                    return
                if self._queue[0].lane == session.lane:
                    self._fill(session)
                    return
            self.sessions.discard(session)
        session.close()
        self._vacate()

    def idle_longer_than(self, seconds: float) -> list[Session]:
        """Take out the sessions nobody used for so long; each must be given back."""
        edge = now() - seconds
        with self._lock:
            old = [session for idle in self._idle for session in idle if session.answered_at < edge]
            for session in old:
                self._idle[session.lane].remove(session)
            return old

    def purge(self, primary: bytes | None = None) -> None:
        """Look at every idle session, and forget those whose server has gone, or is not the primary any more."""
        with self._lock:
            for session in [session for idle in self._idle for session in idle] if primary is not None else []:
                if session.incarnation[0] != primary:
                    session.die()
            alive = tuple([session for session in idle if session.drain()] for idle in self._idle)
            self._total -= sum(map(len, self._idle)) - sum(map(len, alive))
            self._idle = alive
        self.sessions.difference_update([s for s in tuple(self.sessions) if s.state is State.DEAD and s.hold is None])

    def counts(self) -> dict[str, int]:
        """Sessions by state, for the metrics."""
        with self._lock:
            idle, total, waiting = sum(map(len, self._idle)), self._total, len(self._queue)
        return {"idle": idle, "busy": total - idle, "waiting": waiting}

    def close(self) -> None:
        """Close what is idle, refuse new callers, wake the waiting ones with PoolClosed. Idempotent."""
        with self._lock:
            self._closed = True
            idle = [session for lane in self._idle for session in lane]
            self._idle = tuple([] for _ in self._idle)
            queue, self._queue = self._queue, deque()
        for claim in queue:
            claim.waiter.wake()
        for session in idle:
            session.drain()
            self.give_back(session)

    def end(self) -> None:
        """Close every session, whoever has it. Idempotent."""
        self.close()
        for session in tuple(self.sessions):
            session.die()
