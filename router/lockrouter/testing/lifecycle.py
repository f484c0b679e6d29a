"""How the servers of one cluster come up and end; the caller holds the folder (`state.exclusive`)."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import process
from .server import ADMIN, ClusterError, Option, PortTakenError, Server, free_port, prepare, wait_ready
from .shardfiles import APPLICATION
from .state import FILES, STATE, ServerStatus, State, load, save, write

__all__ = [
    "clear_remains",
    "end",
    "end_all",
    "file_texts",
    "launch",
    "living",
    "plan",
    "remove",
    "socket_folder",
    "start_all",
    "status",
]

_SOCKET_LIMIT = 100  # bytes; the system's own limit is 103 to 107
_PORT_TRIES = 5


def plan(folder: Path, shards: int, socket_folder: str | None) -> list[Server]:
    taken: set[int] = set()
    return [
        Server(
            shard=f"shard-{index}",
            folder=str(folder / f"shard-{index}"),
            socket=str(Path(socket_folder or folder) / f"{index}.sock"),
            port=free_port(taken),
        )
        for index in range(shards)
    ]


def socket_folder(folder: Path, shards: int) -> str | None:
    """Where the sockets go when their paths in the cluster's folder would be too long for the system; else None."""
    if len(os.fsencode(folder / f"{shards}.sock.lock")) <= _SOCKET_LIMIT:
        return None
    return str(Path(tempfile.gettempdir(), f"lockrouter-{secrets.token_hex(6)}"))


def file_texts(state: State) -> dict[str, str]:
    shards = [(server.shard, server.port) for server in state.servers]
    users = ((APPLICATION, state.password), (ADMIN, state.admin_password))
    return {name: state.shard_file.text(shards, *user) for name, user in zip(FILES, users, strict=True)}


def start_all(folder: Path, state: State, timeout: float) -> None:
    if state.socket_folder is not None:
        Path(state.socket_folder).mkdir(mode=0o700)
    taken = {server.port for server in state.servers}
    _prepare_all(state)
    starts = [launch(folder, state, server, state.options) for server in state.servers]
    for server, log_from in zip(state.servers, starts, strict=True):
        for attempt in range(_PORT_TRIES):
            try:
                wait_ready(server, state.admin_password, log_from, timeout)
                break
            except PortTakenError:
                if attempt == _PORT_TRIES - 1:
                    raise
                server.port = free_port(taken)
                log_from = launch(folder, state, server, state.options)
    for name, text in file_texts(state).items():
        write(folder / name, text.encode())
    state.ready = True
    save(folder, state)


def _prepare_all(state: State) -> None:
    """Every server has its own fresh datadir."""
    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="lockrouter-cluster") as pool:
        list(pool.map(lambda server: prepare(server, state.program, state.admin_password), state.servers))


def launch(folder: Path, state: State, server: Server, options: Mapping[str, Option]) -> int:
    """Start the server's process, on record before it exists; answers where its new log begins."""
    server.pid, server.known, server.launching = None, None, True
    save(folder, state)
    # A killed server leaves its socket's lock file, whose process id may be in use again, or be a zombie's.
    for path in (server.socket, f"{server.socket}.lock"):
        Path(path).unlink(missing_ok=True)
    log_from = server.log.stat().st_size if server.log.exists() else 0
    server.pid = process.spawn([*state.argv, *server.options(state.program, options)], server.log)
    server.known = process.identity(server.pid)
    server.launching = server.known is None
    save(folder, state)
    return log_from


def living(state: State, server: Server) -> list[tuple[int, str]]:
    """The server's process with its identity; more than one only if starters were killed at the worst moment."""
    pids = [server.pid] if server.pid is not None and process.identity(server.pid) == server.known else []
    if server.launching:
        pids = process.find(state.argv, f"--datadir={server.data}")
    return [(pid, known) for pid in pids if (known := process.identity(pid)) is not None]


def status(state: State, server: Server) -> ServerStatus:
    for pid, _ in living(state, server):
        return ServerStatus(server.shard, server.port, pid, "paused" if process.is_paused(pid) else "running")
    return ServerStatus(server.shard, server.port, None, "stopped")


def end(state: State, server: Server) -> None:
    for pid, known in living(state, server):
        process.send(pid, known, signal.SIGKILL)
        if not process.wait_gone(pid, known, 30.0):
            raise ClusterError(f"server of {server.shard} (pid {pid}) does not end")


def end_all(state: State) -> None:
    for server in state.servers:
        end(state, server)


def clear_remains(folder: Path) -> bool:
    """Leave a folder without a cluster; refuses where one lives or where files lie that no cluster wrote.

    Answers whether the cluster that was there had made the folder.
    """
    state = load(folder)
    if state is not None and state.ready and any(living(state, server) for server in state.servers):
        raise ClusterError(f"a cluster of {len(state.servers)} servers is up in {folder}: take it down first")
    if state is not None:
        remove(folder, keep_folder=True)
    foreign = [name for name in (*FILES, "shard-0") if (folder / name).exists()]
    if foreign:
        raise ClusterError(f"{folder} holds {', '.join(foreign)} of unknown origin: choose another folder")
    return state is not None and state.made_folder


def remove(folder: Path, *, keep_folder: bool = False) -> None:
    """End the servers, then remove what the cluster wrote, the state at last: what is cut short can be repeated."""
    state = load(folder)
    if state is None:
        return
    end_all(state)
    for server in state.servers:
        if Path(server.folder).exists():
            shutil.rmtree(server.folder)
        for path in (server.socket, f"{server.socket}.lock"):
            Path(path).unlink(missing_ok=True)
    if state.socket_folder is not None and Path(state.socket_folder).exists():
        shutil.rmtree(state.socket_folder)
    for name in (*FILES, STATE):
        (folder / f".{name}.new").unlink(missing_ok=True)
        (folder / name).unlink(missing_ok=True)
    if state.made_folder and not keep_folder and not any(folder.iterdir()):
        folder.rmdir()
