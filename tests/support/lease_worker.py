"""One process that takes, renews, checks and releases leases until the end of its input, and records all of it.

    python -m tests.support.lease_worker SHARDS_FILE FOLDER SEED

Prints "ready", begins at a line of input, and prints its figures at the end. With BREAK=owner in the environment its
leases renew and release without naming their owner: what the checker of histories must catch.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections import Counter
from contextlib import suppress

from lockrouter import Lease, LockLost, LockRouter, LockTimeout, OutcomeUnknown, ShardError
from tests.support.history import Call, Recorder

__all__ = ["KEYS", "Worker"]

KEYS = 24
_THREADS = 4
_EXPECTED = (LockLost, LockTimeout, OutcomeUnknown, ShardError)


class Worker:
    """Threads that use leases; every operation is in the history."""

    def __init__(self, shards: str, folder: str, seed: int) -> None:
        self.router = LockRouter.from_file(shards)
        self.history = Recorder(folder)
        self.seed = seed
        self.stop = threading.Event()
        self.figures: Counter[str] = Counter()
        self.bugs: list[BaseException] = []
        self._lock = threading.Lock()

    def count(self, what: str) -> None:
        """Count an outcome."""
        with self._lock:
            self.figures[what] += 1

    def work(self, number: int) -> None:
        """Use leases until told to stop; an error that no fault explains is a bug."""
        dice = random.Random(self.seed * 100 + number)
        try:
            while not self.stop.is_set():
                self.cycle(dice)
        except BaseException as error:  # noqa: BLE001 - reported at the end, as what it is: a bug
            self.bugs.append(error)

    def cycle(self, dice: random.Random) -> None:
        """One acquisition, and what is done with the lease."""
        key = f"settle:{dice.randrange(KEYS)}"
        call = self.history.invoke(key)
        lease = self.take(call, key, dice)
        if lease is None:
            return
        call.ok(lease.token)
        if dice.random() < 0.02:
            self.outlive(call, lease)
            return
        while dice.random() < 0.5 and call.look(lease):
            self.ask(call, lease, dice)
        self.release(call, lease)

    def take(self, call: Call, key: str, dice: random.Random) -> Lease | None:
        """The lease, at once or within a while."""
        kind = dice.random()
        try:
            if kind < 0.5:
                lease = self.router.try_lease(key, ttl=dice.choice([1.0, 2.0]))
            else:
                lease = self.router.lease(key, ttl=1.0, timeout=dice.uniform(0.05, 1.0))
        except _EXPECTED as error:
            call.say("unknown" if isinstance(error, OutcomeUnknown) else "fail", note=type(error).__name__)
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
        except _EXPECTED as error:
            self.count(f"{way} {type(error).__name__}")
        self.history.write(call.event(way))
        call.look(lease)

    def outlive(self, call: Call, lease: Lease) -> None:
        """Look at it for longer than its ttl."""
        until = time.monotonic() + 1.5
        while time.monotonic() < until and call.look(lease):
            time.sleep(0.05)
        self.release(call, lease)

    def release(self, call: Call, lease: Lease) -> None:
        """Release it; lost by then is an answer."""
        if not call.look(lease):
            with suppress(*_EXPECTED):
                lease.release()
            return
        call.say("release")
        try:
            lease.release()
            call.say("released")
        except _EXPECTED as error:
            self.count(f"release {type(error).__name__}")


def main() -> int:
    """Say "ready", work from a line of input until the input's end."""
    shards, folder, seed = sys.argv[1:]
    if os.environ.get("BREAK") == "owner":
        from tests.support.broken import forget_owners

        forget_owners()
    worker = Worker(shards, folder, int(seed))
    with suppress(ShardError):
        worker.router.warm()
    print("ready", flush=True)
    sys.stdin.readline()
    threads = [threading.Thread(target=worker.work, args=(number,)) for number in range(_THREADS)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    worker.stop.set()
    for thread in threads:
        thread.join()
    left = list(worker.router._core.leases.entries)
    if left:
        worker.bugs.append(AssertionError(f"{len(left)} leases are kept alive though all were released"))
    worker.router.close()
    print(json.dumps(worker.figures), flush=True)
    for bug in worker.bugs:
        sys.excepthook(type(bug), bug, bug.__traceback__)
    return 1 if worker.bugs else 0


if __name__ == "__main__":
    sys.exit(main())
