"""Throw-away servers: they are there when `up` says so, survive their starter, and only they end with `down`."""

from __future__ import annotations

import json
import socket
import stat
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pymysql
import pytest
from typer.testing import CliRunner

from lockrouter.cli.cluster import app
from lockrouter.testing import process
from lockrouter.testing.binaries import Vendor, find
from lockrouter.testing.cluster import Cluster, ClusterError, NoClusterError
from lockrouter.testing.server import free_port

pytestmark = pytest.mark.server

STARTER = """
import sys, time
from lockrouter.testing.cluster import Cluster
Cluster.up(sys.argv[1], int(sys.argv[2]), sys.argv[3])
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder of which no server is left behind, however the test ends."""
    home = tmp_path / "c"
    yield home
    try:
        Cluster.open(home).down()
    except NoClusterError:
        pass


def ask(cluster: Cluster, index: int, statement: str, **options: Any) -> Any:
    connection = cluster.connect(index, **options)
    try:
        with connection.cursor() as cursor:
            cursor.execute(statement)
            rows = cursor.fetchall()
            return rows[0][0] if rows else None
    finally:
        connection.close()


def pids(cluster: Cluster) -> list[int]:
    return [one.pid for one in cluster.status() if one.pid is not None]


def servers_of(vendor: Vendor, folder: Path, shards: int) -> list[int]:
    """The living servers on the folder's datadirs, recorded or not."""
    argv = find(vendor).argv
    return [pid for index in range(shards) for pid in process.find(argv, f"--datadir={folder}/shard-{index}/data")]


def start_elsewhere(folder: Path, shards: int, vendor: Vendor) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", STARTER, str(folder), str(shards), vendor]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def kill(starter: subprocess.Popen[str]) -> None:
    starter.kill()
    starter.communicate()


