"""The command `lockrouter`; needs the extra `cli`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockrouter.cli.root import app as app

__all__ = ["app", "main"]


def main() -> None:
    """Runs the command line and ends the process. Exit 2, and one line, if the extra `cli` is not installed."""
    try:
        from lockrouter.cli.root import app as root
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        print(f"lockrouter: {error.name} is not installed: pip install 'lockrouter[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    root()


def __getattr__(name: str) -> Any:
    """`app` is imported when asked for, so that `main` can say what is missing."""
    if name == "app":
        from lockrouter.cli.root import app as root

        return root
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
