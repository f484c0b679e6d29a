"""One process that takes, renews, checks and releases leases until the end of its input, and records all of it.

    python -m tests.support.lease_worker SHARDS_FILE FOLDER SEED

See `crew`. With BREAK in the environment its locks are broken on purpose (`broken`): what the checker must catch.
"""

from __future__ import annotations

import random
import sys
import time
from contextlib import suppress

from lockrouter import Lease, LockTimeout, OutcomeUnknown, ShardError
from lockrouter.deadline import now
from tests.support.broken import break_as_told
from tests.support.crew import EXPECTED, Crew
from tests.support.history import Call, Recorder

__all__ = ["KEYS", "Worker"]

KEYS = 24
_THREADS = 4


class Worker(Crew):
    """Threads that use leases; every operation is in the history."""

    def __init__(self, shards: str, folder: str, seed: int) -> None:
        super().__init__(shards, seed)
        self.history = Recorder(folder)

    def turn(self, dice: random.Random) -> None:
        """Use one of the leases that all processes want."""
        self.use(f"settle:{dice.randrange(KEYS)}", dice)

    def place(self, key: str) -> str:
        """What the history calls a key."""
        return key

    def use(self, key: str, dice: random.Random, *, patience: float = 0.0) -> None:
        """One acquisition, and what is done with the lease; with `patience` it is looked at for so many seconds."""
        call = self.history.invoke(self.place(key), "lease")
        lease = self.take(call, key, dice)
        if lease is None:
            return
        at = now()
        if lease.lost:
            call.say("unknown", note="lost by the time it came")
            return
        call.say("ok", token=lease.token, at=at)
        self.watch(call, lease)
        if patience or dice.random() < 0.02:
            self.outlive(call, lease, patience or 1.5)
            return
        while dice.random() < 0.5 and call.look_ahead(lease):
            self.ask(call, lease, dice)
        self.release(call, lease)

    def watch(self, call: Call, lease: Lease) -> None:
        """Have it noted when and why the lease is lost, and how long after its own deadline its holder was told."""
        entry = lease._entry
        lease.on_lost(lambda reason: call.say("told", note=f"{reason} {now() - entry.deadline:.4f}"))

    def take(self, call: Call, key: str, dice: random.Random) -> Lease | None:
        """The lease, at once or within a while."""
        timeout = 0.0 if dice.random() < 0.5 else dice.uniform(0.05, 1.0)
        try:
            with call.timed("lease", timeout):
                if not timeout:
                    lease = self.router.try_lease(key, ttl=dice.choice([1.0, 2.0]))
                else:
                    lease = self.router.lease(key, ttl=1.0, timeout=timeout)
        except EXPECTED as error:
            call.say("unknown" if isinstance(error, OutcomeUnknown) else "fail", note=type(error).__name__)
            call.say("why", note=str(error))
            self.count(type(error).__name__)
            time.sleep(0.0 if isinstance(error, LockTimeout) else 0.05)
            return None
        if lease is None:
            call.say("fail", note="held")
            self.count("held")
            time.sleep(dice.uniform(0.0, 0.01))
        else:
            self.count("taken")
        return lease

    def ask(self, call: Call, lease: Lease, dice: random.Random) -> None:
        """Renew it, check it, or just hold it for a while."""
        way = dice.choice(["renew", "check", "hold"])
        try:
            if way == "renew":
                lease.renew(dice.choice([None, 1.0, 3.0]))
            elif way == "check":
                lease.check()
            else:
                time.sleep(dice.uniform(0.0, 0.03))
        except EXPECTED as error:
            self.count(f"{way} {type(error).__name__}")
        self.history.write(call.event(way))
        call.look(lease)

    def outlive(self, call: Call, lease: Lease, seconds: float) -> None:
        """Look at it for longer than its ttl."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.going and call.look_ahead(lease):
            time.sleep(0.05)
        self.release(call, lease)

    def release(self, call: Call, lease: Lease) -> None:
        """Release it; lost by then is an answer."""
        if not call.look(lease):
            with suppress(*EXPECTED):
                lease.release()
            return
        call.say("release")
        try:
            lease.release()
            call.say("released")
        except EXPECTED as error:
            self.count(f"release {type(error).__name__}")

    def finished(self) -> None:
        """Every lease was released: none is kept alive."""
        left = list(self.router._core.leases.entries)
        if left:
            self.bugs.append(AssertionError(f"{len(left)} leases are kept alive though all were released"))


def main() -> int:
    """Use leases from a line of input until the input's end."""
    shards, folder, seed = sys.argv[1:]
    break_as_told()
    worker = Worker(shards, folder, int(seed))
    with suppress(ShardError):
        worker.router.warm()
    return worker.run(_THREADS)


if __name__ == "__main__":
    sys.exit(main())
