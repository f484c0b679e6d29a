"""Where services call from: greenlets, worker threads of an async framework, coroutines, forked workers."""

from __future__ import annotations

import ast
import asyncio
import contextvars
import gc
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

import lockrouter
from lockrouter import LockRouter, LockTimeout, RowLock
from lockrouter.testing.cluster import Cluster
from tests.support.observe import Observer, Routers, eventually, keys_on

pytestmark = pytest.mark.server

T = TypeVar("T")


def run_script(script: str, cluster: Cluster, *words: str, flags: tuple[str, ...] = ()) -> str:
    command = [sys.executable, *flags, "-c", script, str(cluster.shards_file), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- greenlets --------------------------------------------------------------------------------------------------------

THOUSAND = """
from gevent import monkey; monkey.patch_all()
import sys, time, gevent, lockrouter
file, hot, other = sys.argv[1:]
router, holder = lockrouter.LockRouter.from_file(file), lockrouter.LockRouter.from_file(file)
router.warm(); holder.warm()
late, counters, running = [], {hot: 0, other: 0}, True
def tick():
    while running:
        began = time.monotonic(); gevent.sleep(0.01); late.append(time.monotonic() - began - 0.01)
def work(key):
    with router.lock(key, timeout=90.0) as held:
        assert not held.degraded
        seen = counters[key]; gevent.sleep(0); counters[key] = seen + 1
first, second = holder.lock(hot, timeout=5.0), holder.lock(other, timeout=5.0)
waiting = [gevent.spawn(work, (hot, other)[number % 2]) for number in range(1000)]
while sum(count for _, count in router._core.gates.waiters()) < 1000: gevent.sleep(0.01)
ticker = gevent.spawn(tick)
gevent.sleep(1.0)
resting, late[:] = sorted(late), []
first.release(); second.release()
gevent.joinall(waiting, raise_error=True)
running = False; ticker.join()
busy = sorted(late)
assert counters == {hot: 500, other: 500}, counters
assert len(resting) > 40, len(resting)
print(resting[len(resting) // 2], busy[len(busy) // 2])
router.close(); holder.close()
"""


def test_a_ticker_goes_on_while_a_thousand_greenlets_wait(cluster: Cluster, router: LockRouter) -> None:
    keys = keys_on(router, 0, 2, prefix="thousand")
    resting, busy = map(float, run_script(THOUSAND, cluster, *keys).split())
    assert resting < 0.02, "nobody's wait may hold the hub"
    assert busy < 0.1, "nor may a thousand that get their turn one after the other"


TIMEOUTS = """
from gevent import monkey; monkey.patch_all()
import random, sys, gevent, lockrouter
from lockrouter.leases import keeper
file, seed, *keys = sys.argv[1:]
keeper._SWEEP_EVERY = 0.05
dice = random.Random(int(seed))
router, other = lockrouter.LockRouter.from_file(file), lockrouter.LockRouter.from_file(file)
router.warm(); other.warm()
def lock():
    with router.lock(keys[0], timeout=5.0, confirm=True): gevent.sleep(0.0005)
def several():
    with router.lock_all(keys, timeout=5.0): gevent.sleep(0.0005)
def shared():
    with router.lock(keys[1], timeout=5.0, shared=True): gevent.sleep(0.0005)
def in_transaction():
    with router.transaction(keys[2], timeout=5.0) as connection: connection.exec_driver_sql("SELECT 1")
def leased():
    with router.lease(keys[0], ttl=600, timeout=5.0): gevent.sleep(0.0005)
def permitted():
    with router.semaphore(keys[0], 1, ttl=600).acquire(timeout=5.0): gevent.sleep(0.0005)
def guarded():
    router.guard(keys[0], ttl=600)(lambda: gevent.sleep(0.0005))()
def done():
    router.once(f"{keys[0]}:{dice.random()}", lambda: gevent.sleep(0.0005), keep=1)
calls = (lock, several, shared, in_transaction, leased, permitted, guarded, done)
cut = 0
def interrupted(call):
    global cut
    try:
        with gevent.Timeout(dice.uniform(0.0, 0.006)): call()
    except gevent.Timeout: cut += 1
    except lockrouter.LockRouterError: pass
def killed(call):
    greenlet = gevent.spawn(call)
    gevent.sleep(dice.uniform(0.0, 0.006))
    greenlet.kill(block=True)
for turn in range(160):
    call = calls[turn % len(calls)]
    gevent.joinall([gevent.spawn(interrupted, call), gevent.spawn(killed, call)])
def idle(caller):
    return all(state["pool"]["busy"] == 0 for state in caller.health().values())
with gevent.Timeout(20.0):
    while not idle(router) or router._core.gates.holds() or router._core.leases.busy: gevent.sleep(0.01)
    for caller in (other, router):
        with caller.lock_all(keys, timeout=10.0, confirm=True): pass
        with caller.lease(keys[0], ttl=2, timeout=10.0), caller.semaphore(keys[0], 1).acquire(timeout=10.0): pass
        while caller.guard(keys[0], ttl=2)(lambda: True)() is not True: gevent.sleep(0.01)
    assert not router._core.leases.queues._queues
assert cut > 10, cut
router.close(); other.close()
"""


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
def test_a_greenlets_timeout_and_death_leave_nothing(cluster: Cluster, routers: Routers, seed: int) -> None:
    keys = keys_on(routers.make(), 0, 3, prefix="cut")
    run_script(TIMEOUTS, cluster, str(seed), *keys, flags=("-W", "ignore"))
    routers.quiet()


UNPATCHED = """
import sys, threading, gevent, lockrouter
file, key = sys.argv[1:]
router = lockrouter.LockRouter.from_file(file)
with router.lock(key, timeout=5.0) as held:
    assert gevent.spawn(router.try_lock, key).get() is None, "a greenlet is an owner of its own"
    assert type(held._held.session.wire.sock).__module__ == "socket"
router.close()
assert threading.active_count() == 1
"""


def test_gevent_that_patched_nothing_changes_nothing(cluster: Cluster, router: LockRouter) -> None:
    run_script(UNPATCHED, cluster, keys_on(router, 0, prefix="unpatched")[0])


# -- worker threads of an async framework, and coroutines -------------------------------------------------------------


class Workers:
    """As anyio and Starlette run a synchronous dependency: each step in some worker thread, in a copied context."""

    def __init__(self) -> None:
        self._pools = [ThreadPoolExecutor(1) for _ in range(3)]
        self._turn = 0

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        self._turn += 1
        pool = self._pools[self._turn % len(self._pools)]
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(pool, lambda: context.run(call, *arguments))

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown()


def test_a_dependency_is_entered_and_left_in_different_workers(
    router: LockRouter, other: LockRouter, server: Observer
) -> None:
    key = keys_on(router, 0, prefix="dependency")[0]
    workers = Workers()

    async def request(number: int) -> int:
        dependency = await workers.run(lambda: router.lock(key, timeout=20.0, owner=f"request {number}"))
        held = await workers.run(dependency.__enter__)
        try:
            await workers.run(held.check)
            assert await workers.run(other.try_lock, key) is None
            nested = await workers.run(lambda: router.lock(key, timeout=1.0, owner=f"request {number}"))
            assert nested.token == held.token, "a named owner nests wherever it runs"
            await workers.run(nested.release)
            return held.token
        finally:
            await workers.run(dependency.__exit__, None, None, None)

    async def serve() -> list[int]:
        tokens = [await request(0)]
        for number in range(1, 6):
            tokens.append(await request(number))
        return tokens

    try:
        tokens = asyncio.run(serve())
    finally:
        workers.close()
    assert tokens == sorted(set(tokens))
    eventually(lambda: not server.holders())


def test_a_worker_without_a_name_does_not_nest_and_does_not_hang(router: LockRouter) -> None:
    """Its context is a copy: what it took is not recorded where the next worker looks."""
    key = keys_on(router, 0, prefix="dependency")[0]
    workers = Workers()

    async def request() -> None:
        held = await workers.run(lambda: router.lock(key, timeout=5.0))
        with pytest.raises(LockTimeout):
            await workers.run(lambda: router.lock(key, timeout=0.2))
        await workers.run(held.release)

    try:
        asyncio.run(request())
    finally:
        workers.close()


def test_the_blocking_router_inside_coroutines(router: LockRouter, other: LockRouter) -> None:
    """A task holds over an await, and another one asks: it blocks the loop, and gives up in time all the same."""
    key = keys_on(router, 0, prefix="coroutine")[0]

    async def hold(inside: asyncio.Event, done: asyncio.Event) -> int:
        with router.lock(key, timeout=5.0) as held:
            inside.set()
            await done.wait()
            with router.lock(key, timeout=0) as nested:
                assert nested.token == held.token
            held.check()
            return held.token

    async def main() -> None:
        inside, done = asyncio.Event(), asyncio.Event()
        holding = asyncio.create_task(hold(inside, done))
        await inside.wait()
        assert router.try_lock(key) is None, "another task of the same thread"
        began = time.monotonic()
        with pytest.raises(LockTimeout):
            router.lock(key, timeout=0.2)
        assert time.monotonic() - began < 2.0
        assert other.try_lock(key) is None
        done.set()
        token = await holding
        with router.lock(key, timeout=5.0) as mine:
            assert mine.token > token

    asyncio.run(main())


def test_a_cancelled_task_gives_its_lock_back(router: LockRouter) -> None:
    key = keys_on(router, 0, prefix="coroutine")[0]

    async def hold(inside: asyncio.Event) -> None:
        with router.lock(key, timeout=5.0):
            inside.set()
            await asyncio.sleep(60)

    async def main() -> None:
        inside = asyncio.Event()
        task = asyncio.create_task(hold(inside))
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        router.lock(key, timeout=5.0).release()

    asyncio.run(main())


# -- forks ------------------------------------------------------------------------------------------------------------

PRELOAD = """
import multiprocessing, os, sys, time, lockrouter
file, used, key, *spare = sys.argv[1:]
router = lockrouter.LockRouter.from_file(file)   # at import, as an application that gunicorn preloads
if used == "used":
    router.warm()
    for one in spare: router.lock(one, timeout=5.0).release()
held = router.lock(key, timeout=5.0) if used == "used" else None
def work(number, shared):
    for _ in range(20):
        with router.lock(spare[0], timeout=30.0) as mine:
            assert not mine.degraded
            seen = shared.value; time.sleep(0); shared.value = seen + 1
    assert held is None or held.lost
    assert router.try_lock(key) is None if held else True
context = multiprocessing.get_context("fork")
shared = context.Value("i", 0, lock=False)
workers = [context.Process(target=work, args=(number, shared)) for number in range(4)]
[worker.start() for worker in workers]
[worker.join() for worker in workers]
assert [worker.exitcode for worker in workers] == [0] * 4
assert shared.value == 80, shared.value
if held:
    assert not held.lost
    held.check()
    held.release(confirm=True)
with context.Pool(2) as pool:
    assert pool.map(abs, [-1, 2]) == [1, 2]
router.lock(key, timeout=5.0).release(confirm=True)
router.close()
"""


@pytest.mark.parametrize("used", ["unused", "used"])
def test_workers_forked_from_a_preloaded_application(cluster: Cluster, router: LockRouter, used: str) -> None:
    run_script(PRELOAD, cluster, used, *keys_on(router, 0, 3, prefix="preload"))


ENDINGS = """
import os, signal, sys, threading, lockrouter
file, ending, key, spare = sys.argv[1:]
router = lockrouter.LockRouter.from_file(file)
router.lock(spare, timeout=5.0).release()
held = router.lock(key, timeout=5.0)
told = []
held.on_lost(told.append)
child = os.fork()
if child == 0:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    mine = router.lock(spare, timeout=5.0)
    if ending == "raise": raise RuntimeError("the child's own")
    if ending == "exit": sys.exit(3)
    if ending == "_exit": os._exit(3)
    if ending == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if ending == "abort": os.abort()
    if ending == "exec": os.execv(sys.executable, [sys.executable, "-c", "raise SystemExit(3)"])
    if ending == "thread":
        threading.Thread(target=lambda: router.lock(spare + "x", timeout=5.0)).start()
        sys.exit(3)
    raise AssertionError(ending)
assert os.waitpid(child, 0)[1] != 0
assert not held.lost and not told
held.check()
other = lockrouter.LockRouter.from_file(file)
assert other.try_lock(key) is None, "the parent's row"
other.lock(spare, timeout=10.0).release(confirm=True)   # the child's went with it
held.release(confirm=True)
router.close(); other.close()
assert threading.active_count() == 1
"""


@pytest.mark.parametrize(
    "ending",
    [
        "raise",
        "kill",
        "thread",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("exit", "_exit", "abort", "exec")),
    ],
)
def test_a_child_may_end_in_any_way(cluster: Cluster, router: LockRouter, ending: str) -> None:
    run_script(ENDINGS, cluster, ending, *keys_on(router, 0, 2, prefix="ending"), flags=("-W", "ignore"))


