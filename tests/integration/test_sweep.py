"""The sweeper deletes what is long over, and nothing else, and waits for nobody."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from lockrouter import load
from lockrouter.admin.sweep import AGE, sweep_shard
from lockrouter.testing.cluster import Cluster
from lockrouter.tokens import base_token
from tests.support.observe import Observer

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
