"""`verify --sizing`: how often a key finds its row busy because of another key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lockrouter.config import Topology

__all__ = ["HELD", "Odds", "sizing"]

HELD = (1, 10, 100, 1_000, 10_000)
"""Numbers of keys held at one time, for the table."""


@dataclass(frozen=True, slots=True)
class Odds:
    """Probabilities, 0 to 1, while `held` other keys are held, all in different rows or not, in the whole topology."""

    held: int
    false_busy: float
    """That one given try meets the row of a foreign key: 1 - (1 - 1/rows) ** held."""
    any_shared: float
    """That at least two of the held keys would share a row (the birthday bound)."""


def sizing(topology: Topology, held: Sequence[int] = HELD) -> list[Odds]:
    """The odds of a false busy for a topology of buckets times rows_per_bucket rows, keys being spread evenly."""
    rows = topology.buckets * topology.rows_per_bucket
    return [Odds(n, _false_busy(rows, n), _any_shared(rows, n)) for n in held]


def _false_busy(rows: int, held: int) -> float:
    if rows == 1:
        return float(held > 0)
    return 0.0 - math.expm1(held * math.log1p(-1 / rows))


def _any_shared(rows: int, held: int) -> float:
    if held > rows:
        return 1.0
    return 0.0 - math.expm1(math.fsum(math.log1p(-earlier / rows) for earlier in range(held)))
