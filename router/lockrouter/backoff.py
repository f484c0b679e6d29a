"""Jittered delays, so that processes which failed together do not come back together."""

from __future__ import annotations

import random

__all__ = ["jittered"]


def jittered(seconds: float, *, spread: float = 0.2) -> float:
    """Return `seconds`, moved by at most `spread` of itself to either side."""
    return seconds * (1 + spread * (2 * random.random() - 1))
