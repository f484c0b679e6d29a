"""Leases on real servers: each sentence of the contract about them, where nothing is broken."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lockrouter import (
    ConfigError,
    Frozen,
    InvalidKey,
    KeyCollision,
    Lease,
    LockLost,
    LockRouter,
    LockTimeout,
    LossReason,
    NotHeld,
    Overloaded,
    RouterClosed,
    ShardError,
    TopologyMismatch,
)
from lockrouter.config import KeyClass
from lockrouter.leases import request, store, taking
from lockrouter.leases.rows import Kind
from lockrouter.leases.store import SqlStore
from lockrouter.protocol.effects import Operation
from lockrouter.session import Session, State
from lockrouter.testing.cluster import Cluster
from lockrouter.tokens import parts
from tests.support.leases import lease_row, owned, place, settled, tombs
from tests.support.observe import Observer, Routers, elapsed, eventually, in_thread, keys_on, soon_enough

pytestmark = pytest.mark.server

SHARD = 1
NAME = f"shard-{SHARD}"


@pytest.fixture
def routers(cluster: Cluster) -> Iterator[Routers]:
    """Routers on the session's cluster, whose shards have no lease before and none owned after the test."""
    kept = Routers(cluster)
    for server in kept.observers:
        clear(server)
    yield kept
    kept.finish()
    for server in kept.observers:
        assert not any(server.ask(f"SELECT 1 FROM lease_{table:02d} WHERE owner <> ''") for table in range(8))
        server.close()


def clear(server: Observer) -> None:
    for table in range(8):
        server.ask(f"DELETE FROM lease_{table:02d}")


@pytest.fixture
def router(routers: Routers) -> LockRouter:
    """The router most tests need."""
    return routers.make()


@pytest.fixture
def server(routers: Routers) -> Observer:
    """The server of the keys."""
    return routers.observers[SHARD]


@pytest.fixture
def key(router: LockRouter) -> str:
    """A key of that server."""
    return keys_on(router, SHARD, prefix="lease")[0]


def test_a_lease_is_a_row_with_its_owner(router: LockRouter, server: Observer, key: str) -> None:
    before = server.clock_us()
    with router.lease(key, ttl=30, timeout=0, payload=b"node 7") as lease:
        row = lease_row(server, router, key)
        assert row is not None
        assert (row.kind, row.key, row.payload) == (Kind.LEASE, key.encode(), b"node 7")
        assert (row.owner.hex(), row.token, row.ttl) == (lease.owner, lease.token, 30_000_000)
        assert before <= row.acquired <= server.clock_us()
        assert row.expires == row.acquired + row.ttl
        assert (lease.key, lease.ttl, lease.lost) == (key, 30.0, False)
        assert 29.0 < lease.remaining() <= 30.0
        lease.check()
        term, clock, passes = parts(lease.token)
        assert (term, passes) == (server.meta("term"), 0)
        assert before <= clock + 4
    row = lease_row(server, router, key)
    assert row is not None
    assert row.owner == b""
    assert 0 < row.expires <= server.clock_us()


def test_it_needs_no_connection_of_the_pool(routers: Routers, key: str) -> None:
    router = routers.make(pool={"size": 1, "min_idle": 1})
    other = keys_on(router, SHARD, prefix="row")[0]
    with router.lock(other), router.lease(key, ttl=2) as lease:
        lease.renew()
        lease.check()


def test_held_by_another_is_an_answer(routers: Routers, router: LockRouter, key: str) -> None:
    other = routers.make()
    with router.lease(key, ttl=30):
        assert other.try_lease(key, ttl=30) is None
        with pytest.raises(LockTimeout) as caught:
            other.lease(key, ttl=30, timeout=0)
        assert caught.value.key == key.encode()
        assert caught.value.address == router.route(key)
        assert "another process" in caught.value.holder
    lease = other.try_lease(key, ttl=30)
    assert isinstance(lease, Lease)
    lease.release()


def test_never_reentrant_and_the_error_names_this_process(router: LockRouter, key: str) -> None:
    with router.lease(key, ttl=30):
        assert router.try_lease(key, ttl=30) is None
        for timeout in (0, 0.1):
            with pytest.raises(LockTimeout, match="of this process") as caught:
                router.lease(key, ttl=30, timeout=timeout)
            assert "MainThread" in caught.value.holder
            assert caught.value.waited >= timeout


