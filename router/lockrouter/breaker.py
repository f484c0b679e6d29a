"""The breaker of one shard: a pure state machine that is told outcomes and never wraps a wait."""

from __future__ import annotations

import enum
import threading

from lockrouter.backoff import jittered
from lockrouter.deadline import Clock, now

__all__ = ["Breaker", "BreakerState"]


class BreakerState(enum.IntEnum):
    """The values of the metric `lockrouter_breaker_state`."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


_CLOSED = BreakerState.CLOSED


class Breaker:
    """Opens after `failures` faults in a row; then one probe at a time, `probe_after` seconds apart, may close it.

    A fault is a shard that does not answer. An answer that is an error is neither a fault nor a success; it is
    remembered as `refusal`, because a server that answers may be granting to others.
    """

    def __init__(self, failures: int, probe_after: float, *, clock: Clock = now) -> None:
        self._failures = failures
        self._probe_after = probe_after
        self._clock = clock
        self._lock = threading.Lock()
        self.in_a_row = 0
        self._probe_at = 0.0
        self.state = BreakerState.CLOSED
        # True while calls may go to the shard: an attribute, since every call asks.
        self.closed = True
        self.refusal: str | None = None
        self.openings = 0

    def _become(self, state: BreakerState) -> None:
        self.state = state
        self.closed = state is _CLOSED

    def fault(self, *, probe: bool = False, refusal: str | None = None) -> bool:
        """Count a fault, of the probe or of a call; True when this one opened the breaker.

        `refusal`: why the shard is not simply dead all the same.
        """
        with self._lock:
            if not probe and self.state is not BreakerState.CLOSED:
                return False  # of a call that began before: what probes find is newer
            self.refusal = refusal
            self.in_a_row += 1
            if self.state == BreakerState.CLOSED and self.in_a_row < self._failures:
                return False
            opened = self.state == BreakerState.CLOSED
            self._become(BreakerState.OPEN)
            self._probe_at = self._clock() + jittered(self._probe_after)
            self.openings += opened
            return opened

    def success(self) -> bool:
        """Note that the shard answered as it should; True when this closed an open breaker."""
        if self.state == BreakerState.CLOSED and not self.in_a_row and self.refusal is None:
            return False
        with self._lock:
            reopened = self.state != BreakerState.CLOSED
            self._become(BreakerState.CLOSED)
            self.in_a_row = 0
            self.refusal = None
            return reopened

    def answered(self) -> None:
        """Note that a call was answered as it should be: faults before it are not in a row with later ones."""
        if self.in_a_row and self.state is _CLOSED:
            with self._lock:
                if self.state == BreakerState.CLOSED:
                    self.in_a_row = 0

    def refused(self, why: str) -> None:
        """Note that the shard answered, with an error: it is not dead, and must not be degraded around."""
        with self._lock:
            self.refusal = why
            if self.state == BreakerState.HALF_OPEN:
                self._become(BreakerState.OPEN)
                self._probe_at = self._clock() + jittered(self._probe_after)

    def take_probe(self) -> bool:
        """Claim the one probe of an open breaker; it ends with `fault`, `success`, `refused` or `abandon_probe`."""
        with self._lock:
            if self.state != BreakerState.OPEN or self._clock() < self._probe_at:
                return False
            self._become(BreakerState.HALF_OPEN)
            return True

    def hasten(self) -> None:
        """Let the next probe start now: somebody else found the shard alive."""
        with self._lock:
            self._probe_at = self._clock()

    def abandon_probe(self) -> None:
        """Give back a claimed probe that ended without an outcome."""
        with self._lock:
            if self.state == BreakerState.HALF_OPEN:
                self._become(BreakerState.OPEN)

    def probe_in(self) -> float:
        """Seconds until the next probe may start; 0.0 when it may now, or none is needed."""
        with self._lock:
            return max(0.0, self._probe_at - self._clock()) if self.state == BreakerState.OPEN else 0.0
