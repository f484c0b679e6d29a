"""A dead shard costs its callers nothing, other shards nothing, and comes back without a storm."""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lockrouter import LockRouter, LockRouterError, ShardUnavailable
from lockrouter.config import KeyClass
from lockrouter.protocol.wire import Wire
from lockrouter.testing.cluster import Cluster
from tests.support.observe import Routers, eventually, in_thread, keys_on
from tests.support.proxy import Proxy, black_hole, dead_port

pytestmark = pytest.mark.server

NAME = "shard-0"
QUICK = {"failures": 3, "probe_after": 0.3, "retry_delay": 0.05}
ANCIENT = {"failures": 3, "probe_after": 600.0, "retry_delay": 0.02}
"""Once open, it stays so: nothing in the background connects while calls are counted."""
REFUSE = KeyClass(prefix="strict:", on_outage="refuse")
ENOUGH = 1500


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """A port whose listener accepts and says nothing."""
    with Proxy(1) as proxy:
        proxy.stop()
        yield proxy.port


DEAD = {"refusing": dead_port, "silent": silent_port, "black-holed": black_hole}


@pytest.fixture(params=DEAD)
def dead(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a dead shard, of each way to be dead."""
    way: Callable[[], contextlib.AbstractContextManager[int]] = DEAD[request.param]
    with way() as port:
        yield port


def opened(routers: Routers, port: int, **changes: Any) -> LockRouter:
    """A router whose first shard is dead, and known to be."""
    router = routers.make(
        ports={0: port}, **({"breaker": ANCIENT, "pool": {"connect_timeout": 0.2}, "classes": (REFUSE,)} | changes)
    )
    router._core.start()
    eventually(lambda: router.health()[NAME]["breaker"] == "open")
    return router


def verbs(router: LockRouter) -> dict[str, Callable[[], object]]:
    """Every verb that needs the dead shard, none of which degrades."""
    strict, plain = keys_on(router, 0, prefix="strict")[0], keys_on(router, 0, prefix="plain")[0]
    return {
        "lock": lambda: router.lock(strict, timeout=20.0),
        "try_lock": lambda: router.try_lock(strict),
        "shared": lambda: router.lock(strict, timeout=20.0, shared=True),
        "lock_all": lambda: router.lock_all([strict, plain], timeout=20.0),
        "transaction": lambda: router.transaction(plain, timeout=20.0).__enter__(),
        "run": lambda: router.run(plain, lambda connection: None, timeout=20.0),
        "lease": lambda: router.lease(plain, ttl=5, timeout=20.0),
        "try_lease": lambda: router.try_lease(plain, ttl=5),
    }


def test_no_call_to_an_open_shard_touches_the_network(
    routers: Routers, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what it costs does not depend on what the shard does."""
    router = opened(routers, dead)
    me, touched = threading.current_thread(), []

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def noted(*arguments: Any, **named: Any) -> Any:
            if threading.current_thread() is me:
                touched.append(name)
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, noted)

    for name in ("send", "talk", "receive", "_poll"):
        watch(Wire, name)
    for module in ("session", "lent"):
        watch(__import__(f"lockrouter.{module}", fromlist=["authenticate"]), "authenticate")
    watch(time, "sleep")
    for name, call in verbs(router).items():
        with pytest.raises(ShardUnavailable):
            call()
        assert not touched, name
    with router.lock(keys_on(router, 0, prefix="plain")[0], timeout=20.0) as held:
        assert held.degraded
    assert not touched
    router.lock(keys_on(router, 1)[0], timeout=20.0).release()
    assert touched, "what it would look like"


def test_threads_and_memory_do_not_grow(routers: Routers, dead: int) -> None:
    router = opened(routers, dead)
    plain = keys_on(router, 0, prefix="plain")[0]
    calls = verbs(router)
    del calls["transaction"], calls["run"], calls["shared"], calls["lock_all"]

    def all_of_them(times: int) -> None:
        for _ in range(times):
            for call in calls.values():
                with contextlib.suppress(ShardUnavailable):
                    call()
            router.lock(plain, timeout=20.0).release()

    all_of_them(20)
    gc.collect()
    threads = threading.active_count()
    tracemalloc.start()
    try:
        all_of_them(5)
        sizes = []
        for _ in range(3):  # what a call leaves shows each time, what the background does meanwhile does not
            for shard in router._core.shards.values():
                shard.stats.settle()
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
            all_of_them(200)
        grown = min(later - earlier for earlier, later in itertools.pairwise(sizes))
    finally:
        tracemalloc.stop()
    assert threading.active_count() <= threads
    assert grown < 20_000, "bytes, for 1,000 calls"


