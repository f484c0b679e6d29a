"""What a key leaves behind: run in a process of its own, it prints bytes of resident memory per key as JSON.

python loadtest/bench_residue.py KEYS
"""

from __future__ import annotations

import gc
import json
import sys

from bench_rss import resident_mb
from bench_stub import stub_router

from lockrouter import LockRouter

_COUNT_AFTER = 500
"""Locks that a busy process takes between two looks of its background."""


def lock_all(router: LockRouter, prefix: str, count: int) -> None:
    """Lock and release so many different keys, one after the other; count what they note, as a background does."""
    (shard,) = router._core.shards.values()
    for number in range(count):
        with router.lock(f"{prefix}:{number}"):
            pass
        if not number % _COUNT_AFTER:
            shard.stats.settle()


def main() -> None:
    """Measures after a tenth as many other keys, which fill whatever has a bound."""
    keys = int(sys.argv[1])
    router = stub_router(rows_per_bucket=1)
    lock_all(router, "before", max(50_000, keys // 10))
    gc.collect()
    before = resident_mb()
    lock_all(router, "account", keys)
    gc.collect()
    used = resident_mb() - before
    router.close()
    print(json.dumps(max(0.0, used) * 2**20 / keys))


if __name__ == "__main__":
    main()
