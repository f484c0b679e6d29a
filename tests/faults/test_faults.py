"""Faults of servers, networks and operators: each has its own outcome, inside the deadline, and leaves nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pymysql
import pytest

from lockrouter import (
    LockLost,
    LockRouter,
    LockRouterError,
    LockTimeout,
    LossReason,
    MaintenanceStall,
    NotSeeded,
    PoolTimeout,
    RowLock,
    ShardError,
    ShardUnavailable,
)
from lockrouter.protocol.wire import Wire
from lockrouter.testing.cluster import Cluster
from lockrouter.testing.shardfiles import APPLICATION
from tests.support.observe import Observer, Routers, eventually, in_thread, keys_on, soon_enough
from tests.support.proxy import EXECUTES, Cut, Proxy, Rule, Way, dead_port

pytestmark = pytest.mark.server

SHARD = 2
NAME = f"shard-{SHARD}"
NEVER = {"failures": 10_000}


@pytest.fixture
def server(routers: Routers) -> Observer:
    """The server that gets broken."""
    return routers.observers[SHARD]


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    """A proxy in front of it."""
    with Proxy(cluster.port(SHARD)) as between:
        yield between


def a_key(router: LockRouter, *, prefix: str = "fault") -> str:
    return keys_on(router, SHARD, prefix=prefix)[0]


def fine(router: LockRouter, key: str, timeout: float = 15.0) -> None:
    """The lock is taken for real and confirmed."""
    with router.lock(key, timeout=timeout, confirm=True) as held:
        assert not held.degraded


def attempt(router: LockRouter, key: str, timeout: float) -> RowLock | LockRouterError:
    """What one call gives; never a degraded lock, never late."""
    began = time.monotonic()
    outcome: RowLock | LockRouterError
    try:
        outcome = router.lock(key, timeout=timeout)
        assert not outcome.degraded
        outcome.release()
    except LockRouterError as error:
        outcome = error
    assert time.monotonic() - began < timeout + 3.0
    return outcome


def refused(
    router: LockRouter, key: str, kind: type[ShardError], match: str | None = None, *, timeout: float = 3.0
) -> None:
    """Both verbs raise the one error, whatever the number of attempts, in time, and name the shard."""
    for _ in range(4):
        calls: tuple[Callable[[], object], ...] = (
            lambda: router.lock(key, timeout=timeout),
            lambda: router.try_lock(key),
        )
        for call in calls:
            with pytest.raises(kind, match=match) as caught:
                call()
            assert type(caught.value) is kind
            assert caught.value.shard == NAME


# -- what operators do to tables --------------------------------------------------------------------------------------


def test_a_deleted_row_is_not_seeded(routers: Routers, server: Observer) -> None:
    router = routers.make()
    key = a_key(router)
    address = router.route(key)
    fine(router, key)
    columns = server.ask(f"SELECT slot, epoch, pad FROM lock_{address.table:02d} WHERE slot = {address.slot}")[0]
    server.ask(f"DELETE FROM lock_{address.table:02d} WHERE slot = {address.slot}")
    try:
        refused(router, key, NotSeeded)
        refused(routers.make(), key, NotSeeded)
        fine(router, keys_on(router, SHARD, 2, prefix="fault")[1])
        routers.quiet()
        assert router.health()[NAME]["breaker"] == "closed"
    finally:
        server.ask(f"INSERT INTO lock_{address.table:02d} (slot, epoch, pad) VALUES (%s, %s, %s)", *columns)
    fine(router, key)


def test_a_dropped_table_is_not_seeded(routers: Routers, server: Observer) -> None:
    router = routers.make()
    key = a_key(router)
    table = f"lock_{router.route(key).table:02d}"
    fine(router, key)
    made = server.ask(f"SHOW CREATE TABLE {table}")[0][1]
    server.ask(f"CREATE TABLE kept AS SELECT * FROM {table}")
    server.ask(f"DROP TABLE {table}")
    try:
        refused(router, key, NotSeeded)
        refused(routers.make(), key, NotSeeded)
        assert router.health()[NAME]["breaker"] == "closed"
    finally:
        server.ask(made)
        server.ask(f"INSERT INTO {table} SELECT * FROM kept")
        server.ask("DROP TABLE kept")
    fine(router, key)


def test_a_dropped_lock_meta_is_an_error(routers: Routers, server: Observer) -> None:
    server.ask("RENAME TABLE lock_meta TO kept_meta")
    try:
        router = routers.make(breaker={"failures": 2})
        for _ in range(5):
            with pytest.raises((NotSeeded, ShardUnavailable)):
                router.lock(a_key(router), timeout=2.0)
    finally:
        server.ask("RENAME TABLE kept_meta TO lock_meta")
    eventually(lambda: isinstance(attempt(router, a_key(router), 3.0), RowLock))


@contextlib.contextmanager
def queued_alter(server: Observer, table: int) -> Iterator[None]:
    """An ALTER that waits for somebody's open transaction; everybody else waits behind the ALTER."""
    reader, changer = server.connect(), server.connect()
    name = f"lock_{table:02d}"

    def change() -> None:
        with changer.cursor() as cursor, contextlib.suppress(pymysql.err.Error):
            cursor.execute(f"ALTER TABLE {name} ENGINE=InnoDB")

    try:
        with reader.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute(f"SELECT 1 FROM {name} LIMIT 1")
            cursor.fetchall()
        number = changer.thread_id()  # type: ignore[no-untyped-call]
        thread = in_thread(change)
        eventually(lambda: _waits_for_metadata(server, number))
        yield
        server.ask(f"KILL {number}")
        thread.result()
    finally:
        reader.close()
        changer.close()


