"""One throw-away server: its files, its options, its first start from a template, its readiness."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pymysql

from . import process
from .binaries import Program, Vendor
from .template import ClusterError, Option, template, word

__all__ = [
    "ADMIN",
    "ClusterError",
    "Option",
    "PortTakenError",
    "Server",
    "connect",
    "free_port",
    "prepare",
    "template",
    "wait_ready",
]

ADMIN = "lockrouter_admin"
_PORT_TAKEN = ("Address already in use", "port: already in use")


class PortTakenError(ClusterError):
    """Somebody else listens on the server's port."""


class Server(msgspec.Struct):
    """One server as the cluster's state file records it; paths are absolute, `pid` and `known` name its process."""

    shard: str
    folder: str
    socket: str
    port: int
    pid: int | None = None
    known: str | None = None
    launching: bool = False
    """Recorded before the process exists: while it is set, the process is looked for by its command line."""

    @property
    def data(self) -> Path:
        """Its datadir."""
        return Path(self.folder, "data")

    @property
    def log(self) -> Path:
        """What it wrote since the cluster came up."""
        return Path(self.folder, "server.log")

    @property
    def temporary(self) -> Path:
        """Where it keeps temporary tables, alone."""
        return Path(self.folder, "tmp")

    @property
    def first_statements(self) -> Path:
        """The file of SQL it runs at its first start; removed when it is ready."""
        return Path(self.folder, "first.sql")

    def options(self, program: Program, chosen: Mapping[str, Option]) -> list[str]:
        """The command line's options: the defaults, over them the layout of the files, over all `chosen`."""
        options: dict[str, Option] = {
            "user": "root" if os.geteuid() == 0 else False,
            "port": self.port,
            "bind-address": "127.0.0.1",
            "socket": self.socket,
            "pid-file": str(Path(self.folder, "server.pid")),
            # A starting MariaDB removes other servers' temporary tables from a folder it shares with them.
            "tmpdir": str(self.temporary),
            "server-id": self.port,
            "skip-name-resolve": True,
            "max-connections": 500,
            "innodb-buffer-pool-size": "64M",
            "innodb-flush-log-at-trx-commit": 1,
            # The kernel has one small budget of asynchronous requests for all servers of a machine.
            "innodb-use-native-aio": "OFF",
            "innodb-buffer-pool-load-at-startup": "OFF",
            "innodb-buffer-pool-dump-at-shutdown": "OFF",
            "sync-binlog": 1,
            "skip-log-bin": "log-bin" not in chosen,
            "performance-schema": "ON" if program.vendor is Vendor.MYSQL else "OFF",
        }
        if program.vendor is Vendor.MYSQL:
            options |= {"secure-file-priv": "NULL", "mysqlx": "OFF"}
        if self.first_statements.is_file():
            options["init-file"] = str(self.first_statements)
        words = [
            word(name, value) for name, value in (program.layout | options | dict(chosen)).items() if value is not False
        ]
        return ["--no-defaults", f"--datadir={self.data}", *words]


def prepare(server: Server, program: Program, password: str) -> None:
    """Leave a fresh datadir whose first start creates the administrator and removes every other account."""
    folder = Path(server.folder)
    folder.mkdir(mode=0o700)
    server.temporary.mkdir(mode=0o700)
    shutil.copytree(template(program), server.data)
    hosts = ("localhost", "127.0.0.1", "::1")
    others = ", ".join(f"'{name}'@'{host}'" for name in ("root", "") for host in hosts)
    server.first_statements.touch(mode=0o600)
    server.first_statements.write_text(
        f"CREATE USER IF NOT EXISTS '{ADMIN}'@'%' IDENTIFIED BY '{password}';\n"
        f"GRANT ALL ON *.* TO '{ADMIN}'@'%' WITH GRANT OPTION;\n"
        f"DROP USER IF EXISTS {others};\n",
        "utf-8",
    )


def free_port(taken: set[int]) -> int:
    """A port of loopback nobody listens on, not in `taken`, which it joins.

    It lies below the range from which the system serves outgoing connections: while a server is down no client can be
    given its port, nor connect to itself on it. Between this answer and the server's own bind another may come first.
    """
    low = 32768
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if limits.is_file():
        low = int(limits.read_text("ascii").split()[0])
    first, last = (10000, low) if low > 12000 else (20000, 32000)
    for _ in range(10000):
        port = first + secrets.randbelow(last - first)
        with closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in taken:
            taken.add(port)
            return port
    raise ClusterError(f"no free port between {first} and {last}")


def connect(server: Server, password: str, **options: Any) -> pymysql.connections.Connection[Any]:
    """An administrator's connection with autocommit on."""
    settings: dict[str, Any] = {"connect_timeout": 5, "autocommit": True, **options}
    return pymysql.connect(host="127.0.0.1", port=server.port, user=ADMIN, password=password, **settings)


def wait_ready(server: Server, password: str, log_from: int, timeout: float) -> None:
    """Answers when this very server, and no other that took its port, serves the administrator.

    Raises:
        PortTakenError: it ended because it could not bind its port.
        ClusterError: it ended for another reason, or `timeout` seconds were not enough.
    """
    deadline = time.monotonic() + timeout
    while not _answers(server, password):
        ended = server.pid is None or process.identity(server.pid) != server.known
        if ended or time.monotonic() >= deadline:
            tail = server.log.read_bytes()[log_from:].decode("utf-8", "replace")[-2000:]
            error = PortTakenError if ended and any(sign in tail for sign in _PORT_TAKEN) else ClusterError
            what = "ended while starting" if ended else f"did not answer within {timeout:g} s"
            raise error(f"server of {server.shard} on port {server.port} {what}; the end of {server.log}:\n{tail}")
        time.sleep(0.02)
    server.first_statements.unlink(missing_ok=True)


def _answers(server: Server, password: str) -> bool:
    try:
        with (
            closing(connect(server, password, connect_timeout=2, read_timeout=5)) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute("SELECT @@datadir")
            return Path(cursor.fetchall()[0][0]).resolve() == server.data.resolve()
    except (pymysql.err.OperationalError, pymysql.err.InternalError):
        return False
