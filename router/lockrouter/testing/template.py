"""Datadirs no server has run on yet: made once per program, copied for every server."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from lockrouter.errors import LockRouterError

from .binaries import Program, Vendor, cache_directory

__all__ = ["ClusterError", "Option", "template", "word"]

Option = str | int | bool | None
"""A server option's value: True or None for a bare option, False to leave it out."""
_SCRIPTS = (
    "*_system_tables.sql",
    "*_performance_tables.sql",
    "*_system_tables_data.sql",
    "fill_help_tables.sql",
    "maria_add_gis_sp_bootstrap.sql",
    "*_sys_schema.sql",
)


class ClusterError(LockRouterError):
    """A throw-away server or cluster cannot be brought into the state asked for; carries the end of a server's log."""


def word(name: str, value: Option) -> str:
    """The option as the command line has it."""
    return f"--{name}" if value is True or value is None else f"--{name}={value}"


def template(program: Program) -> Path:
    """A datadir of that program that no server has ever run on, made once and kept in the cache.

    Raises:
        ClusterError: the program failed to make one.
    """
    about = Path(program.argv[-1]).stat()
    build = hashlib.sha256(f"{program.argv}:{about.st_size}:{about.st_mtime_ns}".encode()).hexdigest()[:8]
    home = cache_directory() / "templates"
    home.mkdir(parents=True, exist_ok=True)
    ready = home / f"{program.vendor}-{program.version}-{build}"
    fresh = home / f".{ready.name}.partial"
    with home.joinpath(f".{ready.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.is_dir():
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(mode=0o700)
            _initialise(program, fresh)
            # Identity and the buffer pool's last content belong to one server; the redo log's spare files grow again.
            for name in ("auto.cnf", "ib_buffer_pool"):
                fresh.joinpath(name).unlink(missing_ok=True)
            for spare in fresh.glob("#innodb_redo/*_tmp"):
                spare.unlink()
            fresh.rename(ready)
    return ready


def _initialise(program: Program, data: Path) -> None:
    options: dict[str, Option] = {**program.layout, "datadir": str(data)}
    if os.geteuid() == 0:
        options["user"] = "root"
    if program.vendor is Vendor.MYSQL:
        options |= {"initialize-insecure": True, "innodb-redo-log-capacity": "8M", "secure-file-priv": "NULL"}
        script = ""
    else:
        options |= {"bootstrap": True, "innodb-log-file-size": "8M"}
        script = _system_tables(program.share)
    command = [*program.argv, "--no-defaults", *(word(name, value) for name, value in options.items())]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"{program.argv[-1]} could not make a datadir: {done.stderr.strip()[-800:]}")


def _system_tables(share: Path) -> str:
    """MariaDB's own scripts in the order its installer runs them."""
    parts = ["CREATE DATABASE IF NOT EXISTS mysql;\nUSE mysql;\nSET @auth_root_socket=NULL;\n"]
    for pattern in _SCRIPTS:
        path = next(iter(sorted(share.glob(pattern))), None)
        if path is None:
            raise ClusterError(f"{share} holds no {pattern}: the server's package is incomplete")
        lines = path.read_text("utf-8").splitlines(keepends=True)
        parts += [line for line in lines if "@current_hostname" not in line]
    return "".join(parts)
