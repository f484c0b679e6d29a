"""What a worker of the chaos run protects with its locks: accounts on the shards, and sets on databases elsewhere."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from lockrouter import Lease, OutcomeUnknown, RowLock, Stale
from lockrouter.deadline import now
from tests.chaos.rows import RowUse
from tests.chaos.site import ACCOUNTS, COUNTER, SETS, SHARDS, Layout
from tests.support.accounts import pay
from tests.support.crew import EXPECTED, EXPECTED_OF_SQL
from tests.support.money import body
from tests.support.sets import add_to_set, engine_for

__all__ = ["Payments"]


class Payments(RowUse):
    """Transactions and sets."""

    def __init__(self, shards: str, folder: str, seed: int) -> None:
        super().__init__(shards, folder, seed)
        layout = msgspec.json.decode(Path(folder, "layout.json").read_bytes(), type=Layout)
        self.protected = [engine_for(url) for url in layout.protected]
        self._accounts: dict[tuple[str, int], str] = {}

    def account_key(self, shard: str, account: int) -> str:
        """A key of the account's own that lives on its shard."""
        if (shard, account) not in self._accounts:
            keys = (f"account:{account}:{number}" for number in range(1_000_000))
            self._accounts[shard, account] = next(key for key in keys if self.router.route(key).shard == shard)
        return self._accounts[shard, account]

    def transfer(self, dice: random.Random) -> None:
        """Under the lock of one account alone, so that transfers deadlock; with faults in the body."""
        shard = dice.choice(SHARDS)
        giver, taker = dice.sample(range(ACCOUNTS), 2)
        key, timeout = self.account_key(shard, giver), dice.choice([0.3, 1.0, 2.0])
        address = self.router.route(key)
        call = self.history.invoke(f"{shard}/row/{address.slot}", "transaction")
        try:
            with self.router.transaction(key, timeout=timeout) as connection:
                at = now()
                call.say("ok", token=connection.info["lock"].tokens[key], at=at)
                body(connection, dice, giver, taker)
                call.say("left")
                at = now()
            call.say("confirmed", at=at)
            self.count("transaction")
        except EXPECTED_OF_SQL as error:
            self.unless_ended(call, "transaction", error)

    def run_transfer(self, dice: random.Random) -> None:
        """Repeated where nothing was committed, and counted by a row."""
        shard = dice.choice(SHARDS)
        giver, taker = dice.sample(range(ACCOUNTS), 2)

        def work(connection: Connection) -> None:
            pay(connection, COUNTER, 1)
            body(connection, dice, giver, taker)

        self.history.note("moving", shard)
        try:
            self.router.run([self.account_key(shard, giver), self.account_key(shard, taker)], work, timeout=2.0)
            self.history.note("moved", shard)
            self.count("run")
        except EXPECTED_OF_SQL as error:
            self.count(f"run {type(error).__name__}")
            if not isinstance(error, OutcomeUnknown):  # every other error says that nothing was committed
                self.history.note("not moved", shard)

    # -- sets -------------------------------------------------------------------------------------------------------

    def add_under_row(self, dice: random.Random) -> None:
        """Add to a set, under a row lock."""
        where = dice.randrange(len(self.protected))
        key = f"set:{where}/0"
        self.hold_row(key, dice, body=lambda _, held: self._add(where, 0, key, held, dice))

    def add_under_lease(self, dice: random.Random) -> None:
        """Add to a set, under a lease."""
        where, number = dice.randrange(len(self.protected)), dice.randrange(1, SETS)
        key = f"set:{where}/{number}"
        call = self.history.invoke(self.place(key), "lease")
        try:
            with call.timed("lease", 0.5):
                lease = self.router.lease(key, ttl=1.0, timeout=0.5)
        except EXPECTED as error:
            self.failed(call, "lease", error)
            return
        at = now()
        if lease.lost:
            call.say("unknown", note="lost by the time it came")
        else:
            call.say("ok", token=lease.token, at=at)
            self.watch(call, lease)
        self._add(where, number, key, lease, dice)
        if call.look_ahead(lease):
            call.say("release")
        try:
            lease.release()
        except EXPECTED as error:
            self.count(f"release {type(error).__name__}")

    def _add(self, where: int, number: int, key: str, held: RowLock | Lease, dice: random.Random) -> None:
        """With its token at each step; a degraded lock has none, and may not touch what others protect."""
        if isinstance(held, RowLock) and held.degraded:
            return
        token, member, name = held.token, f"{self.history.process}-{dice.getrandbits(48)}", f"{where}/{number}"
        self.history.note("adding", name, member)
        try:
            add_to_set(
                self.protected[where],
                number,
                member,
                lambda connection: self.router.fence(connection, key, token),
                dice.choice([0.0, 0.0, 0.01, 0.2]),
            )
            self.history.note("added", name, member)
            self.count("set")
        except Stale:
            self.history.note("stale", name, member)
            self.count("set Stale")
        except DBAPIError as error:
            self.count(f"set {type(error).__name__}")
