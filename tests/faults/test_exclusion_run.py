"""Nothing is lost when a server is killed under load: many processes and threads, hot and cold keys, short holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lockrouter.testing.cluster import Cluster
from lockrouter.testing.exclusion_run import Result, provision, run
from lockrouter.testing.load import Plan

pytestmark = pytest.mark.server

VICTIM = 2


@pytest.fixture
def seeded(cluster: Cluster) -> Iterator[Cluster]:
    """The session's cluster, all its rows there, and all its servers running afterwards."""
    provision(cluster)
    yield cluster
    cluster.start(VICTIM)


def plan_of(cluster: Cluster, folder: Path, on_outage: str, *, unlocked: bool = False) -> Plan:
    """The load on the cluster as if its shard file said `on_outage` for every key."""
    text = cluster.shards_file.read_text()
    shards = folder / "shards.toml"
    shards.write_text(text.replace('on_outage = "local"', f'on_outage = "{on_outage}"'))
    return Plan(shards=str(shards), folder=str(folder), threads=8, hold=0.0045, unlocked=unlocked)


def check(result: Result) -> None:
    """Show the figures, and fail on any fault."""
    print(result)
    assert not result.faults(), "\n".join([str(result), *result.faults()])
    assert all(figures.acquired for figures in result.shards.values())


@pytest.mark.slow
@pytest.mark.parametrize("on_outage", ["refuse", "local"])
def test_a_killed_server_loses_no_increment(seeded: Cluster, tmp_path: Path, on_outage: str) -> None:
    plan = plan_of(seeded, tmp_path, on_outage)
    check(run(seeded, plan, seconds=10.0, processes=8, kills=1, victim=VICTIM))


@pytest.mark.slow
@pytest.mark.parametrize("on_outage", ["refuse", "local"])
def test_a_minute_with_two_kills_loses_no_increment(seeded: Cluster, tmp_path: Path, on_outage: str) -> None:
    plan = plan_of(seeded, tmp_path, on_outage)
    check(run(seeded, plan, seconds=60.0, processes=8, kills=2, victim=VICTIM))


def test_the_run_notices_when_nothing_excludes(seeded: Cluster, tmp_path: Path) -> None:
    plan = plan_of(seeded, tmp_path, "refuse", unlocked=True)
    result = run(seeded, plan, seconds=1.0, processes=2, kills=0)
    assert not result.verdict.kept
    assert any("exclusion failed" in fault for fault in result.faults())
