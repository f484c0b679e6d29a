"""Contenders and how they are timed: side by side, in turns, so that a noisy machine is noisy for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter

__all__ = ["PERCENTS", "Contender", "Cycle", "Sample", "Way", "alternate", "latencies", "ratio", "timed", "way"]

Cycle = Callable[[], object]
"""Takes one lock and releases it."""

PERCENTS = (1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9)
"""What is kept of a run's latencies."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one contender."""

    rate: float
    """Locks taken and released per second."""
    latency: Mapping[float, float] = field(default_factory=dict)
    """Seconds by percentile; only those that the contender can say."""


@dataclass(slots=True)
class Contender:
    """A way to lock with so many callers; `run` measures it for about so many seconds."""

    name: str
    callers: int
    run: Callable[[float], Sample]
    samples: list[Sample] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Name and callers, unique in a run."""
        return f"{self.name}, {self.callers}"

    @property
    def rate(self) -> float:
        """The median of all runs."""
        return median(sample.rate for sample in self.samples)

    @property
    def latency(self) -> dict[float, float]:
        """Seconds by percentile: of each the median over the runs."""
        known = [percent for percent in PERCENTS if all(percent in sample.latency for sample in self.samples)]
        return {percent: median(sample.latency[percent] for sample in self.samples) for percent in known}


Way = Callable[[int], Contender]
"""A way to lock, for a number of callers."""


def way(name: str, cycles: Sequence[Cycle]) -> Way:
    """What runs the first so many of `cycles`, each in a thread of its own."""
    return lambda callers: Contender(name, callers, partial(timed, cycles[:callers]))


def alternate(
    contenders: Sequence[Contender], *, rounds: int, seconds: float, progress: Callable[[Contender], None]
) -> None:
    """Run each contender once in each round, beginning with another one each time; `progress` is told before a run."""
    for contender in contenders:
        contender.run(min(0.2, seconds))  # connects, fills caches; not counted
    for number in range(rounds):
        start = number % len(contenders)
        for contender in (*contenders[start:], *contenders[:start]):
            progress(contender)
            contender.samples.append(contender.run(seconds))


def ratio(one: Contender, other: Contender) -> float:
    """How many times faster `one` is: the median over the rounds, each compared with itself."""
    return median(mine.rate / its.rate for mine, its in zip(one.samples, other.samples, strict=True))


def latencies(took: Sequence[float]) -> dict[float, float]:
    """Seconds by percentile, of durations in order."""
    return {percent: took[min(len(took) - 1, int(len(took) * percent / 100))] for percent in PERCENTS} if took else {}


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
    return Sample(len(took) / elapsed, latencies(took))
