"""`lockrouter demo` shows an outage, proves exclusion, and leaves nothing behind, however it ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockrouter.testing import process
from lockrouter.testing.binaries import Vendor, find

pytestmark = pytest.mark.server

COMMAND = [sys.executable, "-c", "from lockrouter.cli import main; main()", "demo"]


def start(folder: Path, vendor: Vendor) -> subprocess.Popen[str]:
    command = [*COMMAND, "--server", vendor, "--seconds", "6", "--dir", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def servers(folder: Path, vendor: Vendor) -> list[int]:
    argv = find(vendor).argv
    return [pid for index in range(4) for pid in process.find(argv, f"--datadir={folder}/shard-{index}/data")]


def test_the_demo_degrades_recovers_and_proves(tmp_path: Path, vendor: Vendor) -> None:
    folder = tmp_path / "demo"
    output, _ = start(folder, vendor).communicate(timeout=90)
    assert re.search(r"shared counters .* expected ([\d,]+), found \1 ", output), output
    assert re.search(r"exclusion +│ held", output), output
    degraded = re.search(r"degraded locks +│ ([\d,]+), 0 of the outage not marked so", output)
    assert degraded is not None, output
    assert int(degraded[1].replace(",", "")) > 0
    assert "breaker open in 4 of 4" in output
    assert "answers again" in output
    assert not folder.exists()
    assert not servers(folder, vendor)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, vendor: Vendor, number: signal.Signals) -> None:
    folder = tmp_path / "demo"
    with start(folder, vendor) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "locks/s" in line:
                demo.send_signal(number)
                break
        rest = demo.stdout.read()
        assert demo.wait(30) == (130 if number == signal.SIGINT else 143), rest
    assert "the servers are stopped" in rest
    assert not folder.exists()
    assert not servers(folder, vendor)
