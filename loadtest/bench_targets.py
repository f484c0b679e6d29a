"""What the figures are held against: each target beside what was seen. Nothing is asserted, machines differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench_figures import Figures
from bench_timing import Contender, ratio

__all__ = ["Target", "targets"]


@dataclass(frozen=True, slots=True)
class Target:
    """One line of the table; `seen` is None when a contender was missing."""

    work: str
    wanted: float
    seen: float | None
    unit: str
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        """Whether it was reached in this run; None: not measured."""
        if self.seen is None:
            return None
        return self.seen <= self.wanted if self.at_most else self.seen >= self.wanted

    @property
    def shown_wanted(self) -> str:
        """As the tables have it."""
        return f"{'≤' if self.at_most else '≥'} {_number(self.wanted)} {self.unit}"

    @property
    def shown_seen(self) -> str:
        """As the tables have it."""
        return "not measured" if self.seen is None else f"{_number(self.seen)} {self.unit}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


_RATIOS = (
    ("1 caller, against sysbench (C) with 1 thread", ("lockrouter", 1), ("sysbench (C)", 1), 1.05),
    ("8 callers, against sysbench (C) with 8 threads", ("lockrouter", 8), ("sysbench (C)", 8), 0.75),
    ("8 callers, against PyMySQL's cursor path", ("lockrouter", 8), ("PyMySQL cursor", 8), 2.0),
    ("8 callers, against redis-py Lock", ("lockrouter", 8), ("redis-py Lock", 8), 5.0),
    ("one hot key, against no hand-over", ("one hot key", 64), ("one hot key, no hand-over", 64), 5.0),
)


def targets(contenders: Sequence[Contender], figures: Figures | None) -> list[Target]:
    """All targets; those of `figures` only where these were measured."""
    by_name = {(one.name, one.threads): one for one in contenders}
    found = []
    for work, mine, its, wanted in _RATIOS:
        one, other = by_name.get(mine), by_name.get(its)
        found.append(Target(work, wanted, ratio(one, other) if one and other else None, "×"))
    best = max((one.rate for one in contenders if one.name == "lockrouter"), default=None)
    found.append(Target("one process, distinct keys, at its best", 15_200, best, "locks/s"))
    if figures is None:
        return found
    return [
        *found,
        Target("client's CPU for a lock and its release, protocol included", 15, figures["cpu_us"], "µs", True),
        Target("routing, 64 shards", 2, figures["route_us"], "µs", True),
        Target("resident memory, idle router of 4 shards", 80, figures["rss_mb"], "MB", True),
        Target("seeding, one shard", 100_000, figures["seed_rows_per_second"], "rows/s"),
    ]