def test_a_timeout_is_kept(routers: Routers, router: LockRouter, key: str) -> None:
    other = routers.make()
    other.lease(key + "x", ttl=2).release()
    with router.lease(key, ttl=30):
        for caller in (router, other):
            soon_enough(0.4, lambda: caller.lease(key, ttl=30, timeout=0.3))  # noqa: B023 - called now
            assert elapsed(lambda: caller.lease(key, ttl=30, timeout=0.3)) >= 0.3  # noqa: B023


def test_owner_ids_are_unique_and_tokens_rise(routers: Routers, router: LockRouter, key: str) -> None:
    other, seen = routers.make(), []
    for number in range(20):
        with (router, other)[number % 2].lease(key, ttl=2, timeout=5) as lease:
            seen.append((lease.token, lease.owner))
    assert [token for token, _ in seen] == sorted({token for token, _ in seen})
    assert len({owner for _, owner in seen}) == 20


def test_a_released_lease_is_free_at_once(routers: Routers, router: LockRouter, key: str) -> None:
    other = routers.make()
    for _ in range(50):
        router.lease(key, ttl=30, timeout=0).release()
        other.lease(key, ttl=30, timeout=0).release()


def test_a_handle_is_single_use(router: LockRouter, key: str) -> None:
    lease = router.lease(key, ttl=30)
    in_thread(lease.release).result()
    for verb in (lease.release, lease.renew, lease.check):
        with pytest.raises(NotHeld):
            verb()
    assert lease.remaining() == 0.0
    with lease:
        pass
    assert "released" in repr(lease)


def test_the_lease_of_a_key_does_not_exclude_its_row_lock_nor_another_kind(router: LockRouter, key: str) -> None:
    leases = router._core.leases
    with router.lock(key), router.lease(key, ttl=30) as mine:
        guard, _ = leases.acquire(Kind.GUARD, key.encode(), ttl=30, timeout=0)
        assert guard is not None
        assert guard.owner != mine.owner
        again, ask = leases.acquire(Kind.GUARD, key.encode(), ttl=30, timeout=0)
        assert again is None
        assert "of this process" in ask.timed_out().holder
        guard.release()


def test_the_longest_key_and_payload(router: LockRouter, server: Observer) -> None:
    key, payload = "k" * 255, os.urandom(1024)
    index = int(router.route(key).shard.removeprefix("shard-"))
    observer = Observer(server.cluster, index)
    with router.lease(key, ttl=30, payload=payload):
        row = lease_row(observer, router, key)
        assert row is not None
        assert (row.key, row.payload) == (key.encode(), payload)
    observer.close()


@pytest.mark.parametrize("ttl", [0, 0.999, -1, float("nan"), float("inf"), 604_801])
def test_a_ttl_out_of_bounds(router: LockRouter, key: str, ttl: float) -> None:
    with pytest.raises(ValueError, match="ttl"):
        router.lease(key, ttl=ttl)


@pytest.mark.parametrize("ttl", [True, "3", None, b"4"])
def test_a_ttl_that_is_none(router: LockRouter, key: str, ttl: Any) -> None:
    with pytest.raises(TypeError, match="ttl"):
        router.try_lease(key, ttl=ttl)


@pytest.mark.parametrize("ttl", [1, 604_800])
def test_the_bounds_of_a_ttl(router: LockRouter, server: Observer, key: str, ttl: float) -> None:
    with router.lease(key, ttl=ttl):
        row = lease_row(server, router, key)
        assert row is not None
        assert row.ttl == ttl * 1_000_000


def test_other_arguments(router: LockRouter, key: str) -> None:
    with pytest.raises(ValueError, match="payload"):
        router.lease(key, ttl=3, payload=b"x" * 1025)
    with pytest.raises(TypeError, match="payload"):
        router.lease(key, ttl=3, payload="text")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout"):
        router.lease(key, ttl=3, timeout=-1)
    with pytest.raises(TypeError, match="timeout"):
        router.lease(key, ttl=3, timeout=True)
    with pytest.raises(InvalidKey):
        router.lease("", ttl=3)


