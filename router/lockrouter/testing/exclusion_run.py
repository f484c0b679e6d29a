"""The acceptance run: many processes and threads, hot and cold keys, a server killed and restarted, nothing lost.

    python -m lockrouter.testing.exclusion_run --seconds 60 --processes 8 --threads 8 --on-outage refuse

Why no increment may be lost even when a server is killed under its holders: a hold lasts milliseconds, and the server
is back a second later at the earliest, so by then every holder of before has left, whether or not it was told.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from lockrouter.admin.init import init
from lockrouter.admin.seed import seed
from lockrouter.config import load
from lockrouter.errors import LockRouterError
from lockrouter.testing.binaries import Vendor
from lockrouter.testing.cluster import Cluster
from lockrouter.testing.exclusion import Verdict
from lockrouter.testing.fleet import Fleet
from lockrouter.testing.leftovers import leftovers
from lockrouter.testing.load import Figures, Plan

__all__ = ["Result", "main", "provision", "run"]

_LEAST_OUTAGE = 1.0
_RECOVERY = 10.0


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to."""

    seconds: float
    on_outage: str
    kills: int
    victim: str
    verdict: Verdict
    shards: dict[str, Figures]
    recovered: float | None
    """Seconds from the last restart, the server answering, to the first undegraded lock there; None: never."""
    local_lost: int
    problems: dict[str, int]
    leftovers: tuple[str, ...]

    @property
    def total(self) -> Figures:
        """The figures of all shards together."""
        total = Figures()
        for figures in self.shards.values():
            total.add(figures)
        return total

    def faults(self) -> list[str]:
        """A line for everything that must not be; empty when the run passed."""
        total, victim = self.total, self.shards[self.victim]
        others = [figures for name, figures in self.shards.items() if name != self.victim]
        found = {
            f"exclusion failed: {self.verdict}": not self.verdict.kept,
            f"{total.undegraded} locks of an outage are not marked degraded": total.undegraded,
            f"{self.local_lost} increments lost inside a process": self.local_lost,
            "a healthy shard degraded, or lost locks": any(one.degraded or one.lost for one in others),
            "the killed shard did not grant again": self.kills and self.recovered is None,
            "degraded in spite of on_outage=refuse": self.on_outage == "refuse" and total.degraded,
            "nothing was degraded": self.on_outage == "local" and self.kills and not victim.degraded,
            "nothing was refused": self.on_outage == "refuse" and self.kills and not victim.refused,
        }
        unexpected = [f"{count} times {text}" for text, count in self.problems.items()]
        return [text for text, wrong in found.items() if wrong] + unexpected + list(self.leftovers)

    def __str__(self) -> str:
        total, waits = self.total, self.total.waits
        return (
            f"on_outage={self.on_outage}: {total.granted:,} locks in {self.seconds:.0f} s, "
            f"{total.granted / self.seconds:,.0f}/s; "
            f"wait p50 {waits.percentile(50) * 1e3:.1f} ms, p99 {waits.percentile(99) * 1e3:.1f} ms, "
            f"max {waits.longest * 1e3:.0f} ms; degraded {total.degraded:,}, refused {total.refused:,}, "
            f"busy {total.busy:,}, lost {total.lost:,}, errors {total.errors:,}; kills {self.kills}, "
            f"granting again after {self.recovered or 0:.1f} s; {self.verdict}"
        )


def provision(cluster: Cluster, progress: Callable[[str, int, int], None] | None = None) -> None:
    """Create and seed all a cluster's shards."""
    config, administrator = load(cluster.shards_file), load(cluster.admin_file)
    init(config, administrator)
    seed(config, administrator, progress)


def run(cluster: Cluster, plan: Plan, *, seconds: float, processes: int, kills: int = 2, victim: int = 0) -> Result:
    """Run a plan on a provisioned cluster while one of its servers is killed and restarted, `kills` times.

    Raises:
        FleetError: a process of the load did not begin, or did not end well.
        ClusterError: the server did not come back.
    """
    name = f"shard-{victim}"
    recovered = None
    with Fleet(plan, processes) as fleet:
        fleet.go()
        began = time.monotonic()
        for number in range(kills):
            _sleep_until(began + seconds * (number + 0.5) / (kills + 0.5))
            _outage(cluster, fleet, victim, max(_LEAST_OUTAGE, seconds * 0.05))
            recovered = _recovery(fleet, name)
        _sleep_until(began + seconds)
        took = time.monotonic() - began
        reports = fleet.stop()
    problems = Counter[str]()
    for report in reports:
        problems.update(report.problems)
    left = leftovers(cluster)
    left += [f"threads are left: {report.threads_left}" for report in reports if report.threads_left]
    return Result(
        seconds=took,
        on_outage=load(plan.shards).router.on_outage,
        kills=kills,
        victim=name,
        verdict=fleet.verdict(),
        shards=fleet.figures(),
        recovered=recovered,
        local_lost=sum(report.local_lost for report in reports),
        problems=dict(problems),
        leftovers=tuple(left),
    )


def _outage(cluster: Cluster, fleet: Fleet, victim: int, seconds: float) -> None:
    fleet.outage(victim, down=False)
    cluster.kill(victim)
    fleet.outage(victim, down=True)
    time.sleep(seconds)
    fleet.outage(victim, down=False)
    cluster.start(victim)


def _recovery(fleet: Fleet, name: str) -> float | None:
    began, before = time.monotonic(), fleet.figures()[name].acquired
    while fleet.figures()[name].acquired == before:
        if time.monotonic() > began + _RECOVERY:
            return None
        time.sleep(0.02)
    return time.monotonic() - began


def _sleep_until(when: float) -> None:
    time.sleep(max(0.0, when - time.monotonic()))


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line; returns 0 when exclusion was proven and nothing was left behind, else 1."""
    asked = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="lockrouter-run-") as home:
        folder = Path(home, "proof")
        folder.mkdir()
        try:
            with Cluster.up(Path(home, "cluster"), asked.shards, asked.server, on_outage=asked.on_outage) as cluster:
                provision(cluster)
                plan = Plan(shards=str(cluster.shards_file), folder=str(folder), threads=asked.threads)
                result = run(cluster, plan, seconds=asked.seconds, processes=asked.processes, kills=asked.kills)
        except LockRouterError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(f"{asked.server} {cluster.version}: {result}")
    for fault in result.faults():
        print(f"FAULT: {fault}")
    return 1 if result.faults() else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lockrouter.testing.exclusion_run", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--threads", type=int, default=8, help="per process")
    parser.add_argument("--shards", type=int, default=4, help="servers to start")
    parser.add_argument("--server", type=Vendor, choices=list(Vendor), default=Vendor.MYSQL)
    parser.add_argument("--on-outage", choices=("refuse", "local"), default="refuse")
    parser.add_argument("--kills", type=int, default=2, help="how often one server is killed and restarted")
    return parser


if __name__ == "__main__":
    sys.exit(main())
