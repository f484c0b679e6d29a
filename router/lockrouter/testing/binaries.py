"""Server programs that can be run: found where the machine has them, else unpacked into a cache, without root.

`python -m lockrouter.testing.binaries` leaves MySQL and MariaDB ready and prints one line for each.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from lockrouter.errors import LockRouterError

from . import apt

__all__ = ["Program", "ProgramError", "Vendor", "cache_directory", "debian_tool", "find", "main"]

_RECORD = ".unpacked.json"


class ProgramError(LockRouterError):
    """A program is neither there nor to be had; says what to install, or what went wrong while unpacking."""


class Vendor(StrEnum):
    """The servers every test runs on."""

    MYSQL = "mysql"
    MARIADB = "mariadb"

    @property
    def program(self) -> str:
        """The name of the server's program."""
        return "mysqld" if self is Vendor.MYSQL else "mariadbd"

    @property
    def variable(self) -> str:
        """The environment variable that names the server's program, and wins over everything else."""
        return "LOCKROUTER_MYSQLD" if self is Vendor.MYSQL else "LOCKROUTER_MARIADBD"

    @property
    def package(self) -> str:
        """Debian's package with the server and nothing around it."""
        return f"{self.value}-server-core"


@dataclass(frozen=True)
class Program:
    """A server that can be started: `argv`, then options."""

    vendor: Vendor
    argv: tuple[str, ...]
    version: str
    """As the server says it, for example `9.7.4` or `10.11.18-MariaDB`."""
    base: Path | None = None
    """The folder with `share` and `lib`, where the program was unpacked; None where it knows its own."""

    @property
    def share(self) -> Path:
        """The folder with the server's messages and SQL scripts."""
        program = Path(self.argv[-1]).resolve()
        candidates = [
            base / "share" / name
            for base in (self.base, program.parent.parent, Path("/usr"))
            if base is not None
            for name in (self.vendor.value, "mysql", "mariadb")
        ]
        return next((path for path in candidates if path.is_dir()), candidates[0])

    @property
    def layout(self) -> dict[str, str]:
        """The options that tell an unpacked server where its own files are; empty for an installed one."""
        if self.base is None:
            return {}
        plugins = next((self.base / "lib").glob("*/plugin"), self.base / "lib/mysql/plugin")
        return {
            "basedir": str(self.base),
            "lc-messages-dir": str(self.share),
            "character-sets-dir": str(self.share / "charsets"),
            "plugin-dir": str(plugins),
        }


def cache_directory() -> Path:
    """Where unpacked programs live: `$LOCKROUTER_CACHE`, else `.cache` of this clone, else the user's own cache."""
    if named := os.environ.get("LOCKROUTER_CACHE"):
        return Path(named).absolute()
    clone = Path(__file__).resolve().parents[3]
    if (clone / "pyproject.toml").is_file() and (clone / "router/lockrouter").is_dir():
        return clone / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockrouter"


def find(vendor: Vendor | str) -> Program:
    """A server of that vendor, unpacked first where that is needed and possible.

    Raises:
        ProgramError: see there.
    """
    vendor = Vendor(vendor)
    if named := os.environ.get(vendor.variable):
        if not os.access(named, os.X_OK) or Path(named).is_dir():
            raise ProgramError(f"{vendor.variable} names {named!r}, which is no program")
        return _installed(vendor, str(Path(named).absolute()))
    tree = cache_directory() / "servers" / vendor.value
    if (tree / _RECORD).is_file():
        return _unpacked(vendor, tree)
    release = apt.distribution()
    if release is not None:
        suite = "sid" if vendor is Vendor.MYSQL and release[0] == "debian" else None
        _ensure(vendor.package, vendor.program, tree, suite)
        return _unpacked(vendor, tree)
    if path := shutil.which(vendor.program):
        return _installed(vendor, path)
    wanted = "MySQL 8.4 or later" if vendor is Vendor.MYSQL else "MariaDB 10.11 or later"
    raise ProgramError(
        f"no {vendor.program} here: install {wanted}"
        f" so that {vendor.program} is on the PATH, or name the program in {vendor.variable}"
        " (Debian and Ubuntu need neither: there it is unpacked without being installed)"
    )


