"""One process that moves money between accounts of a shard until it is told to stop, with faults in every body.

    python -m tests.support.money SHARDS_FILE SEED

See `crew`; it is ready when it has finished its very first transfer.
"""

from __future__ import annotations

import random
import sys
from contextlib import suppress

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from lockrouter import LockLost
from tests.support.accounts import engine_of, pay
from tests.support.crew import EXPECTED_OF_SQL, Crew
from tests.support.observe import keys_on

__all__ = ["ACCOUNTS", "MOVES"]

ACCOUNTS = 6
MOVES = 1000
"""The account that counts the transfers made by `run`; it belongs to nobody and to no sum."""
_THREADS = 4


class Mover(Crew):
    """Threads that move money; every way of doing so is counted with what came of it."""

    def __init__(self, shards: str, seed: int) -> None:
        super().__init__(shards, seed)
        self.engine = engine_of(self.router._core.config, 0, pool_size=_THREADS)
        self.keys = keys_on(self.router, 0, ACCOUNTS, prefix="account")

    def turn(self, dice: random.Random) -> None:
        """Move money in one of the ways."""
        way = dice.choice([self.by_transaction, self.by_transaction, self.by_run, self.by_lock_all])
        try:
            way(dice)
            self.count(way.__name__)
        except EXPECTED_OF_SQL as error:
            self.count(f"{way.__name__} {type(error).__name__}")

    def by_transaction(self, dice: random.Random) -> None:
        """Under the lock of one account alone, so that transfers meet at the rows, in any order, and deadlock."""
        giver, taker = dice.sample(range(ACCOUNTS), 2)
        with self.router.transaction(self.keys[giver], timeout=2.0) as connection:
            body(connection, dice, giver, taker)

    def by_run(self, dice: random.Random) -> None:
        """The same, repeated where nothing was committed, and counted by a row."""
        giver, taker = dice.sample(range(ACCOUNTS), 2)

        def work(connection: Connection) -> None:
            pay(connection, MOVES, 1)
            body(connection, dice, giver, taker)

        self.router.run([self.keys[giver], self.keys[taker]], work, timeout=2.0)

    def by_lock_all(self, dice: random.Random) -> None:
        """Under the locks of both accounts, with the application's own engine."""
        giver, taker = dice.sample(range(ACCOUNTS), 2)
        both = [self.keys[giver], self.keys[taker]]
        with self.router.lock_all(both, timeout=2.0), self.engine.begin() as connection:
            pay(connection, giver, -1)
            pay(connection, taker, 1)


def body(connection: Connection, dice: random.Random, giver: int, taker: int) -> None:
    """Move money in two statements, with a fault between them in some cases."""
    first, second = ((giver, -1), (taker, 1)) if dice.random() < 0.5 else ((taker, 1), (giver, -1))
    kind = dice.choice(["plain", "plain", "plain", "swallows", "swallows", "ddl", "commit", "savepoint", "error"])
    with suppress(*([DBAPIError] if kind == "swallows" else [])):
        pay(connection, *first)
    if kind == "error":
        with suppress(DBAPIError):
            connection.execute(text("INSERT INTO account VALUES (0, 0)"))
    with suppress(LockLost, DBAPIError):
        if kind == "ddl":
            connection.execute(text("CREATE TABLE IF NOT EXISTS account_ddl (id INT)"))
        if kind == "commit":
            connection.execute(text(dice.choice(["COMMIT", "BEGIN", "SET autocommit = 1"])))
        if kind == "savepoint":
            with connection.begin_nested() as savepoint:
                pay(connection, giver, -50)
                savepoint.rollback()
    with suppress(*([DBAPIError, LockLost] if kind in ("swallows", "ddl", "commit") else [])):
        pay(connection, *second)


def main() -> int:
    """Move money after a first transfer, from a line of input until the input's end."""
    mover = Mover(sys.argv[1], int(sys.argv[2]))
    # The first transaction of a fresh process: SQLAlchemy has not seen the server yet.
    with mover.router.transaction(mover.keys[0], timeout=10.0) as connection:
        pay(connection, 0, -1)
        pay(connection, 1, 1)
    return mover.run(_THREADS)


if __name__ == "__main__":
    sys.exit(main())
