"""Locks per second, beside other ways to lock, on one real server of each vendor on this machine.

`make bench`, or `python loadtest/bench.py --help`. Exits 0 whatever the figures are: targets are shown, not asserted.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import date
from pathlib import Path

from bench_figures import figures
from bench_machine import machine, program_version
from bench_mysql import mysql_contenders
from bench_peers import peer_contenders, redis_command
from bench_readme import put
from bench_report import Report, markdown
from bench_sysbench import sysbench_contenders, sysbench_version
from bench_timing import Contender, alternate
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lockrouter.admin.init import init
from lockrouter.admin.seed import seed
from lockrouter.config import RouterConfig, load
from lockrouter.testing.binaries import ProgramError, Vendor
from lockrouter.testing.cluster import Cluster
from lockrouter.testing.shardfiles import Scalar

_FOLDER = Path(__file__).resolve().parent
_TOPOLOGY: dict[str, Scalar] = {"name": "bench", "buckets": 64, "rows_per_bucket": 256}


def main() -> int:
    """Measure, print, save."""
    options = _arguments()
    signal.signal(signal.SIGTERM, _end)  # so that the servers are taken down then, too
    console = Console()
    vendors = list(Vendor) if options.vendor == "both" else [Vendor(options.vendor)]
    reports = []
    for vendor in vendors:
        report = _measure(vendor, options, console)
        report.print(console)
        for path in report.save(options.out):
            console.print(f"written: {path}", soft_wrap=True)
        reports.append(report)
    if options.update_readme:
        put("bench", markdown(reports))
    return 0


def _end(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vendor", choices=[*map(str, Vendor), "both"], default="both")
    parser.add_argument("--rounds", type=_positive(int), default=5, help="runs of each contender")
    parser.add_argument("--seconds", type=_positive(float), default=2.0, help="of each run")
    parser.add_argument("--quick", action="store_true", help="one round of one second: does it work at all?")
    parser.add_argument("--only", metavar="TEXT", help="only contenders whose name contains it, and no other figures")
    parser.add_argument("--out", type=Path, default=_FOLDER / "results", help="folder for the results")
    parser.add_argument("--update-readme", action="store_true", help="put the tables into loadtest/README.md")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 1, 1.0
    return options


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise ValueError
        return value

    number.__name__ = "number above 0"
    return number


def _measure(vendor: Vendor, options: argparse.Namespace, console: Console) -> Report:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockrouter-bench-")))
        cluster = stack.enter_context(Cluster.up(folder / "cluster", 1, vendor, topology=_TOPOLOGY, on_outage="refuse"))
        config, admin = load(cluster.shards_file), load(cluster.admin_file)
        init(config, admin)
        seed(config, admin)
        server = _server(vendor, cluster.version)
        console.print(f"{server}: {options.rounds} × {options.seconds:g} s for each contender")
        contenders, versions, left_out = _contenders(config, vendor, stack, folder)
        chosen = [one for one in contenders if options.only is None or options.only in one.name]
        _run(chosen, options, console)
        return Report(
            vendor=str(vendor),
            date=date.today().isoformat(),
            servers={str(vendor): server, **versions},
            machine=machine(),
            rounds=options.rounds,
            seconds=options.seconds,
            contenders=chosen,
            figures=None if options.only else figures(cluster, config, quick=options.quick),
            left_out=left_out,
        )


def _server(vendor: Vendor, version: str) -> str:
    return f"{'MySQL' if vendor is Vendor.MYSQL else 'MariaDB'} {version.removesuffix('-MariaDB')}"


def _contenders(
    config: RouterConfig, vendor: Vendor, stack: ExitStack, folder: Path
) -> tuple[list[Contender], dict[str, str], list[str]]:
    """All that can be run here, the versions of their programs, and a line for each that cannot."""
    contenders, left_out = peer_contenders(stack, folder)
    versions = {}
    if any("redis" in one.name for one in contenders):
        versions["redis"] = f"Redis {program_version(redis_command())}"
    own = mysql_contenders(config, vendor, stack)
    try:
        sysbench = sysbench_contenders(config, vendor, folder)
        versions["sysbench"] = f"sysbench {sysbench_version()}"
    except ProgramError as error:
        sysbench = []
        left_out.append(f"left out: sysbench: {error}")
    return [*own, *sysbench, *contenders], versions, left_out


def _run(contenders: Sequence[Contender], options: argparse.Namespace, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("warming up", total=options.rounds * len(contenders))
        alternate(
            contenders,
            rounds=options.rounds,
            seconds=options.seconds,
            progress=lambda one: progress.update(task, advance=1, description=f"{one.title:<36}"),
        )


if __name__ == "__main__":
    raise SystemExit(main())
