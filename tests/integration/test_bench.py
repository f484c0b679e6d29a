"""The benchmark runs to its end and shows every target; `lockrouter bench` measures shards of one's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockrouter.cli import app
from lockrouter.testing.binaries import Vendor
from lockrouter.testing.cluster import Cluster
from lockrouter.testing.leftovers import leftovers
from tests.support.servers import provision

pytestmark = pytest.mark.server

BENCH = Path(__file__).resolve().parents[2] / "loadtest" / "bench.py"


def bench(folder: Path, vendor: Vendor, *options: str) -> tuple[str, dict[str, object]]:
    """What a quick run prints, and the JSON it writes."""
    command = [sys.executable, str(BENCH), "--quick", "--vendor", str(vendor), "--out", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.json")
    found: dict[str, object] = json.loads(path.read_text("utf-8"))
    return done.stdout, found


@pytest.mark.slow
def test_a_part_of_the_benchmark(vendor: Vendor, tmp_path: Path) -> None:
    output, found = bench(tmp_path, vendor, "--only", "one hot key")
    assert "against no hand-over" in output
    names = [one["name"] for one in found["contenders"]]  # type: ignore[attr-defined]
    assert names == ["one hot key", "one hot key, no hand-over"]
    assert all(one["locks_per_second"] > 0 and one["latency"]["p99"] > 0 for one in found["contenders"])  # type: ignore[attr-defined]
    assert found["figures"] is None and found["curve"] == []


@pytest.mark.slow
def test_the_whole_benchmark(vendor: Vendor, tmp_path: Path) -> None:
    output, found = bench(tmp_path, vendor)
    targets = {one["work"]: one["seen"] for one in found["targets"]}  # type: ignore[attr-defined]
    left_out = str(found["left_out"])
    assert all(seen is not None for seen in targets.values()) or "left out" in left_out, targets
    assert "luckiest" in output and "peak of one process" in output
    figures = found["figures"]
    assert isinstance(figures, dict) and figures["fairness"] >= 1 and 0 < figures["crowd"]["success"] <= 1
    pictures = sorted(path.name.rpartition("-")[2] for path in tmp_path.glob("*.svg"))
    assert pictures == ["latency.svg", "throughput.svg"] or "no pictures" in left_out
    text = next(tmp_path.glob("*.md")).read_text("utf-8")
    assert all(f"({path.name})" in text for path in tmp_path.glob("*.svg"))


def test_lockrouter_bench(cluster: Cluster) -> None:
    provision(cluster)
    runner = CliRunner()
    options = ["bench", str(cluster.shards_file), "--callers", "3", "--seconds", "0.1", "--rounds", "1"]
    shown = runner.invoke(app, options)
    assert shown.exit_code == 0, shown.output
    assert "lockrouter is" in shown.stdout and "PyMySQL cursor" in shown.stdout
    assert "taking real row locks of random keys" in shown.stderr
    machine = runner.invoke(app, [*options, "--json", "--redis", "redis://127.0.0.1:1"])
    found = json.loads(machine.stdout)
    rates = {(one["name"], one["callers"]): one["locks_per_second"] for one in found["contenders"]}
    assert {("lockrouter", 1), ("lockrouter", 3), ("PyMySQL cursor", 1), ("PyMySQL cursor", 3)} <= set(rates)
    assert all(rate > 0 for rate in rates.values())
    assert any(line.startswith("redis-py Lock: ") for line in found["left_out"])
    assert leftovers(cluster) == []


def test_lockrouter_bench_says_what_is_wrong(tmp_path: Path) -> None:
    failed = CliRunner().invoke(app, ["bench", str(tmp_path / "none.toml")])
    assert failed.exit_code == 2 and failed.stderr.startswith("lockrouter: ")
