"""A set in a protected database, added to by reading and writing back: what a late holder can destroy, and fences save.

    python -m tests.support.sets SHARDS_FILE FOLDER URL MODE FENCED SEED

One process that adds under the lock of MODE (row or lease), with the fence or, with FENCED "no", without. See `crew`.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from sqlalchemy import Connection, Engine, create_engine, text

from lockrouter import Lease, LockLost, RowLock, Stale
from lockrouter.admin.fence import init_fence
from tests.support.crew import EXPECTED, Crew
from tests.support.history import Recorder

__all__ = ["PAUSE", "add_to_set", "engine_for", "make_sets", "members_of"]

PAUSE = 0.15
"""Seconds between reading the set and writing it back."""
_KEY = "set:protected"


def engine_for(url: str) -> Engine:
    """An engine on the protected database that notices when its connections have died."""
    return create_engine(url, pool_size=8, pool_pre_ping=True, connect_args={"ssl_disabled": True})


def make_sets(url: str, count: int) -> None:
    """Make the table of the fence, and so many empty sets, in an empty database."""
    init_fence(url)
    engine = engine_for(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE sets (id INT PRIMARY KEY, members LONGTEXT NOT NULL)"))
        for number in range(count):
            connection.execute(text("INSERT INTO sets VALUES (:id, '[]')"), {"id": number})
    engine.dispose()


def members_of(url: str) -> dict[int, list[str]]:
    """The members of every set."""
    engine = engine_for(url)
    with engine.begin() as connection:
        found = {int(key): json.loads(text_) for key, text_ in connection.execute(text("SELECT id, members FROM sets"))}
    engine.dispose()
    return found


def add_to_set(engine: Engine, number: int, member: str, guard: Callable[[Connection], object], pause: float) -> None:
    """Read a set, pause, write it back with one member more, in two transactions that `guard` is called in first."""
    with engine.begin() as connection:
        guard(connection)
        found = connection.execute(text("SELECT members FROM sets WHERE id = :id"), {"id": number}).scalar_one()
    members = [*json.loads(found), member]
    time.sleep(pause)
    with engine.begin() as connection:
        guard(connection)
        connection.execute(
            text("UPDATE sets SET members = :members WHERE id = :id"), {"members": json.dumps(members), "id": number}
        )


class Adder(Crew):
    """One thread that adds."""

    def __init__(self, shards: str, folder: str, url: str, mode: str, fenced: str, seed: int) -> None:
        super().__init__(shards, seed)
        self.history = Recorder(folder)
        self.engine = engine_for(url)
        self.mode = mode
        self.fenced = fenced == "yes"

    def turn(self, dice: random.Random) -> None:
        """One add, acknowledged if nothing went wrong with it, whatever has become of the lock by then."""
        member = f"{self.history.process}-{dice.getrandbits(48)}"
        try:
            held = self.take()
        except EXPECTED:
            return
        token = held.token
        with suppress(LockLost), held:
            self.history.note("adding", "0", member)
            try:
                add_to_set(self.engine, 0, member, lambda connection: self.guard(connection, token), PAUSE)
                self.history.note("added", "0", member)
            except Stale:
                self.history.note("stale", "0", member)

    def take(self) -> RowLock | Lease:
        """The lock of this process's mode."""
        if self.mode == "row":
            return self.router.lock(_KEY, timeout=10.0)
        return self.router.lease(_KEY, ttl=1.0, timeout=10.0)

    def guard(self, connection: Connection, token: int) -> None:
        """The fence, or nothing."""
        if self.fenced:
            self.router.fence(connection, _KEY, token)


def main() -> int:
    """Add from a line of input until the input's end."""
    shards, folder, url, mode, fenced, seed = sys.argv[1:]
    return Adder(shards, folder, url, mode, fenced, int(seed)).run(1)


if __name__ == "__main__":
    sys.exit(main())
