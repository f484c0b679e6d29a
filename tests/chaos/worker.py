"""One process of the chaos run: threads that do everything the router can do, and record it.

Started by `process`; see `crew` for how it is spoken with. With BREAK in the environment its locks are broken on
purpose (`broken`).
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from lockrouter import ShardError
from lockrouter.deadline import now
from tests.chaos.checkup import checkup
from tests.chaos.jobs import Jobs
from tests.chaos.process import is_green
from tests.support.broken import break_as_told

__all__ = ["Worker", "main"]

_THREADS = 5
_TICK = 0.02
_LATE = 0.04


class Worker(Jobs):
    """Threads that use every verb; what they do is chosen by their seeds, what comes of it by the faults."""

    def __init__(self, shards: str, folder: str, seed: int) -> None:
        super().__init__(shards, folder, seed)
        self.ways: list[tuple[int, Callable[[random.Random], object]]] = [
            (30, self.row),
            (8, self.together),
            (20, self.lease),
            (4, self.transfer),
            (4, self.run_transfer),
            (6, self.add_under_row),
            (4, self.add_under_lease),
            (4, self.once),
            (2, self.guard),
            (4, self.permit),
            (2, self.stand),
            (4, self.keep),
            (1, self.fork),
        ]
        if is_green(seed):
            self.history.note("green")
        threading.Thread(target=self._tick, name="ticker", daemon=True).start()

    def _tick(self) -> None:
        """Note when this process did not run: frozen, or kept waiting by the machine."""
        last = now()
        while True:
            time.sleep(_TICK)
            at = now()
            if at - last > _TICK + _LATE:
                self.history.note("stall", note=f"{at - last - _TICK:.4f}", at=at)
            last = at

    def turn(self, dice: random.Random) -> None:
        """Something."""
        weights, ways = zip(*self.ways, strict=True)
        way = dice.choices(ways, weights)[0]
        way(dice)
        time.sleep(dice.uniform(0.0, 0.02))

    # -- what the fleet asks -----------------------------------------------------------------------------------------

    def rested(self) -> object:
        """Everything that can be checked while nobody in this process holds anything."""
        return checkup(self.router, self.seed)


def main() -> int:
    """Work from a line of input until the input's end."""
    shards, folder, seed = sys.argv[1:]
    break_as_told()
    worker = Worker(shards, folder, int(seed))
    with suppress(ShardError):
        worker.router.warm()
    return worker.run(_THREADS)