def test_a_shard_that_returns_meets_no_storm(routers: Routers, cluster: Cluster) -> None:
    """64 callers wait for it, and it is given a pool's connections, once."""
    with Proxy(cluster.port(0)) as proxy:
        size = 6
        router = routers.make(
            ports={0: proxy.port}, breaker=QUICK, pool={"connect_timeout": 0.3, "size": size}, classes=(REFUSE,)
        )
        keys = [*keys_on(router, 0, 32, prefix="strict"), *keys_on(router, 0, 32, prefix="plain")]
        router.lock(keys[0], timeout=5.0).release()
        stop, real = threading.Event(), itertools.count()

        def work(key: str) -> None:
            while not stop.is_set():
                try:
                    with router.lock(key, timeout=2.0) as held:
                        if not held.degraded:
                            next(real)
                except LockRouterError:
                    pass
                stop.wait(0.01)

        callers = [in_thread(lambda key=key: work(key)) for key in keys]  # type: ignore[misc]
        proxy.stop()
        eventually(lambda: router.health()[NAME]["breaker"] != "closed")
        eventually(lambda: router.health()[NAME]["breaker"] == "half_open")
        eventually(lambda: router.health()[NAME]["breaker"] == "open")
        before, began = proxy.accepted, time.monotonic()
        for _ in range(2):
            eventually(lambda: router.health()[NAME]["breaker"] == "half_open")
            eventually(lambda: router.health()[NAME]["breaker"] == "open")
        probes = (time.monotonic() - began) / (0.3 * 0.8) + 1
        assert proxy.accepted - before <= probes, "one probe at a time, however many callers"
        before = proxy.accepted
        proxy.accept()
        eventually(lambda: router.health()[NAME]["state"] == "ok")
        seen = next(real)
        eventually(lambda: next(real) > seen + 200)
        # The pool, the control and the writer session; one probe that was under way, one metadata look.
        assert proxy.accepted - before <= size + 4
        stop.set()
        for caller in callers:
            caller.result()
        router.close()


# -- what it costs, measured ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_call_to_an_open_shard_costs(routers: Routers, dead: int, request: pytest.FixtureRequest) -> None:
    """Under 1 ms; printed in microseconds."""
    router = opened(routers, dead)
    plain = keys_on(router, 0, prefix="plain")[0]
    calls = verbs(router)
    calls["degraded"] = lambda: router.lock(plain, timeout=20.0).release()
    costs = {}
    for name, call in calls.items():
        took = []
        for _ in range(ENOUGH):
            began = time.perf_counter()
            with contextlib.suppress(ShardUnavailable):
                call()
            took.append(time.perf_counter() - began)
        costs[name] = statistics.median(took), sorted(took)[-ENOUGH // 100]
    print(
        f"\n{request.node.callspec.id}: " + ", ".join(f"{n} {m * 1e6:.0f}/{p * 1e6:.0f}" for n, (m, p) in costs.items())
    )
    assert max(median for median, _ in costs.values()) < 0.001


@pytest.mark.slow
def test_other_shards_keep_their_pace(routers: Routers, dead: int, request: pytest.FixtureRequest) -> None:
    """Within 10 %: six callers on three shards, beside one that calls the fourth 200 times a second, dead or alive."""
    routes = {"alive": routers.make(classes=(REFUSE,)), "dead": opened(routers, dead, breaker=QUICK)}
    rates: dict[str, list[float]] = {name: [] for name in routes}
    waits: dict[str, list[float]] = {name: [] for name in routes}
    for round_ in range(8):
        for name, router in routes.items():
            took = load(router, 1.5)
            if round_:
                rates[name].append(len(took) / 1.5)
                waits[name].append(statistics.median(took))
    rate = {name: statistics.median(found) for name, found in rates.items()}
    wait = {name: statistics.median(found) for name, found in waits.items()}
    print(
        f"\n{request.node.callspec.id}: {rate['alive']:.0f} locks/s and {wait['alive'] * 1e6:.0f} us with it alive,"
        f" {rate['dead']:.0f} and {wait['dead'] * 1e6:.0f} with it dead"
    )
    assert rate["dead"] > 0.9 * rate["alive"]
    assert wait["dead"] < 1.1 * wait["alive"]


def load(router: LockRouter, seconds: float) -> list[float]:
    until, took = time.monotonic() + seconds, []
    keys = [key for index in (1, 2, 3) for key in keys_on(router, index, 2, prefix="pace")]
    strict = keys_on(router, 0, prefix="strict")[0]

    def work(key: str) -> None:
        while time.monotonic() < until:
            began = time.perf_counter()
            router.lock(key, timeout=5.0).release()
            took.append(time.perf_counter() - began)

    def aside() -> None:
        while time.monotonic() < until:
            with contextlib.suppress(ShardUnavailable):
                router.lock(strict, timeout=5.0).release()
            time.sleep(0.005)

    threads = [in_thread(aside), *(in_thread(lambda key=key: work(key)) for key in keys)]  # type: ignore[misc]
    for thread in threads:
        thread.result()
    return took