def _waits_for_metadata(server: Observer, number: int) -> bool:
    return any("metadata lock" in str(row[6]) for row in server.ask("SHOW FULL PROCESSLIST") if row[0] == number)


@pytest.mark.parametrize("timeout", [None, 0.0, 0.02, 0.4, 2.5])
def test_a_queued_alter_is_a_maintenance_stall(routers: Routers, server: Observer, timeout: float | None) -> None:
    """`None` stands for `try_lock`."""
    router = routers.make()
    key = a_key(router)
    for other in (router, routers.make()):
        other.warm()
    with queued_alter(server, router.route(key).table):

        def stall() -> None:
            with pytest.raises(MaintenanceStall) as caught:
                router.try_lock(key) if timeout is None else router.lock(key, timeout=timeout)
            assert caught.value.shard == NAME

        soon_enough((timeout or 0.1) + 0.1, stall)
        assert router.health()[NAME]["breaker"] == "closed"
    fine(router, key)


def test_a_holder_does_not_notice_a_queued_alter(routers: Routers, server: Observer) -> None:
    router = routers.make()
    key = a_key(router)
    with router.lock(key, timeout=5.0, confirm=True) as held:
        with queued_alter(server, router.route(key).table):
            held.check()
            with pytest.raises(MaintenanceStall):
                routers.make().lock(keys_on(router, SHARD, 2, prefix="fault")[0], timeout=1.5)
        held.check()


# -- servers that do not answer, or with an error ---------------------------------------------------------------------


def test_a_server_that_is_silent_from_the_start(routers: Routers, proxy: Proxy) -> None:
    proxy.stop()
    router = routers.make(ports={SHARD: proxy.port}, breaker=NEVER, pool={"connect_timeout": 0.3})
    key = a_key(router)
    for timeout in (0.05, 0.6):

        def fail(timeout: float = timeout) -> None:
            with pytest.raises((ShardUnavailable, PoolTimeout)):
                router.lock(key, timeout=timeout)

        soon_enough(timeout + 0.1, fail)
    with pytest.raises((ShardUnavailable, PoolTimeout)):
        router.try_lock(key)
    proxy.accept()
    fine(router, key)


