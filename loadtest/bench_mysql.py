"""Contenders on the database server: this router, PyMySQL's cursor path, and the server's own GET_LOCK."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
import pymysql
from bench_timing import Contender, Cycle, timed
from prometheus_client import CollectorRegistry

from lockrouter import LockRouter
from lockrouter.config import Endpoint, RouterConfig
from lockrouter.routing import Address, Routing, encode
from lockrouter.sql.statements import MARIADB, MYSQL, Dialect

__all__ = ["BOUND_MS", "HOT_CALLERS", "THREADS", "dialect_of_vendor", "endpoint_of", "mysql_contenders"]

THREADS = (1, 8)
HOT_CALLERS = 64
KEYS_PER_THREAD = 2500
BOUND_MS = 2994
"""What the router sends as the server's bound for its default timeout of 3 s, or one less."""


def dialect_of_vendor(vendor: str) -> Dialect:
    """How that vendor's statements are spelt."""
    return MARIADB if vendor == "mariadb" else MYSQL


def endpoint_of(config: RouterConfig) -> Endpoint:
    """Where the one shard is, as its router's user."""
    return config.endpoints(config.shards[0])[0]


def mysql_contenders(config: RouterConfig, vendor: str, stack: ExitStack) -> list[Contender]:
    """The router first; what they open is closed with `stack`."""
    router = stack.enter_context(LockRouter(config, registry=CollectorRegistry()))
    router.warm()
    contenders = []
    for threads in THREADS:
        keys = _keys(threads)
        contenders += [
            Contender("lockrouter", threads, partial(timed, [_router_cycle(router, part) for part in keys])),
            Contender("PyMySQL cursor", threads, partial(timed, _cursor_cycles(config, vendor, keys, stack))),
            Contender("GET_LOCK, PyMySQL", threads, partial(timed, _get_lock_cycles(config, keys, stack))),
        ]
    options = msgspec.structs.replace(config.router, handover_limit=0)
    plain = LockRouter(msgspec.structs.replace(config, router=options), registry=CollectorRegistry())
    stack.enter_context(plain)
    for name, one in (("one hot key", router), ("one hot key, no hand-over", plain)):
        contenders.append(Contender(name, HOT_CALLERS, partial(timed, [_hot_cycle(one)] * HOT_CALLERS)))
    return contenders


def _keys(threads: int) -> list[list[str]]:
    """Distinct keys in random order, a list for each thread; the same in every run."""
    numbers = random.Random(threads).sample(range(10_000_000), threads * KEYS_PER_THREAD)
    names = [f"account:{number}" for number in numbers]
    return [names[thread::threads] for thread in range(threads)]


def _router_cycle(router: LockRouter, keys: Sequence[str]) -> Cycle:
    following = itertools.cycle(keys)

    def cycle() -> None:
        with router.lock(next(following)):
            pass

    return cycle


def _hot_cycle(router: LockRouter) -> Cycle:
    def cycle() -> None:
        with router.lock("hot", timeout=60.0):
            pass

    return cycle


def _connect(config: RouterConfig, stack: ExitStack) -> pymysql.connections.Connection[Any]:
    """A connection of the router's own user without TLS, as the router has it on loopback."""
    where = endpoint_of(config)
    connection = pymysql.connect(
        host=where.host,
        port=where.port,
        user=where.user,
        password=where.password,
        database=where.database,
        ssl_disabled=True,
    )
    stack.callback(connection.close)
    return connection


def _cursor_cycles(config: RouterConfig, vendor: str, keys: list[list[str]], stack: ExitStack) -> list[Cycle]:
    routing = Routing(config)
    return [
        _cursor_cycle(_connect(config, stack), dialect_of_vendor(vendor), [routing.route(encode(key)) for key in part])
        for part in keys
    ]


def _cursor_cycle(
    connection: pymysql.connections.Connection[Any], dialect: Dialect, addresses: Sequence[Address]
) -> Cycle:
    """The router's two statements the way PyMySQL is used everywhere."""
    form = dialect.lock_text
    following = itertools.cycle(addresses)
    with connection.cursor() as cursor:
        cursor.execute(dialect.row_session.format(ghost=60))

    def cycle() -> None:
        address = next(following)
        with connection.cursor() as cursor:
            cursor.execute(form % (BOUND_MS, address.table, address.slot, "0123456789abcdef"))
            if cursor.fetchone() is None:
                raise RuntimeError(f"row {address.slot} is missing")
        connection.rollback()

    return cycle


def _get_lock_cycles(config: RouterConfig, keys: list[list[str]], stack: ExitStack) -> list[Cycle]:
    return [_get_lock_cycle(_connect(config, stack), part) for part in keys]


def _get_lock_cycle(connection: pymysql.connections.Connection[Any], keys: Sequence[str]) -> Cycle:
    following = itertools.cycle(keys)
    connection.autocommit(True)

    def cycle() -> None:
        key = next(following)
        with connection.cursor() as cursor:
            cursor.execute("SELECT GET_LOCK(%s, 3)", (key,))
            if cursor.fetchone() != (1,):
                raise RuntimeError("GET_LOCK did not lock")
            cursor.execute("DO RELEASE_LOCK(%s)", (key,))

    return cycle
