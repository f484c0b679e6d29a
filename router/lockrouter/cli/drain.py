"""`lockrouter drain`: before a planned switchover."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from lockrouter.admin.drain import Drained, undo
from lockrouter.admin.drain import drain as empty
from lockrouter.cli.output import failing_clearly, print_json
from lockrouter.cli.shards import Admin, File, Json
from lockrouter.config import load

__all__ = ["drain"]


def drain(
    file: File,
    shard: Annotated[str, typer.Argument(metavar="SHARD", help="The shard's id.", show_default=False)],
    undo_it: Annotated[bool, typer.Option("--undo", help="Let the server grant again.")] = False,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for who holds a row.")] = 60.0,
    admin: Admin = None,
    as_json: Json = False,
) -> None:
    """Have a shard's primary grant nothing more, and wait until none of its rows is held. Leases are kept.

    Then switch over: the new primary opens by itself. Exit 1 if rows are still held; the server stays drained.
    """
    with failing_clearly():
        config, administrator = load(file), None if admin is None else load(admin)
        if undo_it:
            undone = undo(config, administrator, shard)
            if as_json:
                print_json({"shard": shard, "undone": undone})
            else:
                typer.echo(f"{shard}: {'grants again' if undone else 'was not drained'}")
            return

        def tell(line: str) -> None:
            typer.echo(f"{shard}: {line}", err=True)

        drained = empty(config, administrator, shard, timeout=timeout, tell=tell)
    if as_json:
        print_json(asdict(drained))
    else:
        _print(drained)
    if drained.still_held:
        raise typer.Exit(1)


def _print(drained: Drained) -> None:
    where = f"{drained.shard}: {drained.server}"
    if drained.still_held:
        slots = ", ".join(map(str, drained.still_held[:10]))
        typer.echo(f"{where}: still held after {drained.seconds:.1f} s: {len(drained.still_held)} rows (slots {slots})")
        return
    found = f"{drained.held} rows were waited for, {drained.leases} leases are kept"
    typer.echo(f"{where}: drained in {drained.seconds:.1f} s, {found}; switch over now, or `lockrouter drain --undo`")