def test_a_class_pins_its_mode(routers: Routers) -> None:
    router = routers.make(classes=(KeyClass(prefix="row:"), KeyClass(prefix="lease:", mode="lease")))
    with pytest.raises(ConfigError, match="mode"):
        router.lease("row:1", ttl=3)
    with pytest.raises(ConfigError, match="mode"):
        router.try_lease("row:1", ttl=3)
    with pytest.raises(ConfigError, match="mode"):
        router.lock("lease:1")
    with router.lease("lease:1", ttl=3), router.lease("neither", ttl=3), router.lock("neither"):
        pass


def test_a_class_brings_its_timeout_and_its_freeze(routers: Routers, router: LockRouter) -> None:
    classes = (
        KeyClass(prefix="short:", mode="lease", timeout=0.1),
        KeyClass(prefix="cold:", mode="lease", frozen=True),
    )
    limited = routers.make(classes=classes)
    with router.lease("short:1", ttl=30):
        assert elapsed(lambda: limited.lease("short:1", ttl=30)) < 2.0
    with pytest.raises(Frozen):
        limited.lease("cold:1", ttl=30)


def test_an_operators_freeze(routers: Routers, router: LockRouter, server: Observer, key: str) -> None:
    router.lease(key, ttl=3).release()
    server.ask("INSERT INTO frozen (prefix, at) VALUES (%s, 0)", key.encode())
    try:
        eventually(lambda: router._core.shards[NAME].frozen)
        with pytest.raises(Frozen):
            router.try_lease(key, ttl=3)
    finally:
        server.ask("DELETE FROM frozen")


