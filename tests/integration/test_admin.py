"""init, seed and verify on real servers of both vendors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pymysql
import pytest
from typer.testing import CliRunner

from lockrouter.admin.init import init
from lockrouter.admin.seed import seed
from lockrouter.admin.verify import verify
from lockrouter.cli import app
from lockrouter.config import RouterConfig, load
from lockrouter.errors import ConfigError, NotSeeded, ShardUnavailable, TopologyMismatch
from lockrouter.testing.binaries import Vendor
from lockrouter.testing.cluster import Cluster

from ..support.servers import Clusters

pytestmark = pytest.mark.server

TABLES, BUCKETS, ROWS = 2, 8, 16
IN_ONE_TABLE = BUCKETS // 2 // TABLES * ROWS


@dataclass
class Shards:
    """A topology in databases of its own on the two servers of a cluster."""

    cluster: Cluster
    file: Path
    admin_file: Path
    databases: tuple[str, str]

    @property
    def config(self) -> RouterConfig:
        return load(self.file)

    @property
    def admin(self) -> RouterConfig:
        return load(self.admin_file)

    def create(self) -> Shards:
        init(self.config, self.admin)
        seed(self.config, self.admin)
        return self

    def sql(self, index: int, *statements: str) -> list[tuple[Any, ...]]:
        """Executes as administrator in the shard's database; answers the last one's rows."""
        with self.cluster.connect(index) as connection, connection.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE IF NOT EXISTS {self.databases[index]}")
            cursor.execute(f"USE {self.databases[index]}")
            for statement in statements:
                cursor.execute(statement)
            rows = list(cursor.fetchall())
            connection.commit()
        return [tuple(row.values()) if isinstance(row, dict) else tuple(row) for row in rows]

    def problems(self) -> list[tuple[str, str]]:
        return [(finding.shard, finding.problem) for finding in verify(self.config, self.admin)]

    def application(self, index: int) -> pymysql.connections.Connection[Any]:
        """A connection of the application's user."""
        config = self.config
        where = config.endpoints(config.shards[index])[0]
        return pymysql.connect(
            host=where.host,
            port=where.port,
            user=where.user,
            password=where.password,
            database=where.database,
            ssl_disabled=True,
        )

    def epoch(self, epoch: int) -> RouterConfig:
        """The file as it would be at another epoch."""
        config = self.config
        return msgspec.structs.replace(config, topology=msgspec.structs.replace(config.topology, epoch=epoch))


@pytest.fixture
def servers(clusters: Clusters, vendor: Vendor) -> Cluster:
    """Two servers that other tests may use too, each of these with databases of its own."""
    return clusters.get(vendor, 2)


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


def make(cluster: Cluster, folder: Path, prefix: str, tables: int, buckets: int, rows: int) -> Shards:
    """The files of a topology; its databases do not exist yet."""
    shape = f'name = "t"\nepoch = 3\ntables = {tables}\nbuckets = {buckets}\nrows_per_bucket = {rows}\n'
    paths = []
    for original in (cluster.shards_file, cluster.admin_file):
        config = load(original)
        text = f'[topology]\n{shape}[router]\non_outage = "refuse"\n'
        for index, shard in enumerate(config.shards):
            database = config.endpoints(shard)[0].database
            url = shard.url.removesuffix(database) + f"{prefix}_{index}"
            share = f"{buckets // 2 * index}-{buckets // 2 * (index + 1) - 1}"
            text += f'[[shard]]\nid = "s{index}"\nurl = "{url}"\nbuckets = ["{share}"]\n'
        paths.append(folder / f"{prefix}-{Path(original).name}")
        paths[-1].write_text(text, "utf-8")
    shards = Shards(cluster, paths[0], paths[1], (f"{prefix}_0", f"{prefix}_1"))
    drop(shards)
    return shards


def drop(shards: Shards) -> None:
    for index, database in enumerate(shards.databases):
        shards.sql(index, f"DROP DATABASE {database}")


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


def test_a_killed_seeder_is_resumed(servers: Cluster, tmp_path: Path) -> None:
    big = make(servers, tmp_path, "killed", 4, 64, 5000)
    init(big.config, big.admin)
    code = f"from lockrouter.cli import main; import sys; sys.argv[1:] = {_arguments('seed', big)!r}; main()"
    seeder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not big.sql(0, "SELECT COUNT(*) FROM lock_00")[0][0]:
            assert seeder.poll() is None
            time.sleep(0.005)
    finally:
        seeder.send_signal(signal.SIGKILL)
        assert seeder.wait() == -signal.SIGKILL
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


