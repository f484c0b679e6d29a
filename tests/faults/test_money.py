"""Money stays money: deadlocks, swallowed errors, DDL, killed connections and a restarted server change no sum."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator

import pymysql
import pytest

from lockrouter.testing.cluster import Cluster
from tests.support.accounts import Accounts
from tests.support.money import ACCOUNTS, MOVES
from tests.support.observe import Observer, eventually
from tests.support.workers import Workers

pytestmark = pytest.mark.server

PROCESSES = 3


@pytest.fixture
def server(cluster: Cluster) -> Iterator[Observer]:
    """The server of shard-0, running afterwards."""
    made = Observer(cluster, 0)
    yield made
    cluster.start(0)
    made.close()


@pytest.fixture
def accounts(server: Observer, cluster: Cluster) -> Iterator[Accounts]:
    """Accounts, and one that counts what `run` has moved."""
    made = Accounts(server, ACCOUNTS)
    server.ask(f"INSERT INTO account VALUES ({MOVES}, 0)")
    yield made
    cluster.start(0)
    made.drop()


def kill_some(server: Observer, dice: random.Random, seconds: float) -> int:
    """Kill connections of the application, some a second; answers how many."""
    killed = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.1)
        sessions = server.sessions()
        if sessions:
            try:
                server.kill(dice.choice(sessions).id)
                killed += 1
            except pymysql.err.OperationalError:
                pass  # it had ended by itself
    return killed


def sums(server: Observer) -> tuple[int, int]:
    """All money, and how many transfers of `run` were committed."""
    rows = {int(number): int(balance) for number, balance in server.ask("SELECT id, balance FROM account")}
    moves = rows.pop(MOVES)
    return sum(rows.values()), moves


def test_the_sum_never_changes(cluster: Cluster, server: Observer, accounts: Accounts) -> None:
    dice = random.Random(7)
    with Workers("tests.support.money", [str(cluster.shards_file)], PROCESSES) as fleet:
        assert sums(server)[0] == accounts.total, "after the first transaction of each process"
        fleet.go()
        killed = kill_some(server, dice, 4.0)
        assert sums(server)[0] == accounts.total
        cluster.kill(0)
        time.sleep(1.0)
        cluster.start(0)
        killed += kill_some(server, dice, 6.0)
        figures: Counter[str] = Counter()
        for said in fleet.finish(40):
            figures.update(json.loads(said))
    eventually(lambda: not server.locks()["holders"], 15.0)
    money, moves = sums(server)
    print(killed, moves, figures)
    assert money == accounts.total
    confirmed, unknown = figures["by_run"], figures["by_run OutcomeUnknown"]
    assert confirmed <= moves <= confirmed + unknown, "each confirmed transfer once"
    assert killed > 10
    for way in ("by_transaction", "by_run", "by_lock_all"):
        assert figures[way] > 10, f"{way} made no progress: {figures}"
    assert figures["by_transaction LockLost"] > 10, "the faults did not happen"
