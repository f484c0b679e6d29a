"""`lockrouter bench`: locks per second and latency on shards of one's own, beside plain PyMySQL and installed peers."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pymysql
import typer
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from lockrouter.cli.output import failing_clearly, print_json
from lockrouter.cli.timing import Contender, Way, alternate, ratio, way
from lockrouter.cli.ways import cursor_cycle, distinct_keys, file_cycle, redis_cycle, router_cycle
from lockrouter.config import RouterConfig, load
from lockrouter.router import LockRouter

__all__ = ["bench"]

_OWN = "lockrouter"
_PREFIX = "lockrouter-bench:"
_COLUMNS = ("lock and release", "callers", "locks/s", "p50 ms", "p99 ms", "lockrouter is")


@dataclass(frozen=True, slots=True)
class _Plan:
    callers: tuple[int, ...]
    rounds: int
    seconds: float
    redis: str | None


def bench(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The shard file.", show_default=False)],
    callers: Annotated[int, typer.Option(min=1, max=64, help="Threads; one alone is measured too.")] = 8,
    seconds: Annotated[float, typer.Option(min=0.1, max=30.0, help="Of each run.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, max=20, help="Runs of each contender, in turns.")] = 3,
    redis: Annotated[
        str | None, typer.Option(metavar="URL", help="Also redis-py's lock on that server, where it is installed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Measure lock and release with random keys, this router beside plain PyMySQL. It takes real row locks.

    Nothing is written. A caller of another process whose key shares a row with a measured one waits for a moment.
    """
    plan = _Plan(tuple(sorted({1, callers})), rounds, seconds, redis)
    with failing_clearly(), ExitStack() as stack:
        config = load(file)
        try:
            contenders, left_out = _contenders(config, plan, stack)
            _warn(config, plan, len(contenders))
            alternate(contenders, rounds=rounds, seconds=seconds, progress=lambda one: None)
        except pymysql.MySQLError as error:
            typer.echo(f"lockrouter: plain PyMySQL: {error}", err=True)
            raise typer.Exit(2) from None
    if as_json:
        print_json(_as_json(plan, contenders, left_out))
    else:
        _print(contenders, left_out)


def _warn(config: RouterConfig, plan: _Plan, runs: int) -> None:
    about = runs * (plan.rounds * plan.seconds + min(0.3, plan.seconds))
    shards = f"{len(config.shards)} shard{'s' if len(config.shards) > 1 else ''}"
    typer.echo(f"taking real row locks of random keys on {shards} for about {about:.0f} s", err=True)


def _contenders(config: RouterConfig, plan: _Plan, stack: ExitStack) -> tuple[list[Contender], list[str]]:
    """All that can be run, the router first, and a line for each peer that cannot."""
    router = stack.enter_context(LockRouter(config, registry=CollectorRegistry()))
    router.warm()
    keys = distinct_keys(plan.callers[-1], _PREFIX)
    ways = [
        way(_OWN, [router_cycle(router, part) for part in keys]),
        way("PyMySQL cursor", [cursor_cycle(config, part, stack) for part in keys]),
    ]
    left_out = _add_peers(ways, plan, keys, stack)
    return [one(callers) for callers in plan.callers for one in ways], left_out


def _add_peers(ways: list[Way], plan: _Plan, keys: Sequence[Sequence[str]], stack: ExitStack) -> list[str]:
    left_out = []
    if plan.redis is None:
        left_out.append("redis-py Lock: no --redis URL was given")
    elif importlib.util.find_spec("redis") is None:
        left_out.append("redis-py Lock: redis is not installed")
    else:
        module: Any = importlib.import_module("redis")
        client = stack.enter_context(module.Redis.from_url(plan.redis))
        try:
            client.ping()
        except module.RedisError as error:
            left_out.append(f"redis-py Lock: {error}")
        else:
            ways.append(way("redis-py Lock", [redis_cycle(client, part) for part in keys]))
    if importlib.util.find_spec("filelock") is None:
        left_out.append("filelock: not installed")
    else:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockrouter-bench-")))
        ways.append(way("filelock, this machine only", [file_cycle(folder, part) for part in keys]))
    return left_out


def _rows(contenders: Sequence[Contender]) -> list[tuple[Contender, float | None]]:
    """Each with how many times faster the router is with as many callers."""
    own = {one.callers: one for one in contenders if one.name == _OWN}
    return [(one, None if one.name == _OWN else ratio(own[one.callers], one)) for one in contenders]


def _print(contenders: Sequence[Contender], left_out: Sequence[str]) -> None:
    console = Console()
    table = Table()
    for number, name in enumerate(_COLUMNS):
        table.add_column(name, justify="right" if number else "left")
    for one, times in _rows(contenders):
        spans = [f"{one.latency[percent] * 1e3:.2f}" for percent in (50.0, 99.0)]
        compared = "" if times is None else f"{times:.2f} ×"
        style = "bold" if one.name == _OWN else ""
        table.add_row(one.name, str(one.callers), f"{one.rate:,.0f}", *spans, compared, style=style)
    console.print(table)
    for line in left_out:
        console.print(f"left out: {line}", soft_wrap=True)


def _as_json(plan: _Plan, contenders: Sequence[Contender], left_out: Sequence[str]) -> dict[str, Any]:
    """Seconds, and locks per second."""
    found = [
        {
            "name": one.name,
            "callers": one.callers,
            "locks_per_second": round(one.rate, 1),
            "p50": one.latency[50.0],
            "p99": one.latency[99.0],
            "lockrouter_is": times,
        }
        for one, times in _rows(contenders)
    ]
    return {"rounds": plan.rounds, "seconds": plan.seconds, "contenders": found, "left_out": list(left_out)}
