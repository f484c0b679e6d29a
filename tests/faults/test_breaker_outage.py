"""A shard that does not answer: refused or degraded by class, remembered by the handle, over when it answers again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockrouter import (
    LockLost,
    LockRouter,
    LockTimeout,
    LossReason,
    NotHeld,
    NoToken,
    ShardUnavailable,
    WouldDeadlock,
)
from lockrouter.config import KeyClass
from lockrouter.testing.binaries import Vendor
from lockrouter.testing.cluster import Cluster
from tests.support.observe import Routers, eventually, in_thread, keys_on, sharing_row, soon_enough
from tests.support.proxy import Cut, Proxy
from tests.support.servers import provision

pytestmark = pytest.mark.server

SHARD = 0
NAME = f"shard-{SHARD}"
REFUSE = KeyClass(prefix="strict:", on_outage="refuse")
QUICK = {"failures": 3, "probe_after": 0.3, "retry_delay": 0.05}


@pytest.fixture
def proxies(cluster: Cluster) -> Iterator[list[Proxy]]:
    """A proxy in front of each shard."""
    made = [Proxy(cluster.port(index)) for index in range(len(cluster))]
    yield made
    for proxy in made:
        proxy.close()


@pytest.fixture
def proxy(proxies: list[Proxy]) -> Proxy:
    """The way to the shard that goes down."""
    return proxies[SHARD]


@pytest.fixture
def make(routers: Routers, proxies: list[Proxy]) -> Callable[..., LockRouter]:
    """Makes a router behind the proxies whose breaker is quick; on_outage is "local" but for keys with "strict:"."""

    def router(**changes: Any) -> LockRouter:
        settings: dict[str, Any] = {
            "ports": {index: proxy.port for index, proxy in enumerate(proxies)},
            "classes": (REFUSE,),
            "breaker": QUICK,
            "pool": {"connect_timeout": 0.3},
        }
        return routers.make(**(settings | changes))

    return router


def is_open(router: LockRouter, index: int = SHARD) -> bool:
    return bool(router.health()[f"shard-{index}"]["breaker"] != "closed")


def take_down(proxy: Proxy, *routers: LockRouter) -> None:
    """The shard refuses, and every router has noticed: its own control session finds out."""
    proxy.refuse()
    for router in routers:
        eventually(lambda: is_open(router))  # noqa: B023 - called now


def bring_up(proxy: Proxy, *routers: LockRouter) -> None:
    """The shard answers, and every router has noticed."""
    proxy.accept()
    for router in routers:
        eventually(lambda: router.health()[NAME]["state"] == "ok")  # noqa: B023 - called now


def local_key(router: LockRouter) -> str:
    return keys_on(router, SHARD, prefix="local")[0]


def strict_key(router: LockRouter) -> str:
    return keys_on(router, SHARD, prefix="strict")[0]


def elsewhere(call: Callable[[], Any]) -> Any:
    return in_thread(call).result()


def real(router: LockRouter, key: str, timeout: float = 10.0) -> None:
    with router.lock(key, timeout=timeout, confirm=True) as held:
        assert not held.degraded
        assert held.token


@pytest.fixture
def router(make: Callable[..., LockRouter]) -> LockRouter:
    """A router that has locked on the shard while it was up."""
    made = make()
    real(made, local_key(made))
    return made


def test_a_dead_shard_is_refused_or_degraded_by_class(router: LockRouter, proxy: Proxy, routers: Routers) -> None:
    take_down(proxy, router)
    for _ in range(3):
        with pytest.raises(ShardUnavailable) as caught:
            router.lock(strict_key(router), timeout=20.0)
        assert caught.value.shard == NAME
        assert caught.value.__cause__ is not None
        with pytest.raises(ShardUnavailable):
            router.try_lock(strict_key(router))
        key = local_key(router)
        with router.lock(key, timeout=5.0) as held:
            assert held.degraded
            assert held.key == key
            assert held.address == router.route(key)
            assert held.lost is False
            with pytest.raises(NoToken):
                _ = held.token
        taken = router.try_lock(key)
        assert taken is not None
        assert taken.degraded
        taken.release()
        with pytest.raises(NotHeld):
            taken.release()
    assert routers.metric(router, "lockrouter_breaker_state", shard=NAME) > 0
    outcome = {"shard": NAME, "mode": "row", "outcome": "refused"}
    assert routers.metric(router, "lockrouter_acquires_total", **outcome) == 6
    outcome = {"shard": NAME, "mode": "local", "outcome": "degraded"}
    assert routers.metric(router, "lockrouter_acquires_total", **outcome) == 6
    bring_up(proxy, router)
    assert routers.metric(router, "lockrouter_breaker_state", shard=NAME) == 0
    real(router, key)
    real(router, strict_key(router))


def test_an_open_breaker_answers_at_once(router: LockRouter, proxy: Proxy) -> None:
    proxy.stop()
    proxy.cut(Cut.RST)
    eventually(lambda: is_open(router))

    def refused() -> None:
        with pytest.raises(ShardUnavailable):
            router.lock(strict_key(router), timeout=20.0)

    soon_enough(0.05, refused)
    soon_enough(0.05, lambda: router.lock(local_key(router), timeout=20.0).release())


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_the_call_that_opens_the_breaker_is_judged_by_the_new_state(
    make: Callable[..., LockRouter], proxy: Proxy, failures: int
) -> None:
    """Two retries: the third failed attempt of one call opens a breaker of three, if nobody else did before."""
    breaker = QUICK | {"failures": failures, "retries": 2}
    proxy.refuse()
    router = make(breaker=breaker)
    with router.lock(local_key(router), timeout=5.0) as held:
        assert held.degraded
    strict = make(breaker=breaker)
    with pytest.raises(ShardUnavailable):
        strict.lock(strict_key(strict), timeout=5.0)
    assert is_open(strict)


def test_a_silent_shard_degrades_within_the_deadline(router: LockRouter, proxy: Proxy) -> None:
    proxy.stop()
    began = time.monotonic()
    with router.lock(local_key(router), timeout=8.0) as held:
        assert held.degraded
    assert time.monotonic() - began < 8.1
    bring_up(proxy, router)
    real(router, local_key(router))


# -- what degraded locks do -------------------------------------------------------------------------------------------


def test_degraded_locks_exclude_the_whole_process(
    make: Callable[..., LockRouter], router: LockRouter, proxy: Proxy
) -> None:
    other = make()
    real(other, local_key(router))
    take_down(proxy, router, other)
    key = local_key(router)
    held = router.lock(key, timeout=5.0)
    assert held.degraded
    for caller in (router, other):
        for asked in (key, sharing_row(router, key)):
            assert elsewhere(lambda: caller.try_lock(asked)) is None  # noqa: B023 - ended before the next turn
        with pytest.raises(LockTimeout) as caught:
            in_thread(lambda: caller.lock(key, timeout=0.05)).result()  # noqa: B023 - as above
        assert caught.value.key == key.encode()
    waiter = in_thread(lambda: other.lock(key, timeout=30.0))
    free = keys_on(router, SHARD, 2, prefix="local")[1]
    router.lock(free, timeout=0).release()
    held.release()
    got = waiter.result()
    assert got.degraded
    got.release()


def test_degraded_locks_are_granted_in_order(router: LockRouter, proxy: Proxy, routers: Routers) -> None:
    take_down(proxy, router)
    key = local_key(router)
    held = router.lock(key, timeout=5.0)
    order: list[int] = []

    def take(number: int) -> None:
        with router.lock(key, timeout=30.0) as mine:
            assert mine.degraded
            order.append(number)

    threads = []
    for number in range(6):
        threads.append(in_thread(lambda: take(number)))  # noqa: B023 - queued before the next turn
        eventually(lambda: routers.waiting(router, SHARD) == number + 1)  # noqa: B023 - as above
    held.release()
    for thread in threads:
        thread.result()
    assert order == list(range(6))


def test_degraded_locks_nest(router: LockRouter, proxy: Proxy) -> None:
    take_down(proxy, router)
    key = local_key(router)
    with router.lock(key, timeout=5.0) as outer:
        with router.lock(key, timeout=0) as inner, router.lock(sharing_row(router, key), timeout=0) as twin:
            assert outer.degraded and inner.degraded and twin.degraded
        with pytest.raises(WouldDeadlock):
            router.lock(key, timeout=5.0, reentrant=False)
        assert elsewhere(lambda: router.try_lock(key)) is None
    elsewhere(lambda: router.lock(key, timeout=0).release())
    named = router.lock(key, timeout=5.0, owner="me")
    elsewhere(lambda: router.lock(key, timeout=0, owner="me").release())
    named.release()


def test_a_dropped_degraded_handle_is_released(router: LockRouter, proxy: Proxy) -> None:
    take_down(proxy, router)
    key = local_key(router)
    with pytest.warns(ResourceWarning):
        router.lock(key, timeout=5.0)
    elsewhere(lambda: router.lock(key, timeout=3.0).release())


def test_a_cycle_of_degraded_locks_is_refused(router: LockRouter, proxy: Proxy, routers: Routers) -> None:
    take_down(proxy, router)
    first, second = keys_on(router, SHARD, 2, prefix="local")
    up, go = threading.Event(), threading.Event()

    def opposite() -> None:
        with router.lock(second, timeout=5.0):
            up.set()
            go.wait(10.0)
            with router.lock(first, timeout=20.0):
                pass

    with router.lock(first, timeout=5.0):
        thread = in_thread(opposite)
        assert up.wait(10.0)
        go.set()
        eventually(lambda: routers.waiting(router, SHARD) == 1)
        with pytest.raises(WouldDeadlock):
            router.lock(second, timeout=20.0)
    thread.result()


def test_who_waits_at_the_gate_of_the_process_is_judged_anew(
    make: Callable[..., LockRouter], router: LockRouter, proxy: Proxy, routers: Routers
) -> None:
    """The shard is back when another router's degraded lock ends: what follows is the row, or an error, as for all."""
    other, outside = make(), routers.make()
    real(other, local_key(router))
    take_down(proxy, router, other)
    key, second = keys_on(router, SHARD, 2, prefix="local")
    held, more = router.lock(key, timeout=5.0), router.lock(second, timeout=5.0)
    waiter = in_thread(lambda: other.lock(key, timeout=30.0))
    late = in_thread(lambda: other.lock(second, timeout=30.0))
    eventually(lambda: routers.waiting(other, SHARD) == 2)
    bring_up(proxy, router, other)
    with outside.lock(second, timeout=5.0):
        held.release()
        with waiter.result() as got:
            assert not got.degraded
            assert got.token
            assert outside.try_lock(key) is None
        more.release()
        routers.observers[SHARD].await_waiters()
    late.result().release(confirm=True)


