"""Row locks on real servers: every sentence of the contract about the router and its fast lock."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lockrouter import (
    Address,
    ConfigError,
    Frozen,
    InvalidKey,
    LockLost,
    LockRouter,
    LockTimeout,
    LossReason,
    NotHeld,
    Overloaded,
    PoolTimeout,
    RouterClosed,
    RowLock,
    WouldDeadlock,
    load,
)
from lockrouter.config import KeyClass
from lockrouter.routing import encode
from lockrouter.testing.cluster import Cluster
from tests.support.observe import Observer, Routers, eventually, in_thread, keys_on, sharing_row, soon_enough

pytestmark = pytest.mark.server


def elsewhere(call: Callable[[], Any]) -> Any:
    """What the call gives in another thread."""
    return in_thread(call).result()


def free_for(router: LockRouter, key: str | bytes) -> bool:
    """Whether another caller could take the row now."""

    def look() -> bool:
        held = router.try_lock(key)
        if held is not None:
            held.release(confirm=True)
        return held is not None

    return bool(elsewhere(look))


# -- taking and releasing ---------------------------------------------------------------------------------------------


def test_a_lock_is_held_until_the_block_is_left(router: LockRouter, other: LockRouter, server: Observer) -> None:
    key = keys_on(router, 0)[0]
    with router.lock(key, timeout=5.0) as held:
        assert isinstance(held, RowLock)
        assert held.key == key
        assert held.address == router.route(key)
        assert isinstance(held.token, int)
        assert 0 < held.token < 1 << 63
        assert held.degraded is False
        assert held.lost is False
        held.check()
        assert len(eventually(server.holders)) == 1
        assert other.try_lock(key) is None
    eventually(lambda: free_for(other, key))
    for call in (held.release, held.check, held.promote):
        with pytest.raises(NotHeld, match=f"key {router._core.shown(encode(key))} was released before"):
            call()
    assert held.lost is False


def test_leaving_after_a_release_does_nothing(router: LockRouter, other: LockRouter) -> None:
    key = keys_on(router, 0)[0]
    with router.lock(key, timeout=5.0) as held:
        held.release()
        eventually(lambda: free_for(other, key))
        again = other.lock(key, timeout=5.0)
    assert router.try_lock(key) is None
    again.release(confirm=True)


def test_release_frees_soon_and_release_confirmed_frees_now(router: LockRouter, other: LockRouter) -> None:
    key = keys_on(router, 0)[0]
    for _ in range(200):
        router.lock(key, timeout=5.0).release(confirm=True)
        taken = other.try_lock(key)
        assert taken is not None
        taken.release(confirm=True)
    for _ in range(200):
        router.lock(key, timeout=5.0).release()
        other.lock(key, timeout=5.0).release()


def test_any_thread_may_release(router: LockRouter, other: LockRouter) -> None:
    key = keys_on(router, 0)[0]
    held = router.lock(key, timeout=5.0)
    elsewhere(lambda: held.release(confirm=True))
    assert free_for(other, key)
    with pytest.raises(NotHeld):
        held.release()
    with router.lock(key, timeout=5.0, reentrant=False):
        pass


def test_of_many_threads_one_releases(router: LockRouter) -> None:
    key = keys_on(router, 0)[0]

    def outcome(held: RowLock, start: threading.Barrier) -> bool:
        start.wait(10.0)
        try:
            held.release()
        except NotHeld:
            return False
        return True

    for _ in range(20):
        held, start = router.lock(key, timeout=5.0), threading.Barrier(6)
        threads = [in_thread(lambda: outcome(held, start)) for _ in range(6)]  # noqa: B023 - ended before the next turn
        assert sum(thread.result() for thread in threads) == 1


def test_an_error_in_the_block_releases_too(router: LockRouter, other: LockRouter) -> None:
    key = keys_on(router, 0)[0]
    with pytest.raises(KeyError, match="mine"), router.lock(key, timeout=5.0, confirm=True):
        raise KeyError("mine")
    assert free_for(other, key)


def test_try_lock_is_none_when_the_row_is_busy(router: LockRouter, other: LockRouter) -> None:
    key = keys_on(router, 0)[0]
    twin = sharing_row(router, key)
    held = router.try_lock(key)
    assert held is not None
    for caller in (router, other):
        for asked in (key, key.encode(), twin):
            assert elsewhere(lambda: caller.try_lock(asked)) is None  # noqa: B023 - ended before the next turn
    held.release(confirm=True)
    for caller in (router, other):
        taken = caller.try_lock(twin)
        assert taken is not None
        taken.release(confirm=True)


def test_the_error_of_a_busy_row_names_holder_and_place(
    router: LockRouter, other: LockRouter, cluster: Cluster
) -> None:
    key = keys_on(router, 0)[0]
    with router.lock(key, timeout=5.0):
        with pytest.raises(LockTimeout) as local:
            in_thread(lambda: router.lock(key, timeout=0.05)).result()
        with pytest.raises(LockTimeout) as remote:
            other.lock(key, timeout=0.05)
    for caught in (local.value, remote.value):
        assert isinstance(caught, TimeoutError)
        assert caught.key == key.encode()
        assert caught.address == router.route(key)
        assert 0.04 <= caught.waited < 5.0
        assert key not in str(caught)
    assert threading.current_thread().name in local.value.holder
    assert f"lockrouter holders {cluster.shards_file}" in remote.value.holder


def test_a_waiter_gets_the_row_when_it_is_released(router: LockRouter, other: LockRouter, server: Observer) -> None:
    key = keys_on(router, 0)[0]
    held = router.lock(key, timeout=5.0)
    waiter = in_thread(lambda: other.lock(key, timeout=30.0))
    server.await_waiters()
    held.release()
    got = waiter.result()
    assert got.token > held.token
    got.release(confirm=True)


def test_one_waiter_of_a_process_goes_to_the_server(routers: Routers, router: LockRouter, server: Observer) -> None:
    other = routers.make()
    key = keys_on(router, 0)[0]
    held = router.lock(key, timeout=5.0)
    order: list[int] = []

    def take(number: int) -> None:
        with other.lock(key, timeout=30.0):
            order.append(number)

    threads = []
    for number in range(6):
        threads.append(in_thread(lambda: take(number)))  # noqa: B023 - waited for before the next turn
        eventually(lambda: routers.waiting(other) == number + 1)  # noqa: B023 - as above
    server.await_waiters()
    assert len(server.locking()) == 1
    held.release()
    for thread in threads:
        thread.result()
    assert order == sorted(order)


# -- confirming and losing --------------------------------------------------------------------------------------------


def test_confirm_proves_a_loss_that_nobody_had_noticed(router: LockRouter, server: Observer) -> None:
    key = keys_on(router, 0)[0]
    for way in ("leave", "release", "check"):
        held = router.lock(key, timeout=5.0, confirm=way == "leave")
        server.kill(eventually(server.holders)[0])
        with pytest.raises(LockLost) as caught:
            if way == "leave":
                with held:
                    pass
            elif way == "release":
                held.release(confirm=True)
            else:
                held.check()
        assert caught.value.reason is LossReason.CLOSED
        assert caught.value.key == key.encode()
        assert held.lost
        if way == "check":
            with pytest.raises(LockLost):
                held.release()


def test_leaving_a_lock_known_to_be_lost_raises(router: LockRouter, server: Observer) -> None:
    key = keys_on(router, 0)[0]
    with pytest.raises(LockLost) as caught, router.lock(key, timeout=5.0) as held:
        server.kill(eventually(server.holders)[0])
        eventually(lambda: held.lost)
    assert caught.value.reason is LossReason.CLOSED


def test_the_error_of_the_body_wins_and_notes_the_loss(router: LockRouter, server: Observer) -> None:
    key = keys_on(router, 0)[0]
    with pytest.raises(KeyError) as caught, router.lock(key, timeout=5.0) as held:
        server.kill(eventually(server.holders)[0])
        eventually(lambda: held.lost)
        raise KeyError("mine")
    assert any("lost" in note for note in caught.value.__notes__)
    assert caught.value.__context__ is None or not isinstance(caught.value.__context__, LockLost)


def test_releasing_a_lost_lock_raises_once(router: LockRouter, server: Observer) -> None:
    key = keys_on(router, 0)[0]
    held = router.lock(key, timeout=5.0)
    server.kill(eventually(server.holders)[0])
    eventually(lambda: held.lost)
    for _ in range(2):
        with pytest.raises(LockLost):
            held.check()
    with pytest.raises(LockLost):
        held.release()
    with pytest.raises(NotHeld):
        held.release()
    with held:
        pass


def test_on_lost_is_called_once_on_a_thread_of_its_own(router: LockRouter, server: Observer) -> None:
    key = keys_on(router, 0)[0]
    calls: list[tuple[LossReason, threading.Thread]] = []
    before = set(threading.enumerate())
    with pytest.raises(LockLost), router.lock(key, timeout=5.0) as held:
        held.on_lost(lambda reason: calls.append((reason, threading.current_thread())))
        server.kill(eventually(server.holders)[0])
        eventually(lambda: calls)
        with pytest.raises(LockLost):
            held.check()
        late: list[LossReason] = []
        held.on_lost(late.append)
        eventually(lambda: late)
    assert [reason for reason, _ in calls] == [LossReason.CLOSED]
    assert late == [LossReason.CLOSED]
    assert calls[0][1] not in before
    assert calls[0][1] is not threading.current_thread()


def test_a_callback_that_fails_or_hangs_hurts_nobody(
    router: LockRouter, server: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, second = keys_on(router, 0, 2)
    failures: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: failures.append(str(args.exc_value)))
    gate, called = threading.Event(), threading.Event()

    def fail(reason: LossReason) -> None:
        raise RuntimeError(f"mine: {reason}")

    held = router.lock(key, timeout=5.0)
    held.on_lost(lambda reason: gate.wait(30.0))
    held.on_lost(fail)
    held.on_lost(lambda reason: called.set())
    server.kill(eventually(server.holders)[0])
    assert called.wait(5.0)
    with router.lock(second, timeout=5.0) as fine:
        server.kill(eventually(server.holders)[0])
        with pytest.raises(LockLost):
            eventually(lambda: fine.lost)
            fine.release()
    with pytest.raises(LockLost):
        held.release()
    gate.set()


def test_a_callback_that_refers_to_its_handle_keeps_no_row_locked(router: LockRouter, other: LockRouter) -> None:
    key = keys_on(router, 0)[0]

    def take() -> None:
        held = router.lock(key, timeout=5.0)
        held.on_lost(lambda reason: print(held.key, reason))

    with pytest.warns(ResourceWarning, match="dropped without release"):
        take()
        gc.collect()
    for caller in (router, other):
        caller.lock(key, timeout=5.0).release()


def test_a_lock_nobody_lost_is_never_told(router: LockRouter) -> None:
    calls: list[LossReason] = []
    with router.lock(keys_on(router, 0)[0], timeout=5.0) as held:
        held.on_lost(calls.append)
    router.close()
    held.on_lost(calls.append)
    assert calls == []


def test_a_holder_is_kept_alive_beyond_the_ghost_timeout(routers: Routers) -> None:
    router = routers.make(router={"ghost_timeout": 2})
    key = keys_on(router, 0)[0]
    with router.lock(key, timeout=5.0, confirm=True) as held:
        until = time.monotonic() + 3.5
        while time.monotonic() < until:
            assert not held.lost
            threading.Event().wait(0.05)


# -- re-entrancy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner_first", [True, False])
def test_a_nested_lock_of_one_key_shares_row_and_token(
    router: LockRouter, other: LockRouter, server: Observer, inner_first: bool
) -> None:
    key = keys_on(router, 0)[0]
    outer = router.lock(key, timeout=5.0)
    inner = router.lock(key, timeout=0)
    third = router.try_lock(key.encode())
    assert third is not None
    assert outer.token == inner.token == third.token
    assert len(eventually(server.holders)) == 1
    third.release(confirm=True)
    first, last = (inner, outer) if inner_first else (outer, inner)
    first.release()
    with pytest.raises(NotHeld):
        first.release()
    last.check()
    assert other.try_lock(key) is None
    last.release(confirm=True)
    assert free_for(other, key)


def test_two_keys_of_one_row_nest(router: LockRouter, other: LockRouter, server: Observer) -> None:
    key = keys_on(router, 0)[0]
    twin = sharing_row(router, key)
    with router.lock(key, timeout=5.0) as outer:
        with router.lock(twin, timeout=0) as inner:
            assert inner.key == twin
            assert inner.address == outer.address
            inner.check()
            assert len(eventually(server.holders)) == 1
        outer.check()
        assert other.try_lock(twin) is None
        assert other.try_lock(key) is None
    eventually(lambda: free_for(other, twin))


def test_nested_locks_of_different_rows(router: LockRouter, server: Observer) -> None:
    first, second = keys_on(router, 0, 2)
    with router.lock(first, timeout=5.0) as outer:
        with router.lock(second, timeout=5.0):
            assert len(eventually(lambda: server.holders() if len(server.holders()) == 2 else None)) == 2
        outer.check()


def test_another_thread_is_another_owner_even_in_the_same_context(router: LockRouter) -> None:
    key = keys_on(router, 0)[0]
    with router.lock(key, timeout=5.0):
        copied = contextvars.copy_context()
        assert elsewhere(lambda: copied.run(router.try_lock, key)) is None


def test_another_context_of_the_same_thread_is_another_owner(router: LockRouter) -> None:
    key = keys_on(router, 0)[0]
    with router.lock(key, timeout=5.0):
        assert contextvars.Context().run(router.try_lock, key) is None
        copied = contextvars.copy_context().run(router.try_lock, key)
        assert copied is not None
        copied.release()


def test_a_thread_id_in_use_again_is_another_owner(router: LockRouter) -> None:
    key = keys_on(router, 0)[0]
    context = contextvars.copy_context()
    held: list[RowLock] = []
    elsewhere(lambda: held.append(context.run(router.lock, key, 5.0)))
    for _ in range(5):
        assert elsewhere(lambda: context.run(router.try_lock, key)) is None
    held.pop().release()


def test_tasks_of_one_loop_are_owners_of_their_own(router: LockRouter) -> None:
    key = keys_on(router, 0)[0]

    async def main() -> None:
        held = router.lock(key, timeout=5.0)
        nested = router.try_lock(key)
        assert nested is not None
        nested.release()

        async def child() -> RowLock | None:
            return router.try_lock(key)

        assert await asyncio.create_task(child()) is None
        assert await asyncio.to_thread(router.try_lock, key) is None
        held.release()

    asyncio.run(main())


def test_a_named_owner_is_the_same_in_every_thread(router: LockRouter, other: LockRouter) -> None:
    key = keys_on(router, 0)[0]
    outer = router.lock(key, timeout=5.0, owner=("job", 7))
    inner = elsewhere(lambda: router.lock(key, timeout=0, owner=("job", 7)))
    assert inner.token == outer.token
    assert elsewhere(lambda: router.try_lock(key, owner=("job", 8))) is None
    assert elsewhere(lambda: router.try_lock(key)) is None
    outer.release()
    assert other.try_lock(key) is None
    inner.release(confirm=True)
    assert free_for(other, key)


def test_not_reentrant_raises_and_keeps_the_outer_lock(router: LockRouter, other: LockRouter) -> None:
    key = keys_on(router, 0)[0]
    with router.lock(key, timeout=5.0) as held:
        with pytest.raises(WouldDeadlock):
            router.lock(key, timeout=5.0, reentrant=False)
        with pytest.raises(WouldDeadlock):
            router.try_lock(key, reentrant=False)
        held.check()
        assert other.try_lock(key) is None
    eventually(lambda: free_for(other, key))


def test_a_released_lock_is_no_longer_its_owners(router: LockRouter) -> None:
    key = keys_on(router, 0)[0]
    router.lock(key, timeout=5.0).release()
    with router.lock(key, timeout=5.0, reentrant=False):
        pass


def test_a_cycle_inside_the_process_is_refused(routers: Routers, router: LockRouter) -> None:
    first, second = keys_on(router, 0, 2)
    with router.lock(first, timeout=5.0) as mine:
        ready, go = threading.Event(), threading.Event()

        def opposite() -> None:
            with router.lock(second, timeout=5.0):
                ready.set()
                go.wait(10.0)
                with router.lock(first, timeout=20.0):
                    pass

        thread = in_thread(opposite)
        assert ready.wait(10.0)
        go.set()
        eventually(lambda: routers.waiting(router) == 1)
        began = time.monotonic()
        with pytest.raises(WouldDeadlock):
            router.lock(second, timeout=20.0)
        assert time.monotonic() - began < 5.0
        mine.check()
    thread.result()


def test_a_cycle_between_processes_ends_in_a_timeout(router: LockRouter, other: LockRouter, server: Observer) -> None:
    first, second = keys_on(router, 0, 2)
    with router.lock(first, timeout=5.0) as mine, in_order(other, second) as theirs:
        waiter = in_thread(lambda: theirs(lambda: other.lock(first, timeout=1.5)))
        server.await_waiters()
        with pytest.raises(LockTimeout):
            router.lock(second, timeout=0.3)
        mine.check()
        with pytest.raises(LockTimeout):
            waiter.result()


class in_order:  # noqa: N801 - used like a function
    """Another thread that holds `key`, and runs calls while it does."""

    def __init__(self, router: LockRouter, key: str) -> None:
        self._calls: list[Callable[[], Any]] = []
        self._todo, self._done, self._up = threading.Event(), threading.Event(), threading.Event()
        self._outcome: Any = None
        self._thread = in_thread(lambda: self._hold(router, key))

    def _hold(self, router: LockRouter, key: str) -> None:
        with router.lock(key, timeout=5.0):
            self._up.set()
            while self._todo.wait(30.0) and self._calls:
                self._todo.clear()
                try:
                    self._outcome = self._calls.pop()()
                except Exception as error:  # noqa: BLE001 - raised where the call was asked for
                    self._outcome = error
                self._done.set()

    def __call__(self, call: Callable[[], Any]) -> Any:
        self._done.clear()
        self._calls.append(call)
        self._todo.set()
        assert self._done.wait(30.0)
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def __enter__(self) -> in_order:
        assert self._up.wait(10.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._todo.set()
        self._thread.result()


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        "",
        b"",
        "a" * 256,
        b"a" * 256,
        "é" * 128,
        "\ud800",
        "ok\udfff",
        7,
        None,
        1.5,
        ("a",),
        bytearray(b"a"),
        memoryview(b"a"),
    ],
    ids=repr,
)
def test_what_is_no_key_is_refused_before_any_connection(routers: Routers, key: Any) -> None:
    router = routers.make()
    for verb in (router.lock, router.try_lock, router.route):
        with pytest.raises(InvalidKey) as caught:
            verb(key)
        assert isinstance(caught.value, ValueError)
    assert all(not observer.sessions() for observer in routers.observers)


KEYS: list[str | bytes] = [
    "a",
    "A",
    "a ",
    " a",
    "a\0",
    "\0",
    b"\xff\xfe",
    unicodedata.normalize("NFC", "é"),
    unicodedata.normalize("NFD", "é"),
    "ß",
    "ss",
    "😀" * 63,
    "x" * 255,
    b"\x00" * 255,
    "'; DROP TABLE lock_00; --",
    "%s %d {} \\ \n */ --",
]


def test_keys_that_differ_in_any_byte_are_different(router: LockRouter) -> None:
    assert len({router.route(key).slot for key in KEYS}) == len(KEYS)
    held = [router.lock(key, timeout=5.0, reentrant=False) for key in KEYS]
    assert [lock.key for lock in held] == KEYS
    for key in KEYS:
        assert not free_for(router, key)
    for lock in held:
        lock.release(confirm=True)


def test_text_and_its_utf8_are_one_key(router: LockRouter, other: LockRouter) -> None:
    for text in ("a", "é", "😀"):
        with router.lock(text, timeout=5.0) as held:
            assert other.try_lock(text.encode()) is None
            assert router.route(text.encode()) == held.address
            with router.lock(text.encode(), timeout=0) as nested:
                assert nested.token == held.token


def test_route_is_pure_and_the_same_everywhere(routers: Routers, router: LockRouter, other: LockRouter) -> None:
    for number in range(200):
        address = router.route(f"account:{number}")
        assert isinstance(address, Address)
        assert address == other.route(f"account:{number}".encode())
        bucket, shard, table, slot = address
        assert all(type(part) is int for part in (bucket, table, slot))
        assert shard in router.health()
        assert table == bucket % 8
        assert slot // 256 == bucket
    assert all(not observer.sessions() for observer in routers.observers)


# -- timeouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("timeout", "error"),
    [
        (-1, ValueError),
        (-0.001, ValueError),
        (-math.inf, ValueError),
        (math.nan, ValueError),
        (True, TypeError),
        (False, TypeError),
        ("1", TypeError),
        (Decimal(1), TypeError),
        ([], TypeError),
    ],
    ids=repr,
)
def test_what_is_no_timeout_is_refused_before_any_connection(
    routers: Routers, timeout: Any, error: type[Exception]
) -> None:
    router = routers.make()
    with pytest.raises(error):
        router.lock("a", timeout=timeout)
    assert all(not observer.sessions() for observer in routers.observers)


@pytest.mark.parametrize(
    "timeout", [1e12, 1e308, math.inf, 10**400, sys.maxsize], ids=["1e12", "1e308", "inf", "1e400", "max"]
)
def test_a_very_large_timeout_means_long(
    router: LockRouter, other: LockRouter, server: Observer, timeout: float
) -> None:
    key = keys_on(router, 0)[0]
    with router.lock(key, timeout=timeout):
        waiter = in_thread(lambda: other.lock(key, timeout=timeout))
        server.await_waiters()
        local = in_thread(lambda: router.lock(key, timeout=timeout))
    for thread in (waiter, local):
        thread.result().release()


@pytest.mark.parametrize("timeout", [0, 0.0004, 0.001, 0.02, 0.3, 1.2])
def test_a_busy_row_is_given_up_in_time(
    routers: Routers, router: LockRouter, other: LockRouter, timeout: float
) -> None:
    key = keys_on(router, 0)[0]
    other.warm()
    with router.lock(key, timeout=5.0):
        for caller in (other, router):
            waited: list[float] = []

            def give_up(caller: LockRouter = caller, waited: list[float] = waited) -> None:
                with pytest.raises(LockTimeout) as caught:
                    caller.lock(key, timeout=timeout)
                waited.append(caught.value.waited)

            elsewhere(lambda: soon_enough(timeout + 0.1, give_up))
            assert min(waited) >= timeout - 0.01


def test_a_free_row_is_granted_or_given_up_in_time_however_short(router: LockRouter) -> None:
    key = keys_on(router, 0)[0]
    router.warm()

    def attempt(timeout: float) -> None:
        try:
            router.lock(key, timeout=timeout).release()
        except (LockTimeout, PoolTimeout):
            pass

    for timeout in (0.0004, 0.001, 0.01):
        soon_enough(timeout + 0.1, lambda: attempt(timeout))  # noqa: B023 - ended before the next turn
    for _ in range(100):
        router.lock(key, timeout=0).release()
    router.lock(key, timeout=0.2).release()


def test_no_timeout_means_the_class_default(routers: Routers, router: LockRouter) -> None:
    other = routers.make(
        router={"timeout": 0.4},
        classes=(KeyClass(prefix="key:", timeout=0.1), KeyClass(prefix="key:long:", timeout=9.0)),
    )
    cold, key = keys_on(router, 0, 1, prefix="cold")[0], keys_on(router, 0)[0]
    other.warm()
    with router.lock(cold, timeout=5.0), router.lock(key, timeout=5.0):
        for asked, least in ((cold, 0.4), (key, 0.1)):
            with pytest.raises(LockTimeout) as caught:
                other.lock(asked)
            assert least - 0.01 <= caught.value.waited < 4.0
            with pytest.raises(LockTimeout):
                other.lock(asked, timeout=None)


def test_a_wait_longer_than_one_statement(
    router: LockRouter, other: LockRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's bound ends a statement; the call goes on."""
    monkeypatch.setattr("lockrouter.acquire.MAX_STATEMENT_WAIT", 0.1)
    key = keys_on(router, 0)[0]
    held = router.lock(key, timeout=5.0)
    waiter = in_thread(lambda: other.lock(key, timeout=30.0))
    with pytest.raises(LockTimeout) as caught:
        in_thread(lambda: router.lock(key, timeout=0.7)).result()
    assert caught.value.waited >= 0.69
    held.release()
    waiter.result().release()


