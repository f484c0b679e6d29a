"""`semaphore`: at most so many holders in the whole fleet, each with a permit that is a lease of its own.

Who may have the next permit is decided by the queue (`line`): whoever came first.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from lockrouter.deadline import Deadline, checked_timeout
from lockrouter.errors import LockTimeout, LossReason
from lockrouter.leases.handle import checked_ttl
from lockrouter.recipes.line import Line
from lockrouter.recipes.own import OwnLease
from lockrouter.routing import encode

if TYPE_CHECKING:
    from lockrouter.core import Core

__all__ = ["MAX_PERMITS", "Permit", "Semaphore"]

MAX_PERMITS = 1000


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
        self._core = core
        self._raw = encode(name)
        self._kept = self._line
        self.name = name
        self.permits = permits
        self.ttl = checked_ttl(ttl)

    @property
    def _line(self) -> Line:
        """The present process's: a semaphore that was made before a fork works after it, too."""
        self._kept = Line.of(self._core, self._raw)
        return self._kept

    def acquire(self, timeout: float | None = None) -> Permit:
        """Wait for a permit, take it, and return its handle.

        Args:
            timeout: seconds for the whole call; None: the configured default; 0: takes only what is free now.

        Raises:
            LockTimeout: no permit became free in time.
            ShardError: the semaphore's shard does not answer: nobody gets a permit then.
        """
        line = self._line
        rule = line.core.config.class_of(line.name)
        deadline = Deadline(checked_timeout(timeout, rule.timeout))
        lease = line.enter(self.permits, self.ttl, deadline)
        if lease is None:
            raise LockTimeout(
                f"no permit of {line.shown} became free in {deadline.waited():.2f} s; {self.permits} may be held",
                key=line.name,
                address=line.base.address,
                waited=deadline.waited(),
                holder=f"{self.permits} holders",
            )
        return Permit(line, lease)

    def try_acquire(self) -> Permit | None:
        """A permit if one is free now and nobody waits for it; else None. An outage raises.

        Raises:
            ShardError: the semaphore's shard does not answer.
        """
        line = self._line
        lease = line.enter(self.permits, self.ttl, Deadline(0.0))
        return None if lease is None else Permit(line, lease)
