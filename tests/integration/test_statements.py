"""What goes over the wire, and what it locks: one statement, one row, and nothing that a driver or a pool adds."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator

import pymysql
import pytest
from dbutils.steady_db import SteadyDBConnection

from lockrouter import LockLost, LockRouter, LockTimeout, NotSeeded, ShardUnavailable, session
from lockrouter.deadline import now
from lockrouter.protocol.effects import drive
from lockrouter.protocol.packets import PING, Rows, execution, query
from lockrouter.protocol.wire import Wire
from lockrouter.session import Session
from lockrouter.sql.leases import Wanted, take
from lockrouter.sql.statements import MARIADB, MYSQL
from lockrouter.testing.binaries import Vendor
from lockrouter.testing.cluster import Cluster
from lockrouter.testing.shardfiles import APPLICATION
from tests.support.observe import Observer, Routers, elapsed, eventually, in_thread, keys_on
from tests.support.proxy import EXECUTES, Cut, Proxy, Rule, Way

pytestmark = pytest.mark.server


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    with Proxy(cluster.port(0)) as between:
        yield between


@pytest.fixture
def key(router: LockRouter) -> str:
    return keys_on(router, 0, prefix="statement")[0]


def sent(proxy: Proxy, what: bytes) -> int:
    """How often clients have sent that."""
    return sum(link.said.count(what) for link in tuple(proxy._links))


def locking(proxy: Proxy) -> int:
    """How often clients have asked for a row, by a prepared statement or by a text, which carries the key's hash."""
    return sent(proxy, EXECUTES) + sent(proxy, b" /* ")


def test_a_lease_that_is_asked_for_again_stays_as_it_was_taken(
    router: LockRouter, server: Observer, vendor: Vendor, key: str
) -> None:
    """As after a lost reply: the same owner id, token and time of acquisition; it can only be prolonged."""
    address = router.route(key)
    digest, owner, table = secrets.token_bytes(16), secrets.token_bytes(16), f"lease_{address.table:02d}"
    wanted = Wanted(address.bucket, digest, 1, key.encode(), owner, 0, 30_000_000, b"")
    packet = take(MYSQL if vendor is Vendor.MYSQL else MARIADB, address.table, [wanted], 500_000)
    rows = []
    for _ in range(2):
        server.ask(packet[5:].decode("ascii"))
        rows += server.ask(f"SELECT owner, token, acquired, expires FROM {table} WHERE k = %s", digest)
    server.ask(f"DELETE FROM {table} WHERE k = %s", digest)
    (*first, expires), (*second, later) = rows
    assert first[0] == owner and first == second
    assert later > expires


# -- what is locked ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True], ids=["exclusive", "shared"])
def test_one_record_is_locked_and_no_gap(
    router: LockRouter, server: Observer, vendor: Vendor, key: str, shared: bool
) -> None:
    address = router.route(key)
    table = f"lock_{address.table:02d}"
    with router.lock(key, timeout=5.0, shared=shared):
        if vendor is Vendor.MYSQL:
            locked = server.ask(
                "SELECT LOCK_TYPE, LOCK_MODE, LOCK_DATA, INDEX_NAME FROM performance_schema.data_locks"
                " WHERE OBJECT_NAME = %s AND LOCK_TYPE = 'RECORD'",
                table,
            )
            assert locked == [("RECORD", "S,REC_NOT_GAP" if shared else "X,REC_NOT_GAP", str(address.slot), "PRIMARY")]
        else:
            eventually(lambda: server.holders())
            rows = server.ask("SELECT trx_rows_locked, trx_isolation_level FROM information_schema.INNODB_TRX")
            assert (1, "READ COMMITTED") in rows
        # A neighbour can be inserted and removed: no gap is locked.
        low = server.ask(f"SELECT MAX(slot) FROM {table} WHERE slot < {address.slot}")[0][0]
        server.ask("SET SESSION innodb_lock_wait_timeout = 1")
        if low is not None:
            server.ask(f"UPDATE {table} SET pad = pad WHERE slot = {low}")
        server.ask(f"INSERT INTO {table} (slot, epoch, pad) VALUES (4294967290, 0, 0)")
        server.ask(f"DELETE FROM {table} WHERE slot = 4294967290")


