"""What a cluster's folder records: enough to find its servers again, whoever started them and however that ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from .binaries import Program, Vendor
from .server import ClusterError, Option, Server
from .shardfiles import Scalar, ShardFile

__all__ = ["FILES", "STATE", "NoClusterError", "ServerStatus", "State", "exclusive", "load", "save", "write"]

STATE = "cluster.json"
FILES = ("shards.toml", "admin.toml")


class NoClusterError(ClusterError):
    """The folder holds no cluster."""


class ServerStatus(msgspec.Struct, frozen=True):
    """One server as it is now: `running`, `paused` or `stopped`."""

    shard: str
    port: int
    pid: int | None
    state: str


class State(msgspec.Struct):
    """What a cluster's folder records; replaced as a whole, so it is always complete."""

    vendor: Vendor
    version: str
    argv: tuple[str, ...]
    base: str | None
    options: dict[str, Option]
    topology: dict[str, Scalar]
    router: dict[str, Scalar]
    extra: str
    prefix: str
    admin_password: str
    password: str
    socket_folder: str | None
    made_folder: bool
    servers: list[Server]
    ready: bool = False

    @property
    def program(self) -> Program:
        return Program(self.vendor, self.argv, self.version, None if self.base is None else Path(self.base))

    @property
    def shard_file(self) -> ShardFile:
        return ShardFile(
            len(self.servers), topology=self.topology, router=self.router, extra=self.extra, prefix=self.prefix
        )


@contextlib.contextmanager
def exclusive(folder: Path, *, create: bool = False, timeout: float = 150.0) -> Iterator[None]:
    """Only one caller at a time works on the folder; a killed one lets go, and no server inherits the hold.

    Raises:
        NoClusterError: there is no such folder, and it is not to be created.
        ClusterError: somebody else has worked on it for `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        if create:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            raise NoClusterError(f"no cluster in {folder}") from None
        try:
            _hold(handle, folder, deadline)
            # Who held it before may have removed the folder: the lock is then on something that has no name any more.
            if folder.exists() and os.path.samestat(os.fstat(handle), folder.stat()):
                yield
                return
        finally:
            os.close(handle)


def _hold(handle: int, folder: Path, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise ClusterError(f"another process is still working on {folder}") from None
            time.sleep(0.02)


def load(folder: Path) -> State | None:
    try:
        return msgspec.json.decode((folder / STATE).read_bytes(), type=State)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.DecodeError as error:
        raise ClusterError(f"{folder / STATE} is not a cluster's state: {error}") from error


def save(folder: Path, state: State) -> None:
    write(folder / STATE, msgspec.json.format(msgspec.json.encode(state), indent=1))


def write(path: Path, content: bytes) -> None:
    """Replace the file as a whole; only its owner may read it."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.touch(mode=0o600)
    fresh.write_bytes(content)
    fresh.replace(path)
