"""`lockrouter sweep`: the purge of what nobody needs any more."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import Annotated

import typer
from prometheus_client import start_http_server

from lockrouter.admin.sweep import Swept
from lockrouter.admin.sweeper import Sweeper
from lockrouter.cli.output import failing_clearly, print_json
from lockrouter.cli.shards import File, Json
from lockrouter.config import load

__all__ = ["sweep"]


def sweep(
    file: File,
    interval: Annotated[
        float | None, typer.Option(min=1.0, help="Sweep again and again, so many seconds apart; ended by a signal.")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="One pass, which is also what happens without --interval.")
    ] = False,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Serve the metrics on this port.")] = None,
    as_json: Json = False,
) -> None:
    """Delete long-expired leases, results whose time is over and old markers, in small batches that wait for nobody.

    Any number may run: for each shard they elect one. Exit 1 if a shard could not be swept, in the last pass.
    """
    if once and interval is not None:
        raise typer.BadParameter("give --once or --interval, not both")
    with failing_clearly(), _until_signalled() as stop, Sweeper(load(file)) as sweeper:
        if port is not None:
            start_http_server(port)
        while True:
            passed = sweeper.sweep(every=interval or 0.0, go_on=lambda: not stop.is_set())
            _print(passed, as_json=as_json)
            if interval is None or stop.wait(interval):
                break
    if any(swept.failed for swept in passed):
        raise typer.Exit(1)


def _print(passed: list[Swept], *, as_json: bool) -> None:
    if as_json:
        print_json({"shards": [asdict(swept) for swept in passed]})
        return
    for swept in passed:
        if swept.skipped is not None:
            typer.echo(f"{swept.shard}: not swept: {swept.skipped}", err=swept.failed)
            continue
        found = ", ".join(f"{number:,} {what}" for what, number in swept.deleted.items())
        busy = f"; {swept.busy} batches met locked rows and wait for the next pass" if swept.busy else ""
        typer.echo(f"{swept.shard}: deleted {found}{busy}")


@contextmanager
def _until_signalled() -> Iterator[threading.Event]:
    """What is set by SIGTERM or Ctrl-C: the pass under way ends after its batch."""
    stop = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