def test_the_row_is_found_by_its_primary_key_alone(
    router: LockRouter, server: Observer, vendor: Vendor, key: str
) -> None:
    address = router.route(key)
    dialect = MYSQL if vendor is Vendor.MYSQL else MARIADB
    packets = [
        dialect.lock(address.table, address.slot, 1.0, b"x" * 16),
        dialect.try_lock(address.table, address.slot, b"x" * 16),
    ]
    texts = [packet[5:].decode() for packet in packets]
    texts.append(dialect.prepared_lock(address.table).decode().replace("?", str(address.slot)))
    for statement in texts:
        statement = statement[statement.index("SELECT") :]
        explain = "EXPLAIN FORMAT=TRADITIONAL" if vendor is Vendor.MYSQL else "EXPLAIN"
        plan = server.ask(f"{explain} {statement}")[0]
        assert "const" in plan and "PRIMARY" in plan


def test_a_missing_row_locks_nothing(router: LockRouter, server: Observer, vendor: Vendor, key: str) -> None:
    address = router.route(key)
    table = f"lock_{address.table:02d}"
    columns = server.ask(f"SELECT slot, epoch, pad FROM {table} WHERE slot = {address.slot}")[0]
    server.ask(f"DELETE FROM {table} WHERE slot = {address.slot}")
    try:
        for _ in range(3):
            with pytest.raises(NotSeeded):
                router.lock(key, timeout=5.0)
            with pytest.raises(NotSeeded):
                router.try_lock(key)
        assert not server.holders()
    finally:
        server.ask(f"INSERT INTO {table} (slot, epoch, pad) VALUES (%s, %s, %s)", *columns)


# -- what is sent, and how often --------------------------------------------------------------------------------------


def test_a_wait_sends_its_statement_once_and_takes_what_it_says(routers: Routers, proxy: Proxy) -> None:
    """A pool that repairs connections by itself sends a statement again after a lock wait's error."""
    holder = routers.make()
    far = routers.make(ports={0: proxy.port})
    key = keys_on(far, 0, prefix="statement")[0]
    far.lock(key, timeout=5.0).release(confirm=True)
    with holder.lock(key, timeout=5.0):
        before = locking(proxy)
        began = time.monotonic()
        with pytest.raises(LockTimeout):
            far.lock(key, timeout=1.0)
        assert 0.95 < time.monotonic() - began < 1.5
        waited = locking(proxy) - before
        assert waited in (1, 2), "the second for what is left when the server's bound came some milliseconds early"
        assert far.try_lock(key) is None
        assert locking(proxy) - before == waited + 1
    assert sent(proxy, b"\x03BEGIN") == sent(proxy, b"\x03COMMIT") == 0