def test_a_server_that_falls_silent(routers: Routers, proxy: Proxy, server: Observer) -> None:
    router = routers.make(ports={SHARD: proxy.port}, breaker=NEVER)
    key = a_key(router)
    for ways in ((Way.UP,), (Way.DOWN,), (Way.UP, Way.DOWN)):
        fine(router, key)
        proxy.stop(*ways)
        for timeout in (0.05, 0.4):
            began = time.monotonic()
            with pytest.raises((ShardUnavailable, PoolTimeout)):
                router.lock(key, timeout=timeout)
            assert time.monotonic() - began < timeout + 1.0
        proxy.accept()
        fine(router, key)
    routers.quiet()


def test_a_server_that_refuses(routers: Routers) -> None:
    with dead_port() as port:
        router = routers.make(ports={SHARD: port}, breaker=NEVER)
        key = a_key(router)
        for timeout in (0.0, 0.05, 1.0):
            with pytest.raises(ShardUnavailable) as caught:
                router.lock(key, timeout=timeout)
            assert caught.value.__cause__ is not None
        with pytest.raises(ShardUnavailable):
            router.try_lock(key)


def test_too_many_connections(routers: Routers, server: Observer) -> None:
    router, fresh = routers.make(pool={"size": 64, "min_idle": 1}), routers.make()
    key, *others = keys_on(router, SHARD, 70, prefix="fault")
    fine(router, key)
    eventually(lambda: len(router._core.shards[NAME].keeper.sessions()) == 2)  # it can renew its right to grant
    most = int(server.ask("SELECT @@max_connections")[0][0])
    fillers: list[pymysql.Connection[Any]] = []
    server.ask("SET GLOBAL max_connections = 20")
    try:
        with contextlib.suppress(pymysql.err.Error):
            while True:
                fillers.append(
                    pymysql.connect(
                        host="127.0.0.1",
                        port=routers.cluster.port(SHARD),
                        user=APPLICATION,
                        password=routers.user_password(),
                    )
                )
        for _ in range(8):
            with pytest.raises(ShardUnavailable) as caught:
                fresh.lock(key, timeout=0.5)
            assert "1040" in f"{caught.value!r} {caught.value.__cause__!r}"
            with pytest.raises(ShardUnavailable):
                fresh.try_lock(key)
        with router.lock(key, timeout=2.0) as held:  # its connection is there already
            assert not held.degraded
            for _ in range(8):
                with pytest.raises(ShardUnavailable):
                    in_thread(lambda: router.lock(others[0], timeout=0.5)).result()
            held.check()
        assert router.health()[NAME]["breaker"] == "closed"
    finally:
        server.ask(f"SET GLOBAL max_connections = {most}")
        for filler in fillers:
            filler.close()
    eventually(lambda: router.health()[NAME]["state"] == "ok")
    fine(router, others[0])
    eventually(lambda: isinstance(attempt(fresh, key, 3.0), RowLock))


def test_a_wrong_password(routers: Routers) -> None:
    router = routers.make(password="not-it", breaker={"failures": 2})
    key = a_key(router)
    for _ in range(6):
        with pytest.raises(ShardUnavailable, match="1045") as caught:
            router.lock(key, timeout=2.0)
        assert caught.value.__cause__ is not None
        assert "not-it" not in f"{caught.value} {caught.value.__cause__!r}"
    with pytest.raises(ShardUnavailable):
        router.try_lock(key)
    assert router.health()[NAME]["state"] == "refused"


def test_a_read_only_server(routers: Routers, server: Observer) -> None:
    router, other = routers.make(breaker={"failures": 2}), routers.make()
    key, second = keys_on(router, SHARD, 2, prefix="fault")
    reasons: list[LossReason] = []
    held = router.lock(key, timeout=5.0)
    held.on_lost(reasons.append)
    other.warm()
    began = time.monotonic()
    server.ask("SET GLOBAL read_only = 1")
    try:
        eventually(lambda: held.lost)
        assert time.monotonic() - began < 0.5 + 0.5 + 1.0
        eventually(lambda: reasons)
        assert reasons == [LossReason.DEMOTED]
        with pytest.raises(LockLost) as caught:
            held.check()
        assert caught.value.reason is LossReason.DEMOTED
        for caller in (router, other, routers.make()):
            refused(caller, second, ShardUnavailable, "read-only")
    finally:
        server.ask("SET GLOBAL read_only = 0")
    with pytest.raises(LockLost):
        held.release()
    eventually(lambda: router.health()[NAME]["state"] == "ok")
    fine(router, key)