# -- the pool ---------------------------------------------------------------------------------------------------------


def test_an_exhausted_pool_is_not_a_busy_row(routers: Routers) -> None:
    router = routers.make(pool={"size": 1, "min_idle": 1})
    first, second, third = keys_on(router, 0, 3)
    with router.lock(first, timeout=5.0):

        def wait(timeout: float) -> None:
            with pytest.raises(PoolTimeout) as caught:
                router.lock(second, timeout=timeout)
            assert isinstance(caught.value, TimeoutError)
            assert not isinstance(caught.value, LockTimeout)
            assert caught.value.shard == "shard-0"

        for timeout in (0.0, 0.2):
            elsewhere(lambda: soon_enough(timeout + 0.1, lambda: wait(timeout)))  # noqa: B023
        with pytest.raises(PoolTimeout):
            in_thread(lambda: router.try_lock(second)).result()
        nested = router.lock(third, timeout=0)
        nested.release()
        waiter = in_thread(lambda: router.lock(second, timeout=20.0))
        eventually(lambda: router.health()["shard-0"]["pool"]["waiting"] == 1)
    waiter.result().release()


def test_connections_are_bounded(routers: Routers, server: Observer) -> None:
    router = routers.make(pool={"size": 3, "min_idle": 1})
    keys = keys_on(router, 0, 24)
    most: list[int] = []

    def run(key: str) -> None:
        for _ in range(20):
            with router.lock(key, timeout=20.0):
                pass

    threads = [in_thread(lambda key=key: run(key)) for key in keys]  # type: ignore[misc]
    while any(thread.is_alive() for thread in threads):
        most.append(len(server.sessions()))
    for thread in threads:
        thread.result()
    assert max(most) <= 3 + 2


