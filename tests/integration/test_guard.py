"""`guard` on real servers: one runs, the others skip and can say why."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import time

import pytest

from lockrouter import SKIPPED, LockLost, LockRouter, ShardUnavailable
from lockrouter.recipes.own import Kind, Place, holder_of
from tests.support.observe import Observer, Routers, eventually, in_thread, keys_on
from tests.support.proxy import Cut, Proxy, Rule, Way

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("no_leases")]


@pytest.fixture
def name(router: LockRouter) -> str:
    return keys_on(router, 0, prefix="job")[0]


def left(router: LockRouter, name: str) -> float | None:
    """Seconds until the guard's lease expires; None: nobody holds it."""
    held = holder_of(Place(router._core, Kind.GUARD, name))
    return None if held is None else held.left


def test_one_runs_and_the_others_skip(routers: Routers, router: LockRouter, name: str) -> None:
    inside, go_on = threading.Event(), threading.Event()
    other = routers.make()

    @router.guard(name, ttl=1.0)
    def job(number: int, *, word: str = "") -> str:
        inside.set()
        assert go_on.wait(20.0)
        return f"{number}{word}"

    @other.guard(name, ttl=1.0)
    def elsewhere() -> str:
        return "elsewhere"

    running = in_thread(lambda: job(7, word="x"))
    assert inside.wait(10.0)
    assert elsewhere() is SKIPPED
    assert job(8) is SKIPPED
    assert elsewhere.reason is not None
    assert "held by" in elsewhere.reason
    assert f":{os.getpid()}" in elsewhere.reason
    time.sleep(2.0)  # longer than its ttl: it is kept alive
    assert elsewhere() is SKIPPED
    go_on.set()
    assert running.result() == "7x"
    assert elsewhere() == "elsewhere"
    assert job.__name__ == "job"
    assert job.reason is not None


def test_skipped_is_falsy_and_says_its_name() -> None:
    assert not SKIPPED
    assert repr(SKIPPED) == "SKIPPED"
    assert pickle.loads(pickle.dumps(SKIPPED)) is copy.deepcopy(SKIPPED) is SKIPPED


def test_at_least_holds_it_without_anybody(routers: Routers, router: LockRouter, name: str) -> None:
    with router.guard(name, ttl=30.0, at_least=2.0) as held:
        assert held
    router.close()
    other = routers.make()
    assert not other.guard(name, ttl=30.0)(lambda: True)()
    seconds = left(other, name)
    assert seconds is not None
    assert 0.5 < seconds <= 2.0, "neither free, nor held for its ttl"
    eventually(lambda: other.guard(name, ttl=30.0)(lambda: True)(), 10.0)


def test_at_least_may_be_longer_than_the_ttl(router: LockRouter, name: str) -> None:
    with router.guard(name, ttl=1.0, at_least=60.0):
        pass
    seconds = left(router, name)
    assert seconds is not None
    assert 55.0 < seconds <= 60.0


def test_at_least_that_has_passed_frees_at_once(router: LockRouter, name: str) -> None:
    with router.guard(name, ttl=5.0, at_least=0.2):
        time.sleep(0.3)
    assert left(router, name) is None


def test_a_method_can_be_guarded(router: LockRouter, name: str) -> None:
    class Reports:
        written = 0

        @router.guard(name, at_least=60.0)
        def write(self, number: int) -> int:
            self.written += number
            return self.written

    reports = Reports()
    assert reports.write(3) == 3
    assert reports.write(3) is SKIPPED
    assert "held by" in reports.write.reason
    assert reports.written == 3


def test_an_error_is_the_caller_s_and_frees_it(router: LockRouter, name: str) -> None:
    @router.guard(name)
    def fails() -> None:
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fails()


def test_a_guard_that_was_lost_says_so(router: LockRouter, server: Observer, name: str) -> None:
    table = f"lease_{router.route(name).table:02d}"
    with pytest.raises(LockLost), router.guard(name):
        server.ask(f"DELETE FROM {table}")
    with pytest.raises(LockLost), router.guard(name, at_least=60.0):
        server.ask(f"DELETE FROM {table}")
    with pytest.raises(ZeroDivisionError) as raised, router.guard(name):
        server.ask(f"DELETE FROM {table}")
        raise ZeroDivisionError
    assert "lost" in raised.value.__notes__[0]


def test_it_cannot_meet_a_lease_or_a_lock_of_the_same_name(router: LockRouter, name: str) -> None:
    with router.lease(name, ttl=5.0), router.lock(name), router.guard(name) as held:
        assert held


def test_an_outage_is_an_error(routers: Routers, name: str) -> None:
    with Proxy(routers.cluster.port(0)) as proxy:
        router = routers.make(ports={0: proxy.port}, router={"on_outage": "local", "timeout": 1.0})
        router.warm()
        proxy.refuse()
        with pytest.raises(ShardUnavailable):
            router.guard(name)(lambda: 1)()
        proxy.accept()
        eventually(lambda: router.health()["shard-0"]["state"] == "ok")
        assert router.guard(name)(lambda: 1)() == 1
        router.close()


def test_a_lost_reply_on_leaving_is_settled(routers: Routers, name: str) -> None:
    with Proxy(routers.cluster.port(0)) as proxy:
        router = routers.make(ports={0: proxy.port})
        router.warm()
        with router.guard(name, at_least=60.0):
            rule = proxy.add(Rule(Way.DOWN, 0, Cut.RST, marker=b"\x03COMMIT"))
        assert rule.struck.is_set()
        seconds = left(router, name)
        assert seconds is not None
        assert 55.0 < seconds <= 60.0
        router.close()


def test_wrong_use(router: LockRouter, name: str) -> None:
    async def later() -> None:
        pass

    with pytest.raises(TypeError, match="plain functions"):
        router.guard(name)(later)
    for wrong in ({"ttl": 0.5}, {"at_least": -1.0}, {"at_least": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            router.guard(name, **wrong)
    guard = router.guard(name)
    with guard as held:
        assert held
        with pytest.raises(RuntimeError, match="entered already"), guard:
            pass
        assert not held.lost
