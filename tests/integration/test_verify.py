"""verify on real servers of both vendors: each fault alone, and nothing where nothing is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from lockrouter.admin.init import init
from lockrouter.admin.seed import seed
from lockrouter.admin.verify import verify
from lockrouter.config import RouterConfig
from lockrouter.errors import ShardUnavailable
from lockrouter.testing.binaries import Vendor
from lockrouter.testing.cluster import Cluster
from tests.support.servers import Clusters
from tests.support.shards import BUCKETS, ROWS, TABLES, Shards, drop, make

pytestmark = pytest.mark.server


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
    findings = verify(shards.config, shards.admin)
    assert problem in [finding.problem for finding in findings]
    assert all(finding.shard == "s0" and "\n" not in finding.text for finding in findings)


def test_a_drained_server_that_is_not_the_primary_any_more_is_no_fault(shards: Shards) -> None:
    """Only a warning: it would grant nothing if it became the primary again."""
    shards.sql(0, "UPDATE lock_meta SET term_identity = 'new', drained = 'old'")
    findings = verify(shards.config, shards.admin)
    assert [(finding.problem, finding.warning) for finding in findings] == [("drained-before", True)]


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


def test_two_writable_servers_of_one_shard(shards: Shards) -> None:
    """Nobody writes to either, and verify names both."""
    config, admin = shards.config, shards.admin
    ports = [config.endpoints(shard)[0].port for shard in config.shards]

    def both(file: RouterConfig) -> RouterConfig:
        where = file.endpoints(file.shards[0])[0]
        hosts = "&".join(f"host=127.0.0.1:{port}" for port in ports)
        url = f"mysql+pymysql://{where.user}:{where.password}@/{where.database}?{hosts}"
        first = msgspec.structs.replace(file.shards[0], url=url)
        return msgspec.structs.replace(file, shards=(first, *file.shards[1:]))

    findings = verify(both(config), both(admin))
    assert [(finding.shard, finding.problem) for finding in findings] == [("s0", "two-primaries")]
    assert all(str(port) in findings[0].text for port in ports)
    for command in (init, seed):
        with pytest.raises(ShardUnavailable, match=r"s0.*two of its servers"):
            command(both(config), both(admin))
    shards.sql(1, "SET GLOBAL read_only = ON")
    try:
        # The second shard lives on the server that is read-only now; the first one has its one primary.
        assert {finding.shard for finding in verify(both(config), both(admin))} == {"s1"}
    finally:
        shards.sql(1, "SET GLOBAL read_only = OFF")