# -- exclusion and tokens ---------------------------------------------------------------------------------------------

WORKER = """
import os, sys, threading, lockrouter
file, key, counter, log, threads, turns = *sys.argv[1:5], int(sys.argv[5]), int(sys.argv[6])
router = lockrouter.LockRouter.from_file(file)
def work():
    for _ in range(turns):
        with router.lock(key, timeout=60.0) as held:
            assert not held.degraded
            with open(counter) as f: value = int(f.read())
            with open(counter, "w") as f: f.write(str(value + 1))
            with open(log, "a") as f: f.write(f"{held.token}\\n")
workers = [threading.Thread(target=work) for _ in range(threads)]
[worker.start() for worker in workers]; [worker.join() for worker in workers]
router.close()
assert threading.active_count() == 1, threading.enumerate()
"""


def test_exclusion_and_rising_tokens_over_threads_routers_and_processes(
    cluster: Cluster, router: LockRouter, other: LockRouter, tmp_path: Path
) -> None:
    key = keys_on(router, 0, prefix="proof")[0]
    counter, log = tmp_path / "counter", tmp_path / "log"
    counter.write_text("0")
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        WORKER,
        str(cluster.shards_file),
        key,
        str(counter),
        str(log),
        "4",
        "25",
    ]
    processes = [subprocess.Popen(command) for _ in range(3)]

    def work(caller: LockRouter) -> None:
        for _ in range(25):
            with caller.lock(key, timeout=60.0) as held:
                value = int(counter.read_text())
                counter.write_text(str(value + 1))
                with log.open("a") as file:
                    file.write(f"{held.token}\n")

    threads = [in_thread(lambda caller=caller: work(caller)) for caller in (router, other) * 3]  # type: ignore[misc]
    for thread in threads:
        thread.result(120.0)
    assert [process.wait(120.0) for process in processes] == [0, 0, 0]
    assert counter.read_text() == str(3 * 4 * 25 + 6 * 25)
    tokens = [int(line) for line in log.read_text().split()]
    assert tokens == sorted(set(tokens))