def test_a_server_that_was_demoted_is_not_held_on_to(routers: Routers, server: Observer) -> None:
    """The shard's one name may lead to the new primary by now: only who connects anew finds out."""
    router = routers.make()
    fine(router, a_key(router))
    keeper = router._core.shards[NAME].keeper
    before = {session.connection_id for session in keeper.sessions()}
    server.ask("SET GLOBAL read_only = 1")
    try:
        eventually(lambda: router.health()[NAME]["state"] != "ok")
        eventually(lambda: keeper._control is None or keeper._control.connection_id not in before)
    finally:
        server.ask("SET GLOBAL read_only = 0")
    eventually(lambda: router.health()[NAME]["state"] == "ok")
    assert keeper._control is not None
    assert keeper._control.connection_id not in before
    fine(router, a_key(router))


def test_check_sees_read_only_before_the_control_session(routers: Routers, server: Observer) -> None:
    router = routers.make(router={"role_check": 1.0})
    with pytest.raises(LockLost), router.lock(a_key(router), timeout=5.0) as held:
        server.ask("SET GLOBAL read_only = 1")
        try:
            held.check()
        finally:
            server.ask("SET GLOBAL read_only = 0")
    eventually(lambda: router.health()[NAME]["state"] == "ok")


# -- sessions that end ------------------------------------------------------------------------------------------------


def test_a_killed_session_is_known_within_half_a_second(routers: Routers, server: Observer) -> None:
    router, other = routers.make(), routers.make()
    key = a_key(router)
    other.warm()
    delays = []
    for _ in range(4):
        reasons: list[LossReason] = []
        held = router.lock(key, timeout=5.0)
        held.on_lost(reasons.append)
        eventually(server.holders)
        server.kill(server.holders()[0])
        began = time.monotonic()
        eventually(lambda: held.lost)  # noqa: B023 - called now
        delays.append(time.monotonic() - began)
        with other.lock(key, timeout=5.0) as next_one:
            assert next_one.token > held.token
            eventually(lambda: reasons)  # noqa: B023 - called now
            with pytest.raises(LockLost) as caught:
                held.release()
        assert caught.value.reason is LossReason.CLOSED
        assert reasons == [LossReason.CLOSED]
    assert min(delays) < 0.5
    assert router.health()[NAME]["breaker"] == "closed"


def test_a_session_killed_while_waiting_waits_again(routers: Routers, server: Observer) -> None:
    router, other = routers.make(), routers.make(breaker={"failures": 1})
    key = a_key(router)
    fine(other, key)
    held = router.lock(key, timeout=5.0)
    waiter = in_thread(lambda: other.lock(key, timeout=30.0))
    seen: set[int] = set()
    for _ in range(2):
        number = eventually(lambda: next((one for one in server.waiters() if one not in seen), None))
        seen.add(number)
        server.kill(number)
    eventually(lambda: [one for one in server.waiters() if one not in seen])
    held.check()
    held.release()
    got = waiter.result()
    assert not got.degraded
    got.release(confirm=True)


def test_idle_sessions_the_server_closed_are_no_fault(routers: Routers, server: Observer) -> None:
    router = routers.make(breaker={"failures": 1}, pool={"size": 32, "min_idle": 32, "connect_timeout": 5.0})
    key = a_key(router)
    for pause in (0.0, 0.3):
        router.warm()
        eventually(lambda: router.health()[NAME]["pool"]["idle"] >= 32)
        for seen in server.sessions():
            with contextlib.suppress(pymysql.err.Error):
                server.kill(seen.id)
        threading.Event().wait(pause)  # check-out looks first at what was idle for long, and not at what was not
        fine(router, key, 3.0)
        assert router.health()[NAME]["breaker"] == "closed"
        assert routers.metric(router, "lockrouter_acquires_total", shard=NAME, mode="row", outcome="error") == 0


