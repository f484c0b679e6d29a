"""Holders and waiters that are there no more: freed by the server in time, told in time, and in nobody's way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from lockrouter import LockLost, LockRouter, LockRouterError, LockTimeout, LossReason, PoolTimeout, ShardUnavailable
from lockrouter.testing.cluster import Cluster
from tests.support.observe import Observer, Routers, eventually, in_thread, keys_on, soon_enough
from tests.support.proxy import Cut, Proxy, Rule, Way

pytestmark = pytest.mark.server

GHOST = 2


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    """The way to shard-0 of whoever becomes a ghost."""
    with Proxy(cluster.port(0)) as between:
        yield between


@pytest.fixture
def far(proxy: Proxy, routers: Routers) -> LockRouter:
    """A router behind the proxy, whose server has two seconds of patience with it."""
    return routers.make(
        ports={0: proxy.port},
        router={"ghost_timeout": GHOST},
        breaker={"failures": 1000},
        pool={"connect_timeout": 0.4},
    )


# -- the ghost bound --------------------------------------------------------------------------------------------------


SLOW = pytest.mark.slow


@pytest.mark.parametrize("form", ["lock", pytest.param("shared", marks=SLOW), pytest.param("lock_all", marks=SLOW)])
def test_a_partitioned_holder_is_told_before_the_server_frees_its_row(
    far: LockRouter, other: LockRouter, proxy: Proxy, form: str
) -> None:
    """No packet passes any more, and no FIN. A live holder had kept the row for longer than that before."""
    key, second = keys_on(far, 0, 2, prefix="ghost")
    held = far.lock_all([key, second], timeout=5.0) if form == "lock_all" else far.lock(key, shared=form == "shared")
    told: list[tuple[LossReason, float]] = []
    held.on_lost(lambda reason: told.append((reason, time.monotonic())))
    threading.Event().wait(GHOST + 1.0)
    held.check()
    assert not held.lost and not told, "a live holder keeps its lock as long as it likes"
    assert other.try_lock(key) is None

    def take() -> float:
        with other.lock(key, timeout=20.0):
            return time.monotonic()

    proxy.stop()
    began = time.monotonic()
    freed = in_thread(take).result()
    assert freed - began < GHOST + 2.0
    assert told, "its holder had been told by its own clock"
    assert told[0][0] is LossReason.SILENT
    assert began < told[0][1] < freed
    assert held.lost
    with pytest.raises(LockLost):
        held.release()


def test_a_stalled_connection_alone_is_found_out_by_its_ping(far: LockRouter, other: LockRouter, proxy: Proxy) -> None:
    """Only the holder's own connection is black-holed; the control session goes on and says that all is well."""
    key = keys_on(far, 0, prefix="ghost")[0]
    rule = proxy.add(Rule(Way.DOWN, 10_000, Cut.STALL, marker=b"FOR UPDATE"))
    held = far.lock(key, timeout=5.0)
    assert rule.met.is_set()
    rule.allow = 0
    began = time.monotonic()
    eventually(lambda: held.lost, 5.0)
    assert time.monotonic() - began < GHOST
    assert far.health()["shard-0"]["breaker"] == "closed"
    with pytest.raises(LockLost):
        held.release()
    with other.lock(key, timeout=5.0):
        pass


# -- losses are known within half a second ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fin", "rst", "kill", pytest.param("killed server", marks=SLOW)])
def test_a_loss_is_known_within_half_a_second(
    far: LockRouter, proxy: Proxy, server: Observer, cluster: Cluster, how: str
) -> None:
    key = keys_on(far, 0, prefix="loss")[0]
    delays = []
    for _ in range(1 if how == "killed server" else 4):
        held = far.lock(key, timeout=10.0)
        number = eventually(server.holders)[0]
        threading.Event().wait(0.1)
        if how == "kill":
            server.kill(number)
        elif how == "killed server":
            cluster.kill(0)
        else:
            proxy.cut(Cut(how), said=b"FOR UPDATE")
        began = time.monotonic()
        eventually(lambda: held.lost, every=0.002)  # noqa: B023 - called now
        delays.append(time.monotonic() - began)
        with pytest.raises(LockLost):
            held.release()
    if how == "killed server":
        cluster.start(0)
    assert min(delays) < 0.5, delays
    eventually(lambda: _locks(far, key), 15.0)


def _locks(router: LockRouter, key: str) -> bool:
    try:
        router.lock(key, timeout=2.0).release(confirm=True)
    except LockRouterError:
        return False
    return True


# -- waiters that left ------------------------------------------------------------------------------------------------