def test_a_released_row_is_never_busy_for_its_own_process(router: LockRouter) -> None:
    keys = keys_on(router, 0, 4)

    def loop(key: str) -> int:
        missed = 0
        for _ in range(5_000):
            held = router.try_lock(key)
            if held is None:
                missed += 1
            else:
                held.release()
        return missed

    threads = [in_thread(lambda key=key: loop(key)) for key in keys]  # type: ignore[misc]
    assert [thread.result(120.0) for thread in threads] == [0, 0, 0, 0]


def test_a_thread_that_ends_while_holding_releases_nothing(router: LockRouter, other: LockRouter) -> None:
    key = keys_on(router, 0)[0]
    kept: list[RowLock] = []
    elsewhere(lambda: kept.append(router.lock(key, timeout=5.0)))
    assert router.try_lock(key) is None
    assert other.try_lock(key) is None
    kept[0].check()
    kept.pop().release(confirm=True)
    assert free_for(other, key)


def test_a_dropped_handle_is_released_with_a_warning(router: LockRouter, other: LockRouter) -> None:
    key = keys_on(router, 0)[0]

    def take() -> None:
        router.lock(key, timeout=5.0)

    with pytest.warns(ResourceWarning, match="dropped"):
        take()
    eventually(lambda: free_for(other, key), 2.0)
    with pytest.warns(ResourceWarning):
        elsewhere(take)
    with router.lock(key, timeout=2.0, reentrant=False):
        pass


