"""Time: one clock, and one deadline per call.

The clock is CLOCK_BOOTTIME where the system has it: it neither steps with the wall clock nor stands still while the
machine is suspended, so a holder that slept through its bound finds out the moment it wakes.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable

__all__ = ["GRACE", "Clock", "Deadline", "checked_timeout", "now"]

Clock = Callable[[], float]

GRACE = 0.05
"""Seconds past a deadline that the client still waits for the server's own answer at its bound."""

_FOREVER = 1e9

_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


now: Clock = functools.partial(time.clock_gettime, _CLOCK)
"""Seconds since boot, suspend included."""


def checked_timeout(timeout: float | None, default: float) -> float:
    """Return `timeout` in seconds, or `default` for None; a very large one is allowed and means long.

    Raises:
        TypeError: not a number (`bool` is none).
        ValueError: negative or NaN.
    """
    if timeout is None:
        return default
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout: expected seconds as int or float, got {timeout!r}")
    if timeout > _FOREVER:  # before any conversion: an int may be too large for a float
        return _FOREVER
    if timeout < 0 or math.isnan(timeout):
        raise ValueError(f"timeout: expected 0 or more seconds, got {timeout!r}")
    return float(timeout)


class Deadline:
    """When a call must be over, on `now`'s clock; made once at the call's entrance and passed downwards."""

    __slots__ = ("at", "started", "timeout")

    def __init__(self, timeout: float, *, started: float | None = None, clock: Clock = now) -> None:
        self.timeout = timeout
        self.started = clock() if started is None else started
        self.at = self.started + timeout

    def left(self) -> float:
        """Seconds left; negative once it has passed."""
        return self.at - now()

    def waited(self) -> float:
        """Seconds since the call began."""
        return now() - self.started