def debian_tool(name: str, package: str | None = None, *, extra: Sequence[str] = ()) -> tuple[str, ...]:
    """The command line that runs Debian's program `name` (`sysbench`, `redis-server`), unpacked first where needed.

    Args:
        package: that it comes with, where that has another name.
        extra: packages that are to be beside it.

    Raises:
        ProgramError: see there.
    """
    package = package or name
    tree = cache_directory() / "tools" / package
    if not (tree / _RECORD).is_file():
        if apt.distribution() is None:
            if path := shutil.which(name):
                return (path,)
            raise ProgramError(f"no {name} here: install it so that it is on the PATH")
        _ensure(package, name, tree, None, extra)
    plugins = next((tree / "usr/lib").glob("*/libmariadb3/plugin"), None)
    prefix = ("env", f"MARIADB_PLUGIN_DIR={plugins}") if plugins else ()
    return (*prefix, *_argv(tree, name))


def _installed(vendor: Vendor, path: str) -> Program:
    version = _version((path,))
    if ("MariaDB" in version) is not (vendor is Vendor.MARIADB):
        raise ProgramError(f"{path} is {version}, not {vendor.value}: name the right program in {vendor.variable}")
    return Program(vendor, (path,), version)


def _unpacked(vendor: Vendor, tree: Path) -> Program:
    record = json.loads((tree / _RECORD).read_text("utf-8"))
    return Program(vendor, _argv(tree, vendor.program), record["version"], tree / "usr")


def _ensure(package: str, program: str, tree: Path, suite: str | None, extra: Sequence[str] = ()) -> None:
    """Unpack `package` to `tree` unless another process just did."""
    fresh = tree.with_name(f".{tree.name}.partial")
    with _locked(tree.with_name(f".{tree.name}.lock")):
        if (tree / _RECORD).is_file():
            return
        for remains in (fresh, tree):
            shutil.rmtree(remains, ignore_errors=True)
        try:
            apt.unpack(package, fresh, suite=suite, extra=extra)
        except apt.AptError as error:
            raise ProgramError(f"could not unpack {package}: {error}") from error
        (fresh / _RECORD).write_text(json.dumps({"version": _version(_argv(fresh, program))}) + "\n", "utf-8")
        fresh.rename(tree)


def _argv(tree: Path, program: str) -> tuple[str, ...]:
    """Run the program with the loader and the libraries it was unpacked with, and none of the machine's."""
    folders = [path for parent in ("lib", "usr/lib") for path in (tree / parent).glob("*-linux-gnu*")]
    loaders = [
        path for folder in folders for pattern in ("ld-linux*.so.*", "ld64.so.*") for path in folder.glob(pattern)
    ]
    places = ("usr/sbin", "usr/bin", "usr/lib/jvm/java-*-openjdk-*/bin")
    programs = [path for place in places for path in tree.glob(f"{place}/{program}") if path.is_file()]
    if not loaders or not programs:
        raise ProgramError(f"{tree} holds no {program} that can be run: remove the folder and try again")
    folders += (tree / "usr/lib/mysql/private",)
    library_path = ":".join(str(path) for path in folders if path.is_dir())
    return (str(loaders[0]), "--library-path", library_path, str(programs[0]))


def _version(argv: tuple[str, ...]) -> str:
    done = subprocess.run([*argv, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ProgramError(f"{argv[-1]} --version failed: {done.stderr.strip()[-400:]}")
    found = re.search(r"Ver (\d+(?:\.\d+)+(?:-MariaDB)?)", done.stdout) or re.search(r"(\d+(?:\.\d+)+)", done.stdout)
    return found[1] if found else done.stdout.strip()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only one process at a time is inside; a killed one lets go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Leave both servers ready; one line each, exit 1 if one is missing."""
    missing = 0
    for vendor in Vendor:
        try:
            program = find(vendor)
        except ProgramError as error:
            print(f"{vendor}: {error}", file=sys.stderr)
            missing = 1
        else:
            print(f"{vendor} {program.version} ({Path(program.argv[-1])})")
    return missing


if __name__ == "__main__":
    raise SystemExit(main())