def test_a_dropped_nested_handle_counts_as_released(router: LockRouter, other: LockRouter) -> None:
    key = keys_on(router, 0)[0]
    outer = router.lock(key, timeout=5.0)
    with pytest.warns(ResourceWarning):
        router.lock(key, timeout=5.0)
    outer.check()
    assert other.try_lock(key) is None
    outer.release(confirm=True)
    eventually(lambda: free_for(other, key), 2.0)


# -- fork -------------------------------------------------------------------------------------------------------------

FORK = """
import json, os, sys, threading, lockrouter
file, key, spare, ending = sys.argv[1:5]
router = lockrouter.LockRouter.from_file(file)
router.lock(spare, timeout=5.0).release()
held = router.lock(key, timeout=5.0)
calls = []
held.on_lost(calls.append)
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    seen = {"lost": held.lost}
    try: held.check()
    except lockrouter.LockLost as error: seen["check"] = str(error.reason)
    seen["busy"] = router.try_lock(key) is None
    with router.lock(spare, timeout=5.0, confirm=True) as mine: seen["fresh"] = not mine.degraded
    with held: pass
    try: held.release()
    except Exception as error: seen["release"] = repr(error)
    del held
    os.write(writing, json.dumps(seen).encode())
    if ending == "_exit": os._exit(0)
    router.close()
    sys.exit(0)
os.close(writing)
with os.fdopen(reading) as pipe: said = pipe.read()
assert os.waitpid(child, 0)[1] == 0, "the child failed"
assert not held.lost and not calls
held.check()
other = lockrouter.LockRouter.from_file(file)
assert other.try_lock(key) is None
held.release(confirm=True)
router.lock(spare, timeout=5.0).release(confirm=True)
router.close(); other.close()
assert threading.active_count() == 1
print(said)
"""


