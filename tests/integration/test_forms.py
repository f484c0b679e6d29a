"""Shared row locks and several rows at once, on real servers."""

from __future__ import annotations

import random
import threading

import pytest
from prometheus_client import CollectorRegistry

from lockrouter import InvalidKey, LockRouter, LockSet, LockTimeout, LossReason, NotHeld, Overdue, WouldDeadlock
from lockrouter.config import KeyClass
from lockrouter.errors import LockLost
from lockrouter.testing.cluster import Cluster
from tests.support.observe import Observer, Routers, eventually, in_thread, keys_on, sharing_row

pytestmark = pytest.mark.server


# -- shared -------------------------------------------------------------------------------------------------------


def test_readers_share_in_the_process_and_between_processes(router: LockRouter, other: LockRouter) -> None:
    with router.lock("shared:1", shared=True) as first:
        second = in_thread(lambda: router.try_lock("shared:1", shared=True)).result()
        third = other.try_lock("shared:1", shared=True)
        assert second is not None and third is not None
        assert second._hold.session is not first._held.session, "every local reader has a session of its own"
        assert in_thread(lambda: router.try_lock("shared:1")).result() is None, "readers exclude writers here"
        assert in_thread(lambda: other.try_lock("shared:1")).result() is None, "and there"
        second.release()
        third.release()
    writer = router.try_lock("shared:1")
    assert writer is not None, "the row is free after the last reader"
    writer.release()


def test_a_writer_excludes_readers(router: LockRouter, other: LockRouter) -> None:
    with router.lock("shared:2"):
        assert in_thread(lambda: router.try_lock("shared:2", shared=True)).result() is None
        assert other.try_lock("shared:2", shared=True) is None


def test_no_reader_passes_a_waiting_writer(router: LockRouter, routers: Routers) -> None:
    key = keys_on(router, 0, prefix="reader")[0]
    first = router.lock(key, shared=True)
    writer = in_thread(lambda: router.lock(key, timeout=20))
    eventually(lambda: routers.waiting(router) == 1)
    late = in_thread(lambda: router.lock(key, timeout=20, shared=True))
    eventually(lambda: routers.waiting(router) == 2)
    assert in_thread(lambda: router.try_lock(key, shared=True)).result() is None
    first.release()
    written = writer.result()
    assert late.is_alive()
    written.release()
    late.result().release()


def test_readers_behind_a_writer_that_gives_up_go_on(router: LockRouter, routers: Routers) -> None:
    key = keys_on(router, 0, prefix="giveup")[0]
    first = router.lock(key, shared=True)
    writer = in_thread(lambda: router.lock(key, timeout=1.0))
    eventually(lambda: routers.waiting(router) == 1)
    late = in_thread(lambda: router.lock(key, timeout=20, shared=True))
    with pytest.raises(LockTimeout):
        writer.result()
    late.result().release()
    first.release()


def test_shared_and_exclusive_of_one_owner_do_not_mix(router: LockRouter) -> None:
    with router.lock("shared:3", shared=True), router.lock("shared:3", shared=True), pytest.raises(WouldDeadlock):
        router.lock("shared:3")
    with router.lock("shared:3"), pytest.raises(WouldDeadlock):
        router.lock("shared:3", shared=True)


def test_a_later_writer_has_a_higher_token_than_readers(router: LockRouter) -> None:
    with router.lock("shared:4") as writer:
        before = writer.token
    with router.lock("shared:4", shared=True) as reader:
        assert reader.token > before
        between = reader.token
    with router.lock("shared:4") as writer:
        assert writer.token > between


def test_a_class_ends_what_is_held_for_longer_than_its_max_hold(routers: Routers) -> None:
    router = routers.make(classes=(KeyClass("short:", max_hold=0.4, kill=True),))
    held = router.lock("short:1")
    told: list[LossReason] = []
    held.on_lost(told.append)
    eventually(lambda: held.lost)
    assert eventually(lambda: told) == [LossReason.KILLED]
    routers.make().lock("short:1", timeout=5).release()
    with pytest.raises(LockLost):
        held.release()


def test_a_class_without_kill_only_warns(routers: Routers, caplog: pytest.LogCaptureFixture) -> None:
    router = routers.make(classes=(KeyClass("short:", max_hold=0.4),))
    with caplog.at_level("WARNING", "lockrouter"), router.lock("short:2", confirm=True) as held:
        shard = held.address.shard
        eventually(lambda: routers.metric(router, "lockrouter_overdue", shard=shard) == 1)
        assert "is held for" in caplog.text
    assert routers.metric(router, "lockrouter_overdue", shard=shard) == 0


def test_who_holds_for_too_long_is_reported_once(routers: Routers, cluster: Cluster) -> None:
    """Every way of holding counts; the callback has a thread of its own."""
    told: list[Overdue] = []
    threads: list[str] = []

    def tell(overdue: Overdue) -> None:
        told.append(overdue)
        threads.append(threading.current_thread().name)

    registry = CollectorRegistry()
    config = routers.configure(classes=(KeyClass("slow:", max_hold=0.3), KeyClass("shot:", max_hold=0.3, kill=True)))
    with LockRouter(config, registry=registry, on_overdue=tell) as router:
        key, shot = keys_on(router, 0, prefix="slow")[0], keys_on(router, 0, prefix="shot")[0]
        with router.lock(key) as held:
            eventually(lambda: told)
            assert not held.lost
            assert told == [Overdue(key.encode(), router.route(key), told[0].held_for, told[0].holder, False)]
            assert told[0].held_for > 0.3
            assert "MainThread" in told[0].holder
            several = router.lock_all([key])
            with pytest.raises(LockLost), router.transaction(shot) as connection:
                eventually(lambda: connection.info["lock"].lost)
            several.release()
            assert eventually(lambda: told[1:])[0].killed
        both = router.lock_all([*keys_on(router, 0, 2, prefix="slow"), shot])
        with pytest.raises(LockLost), both:
            eventually(lambda: both.lost)
        assert threads == ["lockrouter-on-overdue"] * len(told)


