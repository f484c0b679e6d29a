"""The C client: sysbench with the router's own two statements."""

from __future__ import annotations

import re
import subprocess
from functools import partial
from pathlib import Path

from bench_machine import program_version
from bench_mysql import BOUND_MS, THREADS, dialect_of_vendor, endpoint_of
from bench_timing import Contender, Sample

from lockrouter.config import RouterConfig
from lockrouter.testing.binaries import ProgramError, debian_tool

__all__ = ["sysbench_contenders", "sysbench_version"]

_SCRIPT = Path(__file__).with_name("bench_lock.lua")


def sysbench_contenders(config: RouterConfig, vendor: str, folder: Path) -> list[Contender]:
    """sysbench with each number of threads; its settings, a password among them, are put into `folder`.

    Raises:
        ProgramError: there is no sysbench.
    """
    program = debian_tool("sysbench")
    settings = folder / "sysbench.cnf"
    settings.touch(mode=0o600)
    settings.write_text(_settings(config), "utf-8")
    words = [f"--{name}={value}" for name, value in _workload(config, vendor).items()]
    command = (*program, f"--config-file={settings}", str(_SCRIPT), *words)
    return [Contender("sysbench (C)", threads, partial(_run, command, threads)) for threads in THREADS]


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
        "percentile": 99,
        "rand-type": "uniform",
    }
    return "".join(f"{name}={value}\n" for name, value in options.items())


def _workload(config: RouterConfig, vendor: str) -> dict[str, object]:
    """The script's own options, which sysbench takes from the command line only."""
    dialect, topology = dialect_of_vendor(vendor), config.topology
    form = dialect.lock_text.replace("%d", str(BOUND_MS), 1).replace("%s", "%08x%08x")
    return {
        "tables": topology.tables,
        "buckets": topology.buckets,
        "rows": topology.rows_per_bucket,
        "statement": form,
        "session": dialect.row_session.format(ghost=60),
    }


def _run(command: tuple[str, ...], threads: int, seconds: float) -> Sample:
    text = _output((*command, f"--threads={threads}", f"--time={max(1, round(seconds))}", "run"))
    found = [
        re.search(rf"{name}:\s+([\d.]+)", text) for name in ("total number of events", "total time", "99th percentile")
    ]
    events, elapsed, p99 = (float(match[1]) if match else 0.0 for match in found)
    if not events or not elapsed:
        raise ProgramError(f"sysbench reported nothing: {text.strip()[-400:]}")
    return Sample(events / elapsed, None, p99 / 1000)


def _output(command: tuple[str, ...]) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ProgramError(f"sysbench failed: {(done.stdout + done.stderr).strip()[-800:]}")
    return done.stdout