def test_an_idle_connection_that_was_cut_without_a_word_is_no_fault(routers: Routers, proxy: Proxy) -> None:
    """It had not been proven alive within the second: its silence says nothing of the server."""
    router = routers.make(ports={SHARD: proxy.port}, breaker={"failures": 1}, pool={"min_idle": 1})
    key = a_key(router)
    fine(router, key)
    eventually(lambda: router._core.shards[NAME].pool.counts()["idle"])
    threading.Event().wait(1.1)
    proxy.cut(Cut.STALL, said=b"FOR UPDATE")
    outcome = attempt(router, key, 0.3)
    assert isinstance(outcome, ShardUnavailable), outcome
    assert router.health()[NAME]["breaker"] == "closed"
    fine(router, key, 5.0)
    proxy.accept()


def test_idle_sessions_are_kept_alive(routers: Routers, proxy: Proxy) -> None:
    """Those that have locked much as well as those that have not; a lock after a long rest needs no new connection."""
    router = routers.make(ports={SHARD: proxy.port}, router={"ghost_timeout": 3}, pool={"size": 2, "min_idle": 2})
    router.warm()
    key = a_key(router)
    for _ in range(5):
        router.lock(key, timeout=5.0).release()
    pool = router._core.shards[NAME].pool
    before = {session: session.answered_at for session in pool.sessions}
    eventually(lambda: all(session.answered_at > at + 1.5 for session, at in before.items()), 10.0)
    fine(router, key)
    assert pool.sessions == set(before)


SLEEPER = """
import sys, threading, msgspec, lockrouter
file, key, *others = sys.argv[1:]
config, replace = lockrouter.load(file), msgspec.structs.replace
config = replace(
    config,
    router=replace(config.router, ghost_timeout=2),
    pool=replace(config.pool, min_idle=8),
    breaker=replace(config.breaker, failures=1),
)
router = lockrouter.LockRouter(config)
held = [router.lock(key, timeout=5.0) for key in others]
for one in held: one.release(confirm=True)
print(router.health()[router.route(key).shard]["pool"]["idle"], flush=True)
sys.stdin.readline()
with router.lock(key, timeout=5.0, confirm=True) as lock: print(lock.degraded, flush=True)
print(router.health()[router.route(key).shard]["breaker"], flush=True)
router.close()
"""


def test_a_process_that_slept_over_the_servers_patience(routers: Routers, cluster: Cluster, server: Observer) -> None:
    key, *others = keys_on(routers.make(), SHARD, 5, prefix="sleeper")
    command = [sys.executable, "-c", SLEEPER, str(cluster.shards_file), key, *others]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert int(process.stdout.readline()) >= 4
            there = len(server.sessions())
            os.kill(process.pid, signal.SIGSTOP)
            eventually(lambda: len(server.sessions()) < there, 10.0)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        assert [process.stdout.readline().strip() for _ in range(2)] == ["False", "closed"]
        assert process.wait(20.0) == 0


def test_calls_too_short_for_a_connection_are_no_fault(routers: Routers) -> None:
    for _ in range(3):
        router = routers.make()
        key = a_key(router)
        for _ in range(6):
            assert isinstance(attempt(router, key, 0.001), (RowLock, LockTimeout, PoolTimeout, ShardUnavailable))
        assert router.health()[NAME]["breaker"] == "closed"
        fine(router, key, 5.0)


# -- servers that die, restart, or freeze -----------------------------------------------------------------------------


