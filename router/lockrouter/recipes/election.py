"""`election`: of several candidates one is the leader, until it resigns, leaves, or is found to be gone.

The steps of a candidate's thread:

1. Look at the lease of the election's name, of the recipe's own kind: one plain SELECT, at most every third of the ttl,
   and when it expires.
2. Free: take it. Then lead: the lease is kept alive, and the thread sleeps.
3. Lost (by the holder's own clock at the latest), resigned or left: deposed, and back to 1.

A leader is deposed by its own clock before the server gives the lease to another one, as long as the servers' clocks
agree within `clock_skew`; the token orders the rest.
"""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lockrouter.backoff import jittered
from lockrouter.deadline import Deadline, checked_timeout, now
from lockrouter.errors import LockRouterError, LossReason, RouterClosed, ShardError
from lockrouter.leases.handle import checked_ttl
from lockrouter.protocol.effects import Waiter
from lockrouter.recipes.calling import arguments_of
from lockrouter.recipes.own import Kind, OwnLease, Place, holder_of, take

if TYPE_CHECKING:
    from lockrouter.core import Core

__all__ = ["Election"]

_log = logging.getLogger("lockrouter")

_FOREVER = 1e9
_LEAST_PAUSE = 0.02


class Election:
    """One candidate; a context manager for one use, in which it stands for election. Thread-safe.

    One that is collected inside its block leaves, with a `ResourceWarning`.
    """

    def __init__(self, core: Core, name: str | bytes, *, ttl: float) -> None:
        self._elected: list[Callable[..., object]] = []
        self._deposed: list[Callable[..., object]] = []
        # Nothing of the candidate's thread refers to this object: whoever drops it has left.
        self._candidate = _Candidate(core, name, ttl, weakref.ref(self))

    @property
    def is_leader(self) -> bool:
        """True while this candidate is the leader, by its own clock; no I/O."""
        return self.token is not None

    @property
    def token(self) -> int | None:
        """The fencing token of the present leadership, higher than every earlier leader's; None: not the leader."""
        return self._candidate.token

    def on_elected(self, fn: Callable[..., object]) -> None:
        """Have `fn(token)`, or `fn()` if it takes nothing, called at each election of this candidate.

        On a thread of its own; at once if it is the leader now.
        """
        with self._candidate.lock:
            self._elected.append(fn)
            token = self.token
        if token is not None:
            _tell([fn], token)

    def on_deposed(self, fn: Callable[..., object]) -> None:
        """Have `fn(reason)`, or `fn()`, called whenever this candidate ceases to be the leader.

        On a thread of its own. The reason is a `LossReason`, or None after `resign` or leaving.
        """
        with self._candidate.lock:
            self._deposed.append(fn)

    def wait(self, timeout: float | None = None) -> bool:
        """True once this candidate is the leader; False after `timeout` seconds (None: never), or once it has left.

        Raises:
            ShardError: the time is over, and the shard did not answer when it was last asked.
        """
        return self._candidate.wait(Deadline(checked_timeout(timeout, _FOREVER)))

    def resign(self) -> None:
        """This candidate is not the leader any more, and lets others go first: it stands again after one ttl."""
        self._candidate.resign()

    def __enter__(self) -> Self:
        self._candidate.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._candidate.leave()

    def __del__(self) -> None:
        candidate = getattr(self, "_candidate", None)
        if candidate is not None and candidate.stands:
            candidate.leave_soon()
            warnings.warn("an election was dropped without leaving it", ResourceWarning, stacklevel=2, source=self)


