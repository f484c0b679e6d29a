"""`semaphore` on real servers: never more than the permits, in order, and nobody is forgotten."""

from __future__ import annotations

import functools
import gc
import threading
import time

import pytest

from lockrouter import InvalidKey, LockLost, LockRouter, LockTimeout, NotHeld, Permit, ShardError, ShardUnavailable
from lockrouter.recipes import line
from lockrouter.recipes.line import PLACE_TTL
from lockrouter.recipes.own import holders
from tests.support.observe import Routers, eventually, in_thread, keys_on
from tests.support.proxy import Cut, Proxy, Rule, Way

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("no_leases")]


@pytest.fixture
def name(router: LockRouter) -> str:
    return keys_on(router, 0, prefix="gateway")[0]


def test_so_many_and_no_more(routers: Routers, router: LockRouter, name: str) -> None:
    here, there = router.semaphore(name, permits=3), routers.make().semaphore(name, permits=3)
    permits = [here.acquire(timeout=2.0), there.acquire(timeout=2.0), here.acquire(timeout=2.0)]
    assert here.try_acquire() is None
    assert there.try_acquire() is None
    with pytest.raises(LockTimeout) as raised:
        there.acquire(timeout=0.3)
    assert 0.3 <= raised.value.waited < 1.0
    permits[0].release()
    again = there.acquire(timeout=2.0)
    assert not again.lost
    assert again.token > 0
    for permit in [*permits[1:], again]:
        permit.release()


def test_a_permit_is_a_handle(router: LockRouter, name: str) -> None:
    with router.semaphore(name, permits=1, ttl=5.0).acquire() as permit:
        assert 4.0 < permit.remaining() <= 5.0
        assert permit.ttl == 5.0
        permit.check()
        lost: list[object] = []
        permit.on_lost(lost.append)
    assert permit.remaining() == 0.0
    with pytest.raises(NotHeld):
        permit.release()
    assert lost == []


def test_callers_of_one_process_are_served_in_order(router: LockRouter, name: str) -> None:
    semaphore = router.semaphore(name, permits=1)
    held = semaphore.acquire(timeout=2.0)
    order: list[int] = []
    lines = semaphore._line

    def wait(number: int) -> None:
        with semaphore.acquire(timeout=20.0):
            order.append(number)

    threads = []
    for number in range(6):
        threads.append(in_thread(functools.partial(wait, number)))
        eventually(lambda: len(lines._queue) == number + 1)  # noqa: B023 - called now
    held.release()
    for thread in threads:
        thread.result()
    assert order == list(range(6))


def test_a_busy_process_does_not_starve_another(routers: Routers, router: LockRouter, name: str) -> None:
    busy, patient = router.semaphore(name, permits=1), routers.make().semaphore(name, permits=1)
    stop = threading.Event()
    served = []

    def work() -> None:
        while not stop.is_set():
            with busy.acquire(timeout=20.0):
                served.append(1)
                stop.wait(0.005)

    threads = [in_thread(work) for _ in range(4)]
    try:
        eventually(lambda: len(served) > 10)
        for _ in range(5):
            before = len(served)
            with patient.acquire(timeout=10.0):
                pass
            assert len(served) - before < 20, "others went first"
    finally:
        stop.set()
        for thread in threads:
            thread.result()


def test_lowering_the_permits_drains(routers: Routers, router: LockRouter, name: str) -> None:
    permits = [router.semaphore(name, permits=4).acquire(timeout=2.0) for _ in range(4)]
    lower = routers.make().semaphore(name, permits=2)
    for permit in permits[:2]:
        assert lower.try_acquire() is None
        permit.release()
    assert lower.try_acquire() is None, "two are held still, and two is all there may be"
    permits[2].release()
    one = eventually(lambda: lower.try_acquire(), 5.0)
    assert lower.try_acquire() is None
    permits[3].release()
    two = eventually(lambda: lower.try_acquire(), 5.0)
    assert lower.try_acquire() is None
    one.release()
    two.release()


def test_a_dead_holder_s_permit_comes_back_at_its_ttl(routers: Routers, router: LockRouter, name: str) -> None:
    with Proxy(routers.cluster.port(0)) as proxy:
        dead = routers.make(ports={0: proxy.port})
        permit = dead.semaphore(name, permits=1, ttl=1.0).acquire(timeout=2.0)
        lost = threading.Event()
        permit.on_lost(lambda reason: lost.set())
        proxy.stop()
        began = time.monotonic()
        with router.semaphore(name, permits=1).acquire(timeout=10.0):
            assert lost.is_set(), "told before anybody else came in"
            assert time.monotonic() - began < 5.0
        with pytest.raises(LockLost):
            permit.release()
        proxy.accept()
        dead.close()


def test_an_outage_is_an_error(routers: Routers, name: str) -> None:
    with Proxy(routers.cluster.port(0)) as proxy:
        router = routers.make(ports={0: proxy.port}, router={"on_outage": "local", "timeout": 1.0})
        router.warm()
        proxy.refuse()
        with pytest.raises(ShardUnavailable):
            router.semaphore(name, permits=2).acquire(timeout=1.0)
        proxy.accept()
        eventually(lambda: router.health()["shard-0"]["state"] == "ok")
        with router.semaphore(name, permits=2).acquire(timeout=1.0) as permit:
            assert isinstance(permit, Permit)
        router.close()