def test_a_pool_full_of_dead_sessions_recovers_in_one_call(
    routers: Routers, server: Observer, cluster: Cluster
) -> None:
    router = routers.make(breaker=NEVER, pool={"min_idle": 6})
    keys = keys_on(router, SHARD, 6, prefix="fault")
    router.warm()
    cluster.kill(SHARD)
    cluster.start(SHARD)
    threads = [in_thread(lambda key=key: fine(router, key, 20.0)) for key in keys]  # type: ignore[misc]
    for thread in threads:
        thread.result()
    outcomes = [
        routers.metric(router, "lockrouter_acquires_total", shard=NAME, mode="row", outcome=outcome)
        for outcome in ("acquired", "error", "timeout", "refused")
    ]
    assert outcomes == [6, 0, 0, 0]


def test_a_server_killed_under_holders_and_waiters(routers: Routers, cluster: Cluster, server: Observer) -> None:
    router, other = routers.make(breaker=NEVER), routers.make(breaker=NEVER)
    key = a_key(router)
    held = router.lock(key, timeout=5.0)

    def take(caller: LockRouter) -> None:
        try:
            fine(caller, key, 40.0)
        except ShardUnavailable:
            pass  # the retries of one call end before a server is up again

    at_server = in_thread(lambda: take(other))
    at_gate = in_thread(lambda: take(router))
    server.await_waiters()
    cluster.kill(SHARD)
    eventually(lambda: held.lost)
    with pytest.raises(LockLost):
        held.release()
    cluster.start(SHARD)
    for waiter in (at_server, at_gate):
        waiter.result(45.0)
    fine(other, key)


def test_a_frozen_server_loses_its_holders_before_it_may_free_them(
    routers: Routers, cluster: Cluster, server: Observer
) -> None:
    router = routers.make(router={"ghost_timeout": 2}, breaker=NEVER)
    key = a_key(router)
    reasons: list[LossReason] = []
    held = router.lock(key, timeout=5.0)
    held.on_lost(reasons.append)
    server.ask("SELECT 1")
    cluster.pause(SHARD)
    began = time.monotonic()
    try:
        assert not held.lost
        eventually(lambda: held.lost)
        assert time.monotonic() - began < 2.0
        eventually(lambda: reasons)
        assert reasons == [LossReason.SILENT]
        with pytest.raises(LockLost):
            held.check()
        for timeout in (0.05, 0.4):
            with pytest.raises((ShardUnavailable, PoolTimeout)):
                router.lock(keys_on(router, SHARD, 2, prefix="fault")[1], timeout=timeout)
        with pytest.raises(LockLost):
            held.release()
    finally:
        cluster.resume(SHARD)
    fine(router, key)


def test_check_on_a_frozen_server_is_bounded(routers: Routers, cluster: Cluster) -> None:
    router = routers.make(breaker=NEVER, pool={"connect_timeout": 0.5})
    held = router.lock(a_key(router), timeout=5.0)
    cluster.pause(SHARD)
    try:
        began = time.monotonic()
        with pytest.raises(LockLost) as caught:
            held.check()
        assert time.monotonic() - began < 2.0
        assert caught.value.reason is LossReason.SILENT
        with pytest.raises(LockLost):
            held.release()
    finally:
        cluster.resume(SHARD)


# -- connections that end between any two bytes -----------------------------------------------------------------------


@pytest.mark.parametrize("cut", [Cut.FIN, Cut.RST], ids=lambda cut: cut.value)
@pytest.mark.parametrize("way", list(Way), ids=lambda way: way.value)
@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "every byte"])
@pytest.mark.parametrize("form", ["executed", "text", "prepare"])
def test_the_locking_exchange_is_cut_after_any_byte(
    routers: Routers,
    proxy: Proxy,
    server: Observer,
    monkeypatch: pytest.MonkeyPatch,
    way: Way,
    cut: Cut,
    step: int,
    form: str,
) -> None:
    """The session is one that was idle, or one proven alive just now: the call goes on with another one."""
    marker = {"executed": EXECUTES, "text": b"FOR UPDATE", "prepare": b"\x16SELECT"}[form]
    monkeypatch.setattr(Wire, "prepares", form != "text")
    router = routers.make(ports={SHARD: proxy.port}, breaker={**NEVER, "retry_delay": 0.01})
    key = a_key(router)
    for _ in range(3):
        fine(router, key)
    for allow in range(0, 420, step):
        for _ in range(1 if form == "prepare" else 3):  # the third lock of a session executes what the second prepared
            fine(router, key)
        if form == "prepare":
            forget_prepared(router)
        rule = proxy.add(Rule(way, allow, cut, marker=marker))
        held = router.lock(key, timeout=5.0)
        for _ in range(20):
            if rule.met.is_set():
                break
            held.release(confirm=True)  # that lock was taken step by step, which sends text
            held = router.lock(key, timeout=5.0)
        proxy.drop(rule)
        assert not held.degraded
        assert held.token
        try:
            held.release(confirm=True)
        except LockLost:
            assert rule.struck.is_set()  # it was cut behind the last byte of the reply
        if not rule.struck.is_set():
            break
    assert not rule.struck.is_set(), "the exchange is longer than this test thinks"
    assert allow > 20
    assert router.health()[NAME]["pool"]["busy"] == 0


