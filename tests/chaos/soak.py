"""`make soak`: every verb at full speed, and what the process and the servers have of it afterwards stays flat.

    python -m tests.chaos.soak --seconds 90
    python -m tests.chaos.soak --operations 20000000

Exits 1 when memory, threads, descriptors or server sessions grow.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tests.chaos.site import SHARDS, Site
from tests.chaos.soaker import THREADS
from tests.support.workers import Workers

__all__ = ["Sample", "Soak", "soak"]

_EVERY = 5.0
_MEMORY = 3.0
"""Megabytes that the last third of the samples may lie above the middle one: allocators settle slowly."""


class Sample(NamedTuple):
    """The process at rest, after so many operations."""

    operations: int
    rss: float
    """Megabytes."""
    threads: int
    descriptors: int
    sessions: int
    """Of the application, on all servers together."""


class Soak(NamedTuple):
    """What a soak came to."""

    seconds: float
    samples: list[Sample]

    @property
    def growth(self) -> list[str]:
        """What did not stay flat, comparing the last third of the samples with the one before."""
        third = max(1, len(self.samples) // 3)
        before, after = self.samples[-2 * third : -third], self.samples[-third:]
        found = []
        for name, allowed in (("rss", _MEMORY), ("threads", 0), ("descriptors", 2), ("sessions", 2)):
            first, last = (median(getattr(sample, name) for sample in part) for part in (before, after))
            if last > first + allowed:
                found.append(f"{name} grew from {first:g} to {last:g}")
        return found

    def __str__(self) -> str:
        lines = [f"{'operations':>12}{'RSS MB':>10}{'threads':>10}{'descriptors':>13}{'sessions':>10}"]
        shown = self.samples if len(self.samples) <= 8 else self.samples[:: len(self.samples) // 7]
        for one in [*shown, self.samples[-1]] if shown[-1] is not self.samples[-1] else shown:
            lines.append(
                f"{one.operations:>12,}{one.rss:>10.1f}{one.threads:>10}{one.descriptors:>13}{one.sessions:>10}"
            )
        done = self.samples[-1].operations
        lines.append(f"{done:,} operations in {self.seconds:.0f} s, {done / self.seconds:,.0f}/s, {THREADS} threads")
        return "\n".join(lines)


def soak(site: Site, *, seconds: float, operations: int = 0, say: Callable[[str], object] = lambda _: None) -> Soak:
    """Work for so many seconds, or until so many operations are done, with a sample every few seconds."""
    samples: list[Sample] = []
    worked = 0.0
    every = _EVERY if operations else min(_EVERY, seconds / 9)
    with Workers("tests.chaos.soaker", [str(site.direct_file), str(site.folder)], 1) as fleet:
        while worked < seconds or (samples and samples[-1].operations < operations):
            began = time.monotonic()
            fleet.go()
            time.sleep(every)
            done = int(fleet.rest()[0])
            worked += time.monotonic() - began
            samples.append(_sample(site, fleet.running[0].pid, done))
            say(str(samples[-1]))
        fleet.finish()
    return Soak(worked, samples)


def _sample(site: Site, pid: int, done: int) -> Sample:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    sessions = sum(len(observer.sessions()) for observer in site.observers)
    return Sample(done, int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), descriptors, sessions)


def main() -> int:
    """Run and print the samples."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90.0, help="of work; default 90")
    parser.add_argument("--operations", type=int, default=0, help="go on until so many are done")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, Site(Path(folder), "refuse") as site:
        print(f"four shards: {', '.join(SHARDS)}", flush=True)
        found = soak(site, seconds=options.seconds, operations=options.operations)
    print(found)
    for text in found.growth:
        print(f"NOT FLAT {text}")
    return 1 if found.growth else 0


if __name__ == "__main__":
    sys.exit(main())
