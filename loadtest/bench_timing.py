"""Contenders and how they are timed: side by side, in turns, so that a noisy machine is noisy for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

__all__ = ["Contender", "Sample", "alternate", "ratio", "timed"]

Cycle = Callable[[], object]
"""Takes one lock and releases it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one contender; seconds, `p50` None where the contender cannot say."""

    rate: float
    """Locks taken and released per second."""
    p50: float | None
    p99: float | None


@dataclass(slots=True)
class Contender:
    """A way to lock with so many callers; `run` measures it for about so many seconds."""

    name: str
    threads: int
    run: Callable[[float], Sample]
    samples: list[Sample] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Name and callers, unique in a run."""
        return f"{self.name}, {self.threads}"

    @property
    def rate(self) -> float:
        """The median of all runs."""
        return median(sample.rate for sample in self.samples)

    @property
    def p50(self) -> float | None:
        """The median of the runs' medians."""
        return _median([sample.p50 for sample in self.samples])

    @property
    def p99(self) -> float | None:
        """The median of the runs' 99th percentiles."""
        return _median([sample.p99 for sample in self.samples])


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def alternate(
    contenders: Sequence[Contender], *, rounds: int, seconds: float, progress: Callable[[Contender], None]
) -> None:
    """Run each contender once in each round, beginning with another one each time; `progress` is told before a run."""
    for contender in contenders:
        contender.run(min(0.3, seconds))  # connects, fills caches; not counted
    for number in range(rounds):
        start = number % len(contenders)
        for contender in (*contenders[start:], *contenders[:start]):
            progress(contender)
            contender.samples.append(contender.run(seconds))


def ratio(one: Contender, other: Contender) -> float:
    """How many times faster `one` is: the median over the rounds, each compared with itself."""
    return median(mine.rate / its.rate for mine, its in zip(one.samples, other.samples, strict=True))


def timed(cycles: Sequence[Cycle], seconds: float) -> Sample:
    """Run each cycle over and over in a thread of its own.

    Raises:
        Whatever a cycle raises first.
    """
    barrier = threading.Barrier(len(cycles))
    durations: list[list[float]] = [[] for _ in cycles]
    spans: list[tuple[float, float]] = []
    errors: list[BaseException] = []

    def work(cycle: Cycle, took: list[float]) -> None:
        barrier.wait()
        began = before = perf_counter()
        end = began + seconds
        try:
            while before < end:
                cycle()
                after = perf_counter()
                took.append(after - before)
                before = after
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            errors.append(error)
        spans.append((began, before))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(cycles, durations, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    took = sorted(one for part in durations for one in part)
    elapsed = max(end for _, end in spans) - min(began for began, _ in spans)
    return Sample(len(took) / elapsed, took[len(took) // 2], took[len(took) * 99 // 100])