def forget_prepared(router: LockRouter) -> None:
    for session in tuple(router._core.shards[NAME].pool.sessions):
        session.prepared.clear()


@pytest.mark.parametrize("way", list(Way), ids=lambda way: way.value)
def test_a_new_connection_is_cut_after_any_byte(routers: Routers, proxy: Proxy, server: Observer, way: Way) -> None:
    router = routers.make(ports={SHARD: proxy.port}, breaker={**NEVER, "retry_delay": 0.01}, pool={"min_idle": 1})
    key = a_key(router)
    fine(router, key)
    eventually(lambda: proxy.living >= 3)  # the control session and the writer are up
    reached = 0
    for allow in range(0, 900, 13):
        rule = Rule(way, allow, Cut.FIN)
        with busy_pool(router, key) as second:
            proxy.add(rule)
            held = router.lock(second, timeout=5.0)
            proxy.drop(rule)
            assert not held.degraded
            with contextlib.suppress(LockLost):  # cut behind the last byte of the reply
                held.release(confirm=True)
        reached += rule.struck.is_set()
        proxy.cut(after=2)
    assert reached >= 10


@contextlib.contextmanager
def busy_pool(router: LockRouter, key: str) -> Iterator[str]:
    """All idle sessions of the shard hold rows: the next call opens a new one. Answers a key for it."""
    spare = keys_on(router, SHARD, 40, prefix="busy")
    with contextlib.ExitStack() as stack:
        while router.health()[NAME]["pool"]["idle"]:
            stack.enter_context(router.lock(spare.pop(), timeout=5.0))
        yield key


@pytest.mark.parametrize("way", list(Way), ids=lambda way: way.value)
def test_the_exchange_stalls_after_any_byte(routers: Routers, proxy: Proxy, server: Observer, way: Way) -> None:
    """Nothing more comes, and the server never learns that the client has gone: its row is freed all the same."""
    router = routers.make(ports={SHARD: proxy.port}, breaker={**NEVER, "retry_delay": 0.01})
    other = routers.make()
    key = a_key(router)
    other.warm()
    points = (0, 1, 4, 5, 12, 21, 60) if way is Way.UP else (0, 1, 30, 90, 150, 190, 230, 260)
    for allow, marker, timeout in [*((point, EXECUTES, 0.25) for point in points), (60, b"FOR UPDATE", 0.09)]:
        for _ in range(3):
            fine(router, key)
        rule = proxy.add(Rule(way, allow, Cut.STALL, marker=marker))
        began = time.monotonic()
        outcome = attempt(router, key, timeout)
        assert isinstance(outcome, (RowLock, ShardUnavailable, PoolTimeout)), outcome
        assert time.monotonic() - began < 1.5
        if rule.struck.is_set() and not isinstance(outcome, RowLock):
            fine(other, key, 3.0)
        proxy.drop(rule)
        proxy.cut(Cut.RST, after=2)


