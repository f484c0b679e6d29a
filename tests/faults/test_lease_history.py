"""A history of many processes that take leases of the same keys while everything around them breaks.

Checked are exclusion by interval, on the one clock of the machine, and by token, in the order of the holds. The same
check is shown to find a lease whose owner is not looked at.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from lockrouter.testing.cluster import Cluster
from tests.support.leaseload import Held, Load, overlaps, unordered
from tests.support.observe import Observer, eventually

pytestmark = pytest.mark.server


@pytest.fixture
def servers(cluster: Cluster) -> Iterator[list[Observer]]:
    """What is asked of the servers; all leases are gone before and after."""
    made = [Observer(cluster, index) for index in range(len(cluster))]
    clear(made)
    yield made
    clear(made)
    for server in made:
        server.close()


def clear(servers: list[Observer]) -> None:
    for server in servers:
        for table in range(8):
            server.ask(f"DELETE FROM lease_{table:02d}")


def test_the_check_finds_a_lease_whose_owner_is_not_looked_at(cluster: Cluster, servers: list[Observer]) -> None:
    load = Load(cluster.shards_file, 2, 3.0, 4, 4, "wrong")
    try:
        load.go_all()
        history = [Held(*held) for result in load.results(60) for held in result["history"]]
    finally:
        load.close()
    assert overlaps(history)


@pytest.mark.slow
def test_a_long_history_with_every_fault(cluster: Cluster, servers: list[Observer]) -> None:
    """8 processes, stopped, killed and replaced; connections killed; a server killed and started again."""
    seconds, dice = 60.0, random.Random(5)
    load = Load(cluster.shards_file, 8, seconds, 60, 6)
    done: Counter[str] = Counter()
    try:
        load.go_all()
        began = time.monotonic()
        while (left := began + seconds - time.monotonic()) > 8:
            fault = dice.choice(["stop", "stop", "kill process", "kill connections", "server"])
            if fault == "server" and done["server"] >= 3:
                continue
            done[fault] += 1
            strike(fault, load, cluster, servers, dice, left)
            time.sleep(dice.random())
        results = load.results(120)
    finally:
        for process in load.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
        load.close()
    history = [Held(*held) for result in results for held in result["history"]]
    figures = sum((Counter(result["figures"]) for result in results), Counter())
    print(f"\n{len(history):,} holds; {dict(figures)}; faults {dict(done)}")
    bugs = [bug for result in results for bug in result["bugs"] if "a call with timeout" not in bug]
    assert bugs == []
    assert overlaps(history) == []
    assert unordered(history) == []
    assert len(history) > 5_000


def strike(fault: str, load: Load, cluster: Cluster, servers: list[Observer], dice: random.Random, left: float) -> None:
    """One fault, over when this returns."""
    if fault == "stop":
        process = dice.choice(load.processes)
        process.send_signal(signal.SIGSTOP)
        time.sleep(dice.choice([0.2, 1.2, 2.5]))
        process.send_signal(signal.SIGCONT)
    elif fault == "kill process":
        place = dice.randrange(len(load.processes))
        load.processes[place].kill()
        load.processes[place].communicate()
        fresh = load.processes[place] = load.start(1000 + dice.randrange(100_000), left - 5)
        assert fresh.stdout is not None
        assert fresh.stdout.readline() == "ready\n"
        load.go(fresh)
    elif fault == "kill connections":
        server = dice.choice(servers)
        for seen in server.sessions():
            if dice.random() < 0.3:
                with contextlib.suppress(Exception):
                    server.kill(seen.id)
    else:
        index = dice.randrange(len(cluster))
        cluster.kill(index)
        cluster.start(index)
        eventually(lambda: servers[index].ask("SELECT 1"), 30.0)
