"""The C client: sysbench with the router's own two statements."""

from __future__ import annotations

import re
import subprocess
from functools import partial
from itertools import accumulate
from pathlib import Path

from bench_machine import program_version
from bench_mysql import endpoint_of

from lockrouter.cli.timing import PERCENTS, Contender, Sample, Way
from lockrouter.cli.ways import BOUND_MS
from lockrouter.config import RouterConfig
from lockrouter.sql.statements import dialect_of
from lockrouter.testing.binaries import ProgramError, debian_tool

__all__ = ["sysbench_version", "sysbench_way"]

_SCRIPT = Path(__file__).with_name("bench_lock.lua")


def sysbench_way(config: RouterConfig, vendor: str, folder: Path) -> Way:
    """sysbench; its settings, a password among them, are put into `folder`.

    Raises:
        ProgramError: there is no sysbench.
    """
    program = debian_tool("sysbench")
    settings = folder / "sysbench.cnf"
    settings.touch(mode=0o600)
    settings.write_text(_settings(config), "utf-8")
    words = [f"--{name}={value}" for name, value in _workload(config, vendor).items()]
    command = (*program, f"--config-file={settings}", str(_SCRIPT), *words)
    return lambda callers: Contender("sysbench (C)", callers, partial(_run, command, callers))


def sysbench_version() -> str:
    """As it says it."""
    return program_version(debian_tool("sysbench"))


def _settings(config: RouterConfig) -> str:
    where = endpoint_of(config)
    options = {
        "mysql-host": where.host,
        "mysql-port": where.port,
        "mysql-user": where.user,
        "mysql-password": where.password,
        "mysql-db": where.database,
        "db-driver": "mysql",
        "db-ps-mode": "disable",
        "histogram": "on",
        "rand-type": "uniform",
    }
    return "".join(f"{name}={value}\n" for name, value in options.items())


def _workload(config: RouterConfig, vendor: str) -> dict[str, object]:
    """The script's own options, which sysbench takes from the command line only."""
    dialect, topology = dialect_of(vendor), config.topology
    form = dialect.lock_text.replace("%d", str(BOUND_MS), 1).replace("%s", "%08x%08x")
    return {
        "tables": topology.tables,
        "buckets": topology.buckets,
        "rows": topology.rows_per_bucket,
        "statement": form,
        "session": dialect.row_session.format(ghost=60),
    }


def _run(command: tuple[str, ...], callers: int, seconds: float) -> Sample:
    text = _output((*command, f"--threads={callers}", f"--time={max(1, round(seconds))}", "run"))
    found = [re.search(rf"{name}:\s+([\d.]+)", text) for name in ("total number of events", "total time")]
    events, elapsed = (float(match[1]) if match else 0.0 for match in found)
    if not events or not elapsed:
        raise ProgramError(f"sysbench reported nothing: {text.strip()[-400:]}")
    return Sample(events / elapsed, _latency(text))


def _latency(text: str) -> dict[float, float]:
    """Seconds by percentile, of the histogram's lines: milliseconds, a bar, a count."""
    bins = [(float(ms), int(count)) for ms, count in re.findall(r"^ +([\d.]+) \|\**\s+(\d+)$", text, re.MULTILINE)]
    reached = list(accumulate(count for _, count in bins))
    return {
        percent: next(ms for (ms, _), sofar in zip(bins, reached, strict=True) if sofar >= reached[-1] * percent / 100)
        / 1000
        for percent in PERCENTS
        if bins
    }


def _output(command: tuple[str, ...]) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ProgramError(f"sysbench failed: {(done.stdout + done.stderr).strip()[-800:]}")
    return done.stdout
