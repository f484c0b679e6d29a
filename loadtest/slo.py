"""Figures for service-level objectives: Locust rounds its percentiles, these are exact to 0.8 %.

Where a scenario has a rate, a wait counts from the moment the call was due, not from when the user got round to it:
else a stall would hide the calls that it kept from being made (coordinated omission).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from lockrouter.errors import LockTimeout, PoolTimeout, ShardUnavailable
from lockrouter.testing.exclusion import Histogram

__all__ = ["Slo", "collect"]

_FILE = "slo-{pid}.json"


class Slo(msgspec.Struct):
    """What one process, or all of them, saw of its calls; all attempts are counted, the rejected ones too."""

    acquired: int = 0
    degraded: int = 0
    busy: int = 0
    """Answered with "the row is busy": `try_lock` gave None, or `lock` its LockTimeout."""
    refused: int = 0
    lost: int = 0
    errors: int = 0
    paced: bool = False
    began: float = 0.0
    """By the system's monotonic clock, which all processes of a machine share."""
    ended: float = 0.0
    waits: Histogram = msgspec.field(default_factory=Histogram)
    """Of granted calls, from when they were due."""
    service: Histogram = msgspec.field(default_factory=Histogram)
    """Of granted calls, from when they were made."""

    def granted(self, due: float, began: float, *, degraded: bool) -> None:
        """Count a lock that was granted just now."""
        at = time.monotonic()
        self._saw(began, at)
        self.degraded += degraded
        self.acquired += not degraded
        self.waits.record(at - due)
        self.service.record(at - began)

    def failed(self, began: float, error: BaseException | None) -> None:
        """Count a call that got no lock; no error: the row was busy."""
        self._saw(began, time.monotonic())
        if error is None or (isinstance(error, LockTimeout) and not isinstance(error, PoolTimeout)):
            self.busy += 1
        elif isinstance(error, ShardUnavailable):
            self.refused += 1
        else:
            self.errors += 1

    def _saw(self, began: float, ended: float) -> None:
        self.began = self.began or began
        self.ended = ended

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Leave these figures in the folder, under this process's name."""
        path = Path(folder, _FILE.format(pid=os.getpid()))
        fresh = path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(self))
        fresh.replace(path)

    def add(self, other: Slo) -> None:
        """Add another process's figures."""
        for name in ("acquired", "degraded", "busy", "refused", "lost", "errors"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.paced = self.paced or other.paced
        self.began = min(filter(None, (self.began, other.began)), default=0.0)
        self.ended = max(self.ended, other.ended)
        self.waits.add(other.waits)
        self.service.add(other.service)

    def __str__(self) -> str:
        got = self.acquired + self.degraded
        calls = got + self.busy + self.refused + self.errors
        seconds = max(0.001, self.ended - self.began)
        how = "from when due" if self.paced else "closed loop: stalls hide calls, name a rate to see them"
        return (
            f"SLO: {got:,} locks, {got / seconds:,.0f}/s, success {got / calls if calls else 0.0:.3%} of {calls:,}; "
            f"wait {_percentiles(self.waits)} ({how}); service {_percentiles(self.service)}; "
            f"degraded {self.degraded:,}, busy {self.busy:,}, refused {self.refused:,}, "
            f"lost {self.lost:,}, errors {self.errors:,}"
        )


def _percentiles(waits: Histogram) -> str:
    marks = [f"p{percent:g} {waits.percentile(percent) * 1e3:.2f}" for percent in (50, 99, 99.9)]
    return ", ".join([*marks, f"max {waits.longest * 1e3:.2f} ms"])


def collect(folder: str | os.PathLike[str]) -> Slo:
    """The figures of all processes that saved theirs in the folder."""
    total = Slo()
    for path in Path(folder).glob(_FILE.format(pid="*")):
        total.add(msgspec.json.decode(path.read_bytes(), type=Slo))
    return total
