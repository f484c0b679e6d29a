"""The load test under Locust ends by itself, reports, and fails exactly when exclusion does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockrouter.testing.cluster import Cluster
from lockrouter.testing.exclusion_run import provision
from lockrouter.testing.leftovers import leftovers

pytestmark = pytest.mark.server

RUN = Path(__file__).resolve().parents[2] / "loadtest" / "run_load.py"


def load(cluster: Cluster, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the load test for three seconds on a cluster that is up."""
    provision(cluster)
    command = [sys.executable, str(RUN), "--shards", str(cluster.shards_file), "--seconds", "3", *options]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("processes", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_locust_runs_and_exclusion_holds(cluster: Cluster, processes: str) -> None:
    done = load(cluster, "--processes", processes, "--users", "20", "--rate", "10")
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert re.search(r"exclusion held: expected ([\d,]+), found \1$", output, re.MULTILINE), output
    assert re.search(r"^LOCK +uniform accounts +\d+ +0\(0.00%\)", output, re.MULTILINE), output
    figures = re.search(r"^SLO: ([\d,]+) locks, .*success 100.000% of \1; wait p50 .* \(from when due\)", output, re.M)
    assert figures is not None, output
    assert int(figures[1].replace(",", "")) > 100
    assert "account:" not in output
    assert leftovers(cluster) == []


def test_the_run_fails_when_exclusion_is_violated(cluster: Cluster) -> None:
    done = load(cluster, "--users", "20", "--rate", "0", LOCKROUTER_LOAD_UNLOCKED="1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "exclusion FAILED: expected " in done.stderr
