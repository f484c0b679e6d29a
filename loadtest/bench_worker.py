"""Cycles in a process of their own: for each line with seconds on standard input it prints a run as JSON.

python loadtest/bench_worker.py KIND WHERE NUMBER CALLERS
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

from bench_peers import redis_client
from prometheus_client import CollectorRegistry

from lockrouter import LockRouter
from lockrouter.cli.timing import Cycle, timed
from lockrouter.cli.ways import distinct_keys, redis_cycle, router_cycle
from lockrouter.config import load

_HOLD = 0.001


def main() -> None:
    """Says when it is ready, then works until its standard input ends."""
    kind, where, number, callers = sys.argv[1:]
    with ExitStack() as stack:
        cycles = _KINDS[kind](where, int(number), int(callers), stack)
        for cycle in cycles:
            cycle()
        print("ready", flush=True)
        for line in sys.stdin:
            sample = timed(cycles, float(line))
            print(json.dumps({"rate": sample.rate, "latency": list(sample.latency.items())}), flush=True)


def _redis(port: str, number: int, callers: int, stack: ExitStack) -> list[Cycle]:
    client = redis_client(int(port), stack)
    return [redis_cycle(client, keys) for keys in distinct_keys(callers, "account-", seed=100 + number)]


def _router(file: str, stack: ExitStack) -> LockRouter:
    router = stack.enter_context(LockRouter(load(file), registry=CollectorRegistry()))
    router.warm()
    return router


def _distinct(file: str, number: int, callers: int, stack: ExitStack) -> list[Cycle]:
    router = _router(file, stack)
    return [router_cycle(router, keys) for keys in distinct_keys(callers, "account:", seed=100 + number)]


def _hot(file: str, number: int, callers: int, stack: ExitStack) -> list[Cycle]:
    router = _router(file, stack)

    def cycle() -> None:
        with router.lock("hot", timeout=60.0):
            time.sleep(_HOLD)

    return [cycle] * callers


_KINDS: dict[str, Callable[[str, int, int, ExitStack], list[Cycle]]] = {
    "redis": _redis,
    "router": _distinct,
    "hot": _hot,
}

if __name__ == "__main__":
    main()
