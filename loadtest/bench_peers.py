"""Contenders that are not MySQL: Redis, ZooKeeper, etcd, files. What cannot be had here is left out, and said."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import logging
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_mysql import MOST_CALLERS
from bench_servers import Running, etcd_server, redis_server, zookeeper_server

from lockrouter.cli.timing import Cycle, Way, way
from lockrouter.cli.ways import distinct_keys, file_cycle, redis_cycle
from lockrouter.testing.binaries import ProgramError

__all__ = ["Peers", "peers", "redis_client"]

_TTL = 10
_CONNECTIONS = 512
"""More than any contender has callers: none waits for a connection."""
Keys = Sequence[Sequence[str]]
Maker = Callable[[int, Keys, ExitStack], list[Cycle]]


@dataclass(frozen=True, slots=True)
class Peers:
    """What can be run here."""

    ways: list[Way]
    servers: dict[str, Running]
    left_out: list[str]
    """A line for each that cannot."""


@dataclass(frozen=True, slots=True)
class _Peer:
    name: str
    module: str
    made: Maker
    start: Callable[[ExitStack, Path], Running] | None
    """None: it needs no server, and the port is 0."""
    server: str = ""


def peers(stack: ExitStack, folder: Path, *, others: bool, only: str | None = None) -> Peers:
    """redis-py alone, or all others, as far as they can be run here; what is started ends with `stack`.

    Args:
        only: those whose name contains it.
    """
    found = Peers([], {}, [])
    keys = distinct_keys(MOST_CALLERS, "account-", seed=2)
    logging.getLogger("kazoo").setLevel(logging.ERROR)
    for peer in _OTHERS if others else (_REDIS_PY,):
        if only is not None and only not in peer.name:
            continue
        if importlib.util.find_spec(peer.module) is None:
            found.left_out.append(f"left out: {peer.name}: {peer.module} is not installed")
            continue
        port = 0
        if peer.start is not None:
            try:
                running = found.servers[peer.server] = peer.start(stack, folder)
            except ProgramError as error:
                found.left_out.append(f"left out: {peer.name}: {error}")
                continue
            port = running.port
        found.ways.append(way(peer.name, peer.made(port, keys, stack)))
    return found


def redis_client(port: int, stack: ExitStack) -> Any:
    """A client of that local Redis, with a pool of connections."""
    redis: Any = importlib.import_module("redis")
    client = redis.Redis(host="127.0.0.1", port=port, max_connections=_CONNECTIONS)
    stack.callback(client.close)
    return client


def _redis(port: int, keys: Keys, stack: ExitStack) -> list[Cycle]:
    client = redis_client(port, stack)
    return [redis_cycle(client, part) for part in keys]


def _redis_lock(port: int, keys: Keys, stack: ExitStack) -> list[Cycle]:
    module: Any = importlib.import_module("redis_lock")
    client = redis_client(port, stack)
    return [_held(lambda key: module.Lock(client, key, expire=_TTL), part) for part in keys]


def _kazoo(port: int, keys: Keys, stack: ExitStack) -> list[Cycle]:
    """One session for all threads, as kazoo is used."""
    module: Any = importlib.import_module("kazoo.client")
    client = module.KazooClient(hosts=f"127.0.0.1:{port}")
    client.start(timeout=_TTL)
    stack.callback(client.close)
    stack.callback(client.stop)
    return [_held(lambda key: client.Lock(f"/bench/{key}"), part) for part in keys]


def _held(lock: Callable[[str], Any], keys: Sequence[str]) -> Cycle:
    following = itertools.cycle(keys)

    def cycle() -> None:
        with lock(next(following)):
            pass

    return cycle


def _etcd(port: int, keys: Keys, stack: ExitStack) -> list[Cycle]:
    """A connection for each caller, kept open: one client for all would open and close them."""
    module: Any = importlib.import_module("etcd3gw")
    cycles = []
    for part in keys:
        client = module.client(host="127.0.0.1", port=port)
        stack.callback(client.session.close)
        cycles.append(_etcd_cycle(client, part))
    return cycles


def _etcd_cycle(client: Any, keys: Sequence[str]) -> Cycle:
    following = itertools.cycle(keys)

    def cycle() -> None:
        lock = client.lock(next(following), ttl=_TTL)
        if not lock.acquire():  # its `with` block is entered all the same
            raise RuntimeError("etcd did not lock")
        lock.release()

    return cycle


def _files(_: int, keys: Keys, stack: ExitStack) -> list[Cycle]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockrouter-bench-")))
    return [file_cycle(folder, part) for part in keys]


_REDIS_PY = _Peer("redis-py Lock", "redis", _redis, redis_server, "redis")
_OTHERS = (
    _Peer("python-redis-lock", "redis_lock", _redis_lock, redis_server, "redis"),
    _Peer("filelock", "filelock", _files, None),
    _Peer("kazoo, ZooKeeper", "kazoo", _kazoo, zookeeper_server, "zookeeper"),
    _Peer("etcd3gw, etcd", "etcd3gw", _etcd, etcd_server, "etcd"),
)
