"""Generated parts of loadtest/README.md: what stands between `<!-- name:start -->` and `<!-- name:end -->`."""

from __future__ import annotations

from pathlib import Path

__all__ = ["README", "put"]

README = Path(__file__).with_name("README.md")


def put(name: str, text: str, readme: Path = README) -> None:
    """Replace the part called `name`.

    Raises:
        ValueError: the markers are not there.
    """
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    before, found, rest = readme.read_text("utf-8").partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{readme.name} lacks {start} or {end}")
    readme.write_text(f"{before}{start}\n{text.rstrip()}\n{end}{after}", "utf-8")