def test_a_closed_router_leaves_the_gate_of_the_process(
    make: Callable[..., LockRouter], router: LockRouter, proxy: Proxy
) -> None:
    """Its locks are lost, those that nobody will ever release, too."""
    leaving = make(router={"close_timeout": 0.05})
    real(leaving, local_key(router))
    take_down(proxy, router, leaving)
    key = local_key(router)
    held = leaving.lock(key, timeout=5.0)
    assert elsewhere(lambda: router.try_lock(key)) is None
    leaving.close()
    assert held.lost
    with router.lock(key, timeout=0) as after:
        assert after.degraded
        with pytest.raises(LockLost) as caught:
            held.release()
        assert caught.value.reason is LossReason.ROUTER_CLOSED
        assert elsewhere(lambda: router.try_lock(key)) is None, "the late release freed what was another's"


def test_a_change_is_logged_once_and_no_lock_is(
    router: LockRouter, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="lockrouter")
    for _ in range(2):
        caplog.clear()
        take_down(proxy, router)
        for _ in range(20):
            router.lock(local_key(router), timeout=5.0).release()
            with pytest.raises(ShardUnavailable):
                router.lock(strict_key(router), timeout=5.0)
        began = router._core.shards[NAME].breaker.openings
        time.sleep(0.5)  # one or two probes fail meanwhile
        assert router._core.shards[NAME].breaker.openings == began
        bring_up(proxy, router)
        said = [record.getMessage() for record in caplog.records if NAME in record.getMessage()]
        assert len([text for text in said if "does not answer" in text]) == 1, said
        assert len([text for text in said if "answers again" in text]) == 1, said
        # Beside it: the window cannot be renewed, so that nothing is granted; later it is again.
        assert len(said) == len(set(said)) <= 5, said


