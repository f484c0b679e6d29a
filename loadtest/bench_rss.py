"""Resident memory of an idle router: run in a process of its own, it prints megabytes as JSON.

python loadtest/bench_rss.py FILE
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def resident_mb() -> float:
    """Megabytes (of 1,024 squared bytes) of this process that are in memory."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


def main() -> None:
    """Prints what the interpreter needs, what it needs with the package, and with the router connected and used."""
    found = {"interpreter": resident_mb()}
    import lockrouter

    found["imported"] = resident_mb()
    with lockrouter.LockRouter.from_file(sys.argv[1]) as router:
        router.warm()
        for number in range(64):
            with router.lock(f"account:{number}"):
                pass
        time.sleep(1.0)
        found["router"] = resident_mb()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
