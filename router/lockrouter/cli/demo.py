"""`lockrouter demo`: the main job on a throw-away cluster, from seeding to a proof, with an outage in the middle."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lockrouter.cli.demo_view import View, summary
from lockrouter.cli.output import failing_clearly
from lockrouter.config import load
from lockrouter.testing.binaries import Vendor
from lockrouter.testing.cluster import Cluster, NoClusterError
from lockrouter.testing.exclusion_run import provision
from lockrouter.testing.fleet import Fleet
from lockrouter.testing.load import Figures, Plan
from lockrouter.testing.shardfiles import Scalar

__all__ = ["demo"]

_SHARDS = 4
_VICTIM = 1
_PROCESSES = 4
_THREADS = 4
_STOP_AT, _START_AT = 0.3, 0.55
_TICK, _LINE_EVERY = 0.25, 1.0
_RECOVERY = 3.0
_TOPOLOGY: Mapping[str, Scalar] = {"name": "demo", "buckets": 256, "rows_per_bucket": 512}
_CLASSES = '[[class]]\nprefix = "payout:"\non_outage = "refuse"\n'
_PREFIXES = ("account:", "payout:", "order:")


def demo(
    server: Annotated[Vendor, typer.Option(help="Whose servers.")] = Vendor.MYSQL,
    seconds: Annotated[float, typer.Option(min=5.0, help="How long the load runs.")] = 20.0,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="The cluster's folder; by default a temporary one.", file_okay=False)
    ] = None,
) -> None:
    """Start four shards, lock keys from several processes, kill a shard meanwhile, and prove exclusion.

    Exit 1 if exclusion failed. Ends by itself; Ctrl-C leaves nothing behind either.
    """
    console = Console(highlight=False)
    with failing_clearly(), ExitStack() as clean_up:
        home = Path(clean_up.enter_context(tempfile.TemporaryDirectory(prefix="lockrouter-demo-")))
        folder = directory or home / "cluster"
        clean_up.callback(_take_down, folder, console)
        clean_up.enter_context(_ending_on_sigterm())
        cluster = _bring_up(folder, server, console)
        _fill(cluster, console)
        plan = Plan(
            shards=str(cluster.shards_file),
            folder=str(home),
            threads=_THREADS,
            prefixes=_PREFIXES,
            hold=0.002,
            every=_TICK,
        )
        passed = _load(cluster, plan, seconds, console)
    if not passed:
        raise typer.Exit(1)


def _bring_up(folder: Path, server: Vendor, console: Console) -> Cluster:
    console.print(f"starting {_SHARDS} {server} servers in {folder} ...")
    began = time.monotonic()
    cluster = Cluster.up(folder, _SHARDS, server, topology=_TOPOLOGY, on_outage="local", extra=_CLASSES)
    ports = ", ".join(str(cluster.port(index)) for index in range(_SHARDS))
    took = time.monotonic() - began
    console.print(f"{cluster.vendor} {cluster.version} on ports {ports} of 127.0.0.1, up in {took:.1f} s")
    return cluster


def _take_down(folder: Path, console: Console) -> None:
    """Whatever happened, and whatever is pressed now, no server is left."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        Cluster.open(folder).down()
        console.print("the servers are stopped, their files removed")
    except NoClusterError:
        pass


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that everything is cleaned up."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _fill(cluster: Cluster, console: Console) -> None:
    columns = (TextColumn("seeding {task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rows"))
    began = time.monotonic()
    with Progress(*columns, console=console) as bars:
        tasks = {shard.id: bars.add_task(shard.id, total=None) for shard in load(cluster.shards_file).shards}
        provision(cluster, lambda shard, there, wanted: bars.update(tasks[shard], completed=there, total=wanted))
    console.print(f"created and seeded in {time.monotonic() - began:.1f} s")


def _load(cluster: Cluster, plan: Plan, seconds: float, console: Console) -> bool:
    """Run the load with its outage, show it, sum it up; whether exclusion was proven."""
    keys = f"{plan.hot} hot and {plan.cold:,} cold keys"
    console.print(f"{_PROCESSES} processes of {plan.threads} threads lock {keys} for {seconds:g} s")
    with Fleet(plan, _PROCESSES) as fleet, ThreadPoolExecutor(1, thread_name_prefix="demo-outage") as other:
        fleet.go()
        view = View(fleet)
        leaving = threading.Event()
        try:
            _watch(view, seconds, console, lambda: other.submit(_outage, cluster, fleet, view, seconds, leaving))
        finally:
            leaving.set()
        took = view.elapsed
        fleet.stop()
        total = Figures()
        for figures in fleet.figures().values():
            total.add(figures)
        verdict = fleet.verdict()
    console.print(summary(total, took, verdict))
    return verdict.kept and not total.undegraded


def _watch(view: View, seconds: float, console: Console, outage: Callable[[], Future[None]]) -> None:
    """Show the load until its time is up and the shard has been back for a moment."""
    running: Future[None] | None = None
    end = seconds
    with _screen(view, console) as show:
        while view.elapsed < end:
            if running is None and view.elapsed >= seconds * _STOP_AT:
                running = outage()
            if running is not None and not running.done():
                end = max(seconds, view.elapsed + _RECOVERY)
            show()
            time.sleep(_TICK)
        show()
    if running is not None:
        running.result()


@contextmanager
def _screen(view: View, console: Console) -> Iterator[Callable[[], None]]:
    """What shows the view as it is now: a live table in a terminal, else a line a second and one per event."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda: live.update(view.render(), refresh=True)
        return
    shown, line_at = 0, _LINE_EVERY

    def show() -> None:
        nonlocal shown, line_at
        events, shown = view.events[shown:], len(view.events)
        for event in events:
            console.print(event, soft_wrap=True)
        if view.elapsed >= line_at:
            console.print(view.line(), soft_wrap=True)
            line_at += _LINE_EVERY

    yield show


def _outage(cluster: Cluster, fleet: Fleet, view: View, seconds: float, leaving: threading.Event) -> None:
    name = f"shard-{_VICTIM}"
    fleet.outage(_VICTIM, down=False)
    # A clean shutdown would free rows, and grant them to others, while their holders are still inside.
    cluster.kill(_VICTIM)
    fleet.outage(_VICTIM, down=True)
    view.servers[name] = "dead"
    view.event(f"{name} was killed: its account: and order: keys degrade to local locks, its payout: keys are refused")
    if leaving.wait(max(1.0, seconds * _START_AT - view.elapsed)):
        return
    fleet.outage(_VICTIM, down=False)
    view.servers[name] = "starting"
    view.event(f"{name} is being started")
    cluster.start(_VICTIM)
    view.servers[name] = "running"
    view.event(f"{name} answers again: back to its rows")
