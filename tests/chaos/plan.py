"""Which fault strikes what, when, and for how long: all of it from the seed alone, so that a seed replays."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec

__all__ = ["ENDS_SESSIONS", "OUTAGES", "Fault", "make_plan"]

_PAUSE = (0.2, 1.5)
_CALM = 6.0
"""Seconds at the end of a round without faults: everything has to recover in them."""


class Fault(msgspec.Struct, frozen=True):
    """One fault of one lane; the faults of a lane come one after the other, the lanes side by side."""

    lane: str
    at: float
    """Seconds after the beginning of its round."""
    kind: str
    target: int
    """A shard, or a worker."""
    length: float = 0.0
    """Seconds until it is undone; 0.0: nothing is to be undone."""
    amount: float = 0.0


Kinds = dict[str, tuple[int, tuple[float, float], tuple[float, float]]]

SHARD_KINDS: Kinds = {
    # kind: weight, length, amount
    "delay": (2, (0.5, 2.0), (0.002, 0.05)),
    "throttle": (1, (0.5, 2.0), (4_000.0, 40_000.0)),
    "split": (2, (0.5, 2.0), (1, 9)),
    "merge": (2, (0.5, 2.0), (0.002, 0.02)),
    "fin": (2, (0.0, 0.0), (0, 12)),
    "rst": (2, (0.0, 0.0), (0, 12)),
    "silence": (2, (0.3, 5.0), (0, 0)),
    "silence up": (1, (0.3, 4.0), (0, 0)),
    "silence down": (2, (0.3, 4.0), (0, 0)),
    "refuse": (1, (0.5, 3.0), (0, 0)),
    "cut before reply": (3, (1.0, 2.0), (2, 8)),
    "stall before reply": (1, (1.0, 2.0), (1, 4)),
    "cut in request": (2, (1.0, 2.0), (2, 8)),
    "kill sessions": (3, (0.0, 0.0), (1, 10)),
    "restart server": (2, (0.2, 1.5), (0, 0)),
    "freeze server": (1, (0.3, 4.5), (0, 0)),
    "read only": (1, (0.3, 2.0), (0, 0)),
}
WORKER_KINDS: Kinds = {
    "freeze worker": (3, (0.1, 5.0), (0, 0)),
    "kill worker": (1, (0.0, 0.0), (0, 0)),
}
ENDS_SESSIONS = {
    *("fin", "rst", "silence", "silence up", "silence down", "refuse", "cut before reply", "stall before reply"),
    *("cut in request", "kill sessions", "restart server", "freeze server"),
}
"""After these a session may have ended under its holder, who is told a moment later."""
OUTAGES = {"silence", "silence up", "silence down", "refuse", "restart server", "freeze server", "read only"}
"""After these the shard has to grant again."""


def make_plan(seed: int, number: int, seconds: float, shards: int, workers: int) -> list[Fault]:
    """The faults of one round in the order of their beginning; the same for the same arguments, whatever happens."""
    faults: list[Fault] = []
    for shard in range(shards):
        dice = random.Random(f"{seed} {number} shard {shard}")
        faults += _lane(f"shard {shard}", dice, seconds, SHARD_KINDS, [shard])
    for half in range(2):
        mine = range(half, workers, 2)
        dice = random.Random(f"{seed} {number} workers {half}")
        faults += _lane(f"workers {half}", dice, seconds, WORKER_KINDS, mine)
    return sorted(faults, key=lambda fault: (fault.at, fault.lane))


def _lane(lane: str, dice: random.Random, seconds: float, kinds: Kinds, targets: Sequence[int]) -> Iterator[Fault]:
    at = dice.uniform(0.5, 1.5)
    names, weights = list(kinds), [weight for weight, _, _ in kinds.values()]
    while True:
        kind = dice.choices(names, weights)[0]
        _, length, amount = kinds[kind]
        fault = Fault(lane, at, kind, dice.choice(targets), dice.uniform(*length), dice.uniform(*amount))
        if fault.at + fault.length > seconds - min(_CALM, seconds / 3):
            return
        yield fault
        at += fault.length + dice.uniform(*_PAUSE)
