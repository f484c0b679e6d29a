"""How fast are the lock rows seeded? `measure` is for the report; as a script it prints one line per shard.

python loadtest/bench_seed.py FILE ADMIN_FILE
"""

from __future__ import annotations

import sys
from typing import TypedDict

from lockrouter.admin.init import init
from lockrouter.admin.seed import seed
from lockrouter.config import RouterConfig, load

__all__ = ["Seeding", "measure"]


class Seeding(TypedDict):
    """What was measured."""

    rows: int
    """In the whole topology."""
    seconds: float
    """Until the last shard was full."""
    rows_per_second: dict[str, float]
    """By shard id, all shards being seeded at the same time; a shard that had its rows already is left out."""
    again: float
    """Seconds that a second run took, which found everything there."""


def measure(config: RouterConfig, admin: RouterConfig | None) -> Seeding:
    """Seeds the topology, in databases that have no rows yet, twice.

    Raises:
        LockRouterError: as `init` and `seed`.
    """
    init(config, admin)
    first = seed(config, admin)
    second = seed(config, admin)
    return {
        "rows": sum(report.rows for report in first),
        "seconds": max(report.seconds for report in first),
        "rows_per_second": {report.shard: report.inserted / report.seconds for report in first if report.inserted},
        "again": max(report.seconds for report in second),
    }


def main() -> None:
    """Prints what `measure` finds for a shard file and its administrator's twin."""
    file, admin_file = sys.argv[1:]
    found = measure(load(file), load(admin_file))
    for shard, speed in found["rows_per_second"].items():
        print(f"{shard}: {speed:,.0f} rows/s")
    print(f"{found['rows']:,} rows in {found['seconds']:.1f} s; a second run took {found['again']:.2f} s")


if __name__ == "__main__":
    main()
