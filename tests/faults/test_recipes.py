"""Recipes over several processes, some of which are killed and some frozen."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockrouter.testing.cluster import Cluster
from tests.support.history import judge, read
from tests.support.observe import Observer
from tests.support.recipe_worker import EFFECTS, PERMITS
from tests.support.tables import Business
from tests.support.workers import Workers

pytestmark = [pytest.mark.server, pytest.mark.slow]


def workers(cluster: Cluster, folder: Path, what: str, count: int) -> Workers:
    return Workers("tests.support.recipe_worker", [str(cluster.shards_file), str(folder), what], count)


def notes(folder: Path) -> list[list[Any]]:
    """What all processes noted; a line that a kill cut short is left out."""
    files = (path.read_text().split("\n")[:-1] for path in folder.glob("notes-*"))
    return [json.loads(line) for lines in files for line in lines]


@pytest.fixture(autouse=True)
def clean(cluster: Cluster) -> Iterator[None]:
    """No record or lease of another test is met."""
    servers = [Observer(cluster, index) for index in range(len(cluster))]

    def clear() -> None:
        for server in servers:
            for table in [row[0] for row in server.ask("SHOW TABLES LIKE 'lease%'")] + ["once"]:
                server.ask(f"DELETE FROM {table}")

    clear()
    yield
    clear()
    for server in servers:
        server.close()


def test_a_job_is_done_once_per_slot(cluster: Cluster, tmp_path: Path) -> None:
    with workers(cluster, tmp_path, "guard", 4) as fleet:
        fleet.go()
        fleet.trouble(20.0, random.Random(1))
        fleet.finish()
    done = Counter(slot for what, slot, *_ in notes(tmp_path) if what == "done")
    began = Counter(slot for what, slot, *_ in notes(tmp_path) if what == "began")
    report = judge(read(tmp_path))
    print(report, dict(done), dict(began), fleet.killed, fleet.frozen)
    assert report.violations == []
    assert set(done.values()) == {1}
    assert len(done) >= 5
    assert len(began) - len(done) <= fleet.killed + fleet.frozen, "a slot without a fault was not done"


def test_a_message_is_completed_once(cluster: Cluster, tmp_path: Path) -> None:
    with workers(cluster, tmp_path, "once", 4) as fleet:
        fleet.go()
        fleet.trouble(15.0, random.Random(2))
        fleet.finish()
    results = defaultdict(set)
    runs: Counter[int] = Counter()
    for what, message, *rest in notes(tmp_path):
        if what == "result":
            results[message].add(rest[0]["run"])
        else:
            runs[message] += 1
    again = sum(runs.values()) - len(runs)
    print(f"{len(results)} messages, {again} of them run again, {fleet.killed} killed, {fleet.frozen} frozen")
    assert len(results) > 100
    assert all(len(found) == 1 for found in results.values()), "two callers were told different results"
    assert again <= fleet.killed + fleet.frozen


def test_a_transaction_s_effect_comes_exactly_once(cluster: Cluster, tmp_path: Path) -> None:
    server = Observer(cluster, 0)
    business = Business(server, EFFECTS)
    try:
        with workers(cluster, tmp_path, "exactly_once", 4) as fleet:
            fleet.go()
            fleet.trouble(15.0, random.Random(3), lambda: kill_one(server))
            fleet.finish()
        effects = dict(server.ask("SELECT message, COUNT(*) FROM effects GROUP BY message"))
        runs = dict(server.ask("SELECT message, run FROM effects"))
        print(f"{len(effects)} messages, {fleet.killed} killed, {fleet.frozen} frozen")
        assert len(effects) > 100
        assert set(effects.values()) == {1}
        assert all(runs[message] == result for _, message, result in notes(tmp_path))
    finally:
        business.drop()
        server.close()


def kill_one(server: Observer) -> None:
    """KILL a connection of the application that is in the middle of something."""
    for session in server.sessions():
        if session.command != "Sleep":
            server.ask(f"KILL {session.id}")
            return


def test_never_two_leaders(cluster: Cluster, tmp_path: Path) -> None:
    with workers(cluster, tmp_path, "election", 4) as fleet:
        fleet.go()
        fleet.trouble(20.0, random.Random(4))
        figures = [json.loads(said) for said in fleet.finish()]
    report = judge(read(tmp_path))
    print(report, figures, fleet.killed, fleet.frozen)
    assert report.violations == []
    assert report.outcomes["ok"] >= 8


def test_never_more_than_the_permits_and_nobody_starves(cluster: Cluster, tmp_path: Path) -> None:
    with workers(cluster, tmp_path, "semaphore", 4) as fleet:
        fleet.go()
        fleet.trouble(15.0, random.Random(5))
        figures = [json.loads(said) for said in fleet.finish()]
    report = judge(read(tmp_path), PERMITS, tokens=False)
    longest = max(wait for what, wait in notes(tmp_path) if what == "waited")
    print(report, figures, f"longest wait {longest:.2f} s", fleet.killed, fleet.frozen)
    assert report.violations == []
    assert not any("LockTimeout" in one for one in figures)
    assert report.outcomes["ok"] > 100
