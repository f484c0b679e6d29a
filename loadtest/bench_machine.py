"""What a run was made on, as far as it explains the figures; no names of hosts or users, no paths."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["machine", "program_version"]

_PACKAGES = ("lockrouter", "PyMySQL", "DBUtils", "redis", "python-redis-lock", "kazoo", "etcd3gw", "filelock", "gevent")


def machine() -> dict[str, str]:
    """One line for each thing, in the order of the report."""
    return {
        "CPU": _cpu(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "kernel": f"{platform.system()} {_number(platform.release())}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": ", ".join(f"{name} {number}" for name in _PACKAGES if (number := _version(name))),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text("utf-8"), re.MULTILINE) if info.is_file() else None
    return found[1] if found else platform.machine()


def _number(release: str) -> str:
    """The kernel's version without what its builder appended."""
    found = re.match(r"\d+(?:\.\d+)*", release)
    return found[0] if found else release


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def program_version(command: Sequence[str]) -> str:
    """The first number with dots in what a program says of its version."""
    done = subprocess.run(
        [*command, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    found = re.search(r"\d+(?:\.\d+)+", done.stdout)
    return found[0] if found else "of unknown version"