def test_a_check_and_a_confirmed_release_are_one_round_trip_each(
    router: LockRouter, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = router.lock(key, timeout=5.0)
    session = held._held.session
    assert session is not None
    trains: list[bytes] = []
    send = Wire.send

    def noted(wire: Wire, data: bytes) -> None:
        if wire is session.wire and data != PING:
            trains.append(data)
        send(wire, data)

    monkeypatch.setattr(Wire, "send", noted)
    held.check()
    assert len(trains) == 1
    held.release(confirm=True)
    assert len(trains) == 2 and b"ROLLBACK" in trains[1]


def test_the_driver_and_its_pool_repair_nothing_by_themselves(router: LockRouter, key: str, server: Observer) -> None:
    """A connection that ended is lost with what it held, and no other takes its place behind the holder's back."""
    with pytest.raises(LockLost), router.lock(key, timeout=5.0) as held:
        own = held._held.session
        assert own is not None and isinstance(own._steady, SteadyDBConnection)
        assert not own._steady._ping and own._steady._failures == (session._NeverRaised,)
        number = own.connection_id
        server.kill(number)
        with pytest.raises(LockLost):
            held.check()
        assert own.state is session.State.DEAD
        assert number not in {seen.id for seen in server.sessions()}


def test_every_session_is_set_up_the_same(router: LockRouter, vendor: Vendor, server: Observer, key: str) -> None:
    """The first, one that replaces a killed one, and one that was used for long."""
    isolation = "@@session.transaction_isolation" if vendor is Vendor.MYSQL else "@@session.tx_isolation"
    bound = "@@session.wait_timeout" if vendor is Vendor.MYSQL else "@@session.idle_transaction_timeout"
    asked = f"SELECT {isolation}, @@session.autocommit, @@session.time_zone, @@session.lock_wait_timeout, {bound}"
    shard = router._core.shards[router.route(key).shard]
    router.warm()

    def settings() -> object:
        taken = drive(shard.pool.check_out(now() + 5.0))
        reply = drive(taken.exchange(query(asked.encode()), now() + 5.0))
        drive(taken.rollback(now() + 5.0))
        shard.pool.give_back(taken)
        assert isinstance(reply, Rows)
        return reply.rows

    first = settings()
    assert first == [(b"READ-COMMITTED", b"0", b"+00:00", b"1", b"%d" % shard.config.router.ghost_timeout)]
    for _ in range(100):
        router.lock(key, timeout=5.0).release()
    assert settings() == first
    for seen in server.sessions():
        server.kill(seen.id)
    router.lock(key, timeout=5.0).release(confirm=True)
    assert settings() == first


def test_an_error_that_is_no_contention_is_raised_at_once(
    routers: Routers, router: LockRouter, server: Observer, key: str
) -> None:
    """A right that was taken away is neither "busy" nor waited for."""
    address = router.route(key)
    router.lock(key, timeout=5.0).release(confirm=True)
    table = f"{server.database}.lock_{address.table:02d}"
    rights = "SELECT, UPDATE (pad)"
    for host in ("localhost", "127.0.0.1"):
        try:
            server.ask(f"REVOKE {rights} ON {table} FROM '{APPLICATION}'@'{host}'")
        except pymysql.err.Error:
            pass  # made for the other host only
    try:
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(ShardUnavailable, match="1142"):
                router.lock(key, timeout=10.0)
            with pytest.raises(ShardUnavailable, match="1142"):
                router.try_lock(key)
        assert time.monotonic() - began < 5.0
        assert router.health()["shard-0"]["breaker"] == "closed"
    finally:
        for host in ("localhost", "127.0.0.1"):
            try:
                server.ask(f"GRANT {rights} ON {table} TO '{APPLICATION}'@'{host}'")
            except pymysql.err.Error:
                pass
    router.lock(key, timeout=5.0).release(confirm=True)


def test_a_session_goes_back_without_a_transaction(routers: Routers, server: Observer, vendor: Vendor) -> None:
    """Whatever became of the call before: no idle session keeps a transaction open, or a row."""
    router, other = routers.make(), routers.make()
    key = keys_on(router, 0, prefix="statement")[0]
    with other.lock(key, timeout=5.0):
        for _ in range(3):
            assert router.try_lock(key) is None
            with pytest.raises(LockTimeout):
                router.lock(key, timeout=0.05)
    eventually(lambda: not server.ask("SELECT 1 FROM information_schema.INNODB_TRX WHERE trx_rows_locked > 0"))
    assert router.health()["shard-0"]["pool"]["busy"] == 0


# -- prepared statements ----------------------------------------------------------------------------------------------


def prepared_session(router: LockRouter, key: str) -> Session:
    """The session that locks this key, with a statement for it: a fresh router takes its first lock step by step."""
    for _ in range(20):
        with router.lock(key, timeout=5.0, confirm=True) as held:
            session = held._held.session
        if session is not None and session.prepared:
            return session
    raise AssertionError("no statement was prepared")


def sessions(router: LockRouter) -> list[Session]:
    return [one for shard in router._core.shards.values() for one in tuple(shard.pool.sessions)]


def test_a_lock_executes_what_its_session_has_prepared(routers: Routers, proxy: Proxy) -> None:
    router = routers.make(ports={0: proxy.port})
    keys = keys_on(router, 0, 20, prefix="prepared")
    for key in keys * 3:  # texts, until the replies of each table are known; the first that is prepares
        router.lock(key, timeout=5.0).release()
    tables = {router.route(key).table for key in keys}
    assert sent(proxy, b"\x16SELECT") == len(tables)
    texts, executed = sent(proxy, b" /* "), sent(proxy, EXECUTES)
    for key in keys:
        router.lock(key, timeout=5.0).release()
    assert sent(proxy, b" /* ") == texts
    assert sent(proxy, EXECUTES) == executed + len(keys)


def test_who_waited_for_a_session_executes_too(routers: Routers, proxy: Proxy) -> None:
    router = routers.make(ports={0: proxy.port}, pool={"size": 1, "min_idle": 1})
    key, second = keys_on(router, 0, 2, prefix="waits")
    for _ in range(100):
        prepared_session(router, key)
        prepared_session(router, second)
        texts, executed = sent(proxy, b" /* "), sent(proxy, EXECUTES)
        held = router.lock(key, timeout=5.0)
        waiter = in_thread(lambda: router.lock(second, timeout=5.0).release())
        eventually(lambda: router.health()["shard-0"]["pool"]["waiting"] == 1)
        held.release()
        waiter.result()
        if sent(proxy, b" /* ") == texts:
            assert sent(proxy, EXECUTES) == executed + 2
            return
    raise AssertionError("who waits for a session always sends text")


def test_who_waited_for_a_session_waits_at_the_server_for_what_is_left(routers: Routers) -> None:
    router, other = routers.make(pool={"size": 1, "min_idle": 1}), routers.make()
    key, second = keys_on(router, 0, 2, prefix="left")
    prepared_session(router, second)
    with other.lock(second, timeout=5.0):
        held = router.lock(key, timeout=5.0)
        waiter = in_thread(lambda: elapsed(lambda: router.lock(second, timeout=1.0)))
        eventually(lambda: router.health()["shard-0"]["pool"]["waiting"] == 1)
        time.sleep(0.5)
        held.release()
        assert 0.95 < waiter.result() < 1.3
    prepared_session(router, second)


def test_each_call_is_bounded_by_its_own_timeout(routers: Routers) -> None:
    """One session, many bounds: that of the last call must never be the next one's."""
    holder, router = routers.make(), routers.make(pool={"size": 1, "min_idle": 1})
    busy, free = keys_on(router, 0, 2, prefix="bound")
    with holder.lock(busy, timeout=5.0):
        for seconds in (0.5, 0.15, 0.09, 0.8, 0.15):
            with router.lock(free, timeout=3.0):
                pass
            began = time.monotonic()
            with pytest.raises(LockTimeout):
                router.lock(busy, timeout=seconds)
            assert seconds - 0.01 < time.monotonic() - began < seconds + 0.1
    (session,) = sessions(router)
    assert session.prepared, "nothing of it made the session forget its statements"


def test_a_server_short_of_prepared_statements_is_sent_text(
    routers: Routers, server: Observer, request: pytest.FixtureRequest
) -> None:
    most = server.ask("SELECT @@global.max_prepared_stmt_count")[0][0]
    request.addfinalizer(lambda: server.ask(f"SET GLOBAL max_prepared_stmt_count = {most}"))
    taken = server.ask("SHOW GLOBAL STATUS LIKE 'Prepared_stmt_count'")[0][1]
    server.ask(f"SET GLOBAL max_prepared_stmt_count = {int(taken)}")
    router = routers.make()
    key = keys_on(router, 0, prefix="prepared")[0]
    first = router.lock(key, timeout=5.0)
    first.release()
    with router.lock(key, timeout=5.0) as held:
        held.check()
        assert held.token > first.token
    assert sessions(router)
    assert not any(session.prepared for session in sessions(router))


def test_a_server_that_has_forgotten_a_statement_is_sent_the_text(router: LockRouter, key: str) -> None:
    session = prepared_session(router, key)
    session.prepared = {table: execution(4_000_000 + table) for table in session.prepared}
    with router.lock(key, timeout=5.0) as held:
        held.check()
        assert held._held.session is session
    assert not session.prepared


def test_a_table_that_is_altered_under_a_prepared_statement(router: LockRouter, server: Observer, key: str) -> None:
    address = router.route(key)
    table = f"lock_{address.table:02d}"
    for change in ("COMMENT = 'changed'", "ADD COLUMN extra TINYINT NOT NULL DEFAULT 0", "DROP COLUMN extra"):
        session = prepared_session(router, key)
        server.ask(f"ALTER TABLE {table} {change}")
        with router.lock(key, timeout=5.0) as held:
            held.check()
            assert held._held.session is session
    server.ask(f"ALTER TABLE {table} COMMENT = ''")


def test_a_lock_s_bound_is_not_the_next_users(routers: Routers) -> None:
    router = routers.make(pool={"size": 1, "min_idle": 1})
    key = keys_on(router, 0, prefix="bound")[0]
    for _ in range(20):
        router.lock(key, timeout=0.2).release()
        (session,) = sessions(router)
        if session.bound:
            break
    assert session.bound == 195
    name = keys_on(router, 0, prefix="once")[0]
    assert router.once(name, lambda: 7, ttl=5, keep=5) == 7
    assert sessions(router) == [session]
    assert session.bound == 0


def test_preparing_takes_no_longer_than_the_call_may(routers: Routers, proxy: Proxy) -> None:
    """The row is granted, and then nothing comes: the row is somebody else's in time."""
    router, other = routers.make(ports={0: proxy.port}, breaker={"failures": 100}), routers.make()
    key = keys_on(router, 0, prefix="prepared")[0]
    prepared_session(router, key)
    for _ in range(20):  # a lock while the shard's state is read anew prepares nothing
        for one in sessions(router):
            one.prepared.clear()
        rule = proxy.add(Rule(Way.DOWN, 330, Cut.STALL, marker=b" /* "))
        began = time.monotonic()
        with contextlib.suppress(LockTimeout, ShardUnavailable):
            router.lock(key, timeout=0.5).release(confirm=True)
        assert time.monotonic() - began < 0.65
        proxy.drop(rule)
        if rule.struck.is_set():
            break
    assert rule.struck.is_set()
    other.lock(key, timeout=5.0).release()
