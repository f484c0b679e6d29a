"""What the figures are held against: each target beside what was seen. Nothing is asserted, machines differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench_figures import Figures

from lockrouter.cli.timing import Contender, ratio

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
        return f"{'≤' if self.at_most else '≥'} {self._number(self.wanted)} {self.unit}"

    @property
    def shown_seen(self) -> str:
        """As the tables have it."""
        return "not measured" if self.seen is None else f"{self._number(self.seen)} {self.unit}"

    def _number(self, value: float) -> str:
        if value >= 1000:
            return f"{value:,.0f}"
        return f"{value:.2f}" if value < 10 or self.unit == "%" else f"{value:.1f}"


_RATIOS = (
    ("1 caller, against sysbench (C) with 1 thread", ("lockrouter", 1), ("sysbench (C)", 1), 1.05),
    ("8 callers, against sysbench (C) with 8 threads", ("lockrouter", 8), ("sysbench (C)", 8), 0.75),
    ("8 callers, against PyMySQL's cursor path", ("lockrouter", 8), ("PyMySQL cursor", 8), 2.0),
    ("8 callers, against redis-py Lock", ("lockrouter", 8), ("redis-py Lock", 8), 5.0),
    ("leases, 256 callers, against redis-py Lock", ("lease", 256), ("redis-py Lock", 256), 5.0),
    ("leases, 256 callers, against a statement each", ("lease", 256), ("lease, a statement each", 256), 3.0),
    ("lease, 1 caller, against a statement each", ("lease", 1), ("lease, a statement each", 1), 0.95),
    ("one hot key, against no hand-over", ("one hot key", 64), ("one hot key, no hand-over", 64), 5.0),
)


def targets(contenders: Sequence[Contender], curve: Sequence[Contender], figures: Figures | None) -> list[Target]:
    """All targets; those of `figures` only where these were measured."""
    by_name = {(one.name, one.callers): one for one in contenders}
    found = []
    for work, mine, its, wanted in _RATIOS:
        one, other = by_name.get(mine), by_name.get(its)
        found.append(Target(work, wanted, ratio(one, other) if one and other else None, "×"))
    best = max((one.rate for one in (*contenders, *curve) if one.name == "lockrouter"), default=None)
    found.append(Target("peak of one process, distinct keys", 15_200, best, "locks/s"))
    return found if figures is None else [*found, *_of_figures(figures)]


def _of_figures(figures: Figures) -> list[Target]:
    crowd = figures["crowd"]
    many = f"{crowd['callers']:,} callers at once (greenlets), 4 shards, 1 ms hold"
    even = "one hot key, 4 processes × 8 callers, 1 ms hold: luckiest : unluckiest"
    late = crowd["p99"] - crowd["ideal_p99"]
    waiting, residue = figures["waiting_bytes"] / 1024, figures["residue_bytes"]
    return [
        Target(even, 2, figures["fairness"], "×", True),
        Target(f"{many}: success", 99.97, crowd["success"] * 100, "%"),
        Target(f"{many}: p99 above the ideal", 1, late, "s", True),
        Target("client's CPU for a lock and its release, protocol included", 15, figures["cpu_us"], "µs", True),
        Target("routing, 64 shards", 2, figures["route_us"], "µs", True),
        Target("resident memory, idle router of 4 shards", 80, figures["rss_mb"], "MB", True),
        Target(f"the same, added by each of {figures['waiting_callers']:,} waiting callers", 10, waiting, "KB", True),
        Target(f"the same, left by each of {figures['residue_keys']:,} different keys", 1, residue, "B", True),
        Target("seeding, one shard", 100_000, figures["seed_rows_per_second"], "rows/s"),
    ]
