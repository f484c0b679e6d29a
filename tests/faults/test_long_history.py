"""A long history of leases over eight processes, with every fault at once, is in order; that of a broken store is not.

pytest -m slow tests/faults/test_long_history.py -s
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pymysql
import pytest

from lockrouter.testing.cluster import Cluster
from tests.support.history import judge, read
from tests.support.lease_worker import KEYS
from tests.support.observe import Observer, eventually
from tests.support.workers import Workers

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

OPERATIONS = 100_000
PROCESSES = 8


@pytest.fixture
def servers(cluster: Cluster) -> Iterator[list[Observer]]:
    """All servers of the cluster, running afterwards."""
    made = [Observer(cluster, index) for index in range(len(cluster))]
    yield made
    for server in made:
        cluster.start(server.index)
        server.close()


def kill_sessions(servers: list[Observer], dice: random.Random) -> None:
    """KILL some of the application's connections, on one server."""
    server = dice.choice(servers)
    for session in dice.sample(found := server.sessions(), min(3, len(found))):
        try:
            server.kill(session.id)
        except pymysql.err.OperationalError:
            pass  # it had ended by itself


def restart(cluster: Cluster, servers: list[Observer], dice: random.Random) -> None:
    """`kill -9` of one server, which is started again."""
    victim = dice.choice(servers)
    cluster.kill(victim.index)
    time.sleep(dice.uniform(0.2, 1.5))
    cluster.start(victim.index)


def operations(folder: Path) -> int:
    """At least about so many there are so far: with its waits and notes one takes less than four lines."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("history-*")) // 4


def owned(servers: list[Observer]) -> list[tuple[bytes, float]]:
    """Leases of this test that are owned, expired or not, and the seconds left."""
    found: list[tuple[bytes, float]] = []
    for server in servers:
        for (table,) in server.ask("SHOW TABLES LIKE 'lease%'"):
            clock = server.clock_us()
            rows = server.ask(f"SELECT key_text, expires FROM {table} WHERE owner <> '' AND key_text LIKE 'settle:%%'")
            found += [(key, (expires - clock) / 1e6) for key, expires in rows]
    return found


@pytest.mark.slow
def test_a_long_history_with_all_faults(cluster: Cluster, servers: list[Observer], tmp_path: Path) -> None:
    dice = random.Random(11)
    began = time.monotonic()
    arguments = [str(cluster.shards_file), str(tmp_path)]
    with Workers("tests.support.lease_worker", arguments, PROCESSES) as fleet:
        fleet.go()
        restarts = 0

        def restart_one() -> None:
            nonlocal restarts
            restart(cluster, servers, dice)
            restarts += 1

        while operations(tmp_path) < OPERATIONS or restarts < 4:
            fleet.trouble(5.0, dice, lambda: kill_sessions(servers, dice), lambda: kill_sessions(servers, dice))
            restart_one()
        fleet.finish()
    report = judge(read(tmp_path))
    took = time.monotonic() - began
    print(f"\n{cluster.vendor} in {took:.0f} s: {report}")
    print(f"{fleet.killed} processes killed, {fleet.frozen} frozen, {restarts} servers killed and restarted")
    print(f"{len({event.key for event in read(tmp_path)})} keys")
    assert report.violations == []
    assert report.operations >= OPERATIONS
    assert report.outcomes["ok"] > OPERATIONS / 10
    # Nobody is left to renew anything: within the longest ttl every lease has ended, and none is renewed.
    eventually(lambda: all(left < 0 for _, left in owned(servers)), 5.0, lambda: owned(servers))
    assert len({event.key for event in read(tmp_path)}) == KEYS


@pytest.mark.slow
def test_the_checker_catches_a_store_that_does_not_ask_for_the_owner(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREAK", "forget_owners")
    arguments = [str(cluster.shards_file), str(tmp_path)]
    with Workers("tests.support.lease_worker", arguments, 4) as fleet:
        fleet.go()
        # Who wakes up after its ttl frees what is somebody else's by now; whether that one is met is a matter of luck.
        for turn in range(20):
            time.sleep(0.3)
            fleet.freeze(turn % 4, 3.5)
            if judge(read(tmp_path)).violations:
                break
        fleet.finish()
    report = judge(read(tmp_path))
    print(f"\n{cluster.vendor}: {report}", *report.violations[:3], sep="\n")
    assert report.violations


def test_the_checker_catches_a_store_that_gives_what_is_owned(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREAK", "take_owned")
    with Workers("tests.support.lease_worker", [str(cluster.shards_file), str(tmp_path)], 2) as fleet:
        fleet.go()
        eventually(lambda: judge(read(tmp_path)).violations, 20.0, every=0.2)
        fleet.end()