LIMITS = {
    "MAX_USER_CONNECTIONS": ("WITH MAX_USER_CONNECTIONS 1", "WITH MAX_USER_CONNECTIONS 0", "1226"),
    "MAX_QUERIES_PER_HOUR": ("WITH MAX_QUERIES_PER_HOUR 1", "WITH MAX_QUERIES_PER_HOUR 0", "1226"),
    "ACCOUNT LOCK": ("ACCOUNT LOCK", "ACCOUNT UNLOCK", "locked"),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_server_that_refuses_this_user_is_no_dead_one(routers: Routers, limit: str) -> None:
    """It may be granting to every other user: nothing degrades. MariaDB's number for a locked account is 4151."""
    server, on, off, word = routers.observers[SHARD], *LIMITS[limit]
    before = routers.make()
    real(before, local_key(before))
    before.close()

    def alter(change: str) -> None:
        for host in ("127.0.0.1", "localhost"):
            server.ask(f"ALTER USER lockrouter@{host} {change}")
        server.ask("FLUSH USER_RESOURCES")

    alter(on)
    try:
        router = routers.make(breaker={"failures": 1})
        for _ in range(4):
            with pytest.raises(ShardUnavailable) as caught:
                router.lock(local_key(router), timeout=0.3)
            with pytest.raises(ShardUnavailable):
                router.try_lock(local_key(router))
        assert word in f"{caught.value} {caught.value.__cause__!r} {router.health()[NAME]['why']}"
        assert router.health()[NAME]["breaker"] == "closed"
    finally:
        alter(off)
    eventually(lambda: router.health()[NAME]["state"] == "ok")
    real(router, local_key(router))


@pytest.mark.slow
def test_a_server_whose_tables_are_read_only_is_no_dead_one(vendor: Vendor, tmp_path: Path) -> None:
    """Started with `innodb_read_only`: it reads, and no write of anybody's will ever be committed."""
    with Cluster.up(tmp_path / "frozen", 1, vendor) as cluster:
        provision(cluster)
        kept = Routers(cluster)
        first = kept.make()
        real(first, "any")
        first.close()
        cluster.stop(0)
        cluster.start(0, {"innodb-read-only": True})
        router = kept.make(breaker={"failures": 1})
        for _ in range(6):
            with pytest.raises(ShardUnavailable):
                router.lock("any", timeout=1.0)
            with pytest.raises(ShardUnavailable):
                router.try_lock("any")
            assert router.health()["shard-0"]["breaker"] == "closed"
        kept.finish()


@pytest.mark.parametrize("how", ["interrupted", "failed"])
def test_a_probe_that_ends_otherwise_gives_its_place_back(
    router: LockRouter, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    keeper = router._core.shards[NAME].keeper
    take_down(proxy, router)
    inner, ended = keeper._read, threading.Event()

    def cut_short() -> Any:
        if not ended.is_set() and router._core.shards[NAME].breaker.state == 1:
            ended.set()
            raise KeyError("nobody foresaw this") if how == "failed" else TimeoutError("nor this")
        return (yield from inner())

    monkeypatch.setattr(keeper, "_read", cut_short)
    assert ended.wait(10.0)
    bring_up(proxy, router)
    real(router, local_key(router))


# -- flips ------------------------------------------------------------------------------------------------------------


def test_a_degraded_lock_stays_one_when_the_shard_is_back(router: LockRouter, proxy: Proxy) -> None:
    take_down(proxy, router)
    key = local_key(router)
    held = router.lock(key, timeout=5.0)
    waiter = in_thread(lambda: router.lock(key, timeout=30.0))
    bring_up(proxy, router)
    assert held.degraded
    with pytest.raises(NoToken):
        _ = held.token
    with router.lock(key, timeout=0) as nested:
        assert nested.degraded
        with pytest.raises(NoToken):
            _ = nested.token
    assert elsewhere(lambda: router.try_lock(key)) is None
    held.release()
    got = waiter.result()
    got.release()
    with pytest.raises(NotHeld):
        held.release()
    real(router, key)


def test_promotion_takes_the_row_and_a_token(
    make: Callable[..., LockRouter], router: LockRouter, proxy: Proxy, routers: Routers
) -> None:
    outside = routers.make()
    key, twin = local_key(router), sharing_row(router, local_key(router))
    with outside.lock(key, timeout=5.0) as before:
        pass
    take_down(proxy, router)
    held = router.lock(key, timeout=5.0)
    nested = router.lock(twin, timeout=0)
    reasons: list[LossReason] = []
    held.on_lost(reasons.append)
    for timeout in (0, 0.3):
        with pytest.raises(ShardUnavailable):
            held.promote(timeout=timeout)
    assert routers.held(router, SHARD, "local") == 1
    bring_up(proxy, router)
    waiter = in_thread(lambda: router.lock(key, timeout=30.0))
    assert held.promote(timeout=5.0)
    assert held.promote(timeout=0), "again: nothing to do"
    assert held.degraded and nested.degraded, "for their whole life"
    assert held.token > before.token
    assert nested.token == held.token
    assert nested.promote()
    held.check()
    assert outside.try_lock(key) is None
    assert (routers.held(router, SHARD, "local"), routers.held(router, SHARD, "row")) == (0, 1)
    with router.lock(key, timeout=0) as inner:
        assert inner.token == held.token
    nested.release()
    assert outside.try_lock(key) is None
    token = held.token
    held.release(confirm=True)
    assert held.token == token
    got = waiter.result()
    assert got.token > token
    got.release()
    with pytest.raises(NotHeld):
        held.promote()
    assert not reasons
    count = {"shard": NAME, "mode": "row"}
    assert routers.metric(router, "lockrouter_hold_seconds_count", **count) == 3, "the first, the promoted, the waiter"
    assert routers.metric(router, "lockrouter_hold_seconds_count", shard=NAME, mode="local") == 1


@pytest.mark.parametrize("shared", [False, True], ids=["exclusive", "shared"])
def test_promotion_of_a_busy_row_changes_nothing(
    make: Callable[..., LockRouter], router: LockRouter, proxy: Proxy, routers: Routers, shared: bool
) -> None:
    outside = routers.make()
    key = local_key(router)
    take_down(proxy, router)
    held = router.lock(key, timeout=5.0, shared=shared)
    bring_up(proxy, router)
    with outside.lock(key, timeout=5.0):
        assert not held.promote(timeout=0)
        soon_enough(0.3, lambda: held.promote(timeout=0.2))
        with pytest.raises(NoToken):
            _ = held.token
        assert elsewhere(lambda: router.try_lock(key)) is None
    assert held.promote(timeout=5.0)
    reader = outside.try_lock(key, shared=True)
    assert (reader is not None) is shared
    if reader is not None:
        reader.release()
    held.release(confirm=True)
    outcomes = [
        routers.metric(router, "lockrouter_acquires_total", shard=NAME, mode="row", outcome=outcome)
        for outcome in ("busy", "timeout", "acquired")
    ]
    assert outcomes[0] >= 1 and outcomes[1] >= 1 and outcomes[2] == 2
    real(router, key)


def test_a_promoted_lock_can_be_lost_dropped_and_released_meanwhile(
    router: LockRouter, proxy: Proxy, routers: Routers
) -> None:
    outside, server = routers.make(), routers.observers[SHARD]
    key = local_key(router)
    take_down(proxy, router)
    held = router.lock(key, timeout=5.0)
    bring_up(proxy, router)
    reasons: list[LossReason] = []
    held.on_lost(reasons.append)
    assert held.promote(timeout=5.0)
    server.kill(eventually(server.holders)[0])
    eventually(lambda: held.lost)
    assert eventually(lambda: reasons) == [LossReason.CLOSED]
    with pytest.raises(LockLost):
        held.promote()
    with pytest.raises(LockLost):
        held.release()
    lost = routers.metric(router, "lockrouter_lost_total", shard=NAME, mode="row", reason="closed")
    assert lost == 1, "as what it was when it was lost"
    take_down(proxy, router)
    held = router.lock(key, timeout=5.0)
    bring_up(proxy, router)
    with outside.lock(key, timeout=5.0):
        promoting = in_thread(lambda: held.promote(timeout=30.0))
        server.await_waiters()
        held.release()
    with pytest.raises(NotHeld):
        promoting.result()
    routers.quiet()
    take_down(proxy, router)
    dropped = [router.lock(key, timeout=5.0)]
    bring_up(proxy, router)
    assert dropped[0].promote(timeout=5.0)
    with pytest.warns(ResourceWarning):
        dropped.clear()
    real(router, key)


def test_a_real_lock_stays_one_while_the_shard_is_away(
    make: Callable[..., LockRouter], router: LockRouter, proxy: Proxy
) -> None:
    """New connections are refused, and so is the control session; the holder's own connection lives on."""
    key, second = keys_on(router, SHARD, 2, prefix="local")
    held = router.lock(key, timeout=5.0)
    token = held.token
    proxy.refuse(cut=None)
    proxy.cut(Cut.RST, said=b"clock_high")  # the control and the writer session
    eventually(lambda: is_open(router))
    with router.lock(key, timeout=0) as nested:
        assert not nested.degraded
        assert nested.token == token
    with router.lock(second, timeout=5.0) as aside:
        assert aside.degraded
    assert elsewhere(lambda: router.try_lock(key)) is None
    assert not held.lost
    held.check()
    waiter = in_thread(lambda: router.lock(key, timeout=30.0))
    bring_up(proxy, router)
    assert not held.degraded
    assert held.token == token
    held.release(confirm=True)
    got = waiter.result()
    assert not got.degraded
    assert got.token > token
    got.release(confirm=True)


def test_a_real_lock_whose_connection_goes_is_lost_not_degraded(router: LockRouter, proxy: Proxy) -> None:
    key = local_key(router)
    held = router.lock(key, timeout=5.0)
    take_down(proxy, router)
    eventually(lambda: held.lost)
    assert not held.degraded
    with pytest.raises(LockLost):
        held.check()
    assert elsewhere(lambda: router.try_lock(key)) is None  # its holder has not left yet
    with pytest.raises(LockLost):
        held.release()
    with elsewhere(lambda: router.lock(key, timeout=5.0)) as after:
        assert after.degraded


@pytest.mark.parametrize("prefix", ["strict", "local"])
def test_exclusion_inside_the_process_over_many_flips(
    router: LockRouter, proxy: Proxy, routers: Routers, prefix: str
) -> None:
    key = keys_on(router, SHARD, prefix=prefix)[0]
    value = inside = done = degraded = 0
    stop = threading.Event()

    def work() -> None:
        nonlocal value, inside, done, degraded
        while not stop.is_set():
            try:
                with router.lock(key, timeout=2.0) as held:
                    inside += 1
                    assert inside == 1
                    before = value
                    time.sleep(0.0005)
                    value = before + 1
                    done += 1
                    degraded += held.degraded
                    inside -= 1
            except (ShardUnavailable, LockLost, LockTimeout):
                stop.wait(0.01)

    threads = [in_thread(work) for _ in range(6)]
    for _ in range(3):
        seen = done
        eventually(lambda: done > seen + 20)  # noqa: B023 - called now
        take_down(proxy, router)
        if prefix == "local":
            seen = done
            eventually(lambda: done > seen + 20)  # noqa: B023 - called now
        bring_up(proxy, router)
    stop.set()
    for thread in threads:
        thread.result()
    assert value == done > 60
    assert (degraded > 0) == (prefix == "local")


# -- other shards -----------------------------------------------------------------------------------------------------


def test_other_shards_go_on(router: LockRouter, proxy: Proxy) -> None:
    take_down(proxy, router)
    for index in range(1, 4):
        key = keys_on(router, index, prefix="strict")[0]
        real(router, key)
        soon_enough(0.2, lambda: real(router, key))  # noqa: B023 - called now
        assert not is_open(router, index)


def test_a_storm_refuses_everywhere_but_on_healthy_shards(
    make: Callable[..., LockRouter], proxies: list[Proxy]
) -> None:
    router = make(router={"storm_ratio": 0.5})
    keys = [keys_on(router, index, prefix="local")[0] for index in range(4)]
    for key in keys:
        real(router, key)
    proxies[0].refuse()
    eventually(lambda: is_open(router, 0))
    with router.lock(keys[0], timeout=5.0) as alone:
        assert alone.degraded
    proxies[1].refuse()
    eventually(lambda: is_open(router, 1))
    for key in keys[:2]:
        with pytest.raises(ShardUnavailable):
            router.lock(key, timeout=5.0)
        with pytest.raises(ShardUnavailable):
            router.try_lock(key)
    for key in keys[2:]:
        real(router, key)
    proxies[1].accept()
    eventually(lambda: not is_open(router, 1))
    with router.lock(keys[0], timeout=5.0) as again:
        assert again.degraded
    real(router, keys[1])


def test_two_dead_shards_below_the_ratio_are_no_storm(make: Callable[..., LockRouter], proxies: list[Proxy]) -> None:
    router = make()
    keys = [keys_on(router, index, prefix="local")[0] for index in range(2)]
    for index, key in enumerate(keys):
        real(router, key)
        proxies[index].refuse()
    for index, key in enumerate(keys):
        eventually(lambda: is_open(router, index))  # noqa: B023 - called now
        with router.lock(key, timeout=5.0) as held:
            assert held.degraded


def test_an_outage_of_everything_is_a_storm(make: Callable[..., LockRouter], proxies: list[Proxy]) -> None:
    router = make()
    real(router, local_key(router))
    for proxy in proxies:
        proxy.refuse()
    eventually(lambda: all(is_open(router, index) for index in range(4)))
    with pytest.raises(ShardUnavailable):
        router.lock(local_key(router), timeout=5.0)


# -- probes and recovery ----------------------------------------------------------------------------------------------


def test_one_probe_at_a_time(router: LockRouter, proxy: Proxy) -> None:
    """A silent probe takes `connect_timeout`, the next comes `probe_after` later, however many callers there are."""
    proxy.stop()
    proxy.cut(Cut.RST)
    eventually(lambda: is_open(router))
    before, until = proxy.accepted, time.monotonic() + 2.0
    while time.monotonic() < until:
        router.lock(local_key(router), timeout=1.0).release()
        with pytest.raises(ShardUnavailable):
            router.lock(strict_key(router), timeout=1.0)
        threading.Event().wait(0.02)
    assert 1 <= proxy.accepted - before <= 2.0 / (0.3 * 0.8) + 2
    bring_up(proxy, router)
    real(router, strict_key(router))


def test_recovery_needs_no_caller(router: LockRouter, proxy: Proxy) -> None:
    take_down(proxy, router)
    proxy.accept()
    began = time.monotonic()
    eventually(lambda: router.health()[NAME]["state"] == "ok")
    assert time.monotonic() - began < 0.3 * 1.2 + 3.0
    real(router, strict_key(router))


def test_a_shard_that_answers_with_an_error_is_no_longer_degraded_around(
    router: LockRouter, proxy: Proxy, routers: Routers
) -> None:
    take_down(proxy, router)
    router.lock(local_key(router), timeout=5.0).release()
    server = routers.observers[SHARD]
    server.ask("SET GLOBAL read_only = 1")
    try:
        proxy.accept()
        eventually(lambda: "read-only" in str(router.health()[NAME]["why"]))
        for _ in range(3):
            with pytest.raises(ShardUnavailable, match="read-only"):
                router.lock(local_key(router), timeout=3.0)
            with pytest.raises(ShardUnavailable):
                router.try_lock(local_key(router))
    finally:
        server.ask("SET GLOBAL read_only = 0")
    eventually(lambda: router.health()[NAME]["state"] == "ok")
    real(router, local_key(router))


def test_a_real_server_killed_and_started_again(routers: Routers, cluster: Cluster) -> None:
    router = routers.make(classes=(REFUSE,))
    key, strict = local_key(router), strict_key(router)
    before = router.lock(key, timeout=5.0)
    before.release(confirm=True)
    cluster.kill(SHARD)
    try:
        eventually(lambda: is_open(router))
        with router.lock(key, timeout=3.0) as held:
            assert held.degraded
        with pytest.raises(ShardUnavailable):
            router.lock(strict, timeout=3.0)
    finally:
        cluster.start(SHARD)
    eventually(lambda: router.health()[NAME]["state"] == "ok", 15.0)
    with router.lock(key, timeout=10.0) as after:
        assert not after.degraded
        assert after.token > before.token
    real(router, strict)


def test_warm_says_that_a_shard_is_down(router: LockRouter, proxy: Proxy) -> None:
    take_down(proxy, router)
    with pytest.raises(ShardUnavailable):
        router.warm()
    bring_up(proxy, router)
    router.warm()
    real(router, local_key(router))