def test_two_keys_that_collide_in_the_digest(router: LockRouter, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = keys_on(router, SHARD, 400, prefix="collide")[:2], None
    bucket = router.route(first[0]).bucket
    second = next(k for k in keys_on(router, SHARD, 400, prefix="second") if router.route(k).bucket == bucket)
    monkeypatch.setattr(request, "digest", lambda topology, kind, key: b"the same for all")
    with router.lease(first[0], ttl=30), pytest.raises(KeyCollision):
        router.lease(second, ttl=30, timeout=1)
    with pytest.raises(KeyCollision):  # a released row is still that key's
        router.try_lease(second, ttl=30)


def test_it_is_kept_alive(router: LockRouter, server: Observer, routers: Routers, key: str) -> None:
    with router.lease(key, ttl=1.2) as lease:
        first = lease_row(server, router, key)
        assert first is not None
        began = time.monotonic()
        while time.monotonic() < began + 3.0:
            assert not lease.lost
            assert lease.remaining() > 0.1
            time.sleep(0.01)
        row = lease_row(server, router, key)
        assert row is not None
        assert (row.owner, row.token, row.acquired) == (first.owner, first.token, first.acquired)
        assert row.expires > first.expires + 2_000_000
        lease.check()
    assert routers.metric(router, "lockrouter_renewals_total", shard=NAME, outcome="renewed") >= 4


def test_not_kept_alive_it_ends_and_its_holder_is_told_before(
    routers: Routers, router: LockRouter, server: Observer, key: str
) -> None:
    other, told = routers.make(), []
    other.lease(key, ttl=1).release()
    lease = router.lease(key, ttl=2, keep_alive=False)
    deadline = time.monotonic() + lease.remaining()
    lease.on_lost(lambda reason: told.append((reason, time.monotonic())))
    with other.lease(key, ttl=5, timeout=5) as second:
        at = time.monotonic()
        assert second.token > lease.token
        assert lease.lost
        assert lease.remaining() == 0.0
        eventually(lambda: told)
        assert told[0][0] is LossReason.EXPIRED
        assert told[0][1] < at and deadline <= at
        with pytest.raises(LockLost) as caught:
            lease.release()
        assert caught.value.reason is LossReason.EXPIRED
        second.check()
        row = lease_row(server, router, key)
        assert row is not None
        assert row.owner.hex() == second.owner
    with pytest.raises(NotHeld):
        lease.release()
    assert len(told) == 1


def test_an_expired_lease_of_a_dead_process_is_free_clock_skew_later(
    routers: Routers, router: LockRouter, key: str
) -> None:
    other = routers.make()
    other.lease(key, ttl=1).release()
    began = time.monotonic()
    lease = router.lease(key, ttl=1, keep_alive=False)
    abandon(router, lease)
    with other.lease(key, ttl=3, timeout=5):
        assert 1.5 <= time.monotonic() - began < 2.5


def abandon(router: LockRouter, lease: Lease) -> None:
    """As if the process had died: nothing is done about its lease any more."""
    entry = router._core.leases.entries.pop(bytes.fromhex(lease.owner))
    entry.released = True
    lease._open = False


def test_renewing_by_hand(router: LockRouter, server: Observer, key: str) -> None:
    with router.lease(key, ttl=5, keep_alive=False) as lease:
        first = lease_row(server, router, key)
        lease.renew(ttl=60)
        assert lease.ttl == 60
        assert 59 < lease.remaining() <= 60
        row = lease_row(server, router, key)
        assert first is not None
        assert row is not None
        assert row.ttl == 60_000_000
        assert row.expires > first.expires + 54_000_000
        lease.renew(ttl=2)  # never shortened
        assert lease.remaining() > 58
        assert lease_row(server, router, key)._replace(ttl=0) == row._replace(ttl=0)  # type: ignore[union-attr]
        for ttl in (0.5, 604_801):
            with pytest.raises(ValueError, match="ttl"):
                lease.renew(ttl)


def test_taken_by_force(router: LockRouter, server: Observer, key: str) -> None:
    told: list[LossReason] = []
    lease = router.lease(key, ttl=30)
    lease.on_lost(told.append)
    table, bucket, k = place(router, key)
    server.ask(f"UPDATE {table} SET owner = %s WHERE bucket = %s AND k = %s", b"somebody else 16", bucket, k)
    with pytest.raises(LockLost) as caught:
        lease.check()
    assert caught.value.reason is LossReason.STOLEN
    assert lease.lost
    assert eventually(lambda: told) == [LossReason.STOLEN]
    late: list[LossReason] = []
    lease.on_lost(late.append)
    assert late == [LossReason.STOLEN]
    with pytest.raises(LockLost):
        lease.renew()
    with pytest.raises(LockLost):
        lease.release()
    row = lease_row(server, router, key)
    assert row is not None
    assert row.owner == b"somebody else 16"
    server.ask(f"DELETE FROM {table}")


def test_a_renewal_finds_out(router: LockRouter, routers: Routers, server: Observer, key: str) -> None:
    told: list[LossReason] = []
    lease = router.lease(key, ttl=1.5)
    lease.on_lost(told.append)
    table, bucket, k = place(router, key)
    server.ask(f"UPDATE {table} SET owner = '' WHERE bucket = %s AND k = %s", bucket, k)
    assert eventually(lambda: told, 3.0) == [LossReason.OPERATOR]
    with pytest.raises(LockLost):
        lease.release()
    assert routers.metric(router, "lockrouter_lost_total", shard=NAME, mode="lease", reason="operator") == 1
    assert routers.metric(router, "lockrouter_renewals_total", shard=NAME, outcome="lost") == 1


def test_a_row_that_is_deleted_under_its_holder_is_a_loud_loss(router: LockRouter, server: Observer, key: str) -> None:
    lease = router.lease(key, ttl=30)
    table, bucket, k = place(router, key)
    server.ask(f"DELETE FROM {table} WHERE bucket = %s AND k = %s", bucket, k)
    with pytest.raises(LockLost):
        lease.check()
    with pytest.raises(LockLost):
        lease.release()


def test_purged_and_taken_again_the_token_rises(router: LockRouter, server: Observer, key: str) -> None:
    table, bucket, k = place(router, key)
    with router.lease(key, ttl=3) as lease:
        first = lease.token
    server.ask(f"DELETE FROM {table} WHERE bucket = %s AND k = %s", bucket, k)
    with router.lease(key, ttl=3) as lease:
        assert lease.token > first


def test_a_token_ahead_of_the_clock_still_rises(router: LockRouter, server: Observer, key: str) -> None:
    router.lease(key, ttl=3).release()
    table, bucket, k = place(router, key)
    ahead = (1 << 62) + 5
    server.ask(f"UPDATE {table} SET token = %s WHERE bucket = %s AND k = %s", ahead, bucket, k)
    with router.lease(key, ttl=3) as lease:
        assert lease.token == ahead + 1


def test_dumped_and_restored(router: LockRouter, server: Observer, key: str) -> None:
    table, bucket, k = place(router, key)
    with router.lease(key, ttl=30) as lease:
        where = f"WHERE bucket = {bucket} AND k = 0x{k.hex()}"
        server.ask(f"CREATE TABLE dumped AS SELECT * FROM {table} {where}")
        try:
            server.ask(f"DELETE FROM {table} {where}")
            server.ask(f"INSERT INTO {table} SELECT * FROM dumped")
        finally:
            server.ask("DROP TABLE dumped")
        lease.check()
        lease.renew()
        first = lease.token
    with router.lease(key, ttl=3) as lease:
        assert lease.token > first


def test_after_a_new_term_only_the_holder_goes_on_for_one_ttl(
    routers: Routers, router: LockRouter, server: Observer, key: str
) -> None:
    other, ttl = routers.make(), 2.0
    other.lease(key, ttl=1).release()
    dead = router.lease(key, ttl=ttl, keep_alive=False)
    alive_key = keys_on(router, SHARD, 2, prefix="alive")[1]
    alive = router.lease(alive_key, ttl=ttl)
    abandon(router, dead)
    table, bucket, k = place(router, key)
    # The promoted server has missed the last renewal, and says that the lease has expired.
    server.ask(f"UPDATE {table} SET expires = expires - 2500000 WHERE bucket = %s AND k = %s", bucket, k)
    term, began = server.meta("term"), time.monotonic()
    server.ask("UPDATE lock_meta SET term_identity = 'another server'")
    eventually(lambda: server.meta("term") == term + 1)
    promoted = time.monotonic()
    with other.lease(key, ttl=ttl, timeout=10) as lease:
        assert time.monotonic() - began >= ttl
        assert time.monotonic() - promoted < ttl + 1.5
        assert parts(lease.token)[0] == term + 1
        assert lease.token > dead.token
    alive.check()
    alive.release()


def test_a_release_in_this_process_wakes_the_next_at_once_and_in_order(
    routers: Routers, router: LockRouter, key: str
) -> None:
    held, order, waiters = router.lease(key, ttl=30), [], []

    def take(number: int) -> float:
        with router.lease(key, ttl=30, timeout=20):
            order.append(number)
            return time.monotonic()

    for number in range(5):
        waiters.append(in_thread(lambda number=number: take(number)))  # type: ignore[misc]
        eventually(lambda: routers.waiting(router, SHARD) == number + 1)  # noqa: B023 - called now
    released = time.monotonic()
    held.release()
    times = [waiter.result() for waiter in waiters]
    assert order == list(range(5))
    assert times[0] - released < 0.5


def test_one_poller_per_key_and_process(routers: Routers, router: LockRouter, key: str) -> None:
    other = routers.make()
    with router.lease(key, ttl=30):
        waiters = [in_thread(lambda: other.lease(key, ttl=5, timeout=20)) for _ in range(8)]
        eventually(lambda: routers.waiting(other, SHARD) == 8)
        queue = other._core.leases.queues._queues[Kind.LEASE, key.encode()]
        assert queue.lead is not None
        assert len(queue.waiting) == 7
    while waiters:
        done = eventually(lambda: next((w for w in waiters if not w.is_alive()), None))
        waiters.remove(done)
        done.result().release()


def test_while_the_holder_is_here_nobody_polls(
    router: LockRouter, server: Observer, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with router.lease(key, ttl=30):
        waiter = in_thread(lambda: router.lease(key, ttl=5, timeout=0.6))
        monkeypatch.setattr(taking, "_ask", lambda *_: pytest.fail("asked the server"))
        with pytest.raises(LockTimeout):
            waiter.result()
        monkeypatch.undo()


def test_a_release_elsewhere_is_noticed_by_polling(routers: Routers, router: LockRouter, key: str) -> None:
    other = routers.make()
    held = router.lease(key, ttl=60)
    waiter = in_thread(lambda: other.lease(key, ttl=5, timeout=20))
    eventually(lambda: routers.waiting(other, SHARD))
    held.release()
    released = time.monotonic()
    waiter.result().release()
    assert time.monotonic() - released < 2.0


def test_max_waiters(routers: Routers) -> None:
    router = routers.make(classes=(KeyClass(prefix="crowd:", mode="lease", max_waiters=1),))
    with router.lease("crowd:1", ttl=30):
        waiter = in_thread(lambda: router.lease("crowd:1", ttl=30, timeout=1.0))
        eventually(lambda: sum(router._core.leases.waiting_by_shard().values()))
        with pytest.raises(Overloaded):
            router.lease("crowd:1", ttl=30, timeout=1.0)
        with pytest.raises(LockTimeout):
            waiter.result()


def test_a_waiter_that_is_interrupted_leaves_the_queue(routers: Routers, router: LockRouter, key: str) -> None:
    held = router.lease(key, ttl=30)
    first = in_thread(lambda: router.lease(key, ttl=30, timeout=0.3))
    eventually(lambda: routers.waiting(router, SHARD) == 1)
    second = in_thread(lambda: router.lease(key, ttl=30, timeout=20))
    eventually(lambda: routers.waiting(router, SHARD) == 2)
    with pytest.raises(LockTimeout):
        first.result()
    held.release()
    second.result().release()
    assert not router._core.leases.queues._queues


def test_a_dropped_handle_is_given_up_with_a_warning(routers: Routers, router: LockRouter, key: str) -> None:
    lease: Lease | None = router.lease(key, ttl=600)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del lease
        gc.collect()
    assert [w.category for w in caught] == [ResourceWarning]
    router.lease(key, ttl=3, timeout=5).release()
    settled(routers, router)


def test_a_callback_that_refers_to_its_lease_keeps_nothing_alive(
    routers: Routers, router: LockRouter, key: str
) -> None:
    def take() -> None:
        lease = router.lease(key, ttl=600)
        lease.on_lost(lambda reason: print(lease.key, reason))

    with pytest.warns(ResourceWarning, match="dropped without release"):
        take()
        gc.collect()
    with router.lease(key, ttl=2, timeout=5):
        pass
    settled(routers, router)


def test_a_connection_that_comes_after_the_end_is_closed(
    routers: Routers, router: LockRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` runs while the first lease's connection is made: nothing may be granted that nobody will free."""
    opened: list[Session] = []
    real = SqlStore._open

    def during_close(store: SqlStore, until: float) -> Operation[Session]:
        opened.append((yield from real(store, until)))
        store.shut()
        return opened[-1]

    router.warm()
    monkeypatch.setattr(SqlStore, "_open", during_close)
    with pytest.raises(ShardError):
        router.lease("late", ttl=600, timeout=2.0)
    assert opened
    assert all(session.state is State.DEAD for session in opened)


def test_closing_waits_for_holders_then_tells_and_frees(routers: Routers, server: Observer, key: str) -> None:
    router = routers.make(router={"close_timeout": 0.3})
    told: list[LossReason] = []
    lease = router.lease(key, ttl=600)
    lease.on_lost(told.append)
    waiter = in_thread(lambda: router.lease(key, ttl=3, timeout=20))
    eventually(lambda: routers.waiting(router, SHARD))
    assert elapsed(router.close) >= 0.3
    assert eventually(lambda: told) == [LossReason.ROUTER_CLOSED]
    with pytest.raises(RouterClosed):
        waiter.result()
    with pytest.raises(RouterClosed):
        router.lease(key, ttl=3)
    with pytest.raises(LockLost) as caught:
        lease.release()
    assert caught.value.reason is LossReason.ROUTER_CLOSED
    row = lease_row(server, router, key)
    assert row is not None
    assert row.owner == b""


def test_a_holder_that_releases_while_the_router_closes(routers: Routers, router: LockRouter, key: str) -> None:
    lease = router.lease(key, ttl=600)
    closing = in_thread(router.close)
    eventually(lambda: router._core.closed)
    lease.release()
    closing.result(4.0)


def test_after_a_fork_the_child_has_nothing_and_the_parent_all(
    routers: Routers, router: LockRouter, server: Observer, key: str
) -> None:
    with router.lease(key, ttl=3) as lease:
        code = forked(lambda: child(router, lease, key))
        assert code == 0
        lease.check()
        lease.renew()
    router.lease(key, ttl=3, timeout=0).release()


def child(router: LockRouter, lease: Lease, key: str) -> bool:
    told: list[LossReason] = []
    lease.on_lost(told.append)
    lease.release()  # does nothing here
    fine = lease.lost and told == [LossReason.FORKED] and lease.remaining() == 0.0
    try:
        fine = fine and router.try_lease(key, ttl=3) is None
        router.lease(key + " of the child", ttl=3).release()
    finally:
        router.close()
    return fine


def forked(call: Callable[[], bool]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        code = 1
        try:
            code = 0 if call() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_the_body_error_wins(router: LockRouter, server: Observer, key: str) -> None:
    table = place(router, key)[0]
    with pytest.raises(ZeroDivisionError) as caught, router.lease(key, ttl=30):
        server.ask(f"DELETE FROM {table}")
        raise ZeroDivisionError
    assert "lost" in caught.value.__notes__[0]
    with pytest.raises(LockLost), router.lease(key, ttl=30):
        server.ask(f"DELETE FROM {table}")


def test_metrics(routers: Routers, router: LockRouter, key: str) -> None:
    with router.lease(key, ttl=30):
        assert routers.held(router, SHARD, "lease") == 1
        assert router.try_lease(key, ttl=30) is None
        with pytest.raises(LockTimeout):
            router.lease(key, ttl=30, timeout=0.05)
    assert routers.held(router, SHARD, "lease") == 0
    for outcome in ("acquired", "busy", "timeout"):
        assert routers.metric(router, "lockrouter_acquires_total", shard=NAME, mode="lease", outcome=outcome) == 1
    assert routers.metric(router, "lockrouter_wait_seconds_count", shard=NAME, mode="lease") == 3
    assert routers.metric(router, "lockrouter_hold_seconds_count", shard=NAME, mode="lease") == 1


def test_a_closed_bucket_is_followed(routers: Routers, router: LockRouter, server: Observer, key: str) -> None:
    target, bucket = routers.observers[SHARD + 1], router.route(key).bucket
    table, _, k = place(router, key)
    lease = router.lease(key, ttl=3)
    try:
        server.ask("UPDATE lock_bucket SET epoch = 0, moved_to = %s WHERE bucket = %s", f"shard-{SHARD + 1}", bucket)
        with pytest.raises(TopologyMismatch):
            router.try_lease(key + "?" if False else _neighbour(router, key), ttl=3)
        row = server.ask(f"SELECT * FROM {table} WHERE bucket = %s AND k = %s", bucket, k)[0]
        target.ask(f"INSERT INTO {table} VALUES ({', '.join(['%s'] * len(row))})", *row)
        target.ask("INSERT INTO lock_bucket (bucket, epoch) VALUES (%s, 2)", bucket)
        lease.renew()
        lease.check()
        assert routers.make().try_lease(key, ttl=3) is None
        lease.release()
        with router.lease(key, ttl=3, timeout=3) as again:
            assert again.token > lease.token
            moved = lease_row(target, router, key)
            assert moved is not None
            assert moved.owner.hex() == again.owner
    finally:
        server.ask("UPDATE lock_bucket SET epoch = 1, moved_to = '' WHERE bucket = %s", bucket)
        server.ask(f"DELETE FROM {table}")
        target.ask("DELETE FROM lock_bucket WHERE bucket = %s", bucket)


def _neighbour(router: LockRouter, key: str) -> str:
    """Another key of the same bucket."""
    bucket = router.route(key).bucket
    return next(k for k in keys_on(router, SHARD, 1000, prefix="neighbour") if router.route(k).bucket == bucket)


def test_a_bucket_that_went_to_a_shard_nobody_lists(router: LockRouter, server: Observer, key: str) -> None:
    bucket = router.route(key).bucket
    server.ask("UPDATE lock_bucket SET epoch = 0, moved_to = 'shard-77' WHERE bucket = %s", bucket)
    try:
        with pytest.raises(TopologyMismatch, match="shard-77"):
            router.lease(key, ttl=3, timeout=1)
    finally:
        server.ask("UPDATE lock_bucket SET epoch = 1, moved_to = '' WHERE bucket = %s", bucket)


def test_every_statement_waits_behind_a_fence(router: LockRouter, server: Observer, key: str) -> None:
    lease = router.lease(key, ttl=30)
    bucket = router.route(key).bucket
    neighbour = _neighbour(router, key)
    fence = server.connect()
    try:
        with fence.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute("UPDATE lock_bucket SET epoch = 0, moved_to = '' WHERE bucket = %s", (bucket,))
            calls = [
                in_thread(lambda: router.lease(neighbour, ttl=3, timeout=0.5)),
                in_thread(lease.renew),
            ]
            for call in calls:
                with pytest.raises((LockTimeout, ShardError)):
                    call.result()
            cursor.execute("ROLLBACK")
    finally:
        fence.close()
    row = lease_row(server, router, neighbour)
    assert row is None or not row.owner or eventually(lambda: not owned_by(server, router, neighbour))
    lease.renew()
    lease.release()


def owned_by(server: Observer, router: LockRouter, key: str) -> bool:
    row = lease_row(server, router, key)
    return row is not None and bool(row.owner)


def test_the_grant_window_does_not_wait_for_leases(router: LockRouter, server: Observer, key: str) -> None:
    router.lease(key, ttl=3).release()
    holder = server.connect()
    try:
        with holder.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute("SELECT * FROM lock_meta FOR UPDATE")
            soon_enough(0.5, lambda: router.lease(key, ttl=3, timeout=3).release())
            cursor.execute("ROLLBACK")
    finally:
        holder.close()


def test_many_callers_share_statements(routers: Routers, router: LockRouter, server: Observer) -> None:
    keys = keys_on(router, SHARD, 64, prefix="many")
    before = int(server.ask("SHOW GLOBAL STATUS LIKE 'Com_insert_select'")[0][1])
    start = threading.Barrier(len(keys))

    def work(key: str) -> None:
        start.wait(10)
        for _ in range(5):
            with router.lease(key, ttl=30, timeout=20) as lease:
                assert not lease.lost

    for thread in [in_thread(lambda key=key: work(key)) for key in keys]:  # type: ignore[misc]
        thread.result()
    statements = int(server.ask("SHOW GLOBAL STATUS LIKE 'Com_insert_select'")[0][1]) - before
    assert 0 < statements < 5 * len(keys)
    settled(routers, router)
    assert not owned(server, router)
    assert tombs(router) == 0


def test_connections_nobody_uses_are_closed(
    routers: Routers, router: LockRouter, server: Observer, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    router.lease(key, ttl=3).release()
    leases = router._core.leases
    assert len(leases.sessions()) == 2
    monkeypatch.setattr(store, "_IDLE_FOR", 0.0)
    leases.keeper.adopt(router._core.shards[NAME])  # the background looks
    eventually(lambda: not leases.sessions())
    monkeypatch.undo()
    router.lease(key, ttl=3).release()


GEVENT = """
from gevent import monkey; monkey.patch_all()
import sys, time, gevent, lockrouter
late, order = [], []

def tick():
    while True:
        began = time.monotonic(); gevent.sleep(0.01); late.append(time.monotonic() - began - 0.01)

def work(number):
    for _ in range(3):
        with router.lease(f"gevent:{number % 12}", ttl=2, timeout=30) as lease:
            lease.check()
            order.append((lease.key, lease.token))

with lockrouter.LockRouter.from_file(sys.argv[1]) as router:
    router.lease("gevent:warm", ttl=2, timeout=10).release()
    ticker = gevent.spawn(tick)
    victims = [gevent.spawn(work, number) for number in range(8)]
    workers = [gevent.spawn(work, number) for number in range(40)]
    gevent.sleep(0.02)
    for victim in victims:
        victim.kill()
    gevent.joinall(workers, raise_error=True)
    assert len(order) >= 120 and len(set(order)) == len(order)
    with router.lease("gevent:kept", ttl=1) as lease:
        gevent.sleep(2.5)
        assert not lease.lost
        lease.check()
    until = time.monotonic() + 10
    while (router._core.leases.entries or router._core.leases.queues._queues) and time.monotonic() < until:
        gevent.sleep(0.05)
    assert not router._core.leases.entries and not router._core.leases.queues._queues
    ticker.kill()
print("fine", max(late))
"""


def test_under_gevent_with_greenlets_killed(cluster: Cluster, routers: Routers) -> None:
    """Patched first; killed greenlets, leaders among them, leave the others theirs."""
    done = subprocess.run(
        [sys.executable, "-c", GEVENT, str(cluster.shards_file)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("fine")