# -- handles that are dropped -----------------------------------------------------------------------------------------


def test_a_dropped_set_is_released_with_a_warning_for_each(router: LockRouter, other: LockRouter) -> None:
    keys = keys_on(router, 0, 2, prefix="dropped")
    with pytest.warns(ResourceWarning) as warned:
        router.lock_all(keys, timeout=5.0)
    assert len(warned) == 2
    with other.lock_all(keys, timeout=5.0):
        pass


def test_a_handle_dropped_in_a_cycle_is_released_by_the_collector(router: LockRouter, other: LockRouter) -> None:
    key = keys_on(router, 0, prefix="dropped")[0]

    class Ring:
        me: Ring
        held: RowLock

    with pytest.warns(ResourceWarning):
        ring = Ring()
        ring.me, ring.held = ring, router.lock(key, timeout=5.0)
        del ring
        eventually(_collect)
    other.lock(key, timeout=5.0).release()


def _collect() -> bool:
    gc.collect()
    return True


# -- interpreters -----------------------------------------------------------------------------------------------------

COMPILE = """
import pathlib, sys
for file in pathlib.Path(sys.argv[1]).rglob("*.py"): compile(file.read_text("utf-8"), str(file), "exec")
print("fine")
"""


@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_every_module_compiles_on_each_interpreter_that_is_here(minor: int) -> None:
    """The newest ones are not on every machine; the source keeps to the grammar of the oldest one anyway."""
    package = Path(lockrouter.__file__).parent
    for file in package.rglob("*.py"):
        ast.parse(file.read_text("utf-8"), feature_version=(3, 11))
    for program in filter(None, [shutil.which(f"python3.{minor}")]):
        asked = subprocess.run([program, "-c", COMPILE, str(package)], capture_output=True, text=True, check=False)
        assert asked.returncode or asked.stdout == "fine\n"
        assert "SyntaxError" not in asked.stderr