@pytest.mark.parametrize("ending", ["_exit", "exit"])
def test_a_forked_child_owns_nothing_and_the_parent_loses_nothing(
    cluster: Cluster, router: LockRouter, ending: str
) -> None:
    key, spare = keys_on(router, 0, 2, prefix="fork")
    command = [sys.executable, "-W", "error", "-c", FORK, str(cluster.shards_file), key, spare, ending]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr and "Warning" not in done.stderr, done.stderr
    assert json.loads(done.stdout) == {"lost": True, "check": "forked", "busy": True, "fresh": True}


FORK_WHILE_BUSY = """
import os, sys, threading, lockrouter
file, *keys = sys.argv[1:]
router = lockrouter.LockRouter.from_file(file)
stop = threading.Event()
def work(key):
    while not stop.is_set():
        with router.lock(key, timeout=20.0): pass
workers = [threading.Thread(target=work, args=(key,)) for key in keys]
[worker.start() for worker in workers]
for _ in range(10):
    child = os.fork()
    if child == 0:
        for key in keys:
            with router.lock(key, timeout=20.0, confirm=True) as held: assert not held.degraded
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
[worker.join() for worker in workers]
router.close()
"""


def test_forks_in_the_middle_of_everything(cluster: Cluster, router: LockRouter) -> None:
    command = [sys.executable, "-c", FORK_WHILE_BUSY, str(cluster.shards_file), *keys_on(router, 0, 4, prefix="fork")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


GEVENT = """
from gevent import monkey; monkey.patch_all()
import sys, time, gevent, lockrouter
file, key = sys.argv[1:]
router = lockrouter.LockRouter.from_file(file)
value, late, running = 0, [], True
def tick():
    while running:
        began = time.monotonic(); gevent.sleep(0.01); late.append(time.monotonic() - began - 0.01)
def work():
    global value
    for _ in range(5):
        with router.lock(key, timeout=60.0) as held:
            assert not held.degraded
            before = value; gevent.sleep(0.001); value = before + 1
ticker = gevent.spawn(tick)
gevent.joinall([gevent.spawn(work) for _ in range(40)], raise_error=True)
with router.lock(key, timeout=5.0):
    assert gevent.spawn(router.try_lock, key).get() is None
    other = lockrouter.LockRouter.from_file(file)
    try: other.lock(key, timeout=0.5)
    except lockrouter.LockTimeout: pass
    else: raise AssertionError
running = False; ticker.join()
assert value == 200, value
assert sorted(late)[len(late) // 2] < 0.2, late
router.close(); other.close()
"""


def test_greenlets(cluster: Cluster, router: LockRouter) -> None:
    command = [sys.executable, "-c", GEVENT, str(cluster.shards_file), keys_on(router, 0, prefix="green")[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


# -- the router -------------------------------------------------------------------------------------------------------


def test_warm_opens_connections_to_every_shard(routers: Routers) -> None:
    router = routers.make(pool={"min_idle": 3})
    assert {state["role"] for state in router.health().values()} == {"unknown"}
    assert all(not observer.sessions() for observer in routers.observers)
    router.warm()
    for observer in routers.observers:
        assert len(observer.sessions()) >= 3 + 1
    for state in router.health().values():
        assert state["state"] == "ok"
        assert state["role"] == "primary"
        assert state["term"] >= 1
        assert state["pool"]["idle"] == 3
    router.warm()
    assert {state["pool"]["idle"] for state in router.health().values()} == {3}


def test_closing_ends_every_verb(router: LockRouter) -> None:
    with router as entered:
        assert entered is router
        router.lock("a", timeout=5.0).release()
    router.close()
    for verb in (lambda: router.lock("a"), lambda: router.try_lock("a"), router.warm, router.__enter__):
        with pytest.raises(RouterClosed):
            verb()
    router.health()


def test_a_router_that_was_never_used_closes(router: LockRouter) -> None:
    router.close()
    with pytest.raises(RouterClosed):
        router.lock("a")


def test_closing_wakes_waiters_wherever_they_wait(routers: Routers, server: Observer) -> None:
    router, other = routers.make(router={"close_timeout": 0.3}, pool={"size": 2}), routers.make()
    first, second, third = keys_on(router, 0, 3)
    with other.lock(first, timeout=5.0), other.lock(second, timeout=5.0):
        at_server = [in_thread(lambda key=key: router.lock(key, timeout=60.0)) for key in (first, second)]  # type: ignore[misc]
        server.await_waiters(2)
        at_gate = in_thread(lambda: router.lock(first, timeout=60.0))
        at_pool = in_thread(lambda: router.lock(third, timeout=60.0))
        eventually(lambda: routers.waiting(router) == 4 and router.health()["shard-0"]["pool"]["waiting"] == 1)
        began = time.monotonic()
        router.close()
        for thread in (*at_server, at_gate, at_pool):
            with pytest.raises(RouterClosed):
                thread.result(10.0)
        assert time.monotonic() - began < 8.0
        eventually(lambda: not server.waiters(), 1.0)


def test_closing_waits_for_holders(routers: Routers) -> None:
    router = routers.make(router={"close_timeout": 30.0})
    key = keys_on(router, 0)[0]
    held = router.lock(key, timeout=5.0)
    closing = in_thread(router.close)
    eventually(lambda: _refuses(router))
    assert closing.is_alive()
    held.check()
    held.release(confirm=True)
    closing.result(5.0)


def test_holders_that_outstay_closing_lose(routers: Routers, other: LockRouter) -> None:
    router = routers.make(router={"close_timeout": 0.2})
    key = keys_on(router, 0)[0]
    reasons: list[LossReason] = []
    held = router.lock(key, timeout=5.0)
    held.on_lost(reasons.append)
    router.close()
    assert held.lost
    eventually(lambda: reasons)
    assert reasons == [LossReason.ROUTER_CLOSED]
    eventually(lambda: free_for(other, key))
    with pytest.raises(LockLost) as caught:
        held.release()
    assert caught.value.reason is LossReason.ROUTER_CLOSED


def _refuses(router: LockRouter) -> bool:
    def ask() -> bool:
        try:
            held = router.try_lock("nobody's")
        except RouterClosed:
            return True
        if held is not None:
            held.release()
        return False

    return bool(elsewhere(ask))


def test_limits_of_a_class(routers: Routers, other: LockRouter) -> None:
    router = routers.make(
        classes=(
            KeyClass(prefix="few:", max_waiters=2),
            KeyClass(prefix="frozen:", frozen=True),
            KeyClass(prefix="lease:", mode="lease"),
        )
    )
    with pytest.raises(Frozen):
        router.lock("frozen:1", timeout=5.0)
    with pytest.raises(ConfigError):
        router.try_lock("lease:1")
    key = keys_on(router, 0, prefix="few")[0]
    with router.lock(key, timeout=5.0):
        waiting = [in_thread(lambda: router.lock(key, timeout=30.0)) for _ in range(2)]
        eventually(lambda: routers.waiting(router) == 2)
        with pytest.raises(Overloaded):
            in_thread(lambda: router.lock(key, timeout=30.0)).result(5.0)
        assert elsewhere(lambda: router.try_lock(key)) is None
    for thread in waiting:
        thread.result().release()


def test_a_key_is_in_no_log_and_no_error(
    routers: Routers, other: LockRouter, server: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="lockrouter")
    router = routers.make()
    other.warm()
    key = keys_on(router, 0, prefix="secret-name")[0]
    with router.lock(key, timeout=5.0) as held:
        assert "secret-name" not in repr(held)
        with pytest.raises(LockTimeout) as busy:
            other.lock(key, timeout=0.01)
        assert all("secret-name" not in seen.info for seen in server.sessions())
        server.kill(eventually(server.holders)[0])
        eventually(lambda: held.lost)
        with pytest.raises(LockLost) as lost:
            held.release()
    assert "secret-name" not in f"{busy.value} {lost.value} {caplog.text}"


# -- frozen processes -------------------------------------------------------------------------------------------------

HOLD = """
import sys, msgspec, lockrouter
file, key = sys.argv[1:]
config = lockrouter.load(file)
config = msgspec.structs.replace(config, router=msgspec.structs.replace(config.router, ghost_timeout=2))
router = lockrouter.LockRouter(config)
held = router.lock(key, timeout=5.0)
print(held.token, flush=True)
sys.stdin.readline()
print(held.lost, flush=True)
try: held.release()
except lockrouter.LockLost as error: print(error.reason, flush=True)
router.close()
"""


def test_a_frozen_holder_is_freed_and_finds_out(cluster: Cluster, routers: Routers, router: LockRouter) -> None:
    assert isinstance(load(cluster.shards_file), msgspec.Struct)
    key = keys_on(router, 0, prefix="frozen")[0]
    command = [sys.executable, "-c", HOLD, str(cluster.shards_file), key]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        token = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            with router.lock(key, timeout=20.0) as held:
                assert held.token > token
                assert time.monotonic() - began < 2 + 2 + 1.0
        finally:
            os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "True\n"
        assert process.stdout.readline().strip() in {"silent", "closed"}
        assert process.wait(20.0) == 0
