"""Contenders on the database server: this router, PyMySQL's cursor path, and the server's own GET_LOCK."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import msgspec
from prometheus_client import CollectorRegistry

from lockrouter import LockRouter
from lockrouter.cli.timing import Contender, Cycle, Way, timed, way
from lockrouter.cli.ways import connect, cursor_cycle, distinct_keys, router_cycle
from lockrouter.config import Endpoint, RouterConfig

__all__ = ["CALLERS", "HOT_CALLERS", "MOST_CALLERS", "endpoint_of", "hot_contenders", "mysql_ways"]

CALLERS = (1, 8)
"""Of the table; the curve has more."""
HOT_CALLERS = MOST_CALLERS = 64


def endpoint_of(config: RouterConfig) -> Endpoint:
    """Where the one shard is, as its router's user."""
    return config.endpoints(config.shards[0])[0]


def mysql_ways(config: RouterConfig, router: LockRouter, stack: ExitStack) -> list[Way]:
    """The router first; what they open is closed with `stack`."""
    keys = distinct_keys(MOST_CALLERS, "account:", seed=1)
    return [
        way("lockrouter", [router_cycle(router, part) for part in keys]),
        way("PyMySQL cursor", [cursor_cycle(config, part, stack) for part in keys]),
        way("GET_LOCK, PyMySQL", [_get_lock_cycle(config, part, stack) for part in keys]),
    ]


def hot_contenders(config: RouterConfig, router: LockRouter, stack: ExitStack) -> list[Contender]:
    """Many callers of one key, with hand-over inside the process and without."""
    options = msgspec.structs.replace(config.router, handover_limit=0)
    plain = LockRouter(msgspec.structs.replace(config, router=options), registry=CollectorRegistry())
    stack.enter_context(plain)
    return [
        Contender(name, HOT_CALLERS, partial(timed, [_hot_cycle(one)] * HOT_CALLERS))
        for name, one in (("one hot key", router), ("one hot key, no hand-over", plain))
    ]


def _hot_cycle(router: LockRouter) -> Cycle:
    def cycle() -> None:
        with router.lock("hot", timeout=60.0):
            pass

    return cycle


def _get_lock_cycle(config: RouterConfig, keys: Sequence[str], stack: ExitStack) -> Cycle:
    connection = connect(config, config.shards[0], stack)
    connection.autocommit(True)
    following = itertools.cycle(keys)

    def cycle() -> None:
        key = next(following)
        with connection.cursor() as cursor:
            cursor.execute("SELECT GET_LOCK(%s, 3)", (key,))
            if cursor.fetchone() != (1,):
                raise RuntimeError("GET_LOCK did not lock")
            cursor.execute("DO RELEASE_LOCK(%s)", (key,))

    return cycle