# -- several rows -------------------------------------------------------------------------------------------------


def test_all_rows_are_taken_and_freed_together(router: LockRouter, other: LockRouter) -> None:
    keys = [f"all:{number}" for number in range(20)]
    with router.lock_all(keys) as held:
        assert isinstance(held, LockSet)
        assert set(held.tokens) == set(keys)
        assert not held.degraded and not held.lost
        assert repr(held) == "<LockSet of 20 held>"
        held.check()
        sessions = {member._held.session for member in held}
        assert len(sessions) == len({router.route(key).shard for key in keys}), "one session per shard"
        assert all(other.try_lock(key) is None for key in keys)
    assert repr(held) == "<LockSet of 20 released>"
    for key in keys:
        again = other.lock(key, timeout=1)
        assert again.token > held.tokens[key]
        again.release()


def test_doubles_none_and_too_many(router: LockRouter) -> None:
    with router.lock_all([]) as nothing:
        assert len(nothing) == 0
    with router.lock_all(["x", b"x", "x"]) as one:
        assert len(one) == 1
    with pytest.raises(ValueError, match="1000"):
        router.lock_all(f"k{number}" for number in range(1001))
    with pytest.raises(InvalidKey):
        router.lock_all(["fine", ""])
    with pytest.raises(TypeError):
        router.lock_all("one key")


def test_two_keys_of_one_row_are_one_row(router: LockRouter, other: LockRouter) -> None:
    key = "pair:1"
    twin = sharing_row(router, key)
    with router.lock_all([key, twin]) as held:
        assert set(held.tokens) == {key, twin}
        assert other.try_lock(twin) is None
    eventually(lambda: other.try_lock(twin)).release()


def test_a_busy_row_frees_the_others(router: LockRouter, other: LockRouter) -> None:
    first, second = keys_on(router, 0, 2, prefix="busy")
    order = sorted((first, second), key=lambda key: router.route(key).slot)
    with other.lock(order[1]):
        with pytest.raises(LockTimeout):
            router.lock_all(order, timeout=0.3)
        free = eventually(lambda: other.try_lock(order[0]))
        free.release()


def test_a_caller_who_holds_a_row_gets_what_it_holds_or_an_error(router: LockRouter) -> None:
    with router.lock("mine:1") as outer:
        with router.lock_all(["mine:1"]) as inner:
            assert inner["mine:1"].token == outer.token
        with pytest.raises(WouldDeadlock):
            router.lock_all(["mine:1", "mine:2"])
        outer.check()


def test_members_know_a_loss_and_release_tells_it_once(router: LockRouter, server: Observer) -> None:
    keys = keys_on(router, 0, 3, prefix="loss")
    held = router.lock_all(keys)
    told: list[LossReason] = []
    held.on_lost(told.append)
    session = held[keys[0]]._held.session
    assert session is not None
    server.kill(session.connection_id)
    eventually(lambda: held.lost)
    assert all(member.lost for member in held)
    with pytest.raises(LockLost):
        held.release()
    held.release()
    with pytest.raises(NotHeld):
        held[keys[0]].release()
    assert eventually(lambda: told) == [LossReason.CLOSED]


def test_a_member_released_early_keeps_the_others(router: LockRouter, other: LockRouter) -> None:
    keys = keys_on(router, 0, 2, prefix="early")
    held = router.lock_all(keys)
    held[keys[0]].release()
    assert other.try_lock(keys[1]) is None
    held.release()
    for key in keys:
        other.lock(key, timeout=5).release()


def test_random_sets_in_random_order_lose_nothing(routers: Routers) -> None:
    routers_here = [routers.make(), routers.make()]
    keys = [f"fuzz:{number}" for number in range(6)]
    counters = dict.fromkeys(keys, 0)
    expected = dict.fromkeys(keys, 0)
    guard = threading.Lock()
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        router = routers_here[seed % 2]
        for _ in range(25):
            chosen = chance.sample(keys, chance.randint(1, 4))
            try:
                if chance.random() < 0.3:
                    with router.lock(chosen[0], timeout=30):
                        chosen = chosen[:1]
                        _add(counters, chosen)
                else:
                    with router.lock_all(chosen, timeout=30):
                        _add(counters, chosen)
            except Exception as error:  # noqa: BLE001 - whatever reaches a caller is what the test is about
                failures.append(error)
                return
            with guard:
                for key in chosen:
                    expected[key] += 1

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert counters == expected


def _add(counters: dict[str, int], keys: list[str]) -> None:
    seen = {key: counters[key] for key in keys}
    threading.Event().wait(0.0005)
    for key in keys:
        counters[key] = seen[key] + 1
