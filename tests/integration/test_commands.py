"""The commands init, seed, verify and route."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockrouter.cli import app
from lockrouter.testing.binaries import Vendor
from lockrouter.testing.cluster import Cluster
from tests.support.servers import Clusters
from tests.support.shards import BUCKETS, ROWS, TABLES, Shards, arguments, drop, make

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


def test_the_commands(empty: Shards) -> None:
    runner = CliRunner()
    assert runner.invoke(app, arguments("verify", empty)).exit_code == 1
    first = runner.invoke(app, arguments("init", empty))
    assert first.exit_code == 0 and "created database t_0" in first.stdout
    assert "nothing to create" in runner.invoke(app, arguments("init", empty)).stdout
    seeded = runner.invoke(app, arguments("seed", empty))
    assert seeded.exit_code == 0 and "s1: 64 rows, 64 of them new" in seeded.stdout
    clean = runner.invoke(app, [*arguments("verify", empty), "--sizing"])
    assert clean.exit_code == 0 and "nothing is wrong" in clean.stdout and "10,000" in clean.stdout
    empty.sql(0, "UPDATE lock_meta SET term = 401")
    assert runner.invoke(app, arguments("verify", empty)).exit_code == 0
    empty.sql(0, "DELETE FROM lock_00 WHERE slot = 1")
    dirty = runner.invoke(app, [*arguments("verify", empty), "--json", "--sizing"])
    found = json.loads(dirty.stdout)
    assert dirty.exit_code == 1
    assert {each["problem"] for each in found["findings"]} == {"term", "missing-rows"}
    assert [each["held"] for each in found["sizing"]] == [1, 10, 100, 1_000, 10_000]


def test_the_commands_without_an_administrator(empty: Shards) -> None:
    runner = CliRunner()
    runner.invoke(app, arguments("init", empty))
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
    for wanted in (["verify", str(wrong)], ["route", str(shards.file), ""]):
        failed = subprocess.run([*command, *wanted], capture_output=True, text=True, check=False)
        assert failed.returncode == 2 and failed.stdout == ""
        assert failed.stderr.startswith("lockrouter: ") and failed.stderr.count("\n") == 1


def test_a_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['typer'] = None; from lockrouter.cli import main; main()"
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert failed.returncode == 2 and failed.stderr.strip() == (
        "lockrouter: typer is not installed: pip install 'lockrouter[cli]'"
    )
