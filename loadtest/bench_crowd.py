"""Ten thousand callers at once, as greenlets: run in a process of its own, it prints what they met as JSON.

cd loadtest; python -m gevent.monkey bench_crowd.py FILE CALLERS
"""

from __future__ import annotations

import json
import sys
from time import perf_counter

import gevent
from gevent.event import Event
from prometheus_client import CollectorRegistry

from lockrouter import LockRouter, LockRouterError
from lockrouter.cli.timing import latencies
from lockrouter.config import load

_HOLD = 0.001


def crowd(router: LockRouter, callers: int, name: str) -> tuple[list[float], float]:
    """Have all want keys of their own at the same moment, with the default timeout.

    Returns the seconds of those who got and released it, and those that the last of all took.
    """
    start, took = Event(), []

    def caller(number: int) -> None:
        start.wait()
        try:
            with router.lock(f"{name}:{number}"):
                gevent.sleep(_HOLD)
        except LockRouterError:
            return
        took.append(perf_counter() - began)

    greenlets = [gevent.spawn(caller, number) for number in range(callers)]
    gevent.idle()
    began = perf_counter()
    start.set()
    gevent.joinall(greenlets, raise_error=True)
    return sorted(took), perf_counter() - began


def main() -> None:
    """First a small crowd, which connects; then the one that counts."""
    file, callers = sys.argv[1], int(sys.argv[2])
    config = load(file)
    connections = config.pool.size * len(config.shards)
    with LockRouter(config, registry=CollectorRegistry()) as router:
        router.warm()
        crowd(router, 4 * connections, "before")
        took, seconds = crowd(router, callers, "account")
    latency = latencies(took)
    print(
        json.dumps(
            {
                "callers": callers,
                "connections": connections,
                "success": len(took) / callers,
                "p50": latency.get(50.0),
                "p99": latency.get(99.0),
                "ideal_p99": 0.99 * callers * _HOLD / connections,
                "seconds": seconds,
            }
        )
    )


if __name__ == "__main__":
    main()