class _Candidate:
    """The candidate itself, and its thread."""

    def __init__(self, core: Core, name: str | bytes, ttl: float, told: weakref.ref[Election]) -> None:
        self._place = Place(core, Kind.ELECTION, name)
        self._ttl = checked_ttl(ttl)
        self._generation = core.generation
        self._told = told
        self.lock = threading.Condition()
        self._lease: OwnLease | None = None
        self._trouble: ShardError | None = None
        self._leaving = False
        self._not_before = 0.0
        self._bell = Waiter()
        self._thread: threading.Thread | None = None

    @property
    def _inherited(self) -> bool:
        """True in a child process: the candidate is its parent's."""
        return self._place.core.generation is not self._generation

    @property
    def stands(self) -> bool:
        """True from entering to leaving."""
        return self._thread is not None and not self._leaving and not self._inherited

    @property
    def token(self) -> int | None:
        """As `Election.token`."""
        lease = self._lease
        return lease.token if lease is not None and not lease.lost else None

    def wait(self, deadline: Deadline) -> bool:
        """As `Election.wait`."""
        if self._inherited:
            return False
        with self.lock:
            while self.token is None:
                if self._leaving:
                    return False
                left = deadline.left()
                if left <= 0:
                    if self._trouble is not None:
                        raise self._trouble
                    return False
                self.lock.wait(min(left, threading.TIMEOUT_MAX))
            return True

    def resign(self) -> None:
        """As `Election.resign`."""
        if self._inherited:
            return
        with self.lock:
            self._not_before = now() + self._ttl
        self._depose(self._lease, None)
        self._bell.wake()

    def start(self) -> None:
        """Stand for election from now on; once."""
        if self._thread is not None:
            raise RuntimeError("an election is entered once")
        self._place.core.ready()
        self._thread = threading.Thread(target=self._run, name="lockrouter-election", daemon=True)
        self._thread.start()

    def leave_soon(self) -> None:
        """Have the thread end, and the leadership with it. No I/O, no mutex: a finaliser may run anywhere."""
        self._leaving = True
        try:
            self._bell.wake()
        finally:
            self._bell.wake()  # an interrupt may have come before the first one did anything

    def leave(self) -> None:
        """Stand no more; waits for the thread."""
        if self._inherited:
            return
        self.leave_soon()
        with self.lock:
            self.lock.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self._place.core.config.router.timeout)
        self._depose(self._lease, None)

    # -- standing -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._leaving:
            try:
                pause = self._stand()
                self._trouble = None
            except RouterClosed:
                break
            except ShardError as error:
                self._trouble = error
                pause = self._place.core.config.breaker.probe_after
            except Exception:  # noqa: BLE001 - a candidate must not cease to be one quietly, whatever it met
                _log.exception("election %s: this candidate cannot stand just now", self._place.shown)
                pause = self._ttl / 3
            with self.lock:
                self.lock.notify_all()
            if not self._leaving:
                self._bell.wait(now() + max(_LEAST_PAUSE, jittered(pause, spread=0.1)))
        self._leaving = True
        with self.lock:
            self.lock.notify_all()
        self._depose(self._lease, None)

    def _stand(self) -> float:
        """Look, and take what is free; the seconds until looking again is worth it."""
        lease = self._lease
        if lease is not None:
            if not lease.lost:
                return self._ttl
            self._depose(lease, LossReason.EXPIRED)
        if now() < self._not_before:
            return self._not_before - now()
        holder = holder_of(self._place)
        if holder is not None:
            return min(holder.left + self._place.core.config.router.clock_skew, self._ttl / 3)
        lease = take(self._place, ttl=self._ttl)
        if lease is None:
            return _LEAST_PAUSE
        with self.lock:
            stands = not self._leaving and now() >= self._not_before
            if stands:
                self._lease = lease
                self._tell(lambda told: told._elected, lease.token)  # starts threads, in order; waits for none
            self.lock.notify_all()
        if not stands:
            lease.release()
            return 0.0
        _log.info("election %s: elected", self._place.shown)
        held = weakref.ref(lease)
        lease.on_lost(lambda reason: self._depose(held(), reason))
        return self._ttl

    def _depose(self, lease: OwnLease | None, reason: LossReason | None) -> None:
        """End this leadership, if it is the present one, and tell; its lease is released, lost or not."""
        with self.lock:
            if lease is None or self._lease is not lease:
                return
            self._lease = None
            self._tell(lambda told: told._deposed, reason)
        _log.info("election %s: deposed (%s)", self._place.shown, reason or "resigned")
        try:
            lease.release()
        except LockRouterError:
            pass  # lost, or not to be reached: it ends by itself
        self._bell.wake()

    def _tell(self, which: Callable[[Election], list[Callable[..., object]]], what: Any) -> None:
        told = self._told()
        if told is not None:
            _tell(which(told), what)


def _tell(told: list[Callable[..., object]], what: Any) -> None:
    for fn in told:
        made = threading.Thread(target=fn, args=arguments_of(fn, what), name="lockrouter-election-told", daemon=True)
        made.start()
