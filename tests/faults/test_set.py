"""A set that is added to under a lock whose holders are frozen for longer than they can keep it.

Whoever wakes up late writes back what it had read before: without the fence that destroys what others have added since,
with it the late write is refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockrouter.testing.cluster import Cluster
from tests.support.history import Event, read
from tests.support.judges import judge_set
from tests.support.observe import Observer
from tests.support.sets import make_sets, members_of
from tests.support.workers import Workers

pytestmark = pytest.mark.server

DATABASE = "set_under_a_lock"
GHOST = 2
FROZEN = {"row": GHOST + 2.5, "lease": 2.0}
"""Seconds after which another one surely has the lock."""
TRIES = 6


@pytest.fixture
def url(cluster: Cluster) -> Iterator[str]:
    """A protected database that is no shard, with one empty set."""
    server = Observer(cluster, 0)
    server.ask(f"DROP DATABASE IF EXISTS {DATABASE}")
    server.ask(f"CREATE DATABASE {DATABASE}")
    made = cluster.admin_url(0).rpartition("/")[0] + f"/{DATABASE}"
    make_sets(made, 1)
    yield made
    server.ask(f"DROP DATABASE {DATABASE}")
    server.close()


def shards_with_short_patience(cluster: Cluster, folder: Path) -> Path:
    """The cluster's shard file with the smallest `ghost_timeout`."""
    path = folder / "shards.toml"
    path.write_text(cluster.shards_file.read_text().replace("[router]\n", f"[router]\nghost_timeout = {GHOST}\n"))
    return path


def writer(folder: Path) -> int | None:
    """The id of the process that has read the set and not written it back yet."""
    last: Event | None = max((event for event in read(folder)), key=lambda event: event.at, default=None)
    return int(last.process.split("-")[0]) if last is not None and last.what == "adding" else None


def freeze_writers(fleet: Workers, folder: Path, seconds: float, times: int, url: str | None) -> None:
    """Freeze the one in the middle of its work; with `url`, until something is lost at the latest."""
    for _ in range(times):
        pid = None
        while pid is None or pid not in (pids := [process.pid for process in fleet.running]):
            time.sleep(0.01)
            pid = writer(folder)
        fleet.freeze(pids.index(pid), seconds)
        time.sleep(0.5)
        if url is not None and lost(folder, url):
            return


def lost(folder: Path, url: str) -> list[str]:
    """Adds that were acknowledged and are not there; or another thing that is wrong with the set."""
    # What is acknowledged after the set was read may be missing there.
    events = read(folder)
    added = [event.note for event in events if event.what == "added"]
    maybe = [event.note for event in events if event.what == "adding"]
    return judge_set(members_of(url)[0], added, [*maybe, *added]).violations


@pytest.mark.parametrize("mode", ["lease", pytest.param("row", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fenced", ["yes", "no"])
def test_late_writers_destroy_nothing_only_behind_the_fence(
    cluster: Cluster, tmp_path: Path, url: str, mode: str, fenced: str
) -> None:
    arguments = [str(shards_with_short_patience(cluster, tmp_path)), str(tmp_path), url, mode, fenced]
    with Workers("tests.support.sets", arguments, 3) as fleet:
        fleet.go()
        freeze_writers(fleet, tmp_path, FROZEN[mode], 1 if fenced == "yes" else TRIES, None if fenced == "yes" else url)
        fleet.finish()
    found, events = lost(tmp_path, url), read(tmp_path)
    added, stale = (sum(event.what == what for event in events) for what in ("added", "stale"))
    figures = f"{added} adds, {len(found)} lost, {stale} refused, {fleet.frozen} frozen"
    print(f"\n{cluster.vendor} {mode} fenced={fenced}: {figures}")
    assert added > 5
    if fenced == "yes":
        assert found == []
        assert stale >= 1, "nobody was late"
    else:
        assert found, "nothing was lost without the fence"
