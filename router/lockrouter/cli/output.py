"""How commands speak: errors as one line on stderr, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from lockrouter.errors import LockRouterError

__all__ = ["failing_clearly", "print_json"]


@contextmanager
def failing_clearly() -> Iterator[None]:
    """An error of this package is printed, its notes below it, and ends the command with exit 2.

    Raises:
        typer.Exit: instead of a `LockRouterError`.
    """
    try:
        yield
    except LockRouterError as error:
        for line in (str(error), *getattr(error, "__notes__", ())):
            typer.echo(f"lockrouter: {line}", err=True)
        raise typer.Exit(2) from None


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(value, indent=1))
