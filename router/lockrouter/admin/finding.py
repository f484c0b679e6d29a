"""What `verify` finds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Finding", "listed"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or will be."""

    shard: str
    problem: str
    """A short word for programs: the same problem has the same word in every version."""
    text: str
    """One line for people: what is wrong, and what to do."""
    warning: bool = False
    """True: locks are right as things are; look at it before they are not."""


def listed(numbers: Iterable[int]) -> str:
    """Numbers as ranges, at most five of them: `0-511, 900 and 17 more`."""
    ordered = sorted(numbers)
    ranges: list[tuple[int, int]] = []
    for number in ordered:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    shown = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges[:5])
    rest = len(ordered) - sum(last - first + 1 for first, last in ranges[:5])
    return f"{shown} and {rest} more" if rest else shown
