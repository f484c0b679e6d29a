"""`lockrouter init`, `seed`, `verify` and `route`: what operators do with a shard file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from lockrouter.admin.fence import PASSWORD, init_fence
from lockrouter.admin.finding import Finding
from lockrouter.admin.init import init as create
from lockrouter.admin.seed import seed as fill
from lockrouter.admin.sizing import Odds, sizing
from lockrouter.admin.verify import verify as examine
from lockrouter.cli.output import failing_clearly, print_json
from lockrouter.config import RouterConfig, Topology, load
from lockrouter.routing import Routing, encode

__all__ = ["init", "route", "seed", "verify"]

File = Annotated[Path, typer.Argument(metavar="FILE", help="The shard file.", show_default=False)]
Admin = Annotated[
    Path | None,
    typer.Option("--admin", metavar="FILE", help="The same shards with an administrator's credentials."),
]
OptionalFile = Annotated[Path | None, typer.Argument(metavar="[FILE]", help="The shard file.", show_default=False)]
Fence = Annotated[
    str | None,
    typer.Option(
        "--fence",
        metavar="URL",
        help=f"Also create the table of a database protected by router.fence; its password may be in {PASSWORD}.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]


def init(file: OptionalFile = None, admin: Admin = None, fence: Fence = None) -> None:
    """Create databases, tables and the application's user with its grants. Repeatable; exit 1 if any was denied."""
    if fence is not None:
        with failing_clearly():
            for place in init_fence(fence) or ["nothing to create"]:
                typer.echo(f"fence: {place}")
    if file is None:
        if fence is None:
            raise typer.BadParameter("give a shard file, or --fence URL, or both")
        return
    with failing_clearly():
        reports = create(*_load(file, admin))
    for report in reports:
        for line in report.done or ([] if report.prevented else ["nothing to create"]):
            typer.echo(f"{report.shard}: {line}")
        for line in report.prevented:
            typer.echo(f"{report.shard}: prevented: {line}", err=True)
    if any(report.prevented for report in reports):
        raise typer.Exit(1)


def seed(file: File, admin: Admin = None) -> None:
    """Insert the lock rows that are missing. Repeatable; after a kill it goes on where it was."""
    with failing_clearly():
        config, administrator = _load(file, admin)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rows"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as bars:
            tasks: dict[str, TaskID] = {shard.id: bars.add_task(shard.id, total=None) for shard in config.shards}

            def advance(shard: str, there: int, wanted: int) -> None:
                bars.update(tasks[shard], completed=there, total=wanted)

            reports = fill(config, administrator, advance)
    for report in reports:
        speed = (
            f" in {report.seconds:.1f} s, {report.inserted / report.seconds:,.0f} a second" if report.inserted else ""
        )
        typer.echo(f"{report.shard}: {report.rows:,} rows, {report.inserted:,} of them new{speed}")
        if report.closed:
            typer.echo(f"{report.shard}: {report.closed} buckets are closed: `lockrouter reshard` opens them")


def verify(
    file: File,
    admin: Admin = None,
    odds: Annotated[bool, typer.Option("--sizing", help="Also print the odds of a false busy.")] = False,
    as_json: Json = False,
) -> None:
    """Read every shard and say what is wrong, a line each; exit 1 if anything is. Warnings alone exit 0."""
    with failing_clearly():
        config, administrator = _load(file, admin)
        findings = examine(config, administrator)
    chances = sizing(config.topology) if odds else []
    if as_json:
        found = [asdict(finding) for finding in findings]
        print_json({"findings": found, **({"sizing": [asdict(each) for each in chances]} if odds else {})})
    else:
        _print_findings(config, findings)
        if odds:
            _print_odds(config.topology, chances)
    if any(not finding.warning for finding in findings):
        raise typer.Exit(1)


def route(
    file: File,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="Lock keys.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Say where keys live: bucket, shard, table and slot. Asks no server."""
    with failing_clearly():
        routing = Routing(load(file))
        # The bytes as they were typed: an argument need not be UTF-8.
        addresses = [(key, routing.route(encode(os.fsencode(key)))) for key in keys]
    if as_json:
        print_json([{"key": key, **address._asdict()} for key, address in addresses])
        return
    for key, address in addresses:
        place = f"bucket {address.bucket}  shard {address.shard}  lock_{address.table:02d}  slot {address.slot}"
        typer.echo(f"{os.fsencode(key).decode('utf-8', 'backslashreplace')}  {place}")


def _load(file: Path, admin: Path | None) -> tuple[RouterConfig, RouterConfig | None]:
    return load(file), None if admin is None else load(admin)


def _print_findings(config: RouterConfig, findings: Sequence[Finding]) -> None:
    for finding in findings:
        kind = f"warning: {finding.problem}" if finding.warning else finding.problem
        typer.echo(f"{finding.shard}: {kind}: {finding.text}")
    if not findings:
        rows = config.topology.buckets * config.topology.rows_per_bucket
        typer.echo(f"{len(config.shards)} shards with {rows:,} rows: nothing is wrong")


def _print_odds(topology: Topology, chances: Sequence[Odds]) -> None:
    rows = topology.buckets * topology.rows_per_bucket
    table = Table(title=f"Odds of a false busy, {rows:,} rows")
    for title in ("keys held", "a try meets a foreign key's row", "two of them share a row"):
        table.add_column(title, justify="right")
    for each in chances:
        table.add_row(f"{each.held:,}", f"{each.false_busy:.2g}", f"{each.any_shared:.2g}")
    Console().print(table)
