"""init and seed on real servers of both vendors, and what the application's user may do afterwards."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pymysql
import pytest
from sqlalchemy import text

from lockrouter.admin.connect import connected, fetch
from lockrouter.admin.init import init
from lockrouter.admin.seed import seed
from lockrouter.config import load
from lockrouter.errors import ConfigError, NotSeeded, ShardUnavailable, TopologyMismatch
from lockrouter.testing.binaries import Vendor
from lockrouter.testing.cluster import Cluster
from tests.support.servers import Clusters
from tests.support.shards import BUCKETS, ROWS, TABLES, Shards, arguments, drop, make

pytestmark = pytest.mark.server


@pytest.fixture
def servers(clusters: Clusters, vendor: Vendor) -> Cluster:
    """Two servers that other tests may use too, each of these with databases of its own."""
    return clusters.get(vendor, 2)


@pytest.mark.slow
def test_a_statement_may_take_longer_than_a_login(servers: Cluster) -> None:
    config = load(servers.admin_file)
    with connected(config, config.shards[0], database=False) as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        assert [tuple(row) for row in fetch(connection, text(f"SELECT SLEEP({driver.connect_timeout + 0.5})"))] == [
            (0,)
        ]


@pytest.fixture
def empty(servers: Cluster, tmp_path: Path) -> Iterator[Shards]:
    """Two shards that nobody has initialised."""
    shards = make(servers, tmp_path, "t", TABLES, BUCKETS, ROWS)
    yield shards
    drop(shards)


@pytest.fixture
def shards(empty: Shards) -> Shards:
    """Two shards, initialised and seeded."""
    return empty.create()


def test_init_creates_everything_once(empty: Shards) -> None:
    first = init(empty.config, empty.admin)
    assert [report.shard for report in first] == ["s0", "s1"]
    assert all(report.done and not report.prevented for report in first)
    second = init(empty.config, empty.admin)
    assert all(not report.done and not report.prevented for report in second)
    row = empty.sql(0, "SELECT id, topology, epoch, term, term_identity, clock_high, server_started FROM lock_meta")
    assert row == [(1, b"t", 3, 1, b"", 0, 0)]


def test_init_repairs_what_is_missing_and_takes_a_new_password(shards: Shards) -> None:
    shards.sql(0, "DROP TABLE audit")
    with shards.application(0) as connection:
        user = connection.user.decode() if isinstance(connection.user, bytes) else connection.user
    for host in ("127.0.0.1", "localhost"):
        shards.sql(0, f"ALTER USER '{user}'@'{host}' IDENTIFIED BY 'another'")
    with pytest.raises(pymysql.err.OperationalError):
        shards.application(0)
    assert [report.done for report in init(shards.config, shards.admin)] == [["created 1 tables"], []]
    shards.application(0).close()
    assert shards.problems() == []


def test_init_without_an_administrator_says_what_is_prevented(empty: Shards) -> None:
    init(empty.config, empty.admin)
    drop(empty)
    reports = init(empty.config)
    assert "CREATE" in reports[0].prevented[0] and "t_0" in reports[0].prevented[0]
    init(empty.config, empty.admin)
    empty.sql(1, "DROP TABLE frozen")
    assert [len(report.prevented) for report in init(empty.config)] == [0, 1]


def test_init_refuses_another_topology(shards: Shards) -> None:
    shards.sql(1, "UPDATE lock_meta SET fingerprint = REPEAT('x', 16)")
    with pytest.raises(TopologyMismatch, match=r"s1.*another layout"):
        init(shards.config, shards.admin)


def test_an_admin_file_must_fit(shards: Shards) -> None:
    admin = shards.admin
    other = [msgspec.structs.replace(shard, id="x" + shard.id) for shard in admin.shards]
    with pytest.raises(ConfigError, match="'s0'"):
        seed(shards.config, msgspec.structs.replace(admin, shards=tuple(other)))


def test_seed_inserts_each_row_once(shards: Shards) -> None:
    for index, low in enumerate((0, BUCKETS // 2 * ROWS)):
        rows = shards.sql(index, *[f"SELECT slot, epoch, pad FROM lock_{table:02d}" for table in range(TABLES)])
        assert {row[1:] for row in rows} == {(3, 0)}
        slots = shards.sql(index, "SELECT slot FROM lock_00 UNION ALL SELECT slot FROM lock_01 ORDER BY slot")
        assert [slot for (slot,) in slots] == list(range(low, low + BUCKETS // 2 * ROWS))
    again = seed(shards.config, shards.admin)
    assert [(report.rows, report.inserted, report.closed) for report in again] == [(BUCKETS // 2 * ROWS, 0, 0)] * 2


def test_seed_before_init(empty: Shards) -> None:
    with pytest.raises(NotSeeded, match="lockrouter init"):
        seed(empty.config, empty.admin)


def test_seed_needs_more_than_the_applications_grants(empty: Shards) -> None:
    init(empty.config, empty.admin)
    with pytest.raises(ShardUnavailable, match="--admin"):
        seed(empty.config)


def test_seed_mends_holes_with_the_buckets_epoch(shards: Shards) -> None:
    shards.sql(0, "DELETE FROM lock_00 WHERE slot IN (1, 5, 6)", "DELETE FROM lock_01 WHERE slot >= 16 AND slot < 32")
    shards.sql(0, "UPDATE lock_bucket SET epoch = 2 WHERE bucket = 0", "UPDATE lock_00 SET epoch = 2 WHERE slot < 16")
    told: list[tuple[str, int, int]] = []
    reports = seed(shards.config, shards.admin, lambda *progress: told.append(progress))
    assert [report.inserted for report in reports] == [3 + ROWS, 0]
    assert shards.sql(0, "SELECT DISTINCT epoch FROM lock_00 WHERE slot IN (1, 5, 6)") == [(2,)]
    assert {shard: there for shard, there, _ in sorted(told)} == {"s0": 64, "s1": 64}
    assert shards.problems() == []


def test_seed_never_opens_a_row_of_a_bucket_that_left(shards: Shards) -> None:
    shards.sql(0, "UPDATE lock_bucket SET epoch = 0, moved_to = 's1' WHERE bucket = 0")
    shards.sql(0, "DELETE FROM lock_00 WHERE slot < 10", "UPDATE lock_00 SET epoch = 0 WHERE slot < 16")
    assert [report.closed for report in seed(shards.config, shards.admin)] == [1, 0]
    assert shards.sql(0, "SELECT COUNT(*), SUM(epoch) FROM lock_00 WHERE slot < 16") == [(16, 0)]


def test_seed_refuses_a_file_older_than_the_database(shards: Shards) -> None:
    with pytest.raises(TopologyMismatch, match="epoch 2"):
        seed(shards.epoch(2), shards.admin)


def test_a_bucket_new_to_a_shard_is_closed_once_the_topology_lives(shards: Shards) -> None:
    shards.sql(0, "DELETE FROM lock_bucket WHERE bucket = 1", "DELETE FROM lock_01 WHERE slot >= 16 AND slot < 32")
    assert [report.closed for report in seed(shards.epoch(4), shards.admin)] == [1, 0]
    assert shards.sql(0, "SELECT COUNT(*), SUM(epoch) FROM lock_01 WHERE slot >= 16 AND slot < 32") == [(ROWS, 0)]


def test_a_bucket_that_another_shard_knows_is_never_opened(shards: Shards) -> None:
    shards.sql(0, "DELETE FROM lock_bucket WHERE bucket = 1", "DELETE FROM lock_01 WHERE slot >= 16 AND slot < 32")
    shards.sql(1, "INSERT INTO lock_bucket (bucket, epoch) VALUES (1, 3)")
    assert [report.closed for report in seed(shards.config, shards.admin)] == [1, 0]


def test_two_seeders_at_once(empty: Shards) -> None:
    init(empty.config, empty.admin)
    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(seed, empty.config, empty.admin) for _ in range(2)]
    assert sum(report.inserted for run in runs for report in run.result()) == BUCKETS * ROWS
    assert empty.problems() == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_or_interrupted_seeder_is_resumed(servers: Cluster, tmp_path: Path, how: signal.Signals) -> None:
    big = make(servers, tmp_path, "killed", 4, 64, 5000)
    init(big.config, big.admin)
    code = f"from lockrouter.cli import main; import sys; sys.argv[1:] = {arguments('seed', big)!r}; main()"
    seeder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not big.sql(0, "SELECT COUNT(*) FROM lock_00")[0][0]:
            assert seeder.poll() is None
            time.sleep(0.005)
    finally:
        seeder.send_signal(how)
        assert seeder.wait(60) == (-how if how == signal.SIGKILL else 130)
    assert {problem for _, problem in big.problems()} == {"missing-rows"}
    resumed = seed(big.config, big.admin)
    assert all(report.rows == 160_000 for report in resumed)
    assert 0 < resumed[0].inserted < 160_000
    assert big.problems() == []
    assert [report.inserted for report in seed(big.config, big.admin)] == [0, 0]
    drop(big)


def test_the_application_can_lock_and_nothing_more(shards: Shards) -> None:
    denied = {1142, 1143, 1044, 1227}
    with shards.application(0) as connection, connection.cursor() as cursor:
        assert cursor.execute("SELECT slot FROM lock_00 WHERE slot = 3 FOR UPDATE") == 1
        assert cursor.execute("SELECT epoch FROM lock_bucket WHERE bucket = 0 LOCK IN SHARE MODE") == 1
        assert cursor.execute("UPDATE lock_meta SET clock_high = 1, server_started = 2 WHERE id = 1") == 1
        for statement in (
            "UPDATE lock_00 SET epoch = 9 WHERE slot = 3",
            "DELETE FROM lock_00 WHERE slot = 3",
            "INSERT INTO lock_00 (slot, epoch) VALUES (999, 1)",
            "UPDATE lock_bucket SET epoch = 9",
            "UPDATE lock_meta SET epoch = 9",
            "UPDATE lock_meta SET drained = ''",
            "DELETE FROM audit",
            "SELECT User FROM mysql.user",
            "CREATE TABLE mine (id INT)",
            "SET GLOBAL read_only = 0",
        ):
            with pytest.raises((pymysql.err.OperationalError, pymysql.err.ProgrammingError)) as caught:
                cursor.execute(statement)
            assert caught.value.args[0] in denied, statement
        connection.rollback()


def test_the_application_can_work_with_leases_under_the_buckets_fence(shards: Shards) -> None:
    with shards.application(0) as connection, connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO lease_00 (bucket, k, kind, key_text, owner, token, ttl, acquired, expires)"
            " SELECT v.bucket, REPEAT('k', 16), 1, 'key', REPEAT('o', 16), 1, 1, 1, 1 FROM (SELECT 0 AS bucket) AS v"
            " JOIN lock_bucket AS b ON b.bucket = v.bucket AND b.epoch > 0 LOCK IN SHARE MODE"
            " ON DUPLICATE KEY UPDATE token = lease_00.token + 1"
        )
        released = cursor.execute(
            "UPDATE lease_00 AS l JOIN (SELECT 0 AS bucket) AS v ON l.bucket = v.bucket"
            " JOIN lock_bucket AS b ON b.bucket = v.bucket AND b.epoch > 0 SET l.owner = ''"
        )
        assert released == 1
        assert cursor.execute("DELETE FROM lease_00 WHERE owner = ''") == 1
        connection.rollback()
