"""Locks per second, beside other ways to lock, on one real server of each vendor on this machine.

`make bench`, or `python loadtest/bench.py --help`. Exits 0 whatever the figures are: targets are shown, not asserted.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from bench_readme import put
from bench_report import markdown
from bench_run import Plan, measure, measure_others
from profile_cycle import to_readme as profile_to_readme
from rich.console import Console

from lockrouter.testing.binaries import Vendor

_FOLDER = Path(__file__).resolve().parent


def main() -> int:
    """Measure, print, save."""
    options = _arguments()
    signal.signal(signal.SIGTERM, _end)  # so that the servers are taken down then, too
    console = Console()
    vendors = list(Vendor) if options.vendor == "both" else [Vendor(options.vendor)]
    plan = Plan(options.rounds, options.seconds, options.quick, options.only)
    others, reports = measure_others(plan, console), []
    for vendor in vendors:
        report = measure(vendor, plan, others, console)
        report.print(console)
        for path in report.save(options.out):
            console.print(f"written: {path}", soft_wrap=True)
        reports.append(report)
    if options.update_readme:
        put("bench", markdown(reports, f"{options.out.name}/"))
        profile_to_readme()
    return 0


def _end(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vendor", choices=[*map(str, Vendor), "both"], default="both")
    parser.add_argument("--rounds", type=_positive(int), default=5, help="runs of each contender")
    parser.add_argument("--seconds", type=_positive(float), default=2.0, help="of each run")
    parser.add_argument("--quick", action="store_true", help="one short round: does it work at all?")
    parser.add_argument("--only", metavar="TEXT", help="only contenders whose name contains it, and no other figures")
    parser.add_argument("--out", type=Path, default=_FOLDER / "results", help="folder for the results")
    parser.add_argument("--update-readme", action="store_true", help="put the tables into loadtest/README.md")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 1, 0.5
    return options


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise ValueError
        return value

    number.__name__ = "number above 0"
    return number


if __name__ == "__main__":
    raise SystemExit(main())
