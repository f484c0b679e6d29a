"""One process that takes, keeps, renews and frees leases of shared keys, and writes down what it held and when.

    python -m tests.support.leaseload SHARDS_FILE SEED SECONDS KEYS THREADS [wrong]

Prints "ready", waits for a line, works, and prints one JSON line with its history: for each hold the key, the token,
the moment the caller knew of it, and the moment until which it counted on it, on the clock all processes here share.
With "wrong" nobody looks whether a lease is somebody else's: the history must show it.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from itertools import pairwise
from typing import Any, NamedTuple

from lockrouter import LockLost, LockRouter, LockRouterError, ShardError
from lockrouter.deadline import now
from lockrouter.protocol.packets import query
from lockrouter.sql import leases as sql

__all__ = ["Held", "Load", "overlaps", "unordered"]


class Held(NamedTuple):
    """One hold of one key."""

    key: str
    token: int
    since: float
    until: float


def overlaps(history: list[Held]) -> list[tuple[Held, Held]]:
    """Pairs of holds of one key that were both counted on at one moment."""
    found = []
    by_key: dict[str, list[Held]] = {}
    for held in history:
        by_key.setdefault(held.key, []).append(held)
    for holds in by_key.values():
        holds.sort(key=lambda held: held.since)
        found += [(one, two) for one, two in pairwise(holds) if two.since < one.until]
    return found


def unordered(history: list[Held]) -> list[tuple[Held, Held]]:
    """Pairs of holds of one key, one after the other, whose tokens do not rise."""
    found = []
    by_key: dict[str, list[Held]] = {}
    for held in history:
        by_key.setdefault(held.key, []).append(held)
    for holds in by_key.values():
        holds.sort(key=lambda held: held.since)
        found += [(one, two) for one, two in pairwise(holds) if two.token <= one.token]
    return found


class Worker:
    """Threads that work on the same keys as those of other processes."""

    def __init__(self, shards: str, seed: int, seconds: float, keys: int) -> None:
        self.router = LockRouter.from_file(shards)
        self.keys = [f"load:{number}" for number in range(keys)]
        self.seed = seed
        self.seconds = seconds
        self.history: list[Held] = []
        self.figures: dict[str, int] = {}
        self.bugs: list[str] = []
        self._lock = threading.Lock()

    def count(self, what: str) -> None:
        with self._lock:
            self.figures[what] = self.figures.get(what, 0) + 1

    def work(self, number: int, until: float) -> None:
        """Take and free until the end."""
        dice = random.Random(self.seed * 1000 + number)
        while now() < until:
            try:
                self.turn(dice)
            except (LockLost, ShardError) as error:
                self.count(type(error).__name__)
            except BaseException as error:  # noqa: BLE001 - reported at the end, as what it is: a bug
                self.bugs.append(repr(error))
                return

    def turn(self, dice: random.Random) -> None:
        """One hold of one key."""
        key = dice.choice(self.keys)
        began = now()
        timeout = dice.choice([0.0, 0.05, 0.5, 3.0])
        try:
            lease = self.router.lease(key, ttl=dice.choice([1.0, 2.0, 10.0]), timeout=timeout, payload=b"load")
        except LockRouterError as error:
            self.count(f"{type(error).__name__} within {timeout}")
            return
        finally:
            late = now() - began - max(timeout, 1.0 if not timeout else 0.0)
            if late > 0.1:
                self.count("late")
            if late > 2.0:
                self.bugs.append(f"a call with timeout {timeout} took {late + timeout:.1f} s")
        since = now()
        try:
            if dice.random() < 0.5:
                time.sleep(dice.random() * 0.004)
            if dice.random() < 0.1:
                lease.renew()
            if dice.random() < 0.05:
                lease.check()
        except (LockLost, ShardError) as error:
            self.count(type(error).__name__)
        # Counted on until this moment, or until its own deadline, whichever came first.
        until = min(now(), now() + lease.remaining())
        if not lease.lost:
            with self._lock:
                self.history.append(Held(key, lease.token, since, until))
        self.count("held")
        lease.release()


class Load:
    """Several such processes, started together; whatever happens, none is left."""

    def __init__(self, shards: object, processes: int, seconds: float, keys: int, threads: int, *more: str) -> None:
        self._arguments = [str(shards), str(seconds), str(keys), str(threads), *more]
        self.processes = [self.start(seed, seconds) for seed in range(processes)]

    def start(self, seed: int, seconds: float) -> subprocess.Popen[str]:
        """One process, which waits for `go`."""
        shards, _, *rest = self._arguments
        command = [sys.executable, "-m", "tests.support.leaseload", shards, str(seed), str(seconds), *rest]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def go(self, process: subprocess.Popen[str]) -> None:
        """Let a process begin that has said it is ready."""
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()

    def go_all(self) -> None:
        """Let all begin together."""
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in self.processes:
            self.go(process)

    def results(self, seconds: float) -> list[dict[str, Any]]:
        """What each process that lived to its end has written down."""
        texts = [process.communicate(timeout=seconds)[0] for process in self.processes]
        return [json.loads(text) for text in texts if text.strip()]

    def close(self) -> None:
        """No process is left."""
        for process in self.processes:
            process.kill()
            process.communicate()


def without_owner_check() -> None:
    """Make each acquisition take what it asks for, as if it were free."""
    right = sql.take

    def wrong(*arguments: Any) -> bytes:
        return query(right(*arguments)[5:].replace(b".owner = '' OR ", b".owner = '' OR 1 = 1 OR "))

    setattr(sql, "take", wrong)  # noqa: B010 - a variant made wrong on purpose


def main() -> int:
    """Say "ready", run from a line of input for some seconds, print the history."""
    shards, seed, seconds, keys, threads = sys.argv[1:6]
    if "wrong" in sys.argv[6:]:
        without_owner_check()
    worker = Worker(shards, int(seed), float(seconds), int(keys))
    worker.router.lease(f"warm:{seed}", ttl=2, timeout=10).release()
    print("ready", flush=True)
    sys.stdin.readline()
    until = now() + worker.seconds
    running = [threading.Thread(target=worker.work, args=(number, until)) for number in range(int(threads))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    worker.router.close()
    result: dict[str, Any] = {"history": worker.history, "figures": worker.figures, "bugs": worker.bugs}
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
