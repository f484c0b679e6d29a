"""`guard`: a job that several nodes want to run, and one does.

The node that takes the lease of the job's name, of the recipe's own kind, runs it; the lease is kept alive meanwhile.
Everybody else skips. A crashed node's lease ends at its ttl, and the next node that asks runs the job again.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import MethodType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, ParamSpec, TypeVar, final

from lockrouter.deadline import now
from lockrouter.errors import LockLost, ShardError
from lockrouter.leases.handle import checked_ttl
from lockrouter.recipes.calling import refuse_coroutines
from lockrouter.recipes.own import Kind, OwnLease, Place, holder_of, take

if TYPE_CHECKING:
    from lockrouter.core import Core

__all__ = ["SKIPPED", "Guard", "Guarded", "Skipped"]

P = ParamSpec("P")
Result = TypeVar("Result")

_log = logging.getLogger("lockrouter")


@final
class Skipped:
    """The type of `SKIPPED`: falsy, and nothing else."""

    __slots__ = ()

    def __bool__(self) -> Literal[False]:
        return False

    def __repr__(self) -> str:
        return "SKIPPED"

    def __reduce__(self) -> str:
        return "SKIPPED"


SKIPPED: Final = Skipped()
"""What a guarded job answers where it did not run, because it runs, or ran a moment ago, elsewhere."""


class Guarded(Generic[P, Result]):
    """A guarded function: called, it runs, or answers `SKIPPED`."""

    __name__: str

    def __init__(self, guard: Guard, function: Callable[P, Result]) -> None:
        self.guard = guard
        self._function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result | Skipped:
        with self.guard.once_more() as held:
            if not held:
                return SKIPPED
            return self._function(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """A guarded method, bound like any other."""
        return self if instance is None else MethodType(self, instance)

    @property
    def reason(self) -> str | None:
        """Why the function was skipped when it was last skipped in this process; None: it never was."""
        return self.guard.reason


class Guard:
    """A decorator, or a context manager that is entered by one caller at a time; see `LockRouter.guard`."""

    def __init__(self, core: Core, name: str | bytes, *, ttl: float, at_least: float) -> None:
        self._place = Place(core, Kind.GUARD, name)
        self._ttl = checked_ttl(ttl)
        self._at_least = _checked(at_least)
        self._held: OwnLease | None = None
        self._entered = False
        self._told: list[str | None] = [None]

    def once_more(self) -> Guard:
        """Another guard of the same job, for another entrance; they share `reason`."""
        made = Guard(self._place.core, self._place.name, ttl=self._ttl, at_least=self._at_least)
        made._told = self._told
        return made

    def __call__(self, function: Callable[P, Result]) -> Guarded[P, Result]:
        refuse_coroutines("guard", function)
        return Guarded(self, function)

    @property
    def reason(self) -> str | None:
        """Why this process last skipped the job; None: it never did."""
        return self._told[0]

    def __enter__(self) -> OwnLease | Skipped:
        if self._entered:
            raise RuntimeError("this guard is entered already: make one for each entrance")
        self._entered = True
        try:
            self._began = now()
            self._held = take(self._place, ttl=self._ttl)
        except BaseException:
            self._entered = False
            raise
        if self._held is None:
            self._told[0] = self._why()
            _log.info("guard %s: skipped: %s", self._place.shown, self._told[0])
            return SKIPPED
        return self._held

    def _why(self) -> str:
        try:
            holder = holder_of(self._place)
        except ShardError:
            holder = None
        if holder is None:
            return "it ended elsewhere a moment ago"
        who = holder.payload.decode("utf-8", "replace") or "another node"
        return f"held by {who} for another {holder.left:.1f} s unless it is released or renewed"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease, self._held, self._entered = self._held, None, False
        if lease is None:
            return
        try:
            if now() - self._began < self._at_least:
                lease.leave(self._at_least)
            else:
                lease.release()
        except LockLost as lost:
            if error is None:
                raise
            error.add_note(f"and the guard was lost meanwhile: {lost}")
        except ShardError as outage:
            # The job is done, and the lease ends by itself: no reason to call the job a failure.
            _log.warning("guard %s: could not be released, it ends by itself: %s", self._place.shown, outage)


def _checked(at_least: float) -> float:
    if isinstance(at_least, bool) or not isinstance(at_least, int | float):
        raise TypeError(f"at_least: expected seconds, got {at_least!r}")
    if not 0 <= at_least <= 7 * 86400:
        raise ValueError(f"at_least: expected 0 to {7 * 86400} seconds, got {at_least!r}")
    return float(at_least)
