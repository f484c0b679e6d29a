"""All commands in one place: a new module of commands is mounted here."""

from __future__ import annotations

import typer

from lockrouter.cli import bench, cluster, demo, drain, shards, sweep

__all__ = ["app"]

app = typer.Typer(
    name="lockrouter",
    help="Mutual exclusion on sharded MySQL: create, seed and verify the shards of a topology.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(shards.init)
app.command()(shards.seed)
app.command()(shards.verify)
app.command()(shards.route)
app.command()(drain.drain)
app.command()(bench.bench)
app.command()(sweep.sweep)
app.command()(demo.demo)
app.add_typer(cluster.app, name="cluster")