def threads_of(server: Observer) -> int:
    """How many of the application's connections execute something just now."""
    return sum(seen.command not in ("Sleep", "Daemon") for seen in server.sessions())


def test_after_timeouts_nothing_waits_on_the_server(routers: Routers, server: Observer) -> None:
    """All kinds of calls; counted in server threads, at once after the last of them."""
    holder = routers.make()
    callers = [routers.make(pool={"size": 8}) for _ in range(3)]
    key, second = keys_on(holder, 0, 2, prefix="gone")
    for caller in callers:
        caller.warm()
    calls: list[Callable[[LockRouter], object]] = [
        lambda caller: caller.lock(key, timeout=0.3),
        lambda caller: caller.lock(key, timeout=0.3, shared=True),
        lambda caller: caller.lock_all([key, second], timeout=0.3),
        lambda caller: caller.transaction(key, timeout=0.3).__enter__(),
        lambda caller: caller.lock(key, timeout=0.02),
    ]
    with holder.lock_all([key, second], timeout=5.0):
        threads = [in_thread(lambda one=one, call=call: call(one)) for one in callers for call in calls]  # type: ignore[misc]
        for thread in threads:
            with pytest.raises((LockTimeout, PoolTimeout)):
                thread.result()
        eventually(lambda: threads_of(server) == 0, 0.5, lambda: server.sessions())
        assert not server.waiters()


WAITER = """
import sys, lockrouter
file, key, timeout = sys.argv[1:]
router = lockrouter.LockRouter.from_file(file)
router.warm()
print("ready", flush=True)
router.lock(key, timeout=float(timeout))
print("locked", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def waiting_process(cluster: Cluster, key: str, timeout: float) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WAITER, str(cluster.shards_file), key, str(timeout)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_the_first_in_line_is_killed_and_delays_nobody(
    cluster: Cluster, router: LockRouter, other: LockRouter, server: Observer
) -> None:
    """Its statement is granted by the server to nobody, and freed at once; the next one has the row within a second."""
    key = keys_on(router, 0, prefix="line")[0]
    held = router.lock(key, timeout=5.0)
    with waiting_process(cluster, key, 60.0) as first:
        eventually(lambda: len(server.waiters()) == 1)
        second = in_thread(lambda: other.lock(key, timeout=30.0))
        eventually(lambda: len(server.waiters()) == 2)
        os.kill(first.pid, signal.SIGKILL)
        first.wait(10.0)
        began = time.monotonic()
        held.release()
        got = second.result()
        assert time.monotonic() - began < 1.0
        got.release()
    eventually(lambda: not server.locks()["waiters"] and not server.locks()["holders"], 2.0)


def test_a_killed_waiters_statement_ends_by_its_own_bound(
    cluster: Cluster, router: LockRouter, server: Observer
) -> None:
    key = keys_on(router, 0, prefix="line")[0]
    with router.lock(key, timeout=5.0) as held, waiting_process(cluster, key, 2.0) as process:
        server.await_waiters()
        began = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10.0)
        eventually(lambda: not server.waiters() and threads_of(server) == 0, 5.0)
        assert time.monotonic() - began < 2.0 + 1.0
        held.check()


def test_two_that_try_and_fail_leave_the_row_to_the_third(router: LockRouter, other: LockRouter) -> None:
    key = keys_on(router, 0, prefix="try")[0]
    with router.lock(key, timeout=5.0):
        for _ in range(20):
            both = [in_thread(lambda caller=caller: caller.try_lock(key)) for caller in (router, other)]  # type: ignore[misc]
            assert [thread.result() for thread in both] == [None, None]
    third = eventually(lambda: other.try_lock(key), 1.0)
    third.release()


def test_an_unreachable_shard_is_given_up_in_time_by_every_verb(far: LockRouter, proxy: Proxy) -> None:
    """Connect, pool, retries and the server's wait are all inside the one timeout."""
    keys = keys_on(far, 0, 2, prefix="silent")
    far.lock(keys[0], timeout=5.0).release(confirm=True)
    proxy.stop()
    verbs: list[Callable[[], object]] = [
        lambda: far.lock(keys[0], timeout=0.4),
        lambda: far.lock(keys[0], timeout=0.4, shared=True),
        lambda: far.lock_all(keys, timeout=0.4),
        lambda: far.transaction(keys[0], timeout=0.4).__enter__(),
    ]
    for verb in verbs:

        def fails(verb: Callable[[], object] = verb) -> None:
            with pytest.raises((ShardUnavailable, PoolTimeout)):
                verb()

        soon_enough(0.5, fails)
    proxy.accept()
    eventually(lambda: _locks(far, keys[0]), 15.0)
