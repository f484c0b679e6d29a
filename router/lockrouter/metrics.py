"""Prometheus metrics. The hot path adds integers here; they are folded into the client library's metrics at a scrape.

In prometheus_client's multiprocess mode nobody scrapes this process, so the background thread folds once a second.
"""

from __future__ import annotations

import os
import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric

__all__ = ["BOUNDS", "SEGMENTS", "Metrics", "ModeStats", "ShardStats", "multiprocess"]

BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SEGMENTS = 64
"""Equal parts of the bucket space whose heat is counted."""


class ModeStats:
    """Integers of one shard and mode, under their own mutex.

    The usual lock only leaves notes, in one step each: between two locks the server and other threads use the same
    caches, so what a lock counts by itself costs many times what `settle` needs for it, many at a time.
    """

    __slots__ = (
        "_lock",
        "acquired",
        "hold_counts",
        "hold_sum",
        "left",
        "outcomes",
        "segment_acquires",
        "segment_wait",
        "wait_counts",
        "wait_sum",
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Notes that are not counted yet: seconds waited and the segment of what was acquired, seconds held at its end.
        self.acquired: deque[tuple[float, int]] = deque()
        self.left: deque[float] = deque()
        self.outcomes: dict[str, int] = {}
        self.wait_counts = [0] * (len(BOUNDS) + 1)
        self.hold_counts = [0] * (len(BOUNDS) + 1)
        self.wait_sum = 0.0
        self.hold_sum = 0.0
        self.segment_acquires = [0] * SEGMENTS
        self.segment_wait = [0.0] * SEGMENTS

    def ended(self, outcome: str, waited: float, segment: int) -> None:
        """Count one acquisition in a segment of the bucket space that ended with `outcome` after `waited` seconds."""
        with self._lock:
            self._count(outcome, waited, segment)

    def _count(self, outcome: str, waited: float, segment: int) -> None:
        self.segment_acquires[segment] += 1
        self.segment_wait[segment] += waited
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.wait_counts[bisect_left(BOUNDS, waited)] += 1
        self.wait_sum += waited

    def released(self, held: float) -> None:
        """Count one release after `held` seconds."""
        self.left.append(held)

    def settle(self) -> None:
        """Count what there are notes of."""
        with self._lock:
            for _ in range(len(self.acquired)):
                self._count("acquired", *self.acquired.popleft())
            for _ in range(len(self.left)):
                held = self.left.popleft()
                self.hold_counts[bisect_left(BOUNDS, held)] += 1
                self.hold_sum += held

    def copy(self) -> tuple[dict[str, int], list[int], float, list[int], float]:
        """A consistent copy of all figures."""
        self.settle()
        with self._lock:
            return dict(self.outcomes), [*self.wait_counts], self.wait_sum, [*self.hold_counts], self.hold_sum


class ShardStats:
    """All integers of one shard."""

    def __init__(self) -> None:
        self.row = ModeStats()
        self.local = ModeStats()
        self.transaction = ModeStats()
        self.lease = ModeStats()
        self.renewals: dict[str, int] = {}
        self._lock = threading.Lock()
        self.lost: dict[tuple[str, str], int] = {}
        self.collisions = 0

    def settle(self) -> None:
        """Count what there are notes of."""
        for stats in (self.row, self.local, self.transaction, self.lease):
            stats.settle()

    def count_lost(self, mode: str, reason: str) -> None:
        """Count one lost lock."""
        with self._lock:
            self.lost[mode, reason] = self.lost.get((mode, reason), 0) + 1

    def renewed(self, outcome: str, count: int = 1) -> None:
        """Count renewals that ended: `renewed`, `lost` (refused), or `failed` (to be tried again)."""
        with self._lock:
            self.renewals[outcome] = self.renewals.get(outcome, 0) + count

    def collided(self) -> None:
        """Count two keys of this process that met at one row."""
        with self._lock:
            self.collisions += 1


def multiprocess() -> bool:
    """True in prometheus_client's multiprocess mode."""
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ or "prometheus_multiproc_dir" in os.environ


_of_registry: weakref.WeakKeyDictionary[CollectorRegistry, Metrics] = weakref.WeakKeyDictionary()


class _Folding:
    """A collector that brings the other metrics up to date before they are read; it has none of its own."""

    def __init__(self, fold: Callable[[], None]) -> None:
        self._fold = fold

    def collect(self) -> Iterable[Metric]:
        self._fold()
        return ()

    def describe(self) -> Iterable[Metric]:
        return ()


class Metrics:
    """The metrics of all routers of this process that share a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lock = threading.Lock()
        self._sources: dict[object, Callable[[Metrics], None]] = {}
        self._seen: dict[tuple[object, ...], Any] = {}
        self._levels: dict[tuple[Gauge, tuple[str, ...]], float] = {}
        registry.register(_Folding(self.fold))
        common: dict[str, Any] = {"registry": registry}
        live: dict[str, Any] = {"registry": registry, "multiprocess_mode": "livesum"}
        one: dict[str, Any] = {"registry": registry, "multiprocess_mode": "livemax"}
        self.acquires = Counter("lockrouter_acquires", "Acquisitions ended", ("shard", "mode", "outcome"), **common)
        self.wait = Histogram("lockrouter_wait_seconds", "Waiting", ("shard", "mode"), buckets=BOUNDS, **common)
        self.hold = Histogram("lockrouter_hold_seconds", "Holding", ("shard", "mode"), buckets=BOUNDS, **common)
        self.held = Gauge("lockrouter_held", "Locks held now", ("shard", "mode"), **live)
        self.waiters = Gauge("lockrouter_waiters", "Callers waiting now", ("shard",), **live)
        self.overdue = Gauge("lockrouter_overdue", "Locks held for over half their max_hold", ("shard",), **live)
        self.pool = Gauge("lockrouter_pool_connections", "Connections", ("shard", "state"), **live)
        self.pool_limit = Gauge("lockrouter_pool_limit", "Connections allowed", ("shard",), **live)
        self.breaker = Gauge("lockrouter_breaker_state", "0 closed, 1 half-open, 2 open", ("shard",), **one)
        self.lost = Counter("lockrouter_lost", "Locks lost", ("shard", "mode", "reason"), **common)
        self.renewals = Counter("lockrouter_renewals", "Renewals of leases", ("shard", "outcome"), **common)
        self.offset = Gauge("lockrouter_clock_offset_seconds", "Server clock minus own", ("shard",), **one)
        self.term = Gauge("lockrouter_term", "Term of the tokens", ("shard",), **one)
        self.collisions = Counter(
            "lockrouter_slot_collisions", "Different keys that met at one row in a process", ("shard",), **common
        )
        self.swept = Counter("lockrouter_swept", "Rows a sweeper deleted", ("shard", "what"), **common)
        self.swept_at = Gauge("lockrouter_sweep_timestamp_seconds", "End of the last sweep", ("shard",), **one)
        self.segment_acquires = Counter("lockrouter_segment_acquires", "Row locks", ("segment",), **common)
        self.segment_wait = Counter("lockrouter_segment_wait_seconds", "Waiting", ("segment",), **common)

    @classmethod
    def of(cls, registry: CollectorRegistry) -> Metrics:
        """The metrics of a registry, made at the first call."""
        found = _of_registry.get(registry)
        if found is None:
            found = _of_registry[registry] = cls(registry)
        return found

    def add_source(self, key: object, fold: Callable[[Metrics], None]) -> None:
        """Have `fold` called at each scrape until `remove_source`."""
        with self._lock:
            self._sources[key] = fold

    def remove_source(self, key: object) -> None:
        """Fold a source for the last time and forget it."""
        with self._lock:
            fold = self._sources.pop(key, None)
            if fold is not None:
                fold(self)
                self._fold()
                self._seen = {name: seen for name, seen in self._seen.items() if name[0] is not key}

    def forked(self) -> None:
        """In a child process: the parent's sources are not this process's to count."""
        self._lock = threading.Lock()
        self._sources = {}
        self._seen = {}
        self._levels = {}

    def fold(self) -> None:
        """Bring every metric up to date."""
        with self._lock:
            self._fold()

    def _fold(self) -> None:
        self._levels = dict.fromkeys(self._levels, 0)
        for fold in self._sources.values():
            fold(self)
        for (gauge, labels), level in self._levels.items():
            gauge.labels(*labels).set(level)

    def level(self, gauge: Gauge, labels: tuple[str, ...], value: float, *, add: bool = True) -> None:
        """Set a gauge for this fold; the levels of several routers add up, or the highest counts."""
        before = self._levels.get((gauge, labels), 0)
        self._levels[gauge, labels] = before + value if add else max(before, value)

    def count(self, name: tuple[object, ...], counter: Any, value: float) -> None:
        """Raise a counter by what `value`, a total, has grown since the last call under this name."""
        grown = value - self._seen.get(name, 0)
        if grown:
            self._seen[name] = value
            counter.inc(grown)

    def spread(self, name: tuple[object, ...], histogram: Any, counts: list[int], total: float) -> None:
        """Add to a histogram what its counts per bucket and their sum have grown since the last call."""
        before, before_total = self._seen.get(name, ([0] * len(counts), 0.0))
        if counts == before:
            return
        self._seen[name] = (counts, total)
        for bucket, count, old in zip(histogram._buckets, counts, before, strict=True):
            if count != old:
                bucket.inc(count - old)
        histogram._sum.inc(total - before_total)
