"""One process that uses a recipe until the end of its input, and records what it saw as a history.

    python -m tests.support.recipe_worker SHARDS_FILE FOLDER WHAT SEED

WHAT is guard, once, exactly_once, election, or semaphore. See `crew`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from sqlalchemy import Column, Connection, Integer, MetaData, String, Table, insert

from lockrouter import InProgress, LockLost, LockTimeout, OutcomeUnknown, ShardError
from lockrouter.deadline import now
from tests.support.crew import Crew
from tests.support.history import Recorder
from tests.support.observe import keys_on

__all__ = ["EFFECTS", "PERMITS", "SLOT", "Worker"]

RATE = 25
"""New messages a second; each is delivered, again and again, for two seconds."""
PERMITS = 3
SLOT = 3.0
"""Seconds between two runs of the guarded job."""
AT_LEAST = 1.5
TTL = 1.0

EFFECTS = Table(
    "effects",
    MetaData(),
    Column("id", Integer, primary_key=True),
    Column("message", Integer, nullable=False),
    Column("run", String(40), nullable=False),
    mysql_engine="InnoDB",
)
"""What `exactly_once` writes: on purpose without anything that would keep two rows of one message apart."""


class Worker(Crew):
    """What one process does, in one thread or in several of its own; every outcome is counted."""

    def __init__(self, shards: str, folder: str, what: str, seed: int) -> None:
        super().__init__(shards, seed)
        self.what = what
        self.history = Recorder(folder)
        self.folder = Path(folder)
        self.dice = random.Random(seed)
        self._notes = os.open(self.folder / f"notes-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def turn(self, dice: random.Random) -> None:
        """Use the recipe until told to stop."""
        getattr(self, self.what)()

    def note(self, *words: object) -> None:
        """Append a line, which survives whatever happens to the process."""
        os.write(self._notes, (json.dumps(words) + "\n").encode())

    def guard(self) -> None:
        """A job per slot of time, which every worker starts at the same moment, more or less."""
        last = 0
        while not self.stop.is_set():
            slot = int(now() / SLOT) + 1
            if slot == last or self.stop.wait(max(0.0, slot * SLOT - now() + self.dice.uniform(0.0, 0.15))):
                continue
            last = slot
            if now() - slot * SLOT > AT_LEAST - 0.5:
                continue  # frozen until long after its time: `at_least` covers what timers differ, not that
            call = self.history.invoke("nightly")
            with suppress(LockLost, ShardError):
                guard = self.router.guard("nightly", ttl=TTL, at_least=AT_LEAST)
                with guard as held:
                    if not held:
                        call.say("fail", note=guard.reason or "")
                        continue
                    call.ok(held.token)
                    self.note("began", slot)
                    time.sleep(0.2)
                    if call.look(held):
                        self.note("done", slot, held.token)
                        self.figures["done"] += 1

    def delivered(self) -> int:
        """One of the messages of the last two seconds; all workers get the same ones."""
        return int(now() * RATE) - self.dice.randrange(2 * RATE)

    def once(self) -> None:
        """Messages are delivered again and again, in any order; a result says which run it came from."""
        while not self.stop.is_set():
            message = self.delivered()

            def work(message: int = message) -> dict[str, object]:
                run = f"{os.getpid()}-{self.dice.random()}"
                self.note("ran", message, run)
                time.sleep(self.dice.uniform(0.0, 0.1))
                return {"message": message, "run": run}

            try:
                self.note("result", message, self.router.once(f"message:{message}", work, ttl=TTL))
                self.figures["result"] += 1
            except (InProgress, LockLost, ShardError) as error:
                self.figures[type(error).__name__] += 1

    def exactly_once(self) -> None:
        """The same, with its effect in the record's own transaction."""
        # Keys of the shard that has the table; more of them than messages come in one run.
        keys = keys_on(self.router, 0, 1500, prefix="message")
        while not self.stop.is_set():
            message = self.delivered() % len(keys)

            def work(connection: Connection, message: int = message) -> str:
                run = f"{os.getpid()}-{self.dice.random()}"
                connection.execute(insert(EFFECTS).values(message=message, run=run))
                time.sleep(self.dice.uniform(0.0, 0.1))
                return run

            try:
                self.note("result", message, self.router.once(keys[message], work, transaction=True))
                self.figures["result"] += 1
            except (InProgress, LockLost, LockTimeout, OutcomeUnknown, ShardError) as error:
                self.figures[type(error).__name__] += 1

    def election(self) -> None:
        """Stand for election, lead for a while, resign."""
        with self.router.election("settlement", ttl=TTL) as candidate:
            while not self.stop.is_set():
                call = self.history.invoke("settlement")
                with suppress(ShardError):
                    candidate.wait(timeout=0.5)
                token = candidate.token
                if token is None:
                    call.say("fail")
                    continue
                call.ok(token)
                self.figures["led"] += 1
                until = now() + self.dice.uniform(0.05, 1.5)
                while call.look(lambda token=token: candidate.token != token) and now() < until:
                    if self.stop.wait(0.01):
                        break
                else:
                    if candidate.token == token:
                        call.say("release")
                        candidate.resign()

    def semaphore(self) -> None:
        """Three threads that take permits, for some milliseconds each."""
        threads = [threading.Thread(target=self._permits, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _permits(self, number: int) -> None:
        gateway = self.router.semaphore("gateway", permits=PERMITS, ttl=TTL)
        dice = random.Random(self.dice.random() + number)
        while not self.stop.is_set():
            call, began = self.history.invoke("gateway"), now()
            try:
                permit = gateway.acquire(timeout=20.0)
            except (LockTimeout, ShardError) as error:
                call.say("unknown" if isinstance(error, OutcomeUnknown) else "fail")
                self.figures[type(error).__name__] += 1
                continue
            call.ok(permit.token)
            self.note("waited", now() - began)
            self.figures["permits"] += 1
            time.sleep(dice.uniform(0.0, 0.02))
            call.look(permit)
            call.say("release" if not permit.lost else "lost")
            with suppress(LockLost, ShardError):
                permit.release()


def main() -> int:
    """Use a recipe from a line of input until the input's end."""
    shards, folder, what, seed = sys.argv[1:]
    worker = Worker(shards, folder, what, int(seed))
    worker.router.warm()
    return worker.run(1)


if __name__ == "__main__":
    sys.exit(main())
