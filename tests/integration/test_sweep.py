"""The sweeper deletes what is long over, and nothing else, and waits for nobody."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from lockrouter import LockRouter, load
from lockrouter.admin.sweep import AGE, sweep_shard
from lockrouter.admin.sweeper import Sweeper
from lockrouter.cli import app
from lockrouter.testing.cluster import Cluster
from lockrouter.tokens import base_token
from tests.support.observe import Observer, eventually

pytestmark = pytest.mark.server

HOUR = int(AGE * 1e6)


class Rows:
    """Rows put into a shard's tables by hand, their times relative to the server's clock."""

    def __init__(self, cluster: Cluster) -> None:
        self.config = load(cluster.shards_file)
        self.server = Observer(cluster, 0)
        self.clear()
        self.now = self.server.clock_us()

    def clear(self) -> None:
        tables = [f"lease_{number:02d}" for number in range(self.config.topology.tables)]
        for table in (*tables, "once", "run_marker"):
            self.server.ask(f"DELETE FROM {table}")

    def lease(self, bucket: int, k: int, *, expired: int, granted: int, owner: bytes = b"", table: int = 0) -> None:
        """A lease that expired, and was granted, so many microseconds ago."""
        token = base_token(3, self.now - granted)
        self.server.ask(
            f"INSERT INTO lease_{table:02d} VALUES (%s, %s, 1, 'key', %s, %s, 30000000, %s, %s, '')",
            *(bucket, k.to_bytes(16), owner, token, self.now - granted, self.now - expired),
        )

    def once(self, k: int, *, over: int, state: int = 2) -> None:
        """A result whose time was over so many microseconds ago."""
        keep = self.now - over
        self.server.ask("INSERT INTO once VALUES (%s, 'key', %s, '', 1, 0, %s, '1')", k.to_bytes(16), state, keep)

    def marker(self, k: int, *, age: int) -> None:
        self.server.ask("INSERT INTO run_marker VALUES (%s, %s)", k.to_bytes(16), self.now - age)

    def left(self, table: str, column: str = "k") -> list[int]:
        return [int.from_bytes(row[0]) for row in self.server.ask(f"SELECT {column} FROM {table} ORDER BY {column}")]


@pytest.fixture
def rows(cluster: Cluster) -> Iterator[Rows]:
    made = Rows(cluster)
    yield made
    made.clear()
    made.server.close()


def test_only_what_nobody_can_need_is_deleted(rows: Rows) -> None:
    second = 1_000_000
    rows.lease(0, 1, expired=HOUR + second, granted=HOUR + 2 * second)
    rows.lease(0, 2, expired=HOUR + second, granted=HOUR + 2 * second, owner=bytes(16))
    rows.lease(0, 3, expired=HOUR - 60 * second, granted=HOUR + 2 * second)
    rows.lease(0, 4, expired=2 * HOUR, granted=HOUR - 60 * second)
    rows.lease(0, 5, expired=-30 * second, granted=2 * HOUR, owner=bytes(range(16)))
    rows.lease(8, 6, expired=3 * HOUR, granted=3 * HOUR)
    rows.lease(1, 7, expired=3 * HOUR, granted=3 * HOUR, table=1)
    rows.once(1, over=second)
    rows.once(2, over=-60 * second)
    rows.marker(1, age=HOUR + second)
    rows.marker(2, age=HOUR - 60 * second)
    swept = sweep_shard(rows.config, rows.config.shards[0])
    assert swept.deleted == {"lease": 4, "once": 1, "marker": 1}
    assert swept.busy == 0
    assert rows.left("lease_00") == [3, 4, 5]
    assert rows.left("lease_01") == []
    assert rows.left("once") == [2]
    assert rows.left("run_marker", "id") == [2]
    assert sweep_shard(rows.config, rows.config.shards[0]).deleted == {"lease": 0, "once": 0, "marker": 0}


def test_pages_and_batches_miss_nothing(rows: Rows) -> None:
    for number in range(60):
        old = number % 3 != 0
        rows.lease(number % 5, number, expired=2 * HOUR if old else 0, granted=3 * HOUR)
        rows.once(number, over=1 if old else -HOUR)
    swept = sweep_shard(rows.config, rows.config.shards[0], page=7, batch=2, pause=0.0)
    assert swept.deleted == {"lease": 40, "once": 40, "marker": 0}
    assert sorted(rows.left("lease_00")) == rows.left("once") == list(range(0, 60, 3))


def test_it_ends_when_it_is_told_to(rows: Rows) -> None:
    for number in range(10):
        rows.once(number, over=1)
    left = iter([True, True, False])
    assert sweep_shard(rows.config, rows.config.shards[0], go_on=lambda: next(left), batch=1).deleted["once"] == 2
    assert len(rows.left("once")) == 8


def test_a_locked_row_is_left_for_the_next_time_and_a_revived_one_for_good(rows: Rows) -> None:
    for number in range(4):
        rows.lease(0, number, expired=2 * HOUR, granted=2 * HOUR)
    with rows.server.connect() as connection, connection.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute("UPDATE lease_00 SET expires = %s WHERE bucket = 0 AND k = %s", (rows.now * 2, (2).to_bytes(16)))
        began = time.monotonic()
        swept = sweep_shard(rows.config, rows.config.shards[0], batch=2)
        assert time.monotonic() - began < 5.0
        assert (swept.deleted["lease"], swept.busy) == (2, 1)
        connection.commit()
    assert sweep_shard(rows.config, rows.config.shards[0], batch=2).deleted["lease"] == 1
    assert rows.left("lease_00") == [2]


def sweeper(rows: Rows) -> tuple[Sweeper, CollectorRegistry]:
    registry = CollectorRegistry()
    return Sweeper(rows.config, registry=registry), registry


def test_of_several_sweepers_one_sweeps(rows: Rows) -> None:
    rows.once(1, over=1)
    (first, registry), (second, _) = sweeper(rows), sweeper(rows)
    with first, second:
        passed = first.sweep(every=60.0)
        assert [swept.skipped for swept in passed] == [None] * len(passed)
        assert passed[0].deleted["once"] == 1
        rows.once(2, over=1)
        again = second.sweep(every=60.0)
        assert all(swept.skipped and not swept.failed for swept in again)
        assert rows.left("once") == [2]
        assert registry.get_sample_value("lockrouter_swept_total", {"shard": "shard-0", "what": "once"}) == 1
        at = registry.get_sample_value("lockrouter_sweep_timestamp_seconds", {"shard": "shard-0"})
        assert at is not None
        assert abs(at - time.time()) < 60
    rows.server.ask("UPDATE lease_00 SET owner = ''")  # the interval is over
    third, _ = sweeper(rows)
    with third:
        assert third.sweep()[0].deleted["once"] == 1


def test_a_shard_that_is_down_is_named_and_the_others_are_swept(rows: Rows, cluster: Cluster) -> None:
    made, _ = sweeper(rows)
    cluster.kill(1)
    try:
        with made:
            passed = {swept.shard: swept for swept in made.sweep()}
        assert passed["shard-1"].failed
        assert passed["shard-0"].skipped is None
    finally:
        cluster.start(1)


def test_live_leases_and_results_are_never_swept_under_traffic(rows: Rows, cluster: Cluster) -> None:
    made, _ = sweeper(rows)
    stop, bugs, done = threading.Event(), [], []

    def work(number: int) -> None:
        router = LockRouter(rows.config, registry=CollectorRegistry())
        with router:
            turn = 0
            while not stop.is_set():
                turn += 1
                with router.lease(f"traffic:{number}:{turn % 7}", ttl=5.0, timeout=5.0) as lease:
                    if router.once(f"traffic:{number}:{turn}", lambda turn=turn: turn) != turn:
                        bugs.append("another's result")
                    lease.check()
                done.append(1)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        with made:
            until = time.monotonic() + 4.0
            passes = 0
            while time.monotonic() < until:
                # What is released now is old at once: the sweeper and the traffic meet at the same rows.
                for server in [rows.server]:
                    for number in range(rows.config.topology.tables):
                        server.ask(
                            f"UPDATE lease_{number:02d} SET expires = expires - %s, token = %s WHERE owner = ''",
                            *(2 * HOUR, base_token(1, rows.now - 2 * HOUR)),
                        )
                passes += all(not swept.failed for swept in made.sweep())
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not bugs
    assert len(done) > 50
    assert passes > 1


def test_the_command(rows: Rows, cluster: Cluster) -> None:
    rows.once(1, over=1)
    file = str(cluster.shards_file)
    first = CliRunner().invoke(app, ["sweep", file, "--json"])
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)["shards"]
    assert found[0] == {
        "shard": "shard-0",
        "deleted": {"lease": 0, "once": 1, "marker": 0},
        "busy": 0,
        "skipped": None,
        "failed": False,
    }
    second = CliRunner().invoke(app, ["sweep", file, "--once"])
    assert second.exit_code == 0
    assert "shard-0: deleted 0 lease, 0 once, 0 marker" in second.stdout
    assert CliRunner().invoke(app, ["sweep", file, "--once", "--interval", "5"]).exit_code == 2


def test_the_command_sweeps_on_until_it_is_told_to_end(rows: Rows, cluster: Cluster) -> None:
    command = [
        sys.executable,
        "-c",
        "from lockrouter.cli import main; main()",
        "sweep",
        str(cluster.shards_file),
        "--interval",
        "1",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(len(cluster) + 1)]
            rows.once(1, over=1)
            eventually(lambda: rows.left("once") == [], 10.0)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=20)
            assert process.returncode == 0
            assert said[0].startswith("shard-0: deleted")
        finally:
            process.kill()