def test_up_and_down(folder: Path, vendor: Vendor) -> None:
    cluster = Cluster.up(folder, 3, vendor, on_outage="refuse", extra="[pool]\nsize = 5", router={"timeout": 1.5})
    assert [(one.shard, one.state) for one in cluster.status()] == [(f"shard-{i}", "running") for i in range(3)]
    running = pids(cluster)
    for path, user in ((cluster.shards_file, "lockrouter"), (cluster.admin_file, "lockrouter_admin")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        content = tomllib.loads(path.read_text())
        assert content["topology"]["buckets"] == 64
        assert content["router"] == {"on_outage": "refuse", "timeout": 1.5}
        assert content["pool"] == {"size": 5}
        assert [shard["buckets"] for shard in content["shard"]] == [["0-20"], ["21-41"], ["42-63"]]
        for index, shard in enumerate(content["shard"]):
            assert shard["url"].startswith(f"mysql+pymysql://{user}:")
            assert shard["url"].endswith(f"@127.0.0.1:{cluster.port(index)}/locks_{index}")
    assert cluster.admin_url(2) == tomllib.loads(cluster.admin_file.read_text())["shard"][2]["url"]
    assert cluster.version in ask(cluster, 0, "SELECT VERSION()")
    assert ask(cluster, 0, "SELECT @@innodb_flush_log_at_trx_commit") == 1
    assert ask(cluster, 0, "SELECT @@log_bin") == 0
    cluster.down()
    assert not folder.exists()
    assert all(process.identity(pid) is None for pid in running)
    cluster.down()
    assert cluster.status() == []
    with pytest.raises(NoClusterError):
        cluster.start(0)


def test_only_the_administrator_can_log_in(folder: Path, vendor: Vendor) -> None:
    with Cluster.up(folder, 1, vendor) as cluster:
        with pytest.raises(pymysql.err.OperationalError):
            pymysql.connect(host="127.0.0.1", port=cluster.port(0), user="root")
        users = "SELECT COUNT(*) FROM mysql.user WHERE user IN ('root', '')"
        assert ask(cluster, 0, users) == 0
        if vendor is Vendor.MYSQL:  # TLS as the server has it by default
            assert ask(cluster, 0, "SELECT COUNT(*) FROM performance_schema.tls_channel_status WHERE value = 'Yes'")


def test_every_server_has_its_own_identity(folder: Path, vendor: Vendor) -> None:
    variable = "@@server_uuid" if vendor is Vendor.MYSQL else "@@server_uid"
    with Cluster.up(folder, 2, vendor) as cluster:
        before = [ask(cluster, index, f"SELECT {variable}") for index in range(2)]
        assert len(set(before)) == 2
        assert len({ask(cluster, index, "SELECT @@server_id") for index in range(2)}) == 2
        cluster.stop(1)
        cluster.start(1)
        assert ask(cluster, 1, f"SELECT {variable}") == before[1]


def test_stop_kill_and_start_keep_port_and_data(folder: Path, vendor: Vendor) -> None:
    with Cluster.up(folder, 2, vendor) as cluster:
        port = cluster.port(0)
        ask(cluster, 0, "CREATE DATABASE kept")
        ask(cluster, 0, "CREATE TABLE kept.t (n INT) ENGINE=InnoDB")
        for count, end in enumerate((cluster.stop, cluster.kill), start=1):
            ask(cluster, 0, f"INSERT INTO kept.t VALUES ({count})")
            end(0)
            end(0)
            assert [one.state for one in cluster.status()] == ["stopped", "running"]
            with pytest.raises(pymysql.err.OperationalError):
                cluster.connect(0)
            cluster.start(0)
            cluster.start(0)
            assert cluster.port(0) == port
            assert ask(cluster, 0, "SELECT COUNT(*) FROM kept.t") == count
        assert ask(cluster, 1, "SELECT 1") == 1
        log = cluster.log(0).read_text().lower()
        assert "shutdown complete" in log


@pytest.mark.slow
def test_options_hold_for_the_cluster_or_for_one_run(folder: Path, vendor: Vendor) -> None:
    with Cluster.up(folder, 1, vendor, options={"max-connections": 33}, binlog=True) as cluster:
        assert ask(cluster, 0, "SELECT @@max_connections") == 33
        assert ask(cluster, 0, "SELECT @@log_bin") == 1
        cluster.stop(0)
        cluster.start(0, {"read-only": True})
        assert ask(cluster, 0, "SELECT @@read_only") == 1
        assert ask(cluster, 0, "SELECT @@max_connections") == 33
        cluster.stop(0)
        cluster.start(0)
        assert ask(cluster, 0, "SELECT @@read_only") == 0


def test_a_paused_server_is_silent_and_goes_on(folder: Path, vendor: Vendor) -> None:
    with Cluster.up(folder, 1, vendor) as cluster:
        cluster.pause(0)
        assert [one.state for one in cluster.status()] == ["paused"]
        with pytest.raises(pymysql.err.OperationalError):
            cluster.connect(0, connect_timeout=1, read_timeout=1)
        cluster.resume(0)
        assert ask(cluster, 0, "SELECT 1") == 1
        cluster.pause(0)
        cluster.stop(0)
        with pytest.raises(ClusterError, match="does not run"):
            cluster.pause(0)


def test_servers_outlive_a_killed_starter(folder: Path, vendor: Vendor) -> None:
    starter = start_elsewhere(folder, 2, vendor)
    assert starter.stdout is not None
    assert starter.stdout.readline() == "up\n"
    kill(starter)
    cluster = Cluster.open(folder)
    assert [one.state for one in cluster.status()] == ["running", "running"]
    assert ask(cluster, 1, "SELECT 1") == 1
    cluster.down()
    assert servers_of(vendor, folder, 2) == []
    assert not folder.exists()


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.3])
def test_a_starter_killed_midway_leaves_nothing_that_down_does_not_find(
    folder: Path, vendor: Vendor, delay: float
) -> None:
    """The starter dies `delay` seconds after its first server is on record."""
    starter = start_elsewhere(folder, 2, vendor)
    deadline = time.monotonic() + 60
    state = folder / "cluster.json"

    def begun() -> bool:
        servers = json.loads(state.read_text())["servers"] if state.is_file() else []
        return any(one["launching"] or one["pid"] for one in servers)

    while not begun():
        assert time.monotonic() < deadline and starter.poll() is None
        time.sleep(0.001)
    time.sleep(delay)
    kill(starter)
    Cluster.open(folder).down()
    assert servers_of(vendor, folder, 2) == []
    assert not folder.exists()


@pytest.mark.slow
def test_two_clusters_side_by_side(folder: Path, tmp_path: Path, vendor: Vendor) -> None:
    with Cluster.up(folder, 2, vendor) as one, Cluster.up(tmp_path / "other", 2, vendor) as other:
        assert len({cluster.port(index) for cluster in (one, other) for index in range(2)}) == 4
        other.down()
        assert [ask(one, index, "SELECT 1") for index in range(2)] == [1, 1]


