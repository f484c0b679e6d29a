"""`make chaos`: random faults over four shards of both vendors, and the invariants at the end.

    python -m tests.chaos --seconds 180 --seed 1 --on-outage local

Exits 1 at any violation. The faults derive from the seed alone.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import sys
import tempfile
from pathlib import Path

from tests.chaos.run import run_alone

__all__ = ["main"]


def main() -> int:
    """Run and print the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=180.0, help="of load and faults; default 180")
    parser.add_argument("--seed", type=int, default=None, help="of the plan of faults; default a random one")
    parser.add_argument("--on-outage", choices=["refuse", "local"], default="local", help="of every key; default local")
    parser.add_argument("--folder", type=Path, help="an empty folder where the histories stay; default a temporary one")
    options = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    with contextlib.ExitStack() as stack:
        folder = options.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-"))
        report = run_alone(Path(folder), seed=seed, seconds=options.seconds, on_outage=options.on_outage, say=_say)
    print(report)
    return 1 if report.violations else 0


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
