"""One process of the soak: every verb at full speed, without faults.

    python -m tests.chaos.soaker SHARDS_FILE FOLDER SEED

See `crew`. At rest it says how many operations it has done.
"""

from __future__ import annotations

import gc
import itertools
import random
import sys
from contextlib import suppress

from sqlalchemy import text

from lockrouter import LockTimeout
from tests.chaos.rows import row_keys
from tests.chaos.site import SHARDS
from tests.support.crew import Crew

__all__ = ["THREADS", "Soaker"]

THREADS = 8
_BATCH = 50
"""Row locks between two of the rarer verbs."""


class Soaker(Crew):
    """Threads that lock keys nobody has locked before, hot keys, several at once, leases, transactions, recipes."""

    def __init__(self, shards: str, seed: int) -> None:
        super().__init__(shards, seed)
        self.rows = row_keys(self.router)
        self.names = itertools.count()

    def turn(self, dice: random.Random) -> None:
        """Many row locks of ever new keys, and one of everything else."""
        for _ in range(_BATCH):
            self.router.lock(f"soak:{next(self.names)}").release()
        shard = dice.choice(SHARDS)
        hot = self.rows[shard]
        with suppress(LockTimeout):
            with self.router.lock(hot[0], timeout=1.0) as held, self.router.lock(hot[0]):
                held.check()
            with self.router.lock(hot[1], timeout=1.0, shared=True, confirm=True):
                pass
            with self.router.lock_all(dice.sample(hot, 3), timeout=1.0):
                pass
            with self.router.lease(f"soak:{next(self.names)}", ttl=5, timeout=1.0):
                pass
            with self.router.transaction(f"soak:{next(self.names)}", timeout=1.0) as connection:
                connection.execute(text("UPDATE account SET balance = balance WHERE id = 0"))
            with self.router.semaphore("soak", permits=4, ttl=5).acquire(timeout=1.0):
                pass
            self.router.once(f"soak:{next(self.names)}", dict, keep=60)
        self.count("operations", _BATCH + 7)

    def rested(self) -> object:
        """How many operations so far; what is garbage is gone."""
        gc.collect()
        return self.figures["operations"]


def main() -> int:
    """Work from a line of input until the input's end."""
    shards, _, seed = sys.argv[1:]
    soaker = Soaker(shards, int(seed))
    soaker.router.warm()
    return soaker.run(THREADS)


if __name__ == "__main__":
    sys.exit(main())