def test_a_kill_that_was_cut_is_sent_again(routers: Routers, proxy: Proxy) -> None:
    router = routers.make(ports={SHARD: proxy.port}, breaker={**NEVER, "retry_delay": 0.01})
    other = routers.make()
    key = a_key(router)
    for _ in range(3):
        fine(router, key)
    stall, cut = Rule(Way.DOWN, 0, Cut.STALL, marker=b"FOR UPDATE"), Rule(Way.UP, 0, Cut.FIN, marker=b"KILL")
    proxy.add(stall)
    proxy.add(cut)
    assert isinstance(attempt(router, key, 0.09), ShardUnavailable)
    assert stall.struck.is_set()
    assert cut.struck.wait(5.0)
    fine(other, key, 3.0)


@pytest.mark.parametrize("way", list(Way), ids=lambda way: way.value)
def test_check_and_confirmed_release_are_cut_after_any_byte(
    routers: Routers, proxy: Proxy, server: Observer, way: Way
) -> None:
    router = routers.make(ports={SHARD: proxy.port}, breaker=NEVER)
    other = routers.make()
    key = a_key(router)
    other.warm()
    calls: list[tuple[bytes, Callable[[RowLock], None]]] = [
        (b"@@global.read_only", lambda held: held.check()),
        (b"@@global.read_only", lambda held: held.release(confirm=True)),
    ]
    for marker, call in calls:
        lost = 0
        for allow in range(0, 160, 4):
            held = router.lock(key, timeout=5.0)
            rule = proxy.add(Rule(way, allow, Cut.FIN, marker=marker))
            try:
                call(held)
            except LockLost as error:
                assert error.reason is LossReason.CLOSED
                lost += 1
            with contextlib.suppress(LockRouterError):
                held.release()
            fine(other, key, 3.0)
            proxy.drop(rule)
        assert lost >= 1


def test_a_slow_network_is_no_fault(routers: Routers, proxy: Proxy) -> None:
    router = routers.make(ports={SHARD: proxy.port}, breaker={"failures": 1})
    key = a_key(router)
    fine(router, key)
    proxy.delay(0.05)
    for _ in range(3):
        fine(router, key, 3.0)
    for timeout in (0.02, 0.06):
        attempt(router, key, timeout)
    assert router.health()[NAME]["breaker"] == "closed"
    proxy.delay(0.0)
    fine(router, key)


# -- interrupts -------------------------------------------------------------------------------------------------------


def interrupt_main_when(probe: Callable[[], object]) -> in_thread:
    """A thread that sends SIGINT to the main thread once `probe` answers."""
    main = threading.main_thread().ident
    assert main is not None

    def send() -> None:
        eventually(probe, 20.0)
        signal.pthread_kill(main, signal.SIGINT)

    return in_thread(send)


def test_an_interrupt_while_waiting_at_the_server(routers: Routers, server: Observer) -> None:
    router, other = routers.make(), routers.make()
    key = a_key(router)
    with other.lock(key, timeout=5.0) as held:
        for _ in range(3):
            sender = interrupt_main_when(server.waiters)
            with pytest.raises(KeyboardInterrupt):
                router.lock(key, timeout=60.0)
            sender.result()
            eventually(lambda: not server.waiters(), 1.0)
        held.check()
    fine(router, key, 3.0)


def test_an_interrupt_while_waiting_in_the_process(routers: Routers, server: Observer) -> None:
    router = routers.make(pool={"size": 1, "min_idle": 1})
    key, other_row = keys_on(router, SHARD, 2, prefix="fault")
    release = threading.Event()

    def hold() -> None:
        with router.lock(key, timeout=5.0):
            release.wait(30.0)

    holder = in_thread(hold)
    eventually(lambda: routers.held(router, SHARD) == 1)
    for asked in (key, other_row):  # at the gate; at the pool
        sender = interrupt_main_when(lambda: routers.waiting(router, SHARD) == 1)
        with pytest.raises(KeyboardInterrupt):
            router.lock(asked, timeout=60.0)
        sender.result()
        assert routers.waiting(router, SHARD) == 0
    release.set()
    holder.result()
    for asked in (key, other_row):
        fine(router, asked, 3.0)
