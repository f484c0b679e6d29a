"""The side of one process of a fleet (`workers.Workers`): threads that do something again and again until told to stop.

Says "ready", begins at a line "go", rests at a line "rest" and says so, ends at the end of its input with its figures.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import Counter
from contextlib import suppress

import msgspec
from sqlalchemy.exc import DBAPIError

from lockrouter import LockLost, LockRouter, LockRouterError, LockTimeout, OutcomeUnknown, ShardError

__all__ = ["EXPECTED", "EXPECTED_OF_SQL", "Crew"]

EXPECTED: tuple[type[BaseException], ...] = (LockLost, LockTimeout, OutcomeUnknown, ShardError)
"""What faults explain; any other error is a bug."""

EXPECTED_OF_SQL: tuple[type[BaseException], ...] = (*EXPECTED, DBAPIError)
"""The same where the caller's own statements can fail."""


class Crew:
    """Threads of one process; `figures` say how often what came of what they do."""

    def __init__(self, shards: str, seed: int) -> None:
        self.router = LockRouter.from_file(shards)
        self.seed = seed
        self.stop = threading.Event()
        self.figures: Counter[str] = Counter()
        self.bugs: list[BaseException] = []
        self._lock = threading.Lock()
        self._going = threading.Event()
        self._idle = 0

    @property
    def going(self) -> bool:
        """False while all are to rest, and at the end."""
        return self._going.is_set() and not self.stop.is_set()

    def count(self, what: str, number: int = 1) -> None:
        """Count an outcome."""
        with self._lock:
            self.figures[what] += number

    def turn(self, dice: random.Random) -> None:
        """What each thread does again and again."""
        raise NotImplementedError

    def work(self, number: int) -> None:
        """Take turns until told to stop; an error that no fault explains is a bug."""
        dice = random.Random(self.seed * 100 + number)
        try:
            while not self.stop.is_set():
                if not self._going.is_set():
                    self._rest()
                    continue
                self.turn(dice)
        except BaseException as error:  # noqa: BLE001 - reported at the end, as what it is: a bug
            self.bugs.append(error)

    def _rest(self) -> None:
        with self._lock:
            self._idle += 1
        while not self._going.wait(0.02) and not self.stop.is_set():
            pass
        with self._lock:
            self._idle -= 1

    def rested(self) -> object:
        """What to say once all threads rest."""
        return "resting"

    def finished(self) -> None:
        """Called when all threads have ended, before the router is closed."""

    def run(self, threads: int) -> int:
        """Speak with the fleet; answers the process's exit status."""
        print("ready", flush=True)
        # Without waiting here, the threads of one process would begin before the first steps of another are over.
        if sys.stdin.readline() != "go\n":
            return 1
        self._going.set()
        running = [threading.Thread(target=self.work, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        for line in sys.stdin:
            if line == "rest\n":
                self._going.clear()
                while self._idle < sum(thread.is_alive() for thread in running):
                    time.sleep(0.01)
                print(msgspec.json.encode(self.rested()).decode(), flush=True)
            else:
                self._going.set()
        self.stop.set()
        for thread in running:
            thread.join()
        self.finished()
        with suppress(LockRouterError):
            self.router.close()
        for bug in self.bugs:
            self.count(f"bug {type(bug).__name__}")
        print(json.dumps(self.figures), flush=True)
        for bug in self.bugs:
            sys.excepthook(type(bug), bug, bug.__traceback__)
        return 1 if self.bugs else 0