def test_verify_finds_nothing_wrong_with_or_without_an_administrator(shards: Shards) -> None:
    assert verify(shards.config, shards.admin) == []
    assert verify(shards.config) == []


FAULTS = [
    ("DROP TABLE lease_01", "missing-table"),
    ("DROP TABLE lock_01", "missing-table"),
    ("DROP TABLE lock_meta", "missing-table"),
    ("ALTER TABLE lease_00 ENGINE = MyISAM", "engine"),
    ("DELETE FROM lock_00 WHERE slot = 7", "missing-rows"),
    ("DELETE FROM lock_bucket WHERE bucket = 3", "unseeded"),
    ("INSERT INTO lock_00 (slot, epoch) VALUES (16, 3)", "extra-rows"),
    ("INSERT INTO lock_00 (slot, epoch) VALUES (4294967295, 3)", "extra-rows"),
    ("UPDATE lock_00 SET epoch = 2 WHERE slot = 7", "row-epoch"),
    ("UPDATE lock_00 SET epoch = 0 WHERE slot = 7", "closed-rows"),
    ("UPDATE lock_bucket SET epoch = 0, moved_to = 's1' WHERE bucket = 0", "closed-bucket"),
    ("UPDATE lock_bucket SET epoch = 0, moved_to = 's1' WHERE bucket = 0", "departed-open"),
    ("INSERT INTO lock_bucket (bucket, epoch) VALUES (7, 3)", "foreign-bucket"),
    ("INSERT INTO lock_bucket (bucket, epoch) VALUES (7, 3)", "open-twice"),
    ("UPDATE lock_meta SET topology = 'other'", "topology"),
    ("UPDATE lock_meta SET protocol = 2", "protocol"),
    ("UPDATE lock_meta SET fingerprint = REPEAT('x', 16)", "fingerprint"),
    ("UPDATE lock_meta SET epoch = 2", "epoch"),
    ("UPDATE lock_meta SET epoch = 4", "epoch"),
    ("UPDATE lock_meta SET term = 400", "term"),
    ("UPDATE lock_meta SET migration = 'somebody'", "migration"),
    ("UPDATE lock_meta SET term_identity = 'me', drained = 'me'", "drained"),
    ("DELETE FROM lock_meta", "not-initialised"),
]


@pytest.mark.parametrize(("fault", "problem"), FAULTS, ids=[f"{problem}-{n}" for n, (_, problem) in enumerate(FAULTS)])
def test_verify_finds_a_fault(shards: Shards, fault: str, problem: str) -> None:
    shards.sql(0, fault)
    assert ("s0", problem) in shards.problems()
    assert not [found for found in shards.problems() if found[0] == "s1"]
    assert all("\n" not in finding.text for finding in verify(shards.config, shards.admin))


def test_a_drained_server_that_is_not_the_primary_any_more_is_no_fault(shards: Shards) -> None:
    shards.sql(0, "UPDATE lock_meta SET term_identity = 'new', drained = 'old'")
    assert shards.problems() == []


@pytest.mark.parametrize(
    ("statement", "undo", "problem"),
    [
        ("REVOKE DELETE ON once FROM", "GRANT DELETE ON once TO", "missing-grant"),
        ("REVOKE UPDATE (pad) ON lock_00 FROM", "GRANT UPDATE (pad) ON lock_00 TO", "missing-grant"),
        ("GRANT UPDATE (epoch) ON lock_00 TO", "REVOKE UPDATE (epoch) ON lock_00 FROM", "excess-grant"),
        ("GRANT DROP ON t_0.* TO", "REVOKE DROP ON t_0.* FROM", "excess-grant"),
    ],
)
def test_verify_finds_wrong_grants(shards: Shards, statement: str, undo: str, problem: str) -> None:
    config = shards.config
    user = config.endpoints(config.shards[0])[0].user
    accounts = f"'{user}'@'127.0.0.1', '{user}'@'localhost'"
    shards.sql(0, f"{statement} {accounts}")
    try:
        assert shards.problems() == [("s0", problem)]
    finally:
        # A grant outlives the database that it is on.
        shards.sql(0, f"{undo} {accounts}")


@pytest.mark.parametrize(
    ("variable", "value", "back", "problem"),
    [("read_only", "ON", "OFF", "read-only"), ("binlog_format", "'STATEMENT'", "'ROW'", "binlog-format")],
)
def test_verify_finds_a_setting(shards: Shards, variable: str, value: str, back: str, problem: str) -> None:
    shards.sql(1, f"SET GLOBAL {variable} = {value}")
    try:
        assert shards.problems() == [("s1", problem)]
    finally:
        shards.sql(1, f"SET GLOBAL {variable} = {back}")


