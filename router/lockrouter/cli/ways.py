"""Ways to lock, as cycles to be timed: this router, PyMySQL's cursor path beside it, and peers that are installed."""

from __future__ import annotations

import importlib
import itertools
import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pymysql

from lockrouter.cli.timing import Cycle
from lockrouter.config import RouterConfig, ShardConfig
from lockrouter.router import LockRouter
from lockrouter.routing import Routing, encode
from lockrouter.shard import tls_context
from lockrouter.sql.statements import dialect_of

__all__ = ["BOUND_MS", "connect", "cursor_cycle", "distinct_keys", "file_cycle", "redis_cycle", "router_cycle"]

BOUND_MS = 2994
"""What the router sends as the server's bound for its default timeout of 3 s, or one less."""
_KEYS_PER_CALLER = 2500
_WITHIN, _IDLE = 10, 3600
"""Seconds: to connect, and until the server ends a plain connection that waits for its turn."""


def distinct_keys(callers: int, prefix: str, seed: int | None = None) -> list[list[str]]:
    """Random keys of which none occurs twice, a list for each caller; the same for the same `seed`."""
    numbers = random.Random(seed).sample(range(10**12), callers * _KEYS_PER_CALLER)
    names = [f"{prefix}{number}" for number in numbers]
    return [names[caller::callers] for caller in range(callers)]


def router_cycle(router: LockRouter, keys: Sequence[str]) -> Cycle:
    """The lock and its release, of one key after the other."""
    following = itertools.cycle(keys)

    def cycle() -> None:
        with router.lock(next(following)):
            pass

    return cycle


def connect(config: RouterConfig, shard: ShardConfig, stack: ExitStack) -> pymysql.connections.Connection[Any]:
    """A plain connection to the shard's first writable server, with TLS where the router uses it.

    Raises:
        pymysql.MySQLError: there is none.
    """
    found = None
    for where in config.endpoints(shard):
        tls = tls_context(where)
        found = pymysql.connect(
            host=where.host,
            port=where.port,
            unix_socket=where.unix_socket,
            user=where.user,
            password=where.password,
            database=where.database,
            connect_timeout=_WITHIN,
            ssl=tls,
            ssl_disabled=tls is None,
        )
        stack.callback(found.close)
        with found.cursor() as cursor:
            cursor.execute("SELECT @@global.read_only")
            if cursor.fetchone() == (0,):
                return found
    raise pymysql.OperationalError(f"no server of shard {shard.id} is writable")


def cursor_cycle(config: RouterConfig, keys: Sequence[str], stack: ExitStack) -> Cycle:
    """The router's two statements the way PyMySQL is used everywhere, on a connection to each shard that stays open."""
    routing = Routing(config)
    connections = {shard.id: connect(config, shard, stack) for shard in config.shards}
    dialects = {}
    for name, connection in connections.items():
        dialects[name] = dialect_of(connection.get_server_info())  # type: ignore[no-untyped-call]
        with connection.cursor() as cursor:
            cursor.execute(dialects[name].row_session.format(ghost=_IDLE))
    addresses = [routing.route(encode(key)) for key in keys]
    following = itertools.cycle([(connections[one.shard], dialects[one.shard].lock_text, one) for one in addresses])

    def cycle() -> None:
        connection, form, address = next(following)
        with connection.cursor() as cursor:
            cursor.execute(form % (BOUND_MS, address.table, address.slot, "0123456789abcdef"))
            if cursor.fetchone() is None:
                raise RuntimeError(f"row {address.slot} is missing")
        connection.rollback()

    return cycle


def redis_cycle(client: Any, keys: Sequence[str]) -> Cycle:
    """redis-py's lock, with the script it releases by."""
    following = itertools.cycle(keys)

    def cycle() -> None:
        with client.lock(next(following), timeout=10.0):
            pass

    return cycle


def file_cycle(folder: Path, keys: Sequence[str]) -> Cycle:
    """filelock's lock on a file for each key."""
    filelock: Any = importlib.import_module("filelock")
    following = itertools.cycle(keys)

    def cycle() -> None:
        with filelock.FileLock(folder / next(following)):
            pass

    return cycle