def test_a_foreign_process_with_a_recorded_id_is_left_alone(folder: Path, vendor: Vendor) -> None:
    cluster = Cluster.up(folder, 1, vendor)
    cluster.kill(0)
    with subprocess.Popen(["sleep", "600"]) as bystander:
        try:
            state = folder / "cluster.json"
            content = json.loads(state.read_text())
            assert content["servers"][0]["known"]
            content["servers"][0]["pid"] = bystander.pid
            state.write_text(json.dumps(content))
            assert [one.state for one in cluster.status()] == ["stopped"]
            cluster.kill(0)
            cluster.stop(0)
            cluster.down()
            assert bystander.poll() is None
        finally:
            bystander.kill()


def test_up_refuses_a_live_cluster_and_clears_a_dead_one(folder: Path, vendor: Vendor) -> None:
    first = Cluster.up(folder, 1, vendor)
    with pytest.raises(ClusterError, match="is up in"):
        Cluster.up(folder, 1, vendor)
    assert ask(first, 0, "SELECT 1") == 1
    first.kill(0)
    with Cluster.up(folder, 1, vendor) as second:
        assert ask(second, 0, "SELECT 1") == 1
    assert not folder.exists()


def test_foreign_files_are_not_touched(folder: Path, vendor: Vendor) -> None:
    folder.mkdir()
    (folder / "shards.toml").write_text("mine")
    with pytest.raises(ClusterError, match=r"shards\.toml"):
        Cluster.up(folder, 1, vendor)
    (folder / "shards.toml").rename(folder / "notes.txt")
    Cluster.up(folder, 1, vendor).down()
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_server_that_does_not_start_says_why(folder: Path, vendor: Vendor) -> None:
    with pytest.raises(ClusterError, match="no-such-option"):
        Cluster.up(folder, 1, vendor, options={"no-such-option": 1})
    assert servers_of(vendor, folder, 1) == []


def test_more_shards_than_buckets(folder: Path, vendor: Vendor) -> None:
    with pytest.raises(ClusterError, match="1 to 2"):
        Cluster.up(folder, 3, vendor, topology={"buckets": 2})


@pytest.mark.slow
def test_a_port_that_was_taken_meanwhile(folder: Path, vendor: Vendor, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as rival:
        ports = [rival.getsockname()[1]]
        choose = "lockrouter.testing.lifecycle.free_port"
        monkeypatch.setattr(choose, lambda taken: ports.pop() if ports else free_port(taken))
        with Cluster.up(folder, 1, vendor) as cluster:
            assert cluster.port(0) != rival.getsockname()[1]
            assert f":{cluster.port(0)}/" in cluster.shards_file.read_text()


def test_a_folder_too_deep_for_sockets(tmp_path: Path, vendor: Vendor) -> None:
    deep = tmp_path / ("d" * 100) / "c"
    with Cluster.up(deep, 1, vendor) as cluster:
        place = Path(ask(cluster, 0, "SELECT @@socket"))
        assert place.exists()
    assert not place.parent.exists()
    assert not deep.exists()


def test_commands(folder: Path, vendor: Vendor) -> None:
    run = CliRunner().invoke
    there = ["--dir", str(folder)]
    assert run(app, ["status", *there]).exit_code == 1
    up = run(app, ["up", "--shards", "2", "--server", vendor, *there])
    assert up.exit_code == 0, up.output
    assert str(folder / "shards.toml") in up.output
    shown = run(app, ["status", "--json", *there])
    assert shown.exit_code == 0
    about = json.loads(shown.output)
    assert (about["vendor"], [one["state"] for one in about["servers"]]) == (vendor, ["running", "running"])
    Cluster.open(folder).kill(0)
    assert run(app, ["status", *there]).exit_code == 1
    assert run(app, ["up", *there]).exit_code == 1
    for _ in range(2):
        assert run(app, ["down", *there]).exit_code == 0
    assert not folder.exists()


@pytest.mark.slow
def test_up_and_down_at_once_by_many_end_in_order(folder: Path, vendor: Vendor) -> None:
    """Of three that want the folder one gets it, two are told; three that end it end it once."""
    starters = [start_elsewhere(folder, 1, vendor) for _ in range(3)]
    try:
        losers = [starter for starter in starters if starter.stdout is not None and starter.stdout.readline() != "up\n"]
        assert len(losers) == 2
        assert ask(Cluster.open(folder), 0, "SELECT 1") == 1
    finally:
        for starter in starters:
            kill(starter)
    cluster = Cluster.open(folder)
    with ThreadPoolExecutor(max_workers=3) as pool:
        for ended in [pool.submit(cluster.down) for _ in range(3)]:
            ended.result()
    assert servers_of(vendor, folder, 1) == []
    assert not folder.exists()
