"""What a waiting caller needs: run in a process of its own, it prints bytes of resident memory per greenlet as JSON.

cd loadtest; python -m gevent.monkey bench_waiting.py FILE CALLERS parked|row|pool

`parked`: the greenlets wait for nothing of the router, that is, what they need themselves; `row`: all want one row;
`pool`: all want rows of their own while every connection is in use.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack

import gevent
from bench_rss import resident_mb
from gevent.event import Event
from prometheus_client import CollectorRegistry

from lockrouter import LockRouter
from lockrouter.config import load

_TIMEOUT = 120.0


def measure(callers: int, wait: Callable[[int], object], release: Callable[[], object]) -> float:
    """Bytes for each of so many greenlets while all of them are inside `wait`, which ends after `release`."""
    inside = 0

    def caller(number: int) -> None:
        nonlocal inside
        inside += 1
        wait(number)

    gc.collect()
    before = resident_mb()
    greenlets = [gevent.spawn(caller, number) for number in range(callers)]
    while inside < callers:
        gevent.idle()
    gc.collect()
    used = resident_mb() - before
    release()
    gevent.joinall(greenlets, raise_error=True)
    return used * 2**20 / callers


def main() -> None:
    """One measurement."""
    file, callers, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    config = load(file)
    with LockRouter(config, registry=CollectorRegistry()) as router, ExitStack() as held:
        router.warm()

        def lock(key: str) -> None:
            with router.lock(key, timeout=_TIMEOUT):
                pass

        if kind == "parked":
            event = Event()
            found = measure(callers, lambda number: event.wait(), event.set)
        elif kind == "row":
            held.enter_context(router.lock("hot"))
            found = measure(callers, lambda number: lock("hot"), held.close)
        else:
            _hold_all(router, config.pool.size * len(config.shards), held)
            found = measure(callers, lambda number: lock(f"account:{number}"), held.close)
    print(json.dumps(found))


def _hold_all(router: LockRouter, connections: int, held: ExitStack) -> None:
    """Hold rows until no connection of any shard is free."""
    taken = number = 0
    while taken < connections:
        handle = router.try_lock(f"held:{number}", reentrant=False)
        number += 1
        if handle is not None:
            held.enter_context(handle)
            taken += 1


if __name__ == "__main__":
    main()
