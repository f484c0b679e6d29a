"""Contenders for leases: callers that share statements, and callers that send one of their own each."""

from __future__ import annotations

import itertools
import os
import queue
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from bench_peers import redis_client
from bench_servers import Running

from lockrouter import LockRouter
from lockrouter.cli.timing import Contender, Cycle, timed
from lockrouter.cli.ways import distinct_keys, redis_cycle
from lockrouter.deadline import now
from lockrouter.leases.rows import Item, Kind, Seen, Verb, digest
from lockrouter.leases.store import SqlStore
from lockrouter.protocol.effects import drive
from lockrouter.routing import encode
from lockrouter.sql.leases import Wanted

__all__ = ["MANY", "lease_contenders"]

MANY = 256
_CONNECTIONS = 16
"""As many as the router's pool has, for those that share none."""
_TTL = 10.0


def lease_contenders(router: LockRouter, redis: Sequence[Running], stack: ExitStack) -> list[Contender]:
    """Leases of one process; what is opened is closed with `stack`."""
    keys = distinct_keys(MANY, "lease:", seed=3)
    ways: dict[str, list[Cycle]] = {
        "lease": [_lease_cycle(router, part) for part in keys],
        "lease, a statement each": _single_cycles(router, keys, stack),
    }
    found = [
        Contender(name, callers, partial(timed, cycles[:callers]))
        for name, cycles in ways.items()
        for callers in (1, MANY)
    ]
    for server in redis:
        client = redis_client(server.port, stack)
        cycles = [redis_cycle(client, part) for part in keys]
        found.append(Contender("redis-py Lock", MANY, partial(timed, cycles)))
    return found


def _lease_cycle(router: LockRouter, keys: Sequence[str]) -> Cycle:
    following = itertools.cycle(keys)

    def cycle() -> None:
        with router.lease(next(following), ttl=_TTL, timeout=5.0):
            pass

    return cycle


def _single_cycles(router: LockRouter, keys: Sequence[Sequence[str]], stack: ExitStack) -> list[Cycle]:
    """The same statements, of one row each, through a pool of connections."""
    core = router._core
    (shard,) = core.shards.values()
    stores: queue.LifoQueue[SqlStore] = queue.LifoQueue()
    for _ in range(_CONNECTIONS):
        store = SqlStore(shard)
        stack.callback(store.shut)
        stores.put(store)
    return [_single_cycle(router, stores, part) for part in keys]


def _single_cycle(router: LockRouter, stores: queue.LifoQueue[SqlStore], keys: Sequence[str]) -> Cycle:
    core = router._core
    following = itertools.cycle(keys)
    topology = core.config.topology.name

    def carry_out(item: Item) -> Item:
        store = stores.get()
        try:
            verb = store.acquire if item.verb is Verb.ACQUIRE else store.release
            (answer,) = drive(verb([item], now() + 5.0))
        finally:
            stores.put(store)
        item.answer = answer
        return item

    def cycle() -> None:
        key = encode(next(following))
        address, name = core.routing.route(key), digest(topology, Kind.LEASE, key)
        owner = os.urandom(16)
        row = Wanted(address.bucket, name, Kind.LEASE, key, owner, 0, int(_TTL * 1e6), b"")
        answer = carry_out(Item(Verb.ACQUIRE, address.table, row)).answer
        if not isinstance(answer, Seen) or answer.owner != owner:
            raise RuntimeError(f"the lease was not granted: {answer}")
        carry_out(Item(Verb.RELEASE, address.table, row._replace(token=answer.token)))

    return cycle
