"""`lockrouter cluster`: throw-away real servers on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from lockrouter.errors import LockRouterError
from lockrouter.testing.binaries import Vendor
from lockrouter.testing.cluster import Cluster, NoClusterError

__all__ = ["app"]

app = typer.Typer(help="Throw-away real servers on loopback: one per shard.", no_args_is_help=True)

Directory = Annotated[Path, typer.Option("--dir", help="The cluster's folder.", file_okay=False)]


@app.command()
def up(
    directory: Directory,
    shards: Annotated[int, typer.Option(min=1, help="Servers to start, one per shard.")] = 4,
    server: Annotated[Vendor, typer.Option(help="Whose servers.")] = Vendor.MYSQL,
) -> None:
    """Start the servers; write DIR/shards.toml (the application's user) and DIR/admin.toml (an administrator)."""
    with _failing_clearly():
        cluster = Cluster.up(directory, shards, server)
        typer.echo(f"{len(cluster)} servers of {cluster.vendor} {cluster.version} are up in {cluster.directory}")
        for one in cluster.status():
            typer.echo(f"  {one.shard}  127.0.0.1:{one.port}  pid {one.pid}")
        typer.echo(f"application: {cluster.shards_file}\nadministrator: {cluster.admin_file}")


@app.command()
def status(
    directory: Directory, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False
) -> None:
    """Say how each server is; exit 1 unless all of them run."""
    with _failing_clearly():
        cluster = Cluster.open(directory)
        servers = cluster.status()
    if as_json:
        about = {"vendor": cluster.vendor, "version": cluster.version, "servers": msgspec.to_builtins(servers)}
        typer.echo(json.dumps(about, indent=1))
    else:
        typer.echo(f"{cluster.vendor} {cluster.version} in {cluster.directory}")
        for one in servers:
            typer.echo(f"  {one.shard}  127.0.0.1:{one.port}  {one.state}" + (f"  pid {one.pid}" if one.pid else ""))
    if any(one.state != "running" for one in servers):
        raise typer.Exit(1)


@app.command()
def down(directory: Directory) -> None:
    """End the servers, whoever started them, and remove what the cluster wrote. Repeatable."""
    with _failing_clearly():
        try:
            cluster = Cluster.open(directory)
        except NoClusterError as nothing:
            typer.echo(str(nothing))
            return
        cluster.down()
        typer.echo(f"the cluster in {directory} is gone")


@contextmanager
def _failing_clearly() -> Iterator[None]:
    """Errors made to be read are printed as one message, exit 1."""
    try:
        yield
    except LockRouterError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
