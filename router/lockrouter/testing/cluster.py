"""Throw-away real servers on loopback: one process, port and datadir per shard, all in one folder.

What runs is recorded in the folder before it is started, and a process is ended only when it is provably the recorded
one. So a cluster outlives its starter, and whoever opens the folder next can go on with it or take it down.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pymysql

from . import lifecycle, process
from .binaries import Vendor, find
from .server import ADMIN, ClusterError, Option, connect, wait_ready
from .shardfiles import Scalar
from .state import NoClusterError, ServerStatus, State, exclusive, load, save

__all__ = ["Cluster", "ClusterError", "NoClusterError", "ServerStatus"]


class Cluster:
    """Real servers in a folder. `up` starts them, `open` finds them again, `down` ends them and removes their files.

    Leaving a `with` block takes the cluster down; a cluster that is just forgotten stays up. Servers are numbered from
    0, server `i` being the shard `shard-i`. Every change goes through the folder's state file under a lock, so several
    processes may hold the same cluster open.
    """

    def __init__(self, directory: Path, state: State) -> None:
        self.directory = directory
        self.vendor = state.vendor
        self.version = state.version
        self.shards_file = directory / "shards.toml"
        self.admin_file = directory / "admin.toml"
        self._password = state.admin_password
        self._shard_file = state.shard_file
        self._servers = state.servers

    @classmethod
    def up(
        cls,
        directory: str | os.PathLike[str],
        shards: int = 4,
        vendor: Vendor | str = Vendor.MYSQL,
        *,
        topology: Mapping[str, Scalar] | None = None,
        on_outage: str = "local",
        router: Mapping[str, Scalar] | None = None,
        extra: str = "",
        database_prefix: str = "locks_",
        options: Mapping[str, Option] | None = None,
        binlog: bool = False,
        timeout: float = 120.0,
    ) -> Cluster:
        """A cluster whose servers all answer, with `shards.toml` and `admin.toml` beside them.

        Databases, tables and the application's user are not there yet: `lockrouter init` makes them. What a cluster
        that died left in the folder is removed first.

        Args:
            topology: fields of the shard file's `[topology]` that differ from the small default map.
            router: fields of `[router]` beside `on_outage`.
            extra: TOML text appended to both files.
            options: server options over the defaults; True for a bare option, False to leave a default out.
            binlog: write a binary log, row based.
            timeout: seconds for each server to answer.

        Raises:
            ClusterError: a live cluster is in the folder, foreign files are, or a server does not start.
            ProgramError: there is no server program of that vendor.
        """
        folder = Path(directory).absolute()
        program = find(vendor)
        logging: dict[str, Option] = {"log-bin": "binlog", "binlog-format": "ROW"} if binlog else {}
        made = not folder.exists()
        with exclusive(folder, create=True):
            made = lifecycle.clear_remains(folder) or made
            state = State(
                vendor=program.vendor,
                version=program.version,
                argv=program.argv,
                base=None if program.base is None else str(program.base),
                options={**logging, **(options or {})},
                topology=dict(topology or {}),
                router={"on_outage": on_outage, **(router or {})},
                extra=extra,
                prefix=database_prefix,
                admin_password=secrets.token_urlsafe(18),
                password=secrets.token_urlsafe(18),
                socket_folder=lifecycle.socket_folder(folder, shards),
                made_folder=made,
                servers=[],
            )
            state.servers = lifecycle.plan(folder, shards, state.socket_folder)
            lifecycle.file_texts(state)  # refuses a bad map before anything is started
            save(folder, state)
            try:
                lifecycle.start_all(folder, state, timeout)
            except BaseException:
                lifecycle.end_all(state)
                raise
        return cls(folder, state)

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Cluster:
        """The cluster in the folder, whoever started it and whether or not its servers run.

        Raises:
            NoClusterError: there is none.
        """
        folder = Path(directory).absolute()
        state = load(folder)
        if state is None:
            raise NoClusterError(f"no cluster in {folder}")
        return cls(folder, state)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def __len__(self) -> int:
        return len(self._servers)

    def port(self, index: int) -> int:
        """The server's port on 127.0.0.1; the same for the cluster's whole life."""
        return self._servers[index].port

    def socket(self, index: int) -> str:
        """The path of the server's unix socket."""
        return self._servers[index].socket

    def log(self, index: int) -> Path:
        """The file with all the server wrote."""
        return self._servers[index].log

    def admin_url(self, index: int) -> str:
        """The administrator's SQLAlchemy URL of the shard, password included."""
        return self._shard_file.url(index, self.port(index), ADMIN, self._password)

    def connect(self, index: int, **options: Any) -> pymysql.connections.Connection[Any]:
        """A new administrator's connection, autocommit on, no database chosen; `options` are PyMySQL's."""
        return connect(self._servers[index], self._password, **options)

    def status(self) -> list[ServerStatus]:
        """Every server as it is now, in order; empty after `down`."""
        state = load(self.directory)
        return [lifecycle.status(state, server) for server in state.servers] if state else []

    def start(self, index: int, options: Mapping[str, Option] | None = None, *, timeout: float = 120.0) -> None:
        """The server answers again, on its old port and data; `options` count for this run only. No-op if it runs.

        Raises:
            ClusterError: it does not come up within `timeout` seconds; the message ends with its log.
        """
        with self._changing() as state:
            server = state.servers[index]
            if lifecycle.living(state, server):
                return
            log_from = lifecycle.launch(self.directory, state, server, {**state.options, **(options or {})})
        wait_ready(server, self._password, log_from, timeout)

    def stop(self, index: int, *, timeout: float = 60.0) -> None:
        """The server has shut down cleanly. No-op if it does not run.

        Raises:
            ClusterError: it still runs after `timeout` seconds.
        """
        with self._changing() as state:
            server = state.servers[index]
            for pid, known in lifecycle.living(state, server):
                process.send(pid, known, signal.SIGCONT)
                process.send(pid, known, signal.SIGTERM)
                if not process.wait_gone(pid, known, timeout):
                    raise ClusterError(f"server of {server.shard} (pid {pid}) still runs {timeout:g} s after SIGTERM")

    def kill(self, index: int) -> None:
        """The server has died at once, as in a crash. No-op if it does not run."""
        with self._changing() as state:
            lifecycle.end(state, state.servers[index])

    def pause(self, index: int) -> None:
        """The server hangs: its port accepts, nothing answers, what it holds it keeps. Undone by `resume`."""
        for pid, known in self._signal(index, signal.SIGSTOP):
            while process.identity(pid) == known and not process.is_paused(pid):
                time.sleep(0.001)

    def resume(self, index: int) -> None:
        """The server goes on where `pause` stopped it."""
        self._signal(index, signal.SIGCONT)

    def down(self) -> None:
        """Every server of this cluster has ended, and all that the cluster wrote is gone. Repeatable."""
        with contextlib.suppress(NoClusterError), exclusive(self.directory):
            lifecycle.remove(self.directory)

    def _signal(self, index: int, number: signal.Signals) -> list[tuple[int, str]]:
        with self._changing() as state:
            reached = [one for one in lifecycle.living(state, state.servers[index]) if process.send(*one, number)]
        if not reached:
            raise ClusterError(f"server of shard-{index} does not run")
        return reached

    @contextlib.contextmanager
    def _changing(self) -> Iterator[State]:
        with exclusive(self.directory):
            state = load(self.directory)
            if state is None:
                raise NoClusterError(f"no cluster in {self.directory}")
            yield state