def test_who_gives_up_waiting_leaves_nothing(routers: Routers, router: LockRouter, name: str) -> None:
    other = routers.make().semaphore(name, permits=1)
    held = router.semaphore(name, permits=1).acquire(timeout=2.0)
    with pytest.raises(LockTimeout):
        other.acquire(timeout=0.2)
    held.release()
    # Sooner than a place in the queue that was left behind would end by itself.
    eventually(other.try_acquire, PLACE_TTL - 0.5).release()


def test_a_permit_that_is_dropped_comes_back_with_a_warning(router: LockRouter, name: str) -> None:
    semaphore = router.semaphore(name, permits=1)
    permit = semaphore.acquire(timeout=2.0)
    with pytest.warns(ResourceWarning, match="dropped without release"):
        del permit
        gc.collect()
    with semaphore.acquire(timeout=5.0):
        pass


def test_a_black_holed_shard_costs_no_more_than_the_timeout(routers: Routers, name: str) -> None:
    with Proxy(routers.cluster.port(0)) as proxy:
        router = routers.make(ports={0: proxy.port}, pool={"connect_timeout": 3.0}, breaker={"failures": 10_000})
        router.semaphore(name, permits=1).acquire(timeout=5.0).release()
        waiting, holder = router.semaphore(name, permits=1), routers.make().semaphore(name, permits=1)

        took = []
        for silent_after in (0.0, 0.02, 0.1):
            with holder.acquire(timeout=5.0):
                timer = threading.Timer(silent_after, proxy.stop)
                timer.start()
                began = time.monotonic()
                with pytest.raises((LockTimeout, ShardError)):
                    waiting.acquire(timeout=0.5)
                took.append(time.monotonic() - began)
                timer.join()
                proxy.accept()
            eventually(lambda: router.health()["shard-0"]["state"] == "ok")
        assert max(took) < 2.0, "not a connect_timeout more"
        assert min(took) < 0.6, took
        router.close()


def test_no_question_of_an_acquire_outlasts_its_timeout(routers: Routers, name: str) -> None:
    with Proxy(routers.cluster.port(0)) as proxy:
        router = routers.make(ports={0: proxy.port}, breaker={"failures": 10_000})
        router.warm()
        for question in (b"l.kind = ", b"lease_"):
            rule = proxy.add(Rule(Way.DOWN, 0, Cut.STALL, marker=question))
            began = time.monotonic()
            with pytest.raises((LockTimeout, ShardError)):
                router.semaphore(name, permits=1).acquire(timeout=0.4)
            assert time.monotonic() - began < 0.9
            assert rule.struck.is_set()
            proxy.accept()
            eventually(lambda: router.health()["shard-0"]["state"] == "ok")
        router.close()


@pytest.fixture
def never_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of itself, in the time of a test."""
    monkeypatch.setattr(line, "_POLL", 60.0)
    monkeypatch.setattr(line, "_SLOWEST_POLL", 60.0)


@pytest.mark.usefixtures("never_looks_again")
def test_a_permit_that_comes_back_in_this_process_wakes_the_next_at_once(router: LockRouter, name: str) -> None:
    semaphore = router.semaphore(name, permits=1)
    held = semaphore.acquire(timeout=2.0)
    waiting = in_thread(lambda: semaphore.acquire(timeout=30.0))
    eventually(lambda: semaphore._line._queue)
    places = functools.partial(holders, semaphore._line.base, semaphore._line._places)
    eventually(places)  # it has looked, and waits
    held.release()
    waiting.result(5.0).release()


@pytest.mark.usefixtures("never_looks_again")
def test_a_waiter_looks_again_when_a_permit_expires(routers: Routers, name: str) -> None:
    with Proxy(routers.cluster.port(0)) as proxy:
        dead = routers.make(ports={0: proxy.port})
        permit = dead.semaphore(name, permits=1, ttl=1.0).acquire(timeout=2.0)
        proxy.stop()
        began = time.monotonic()
        routers.make().semaphore(name, permits=1).acquire(timeout=30.0).release()
        assert time.monotonic() - began < 5.0
        assert permit.lost
        dead.close()


def test_wrong_arguments(router: LockRouter, name: str) -> None:
    for wrong in (0, 1001):
        with pytest.raises(ValueError, match="permits"):
            router.semaphore(name, permits=wrong)
    with pytest.raises(TypeError, match="permits"):
        router.semaphore(name, permits=True)
    with pytest.raises(ValueError, match="ttl"):
        router.semaphore(name, permits=1, ttl=0.1)
    with pytest.raises(InvalidKey):
        router.semaphore("x" * 248, permits=1)
    with pytest.raises(ValueError, match="timeout"):
        router.semaphore(name, permits=1).acquire(timeout=-1)
