"""Money stays money: deadlocks, swallowed errors, DDL, killed connections and a restarted server change no sum."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pymysql
import pytest

from lockrouter.testing.cluster import Cluster
from tests.support.accounts import Accounts
from tests.support.money import ACCOUNTS, MOVES
from tests.support.observe import Observer, eventually

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]
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


def start(cluster: Cluster, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.money", str(cluster.shards_file), str(seed)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


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
    processes = [start(cluster, seed) for seed in range(PROCESSES)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        assert sums(server)[0] == accounts.total, "after the first transaction of each process"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        killed = kill_some(server, dice, 4.0)
        assert sums(server)[0] == accounts.total
        cluster.kill(0)
        time.sleep(1.0)
        cluster.start(0)
        killed += kill_some(server, dice, 6.0)
        figures: Counter[str] = Counter()
        for process in processes:
            said, _ = process.communicate(timeout=40)
            assert process.returncode == 0
            figures.update(json.loads(said.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
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
