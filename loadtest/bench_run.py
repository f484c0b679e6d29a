"""One run of the benchmark: who contends, in which order, and what is found on one server."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from bench_figures import figures
from bench_lease import lease_contenders
from bench_machine import machine
from bench_mysql import CALLERS, hot_contenders, mysql_ways
from bench_peers import peers
from bench_report import Report
from bench_sysbench import sysbench_version, sysbench_way
from bench_workers import processes
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lockrouter import LockRouter
from lockrouter.admin.init import init
from lockrouter.admin.seed import seed
from lockrouter.cli.timing import Contender, Way, alternate
from lockrouter.config import RouterConfig, load
from lockrouter.testing.binaries import ProgramError, Vendor
from lockrouter.testing.cluster import Cluster
from lockrouter.testing.shardfiles import Scalar

__all__ = ["Plan", "Run", "measure", "measure_others"]

_CURVE, _QUICK_CURVE = (2, 4, 16, 32, 64), (64,)
"""Callers, beside those of the table."""
_PROCESSES, _CALLERS_EACH = 2, 8
_TOPOLOGY: dict[str, Scalar] = {"name": "bench", "buckets": 64, "rows_per_bucket": 256}


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int
    seconds: float
    quick: bool
    only: str | None
    """Only contenders whose name contains it, and nothing else."""


@dataclass(slots=True)
class Run:
    """Contenders that were measured."""

    table: list[Contender] = field(default_factory=list)
    curve: list[Contender] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def contend(self, ways: Sequence[Way], special: Sequence[Contender], plan: Plan, console: Console) -> None:
        """Measure the ways with the callers of the table, beside them what is special, then those of the curve."""
        table = [*(one(callers) for callers in CALLERS for one in ways), *special]
        self.table = [one for one in table if plan.only is None or plan.only in one.name]
        _alternate(self.table, plan.rounds, plan.seconds, console)
        if plan.only is None:
            callers = _QUICK_CURVE if plan.quick else _CURVE
            self.curve = [one(count) for count in callers for one in ways]
            _alternate(self.curve, min(2, plan.rounds), plan.seconds / 4, console)


def measure_others(plan: Plan, console: Console) -> Run:
    """The peers that no target is about: once for all servers, and alone, for some go on writing after their turn."""
    run = Run()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockrouter-bench-")))
        found = peers(stack, folder, others=True, only=plan.only)
        run.versions = {name: server.name for name, server in found.servers.items()}
        run.left_out = found.left_out
        if found.ways:
            console.print(f"first, once for all servers: {', '.join(one(1).name for one in found.ways)}")
        run.contend(found.ways, [], plan, console)
    return run


def measure(vendor: Vendor, plan: Plan, others: Run, console: Console) -> Report:
    """All on one server of that vendor."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockrouter-bench-")))
        cluster = stack.enter_context(Cluster.up(folder / "cluster", 1, vendor, topology=_TOPOLOGY, on_outage="refuse"))
        config, admin = load(cluster.shards_file), load(cluster.admin_file)
        init(config, admin)
        seed(config, admin)
        server = f"{'MySQL' if vendor is Vendor.MYSQL else 'MariaDB'} {cluster.version.removesuffix('-MariaDB')}"
        console.print(f"{server}: {plan.rounds} × {plan.seconds:g} s for each contender")
        run = _contend(cluster, config, plan, folder, console)
        found = None
        if plan.only is None:
            found = figures(cluster, config, rounds=min(3, plan.rounds), seconds=plan.seconds, quick=plan.quick)
        return Report(
            vendor=str(vendor),
            date=date.today().isoformat(),
            servers={str(vendor): server, **run.versions, **others.versions},
            machine=machine(),
            rounds=plan.rounds,
            seconds=plan.seconds,
            contenders=[*run.table, *others.table],
            curve=[*run.curve, *others.curve],
            figures=found,
            left_out=[*run.left_out, *others.left_out],
        )


def _contend(cluster: Cluster, config: RouterConfig, plan: Plan, folder: Path, console: Console) -> Run:
    """The router, and what its targets compare it with."""
    run = Run()
    with ExitStack() as stack:
        router = stack.enter_context(LockRouter(config, registry=CollectorRegistry()))
        router.warm()
        redis = peers(stack, folder, others=False, only=plan.only)
        run.versions = {name: server.name for name, server in redis.servers.items()}
        run.left_out = redis.left_out
        ways = mysql_ways(config, router, stack)
        try:
            ways.append(sysbench_way(config, str(cluster.vendor), folder))
            run.versions["sysbench"] = f"sysbench {sysbench_version()}"
        except ProgramError as error:
            run.left_out.append(f"left out: sysbench: {error}")
        special = hot_contenders(config, router, stack)
        several = [("lockrouter", "router", str(cluster.shards_file))]
        several += [("redis-py Lock", "redis", str(server.port)) for server in redis.servers.values()]
        for name, kind, where in several:
            special.append(processes(name, _PROCESSES, kind, where, _CALLERS_EACH, stack))
        special += lease_contenders(router, list(redis.servers.values()), stack)
        run.contend([*ways, *redis.ways], special, plan, console)
    return run


def _alternate(contenders: Sequence[Contender], rounds: int, seconds: float, console: Console) -> None:
    if not contenders:
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("warming up", total=rounds * len(contenders))
        alternate(
            contenders,
            rounds=rounds,
            seconds=seconds,
            progress=lambda one: progress.update(task, advance=1, description=f"{one.title:<36}"),
        )