def test_a_read_only_server_is_not_written_to(shards: Shards) -> None:
    shards.sql(1, "SET GLOBAL read_only = ON")
    try:
        for command in (init, seed):
            with pytest.raises(ShardUnavailable, match=r"s1.*read-only"):
                command(shards.config, shards.admin)
    finally:
        shards.sql(1, "SET GLOBAL read_only = OFF")


def test_verify_finds_a_clock_that_stands(shards: Shards) -> None:
    shards.cluster.stop(1)
    shards.cluster.start(1, {"sysdate-is-now": True})
    try:
        assert shards.problems() == [("s1", "sysdate-is-now")]
    finally:
        shards.cluster.stop(1)
        shards.cluster.start(1)


def test_a_shard_that_does_not_answer(shards: Shards) -> None:
    shards.sql(0, "DELETE FROM lock_00 WHERE slot = 1")
    shards.cluster.stop(1)
    try:
        assert sorted(shards.problems()) == [("s0", "missing-rows"), ("s1", "unavailable")]
        with pytest.raises(ShardUnavailable, match="s1"):
            seed(shards.config, shards.admin)
        with pytest.raises(ShardUnavailable, match="s1"):
            init(shards.config, shards.admin)
    finally:
        shards.cluster.start(1)
    # What the first shard lacked it got although the second did not answer: it knew all its buckets.
    assert shards.problems() == []


def _arguments(command: str, shards: Shards) -> list[str]:
    return [command, str(shards.file), "--admin", str(shards.admin_file)]


def test_the_commands(empty: Shards) -> None:
    runner = CliRunner()
    assert runner.invoke(app, _arguments("verify", empty)).exit_code == 1
    first = runner.invoke(app, _arguments("init", empty))
    assert first.exit_code == 0 and "created database t_0" in first.stdout
    assert "nothing to create" in runner.invoke(app, _arguments("init", empty)).stdout
    seeded = runner.invoke(app, _arguments("seed", empty))
    assert seeded.exit_code == 0 and "s1: 64 rows, 64 of them new" in seeded.stdout
    clean = runner.invoke(app, [*_arguments("verify", empty), "--sizing"])
    assert clean.exit_code == 0 and "nothing is wrong" in clean.stdout and "10,000" in clean.stdout
    empty.sql(0, "UPDATE lock_meta SET term = 401")
    assert runner.invoke(app, _arguments("verify", empty)).exit_code == 0
    empty.sql(0, "DELETE FROM lock_00 WHERE slot = 1")
    dirty = runner.invoke(app, [*_arguments("verify", empty), "--json", "--sizing"])
    found = json.loads(dirty.stdout)
    assert dirty.exit_code == 1
    assert {each["problem"] for each in found["findings"]} == {"term", "missing-rows"}
    assert [each["held"] for each in found["sizing"]] == [1, 10, 100, 1_000, 10_000]


def test_the_commands_without_an_administrator(empty: Shards) -> None:
    runner = CliRunner()
    runner.invoke(app, _arguments("init", empty))
    drop(empty)
    denied = runner.invoke(app, ["init", str(empty.file)])
    assert denied.exit_code == 1 and "CREATE" in denied.stderr
    assert runner.invoke(app, ["seed", str(empty.file)]).exit_code == 2


def test_the_installed_command(shards: Shards, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", "from lockrouter.cli import main; main()"]
    routed = subprocess.run([*command, "route", shards.file, "a", "--json"], capture_output=True, text=True, check=True)
    (address,) = json.loads(routed.stdout)
    assert address["key"] == "a" and address["slot"] // ROWS == address["bucket"]
    raw = subprocess.run([*command, "route", shards.file, os.fsdecode(b"\xff")], capture_output=True, check=True)
    assert raw.stdout.startswith(b"\\xff  bucket ")
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[topology]\nsurprise = 1\n", "utf-8")
    for arguments in (["verify", str(wrong)], ["route", str(shards.file), ""]):
        failed = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert failed.returncode == 2 and failed.stdout == ""
        assert failed.stderr.startswith("lockrouter: ") and failed.stderr.count("\n") == 1


def test_a_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['typer'] = None; from lockrouter.cli import main; main()"
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert failed.returncode == 2 and failed.stderr.strip() == (
        "lockrouter: typer is not installed: pip install 'lockrouter[cli]'"
    )
