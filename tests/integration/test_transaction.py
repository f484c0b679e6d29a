"""`transaction` and `run` on real servers: nothing is committed that the lock did not cover."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pymysql
import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from lockrouter import (
    CrossShard,
    LockLost,
    LockRouter,
    LockTimeout,
    LossReason,
    OutcomeUnknown,
    PoolTimeout,
    ShardUnavailable,
    TransactionLock,
    WouldDeadlock,
    rerun,
)
from lockrouter.testing.cluster import Cluster
from tests.support.accounts import Accounts, balance, engine_of, pay
from tests.support.observe import Observer, Routers, eventually, in_thread, keys_on
from tests.support.proxy import Cut, Proxy, Rule, Way

pytestmark = pytest.mark.server


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "account"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]


@pytest.fixture
def accounts(server: Observer) -> Iterator[Accounts]:
    made = Accounts(server)
    yield made
    made.drop()


@pytest.fixture
def router(routers: Routers) -> LockRouter:
    return routers.make(router={"ghost_timeout": 4})


@pytest.fixture
def key(router: LockRouter) -> str:
    return keys_on(router, 0)[0]


def lock_of(connection: Connection) -> TransactionLock:
    lock: TransactionLock = connection.info["lock"]
    return lock


def execute(connection: Connection, statement: str) -> None:
    connection.execute(text(statement))


def free(router: LockRouter, key: str) -> bool:
    """Whether another caller can have the row now."""

    def look() -> bool:
        held = router.try_lock(key)
        if held is not None:
            held.release(confirm=True)
        return held is not None

    return bool(in_thread(look).result())


# -- the promise ----------------------------------------------------------------------------------------------------


def test_success_commits_and_frees(routers: Routers, router: LockRouter, accounts: Accounts, key: str) -> None:
    other = routers.make()
    with router.transaction(key, timeout=5.0) as connection:
        lock = lock_of(connection)
        assert (lock.key, lock.address, lock.degraded, lock.lost) == (key, router.route(key), False, False)
        assert 0 < lock.token < 1 << 63
        lock.check()
        assert pay(connection, 0, -10) == 1
        assert pay(connection, 1, 10) == 1
        assert accounts.balances()[:2] == [100, 100], "nothing is visible before the COMMIT"
        assert not free(router, key)
        assert not free(other, key)
    assert accounts.balances()[:2] == [90, 110], "COMMIT is awaited"
    assert free(router, key)
    assert free(other, key)
    with other.transaction(key) as connection:
        assert lock_of(connection).token > lock.token
    with router.lock(key) as held:
        assert held.token > lock.token


def test_an_error_rolls_back_and_comes_out(router: LockRouter, accounts: Accounts, key: str) -> None:
    with pytest.raises(ZeroDivisionError), router.transaction(key) as connection:
        pay(connection, 0, -10)
        raise ZeroDivisionError
    assert accounts.balances()[0] == 100
    assert free(router, key)


def test_the_first_transaction_of_a_router_keeps_its_row(
    routers: Routers, server: Observer, accounts: Accounts
) -> None:
    # SQLAlchemy rolls back at the first use of an engine: that must not be this transaction.
    fresh = routers.make()
    with fresh.transaction(keys_on(fresh, 0)[0], timeout=5.0) as connection:
        execute(connection, "SELECT 1")
        assert len(eventually(server.holders)) == 1
        lock_of(connection).check()


def test_orm_sessions_work(router: LockRouter, accounts: Accounts, key: str) -> None:
    with router.transaction(key) as connection, Session(bind=connection) as session:
        account = session.get_one(Account, 0)
        account.balance = account.balance  # an UPDATE that changes nothing still finds its row
        session.flush()
        session.execute(text("UPDATE account SET balance = 100 WHERE id = 0"))
        account.balance -= 5
        session.add(Account(id=77, balance=5))
        session.commit()  # flushes; the block alone commits
        assert accounts.sum() == accounts.total
        assert not lock_of(connection).lost
    assert accounts.balances() == [95, 100, 100, 100, 5]


def test_an_unchanged_row_counts_as_found(router: LockRouter, accounts: Accounts, key: str) -> None:
    with router.transaction(key) as connection:
        assert pay(connection, 0, 0) == 1


def test_savepoints_and_swallowed_errors_that_end_nothing(router: LockRouter, accounts: Accounts, key: str) -> None:
    with router.transaction(key) as connection:
        pay(connection, 0, -1)
        with pytest.raises(ZeroDivisionError), connection.begin_nested():
            pay(connection, 0, -50)
            raise ZeroDivisionError
        with pytest.raises(IntegrityError):
            execute(connection, "INSERT INTO account VALUES (1, 0)")
        with pytest.raises(DBAPIError):
            execute(connection, "SELECT nonsense")
        with connection.begin_nested():
            pay(connection, 1, 1)
        assert not lock_of(connection).lost
    assert accounts.balances()[:2] == [99, 101]


def test_several_keys_share_one_transaction(router: LockRouter, accounts: Accounts) -> None:
    keys = keys_on(router, 0, 5)
    with router.transaction([*reversed(keys), keys[0].encode()], timeout=5.0) as connection:
        lock = lock_of(connection)
        assert set(lock.tokens) >= set(keys[1:])
        assert lock.token == max(lock.tokens.values())
        pay(connection, 0, 1)
        assert not any(free(router, key) for key in keys)
    assert all(free(router, key) for key in keys)


def test_keys_of_different_shards_are_refused(router: LockRouter) -> None:
    with pytest.raises(CrossShard), router.transaction([keys_on(router, 0)[0], keys_on(router, 1)[0]]):
        pass
    with pytest.raises(ValueError, match="at least one key"), router.transaction([]):
        pass


def test_it_excludes_row_locks_and_nests_with_none_of_its_own(router: LockRouter, accounts: Accounts, key: str) -> None:
    other = keys_on(router, 0, 2)[1]
    with router.lock(key):
        with pytest.raises(WouldDeadlock), router.transaction(key):
            pass
        with router.transaction(other, timeout=5.0) as connection:
            pay(connection, 0, 0)
    with router.transaction(key) as connection:
        with pytest.raises(WouldDeadlock), router.transaction(key):
            pass
        with router.lock(key) as nested:
            assert nested.token == lock_of(connection).token
            nested.check()
        with router.lock(other, timeout=5.0):
            pay(connection, 0, 0)
        assert not lock_of(connection).lost


def test_a_nested_lock_that_outlives_the_transaction_is_lost(router: LockRouter, accounts: Accounts, key: str) -> None:
    with router.transaction(key):
        nested = router.lock(key)
    assert nested.lost
    with pytest.raises(LockLost):
        nested.release()
    assert free(router, key)


def test_waiting_is_bounded_and_leaves_nothing(router: LockRouter, routers: Routers, key: str) -> None:
    other = routers.make()
    with other.lock(key):
        began = time.monotonic()
        with pytest.raises(LockTimeout), router.transaction(key, timeout=0.3):
            pass
        assert 0.25 < time.monotonic() - began < 1.5
        with pytest.raises(LockTimeout), router.transaction(key, timeout=0):
            pass
    with router.transaction(key, timeout=2.0):
        pass


def test_waiters_queue_behind_it_and_get_the_row(router: LockRouter, accounts: Accounts, key: str) -> None:
    got: list[int] = []
    with router.transaction(key) as connection:
        waiting = [in_thread(lambda: got.append(_token_of_a_lock(router, key))) for _ in range(3)]
        time.sleep(0.3)
        assert all(thread.is_alive() for thread in waiting) and not got
        token = lock_of(connection).token
    for thread in waiting:
        thread.result()
    assert all(later > token for later in got)


def _token_of_a_lock(router: LockRouter, key: str) -> int:
    with router.lock(key, timeout=5.0) as held:
        return held.token


def test_a_longer_wait_than_the_sessions_own_bound(routers: Routers, router: LockRouter, key: str) -> None:
    impatient = routers.make(transaction={"lock_wait": 1})
    with router.lock(key) as held:
        waiting = in_thread(lambda: _enter(impatient, key, 10.0))
        time.sleep(2.6)
        held.release()
        assert waiting.result() > held.token


def _enter(router: LockRouter, key: str, timeout: float) -> int:
    with router.transaction(key, timeout=timeout) as connection:
        return lock_of(connection).token


def test_pool_is_shared_with_row_locks(routers: Routers, server: Observer) -> None:
    small = routers.make(pool={"size": 2, "min_idle": 1})
    keys = keys_on(small, 0, 4)
    with small.transaction(keys[0], timeout=5.0), small.lock(keys[1]):
        pass
    assert in_thread(lambda: _hold_two(small, keys)).result() == "full"
    for _ in range(3):
        with small.lock(keys[0]), small.lock(keys[1]):
            pass
        with small.transaction(keys[2], timeout=5.0):
            pass
    counts = small.health()["shard-0"]["pool"]
    assert counts["busy"] == 0 and counts["idle"] <= 2


def _hold_two(router: LockRouter, keys: list[str]) -> str:
    held = [in_thread(lambda: router.lock(key, timeout=5.0)).result() for key in keys[:2]]  # noqa: B023 - called now
    try:
        with pytest.raises(PoolTimeout), router.transaction(keys[2], timeout=0.2):
            pass
        return "full"
    finally:
        for lock in held:
            lock.release()


def test_settings_of_the_session(routers: Routers, server: Observer) -> None:
    router = routers.make(
        transaction={"isolation": "REPEATABLE READ", "time_zone": "+02:00", "lock_wait": 3, "idle": 7}
    )
    with router.transaction(keys_on(router, 0)[0], timeout=5.0) as connection:
        values = connection.execute(
            text("SELECT @@time_zone, @@innodb_lock_wait_timeout, @@lock_wait_timeout, @@autocommit")
        ).one()
        assert tuple(values) == ("+02:00", 3, 3, 0)
        assert connection.get_isolation_level() == "REPEATABLE READ"


# -- poison ---------------------------------------------------------------------------------------------------------

ENDINGS = [
    "CREATE TABLE account_ddl (id INT)",
    "COMMIT",
    "ROLLBACK",
    "BEGIN",
    "/* a comment */ START TRANSACTION",
    "-- a comment\nCOMMIT AND CHAIN",
    "SET SESSION autocommit = 1",
    "CALL commits_inside()",
    "ALTER TABLE account COMMENT = 'changed'",
    "/*!50000 COMMIT */",
]


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_ends_the_transaction_poisons_the_block(
    router: LockRouter, accounts: Accounts, key: str, ending: str
) -> None:
    reasons: list[LossReason] = []
    with pytest.raises(LockLost) as left, router.transaction(key) as connection:
        lock_of(connection).on_lost(reasons.append)
        pay(connection, 0, -10)
        with suppress(LockLost):
            execute(connection, ending)
        for _ in range(2):
            with pytest.raises(LockLost) as refused:
                pay(connection, 0, -10)
            assert refused.value.reason is LossReason.TRANSACTION_ENDED
        with pytest.raises(LockLost):
            lock_of(connection).check()
        assert lock_of(connection).lost
    assert left.value.reason is LossReason.TRANSACTION_ENDED
    assert left.value.key == key.encode()
    inside = ending.startswith(("CALL", "/*!"))
    assert accounts.sum() == accounts.total - 10 * inside, "what nobody can see before it happens was committed"
    assert free(router, key)
    eventually(lambda: reasons == [LossReason.TRANSACTION_ENDED])


@pytest.mark.parametrize("ending", ENDINGS)
def test_it_is_noticed_at_the_end_too(router: LockRouter, accounts: Accounts, key: str, ending: str) -> None:
    with pytest.raises(LockLost), router.transaction(key) as connection:
        execute(connection, ending)


ENDS: dict[str, Callable[[Connection], object]] = {
    "commit": lambda connection: connection.commit(),
    "rollback": lambda connection: connection.rollback(),
    "close": lambda connection: connection.close(),
    "invalidate": lambda connection: connection.invalidate(),
}


@pytest.mark.parametrize("how", ["commit", "rollback", "close", "invalidate"])
def test_the_callers_own_end_of_it_poisons_the_block(
    router: LockRouter, accounts: Accounts, key: str, how: str
) -> None:
    with pytest.raises(LockLost) as left, router.transaction(key) as connection:
        pay(connection, 0, -10)
        ENDS[how](connection)
    assert left.value.reason is LossReason.TRANSACTION_ENDED
    assert accounts.sum() == accounts.total, "only leaving the block commits"
    assert free(router, key)


def test_a_session_that_rolls_back_ends_it(router: LockRouter, accounts: Accounts, key: str) -> None:
    with pytest.raises(LockLost), router.transaction(key) as connection, Session(bind=connection) as session:
        session.execute(text("UPDATE account SET balance = 0"))
        session.rollback()
    assert accounts.sum() == accounts.total


def _deadlock(server: Observer, connection: Connection) -> DBAPIError | None:
    """Make the body the victim of a deadlock with a heavier transaction."""
    rival = server.connect()
    try:
        rival.autocommit(False)
        with rival.cursor() as cursor:
            cursor.execute("UPDATE account SET balance = balance WHERE id IN (2, 3)")
            cursor.execute("INSERT INTO account VALUES (90, 0), (91, 0), (92, 0), (93, 0), (94, 0)")
            pay(connection, 0, -30)

            def cross() -> None:
                with rival.cursor() as second:
                    second.execute("UPDATE account SET balance = balance WHERE id = 0")

            crossing = in_thread(cross)
            time.sleep(0.3)
            try:
                pay(connection, 2, 0)
            except DBAPIError as error:
                return error
            finally:
                crossing.result()
        return None
    finally:
        rival.rollback()
        rival.close()


def test_a_procedure_that_commits_and_then_fails_is_noticed_though_its_error_is_swallowed(
    router: LockRouter, accounts: Accounts, key: str
) -> None:
    with pytest.raises(LockLost) as left, router.transaction(key) as connection:
        pay(connection, 0, -10)
        with suppress(DBAPIError, LockLost):
            execute(connection, "CALL commits_and_fails()")
        with pytest.raises(LockLost):
            pay(connection, 1, 10)
    assert left.value.reason is LossReason.TRANSACTION_ENDED
    assert free(router, key)


@pytest.mark.parametrize("swallowed", [True, False])
def test_a_deadlock_in_the_body_commits_nothing(
    router: LockRouter, server: Observer, accounts: Accounts, key: str, swallowed: bool
) -> None:
    with pytest.raises(LockLost) as left, router.transaction(key) as connection:
        error = _deadlock(server, connection)
        assert error is not None and error.orig is not None and error.orig.args[0] == 1213
        assert lock_of(connection).lost
        if not swallowed:
            raise error
        with pytest.raises(LockLost):
            pay(connection, 1, 30)
    assert left.value.reason is LossReason.TRANSACTION_ENDED
    assert isinstance(left.value.__cause__, DBAPIError | pymysql.err.OperationalError)
    assert accounts.balances() == [100] * 4
    assert free(router, key)


def test_the_bodys_own_error_wins_and_tells_of_the_loss(router: LockRouter, accounts: Accounts, key: str) -> None:
    with pytest.raises(ZeroDivisionError) as raised, router.transaction(key) as connection:
        with suppress(LockLost):
            execute(connection, "COMMIT")
        raise ZeroDivisionError
    assert "transaction_ended" in "".join(raised.value.__notes__)


def test_a_killed_connection_is_noticed_and_told(
    router: LockRouter, server: Observer, accounts: Accounts, key: str
) -> None:
    told = threading.Event()
    with pytest.raises(LockLost) as left, router.transaction(key) as connection:
        pay(connection, 0, -10)
        lock_of(connection).on_lost(lambda reason: told.set())
        server.kill(connection.execute(text("SELECT CONNECTION_ID()")).scalar_one())
        assert told.wait(1.0), "noticed without a statement"
        for _ in range(2):
            with pytest.raises(LockLost):
                pay(connection, 1, 10)
    assert left.value.reason is LossReason.TRANSACTION_ENDED
    assert accounts.balances()[:2] == [100, 100]
    assert free(router, key)


def test_a_connection_killed_inside_a_statement(
    router: LockRouter, server: Observer, accounts: Accounts, key: str
) -> None:
    with pytest.raises(LockLost), router.transaction(key) as connection:
        pay(connection, 0, -10)
        number = connection.execute(text("SELECT CONNECTION_ID()")).scalar_one()

        def kill() -> None:
            time.sleep(0.2)
            server.kill(number)

        killer = in_thread(kill)
        with pytest.raises(DBAPIError):
            execute(connection, "SELECT SLEEP(20)")
        killer.result()
        with pytest.raises(LockLost):
            pay(connection, 1, 10)
    assert accounts.balances()[:2] == [100, 100]


def test_idle_for_too_long_is_rolled_back_by_the_server(routers: Routers, accounts: Accounts) -> None:
    router = routers.make(transaction={"idle": 1})
    key = keys_on(router, 0)[0]
    with pytest.raises(LockLost), router.transaction(key, timeout=5.0) as connection:
        pay(connection, 0, -10)
        eventually(lambda: lock_of(connection).lost, 5.0)
    assert accounts.balances()[0] == 100
    assert free(router, key)


def test_a_statement_may_take_longer_than_the_idle_bound(routers: Routers, accounts: Accounts) -> None:
    router = routers.make(transaction={"idle": 1})
    with router.transaction(keys_on(router, 0)[0], timeout=5.0) as connection:
        pay(connection, 0, -10)
        execute(connection, "SELECT SLEEP(2.2)")
        assert not lock_of(connection).lost
        pay(connection, 1, 10)
    assert accounts.balances()[:2] == [90, 110]


def test_streamed_results(router: LockRouter, accounts: Accounts, key: str) -> None:
    with router.transaction(key) as connection:
        stream = connection.execution_options(stream_results=True).execute(text("SELECT id FROM account"))
        assert stream.fetchone() is not None
        time.sleep(0.2)  # the background thread must not take the rows for the end of the connection
        assert not lock_of(connection).lost
        assert len(stream.all()) == 3
        lock_of(connection).check()
        pay(connection, 0, -1)
        pay(connection, 1, 1)
    assert accounts.balances()[:2] == [99, 101]


def test_large_statements_and_results(router: LockRouter, accounts: Accounts, key: str) -> None:
    blob = os.urandom(300_000).hex()
    with router.transaction(key) as connection:
        assert connection.execute(text("SELECT :blob"), {"blob": blob}).scalar_one() == blob


def test_sessions_are_used_again_unless_something_else_may_have_changed(
    router: LockRouter, accounts: Accounts, key: str
) -> None:
    def number(then: str = "SELECT 1") -> int:
        with router.transaction(key) as connection:
            execute(connection, then)
            return int(connection.execute(text("SELECT CONNECTION_ID()")).scalar_one())

    first = number()
    assert number() == first
    assert number("SET time_zone = '+05:00'") == first
    assert number() != first


def test_the_connection_is_of_no_use_afterwards(router: LockRouter, accounts: Accounts, key: str) -> None:
    with router.transaction(key) as connection:
        raw: Any = connection.connection.dbapi_connection
    with pytest.raises(pymysql.err.InterfaceError), raw.cursor() as cursor:
        cursor.execute("SELECT 1")
    raw.rollback()
    raw.close()
    with router.transaction(key):
        pass


def test_closing_the_router_takes_the_transaction_along(routers: Routers, accounts: Accounts) -> None:
    router = routers.make(router={"close_timeout": 0.1})
    key = keys_on(router, 0)[0]
    with pytest.raises(LockLost) as left, router.transaction(key, timeout=5.0) as connection:
        pay(connection, 0, -10)
        router.close()
    assert left.value.reason is LossReason.ROUTER_CLOSED
    assert accounts.balances()[0] == 100


def test_a_dropped_block_is_rolled_back_with_a_warning(
    router: LockRouter, other: LockRouter, accounts: Accounts, key: str
) -> None:
    block = router.transaction(key)
    connection = block.__enter__()
    pay(connection, 0, 5)
    with pytest.warns(ResourceWarning, match="dropped without leaving"):
        del block
        gc.collect()
    for caller in (other, router):
        with caller.lock(key, timeout=5.0):
            pass
    assert accounts.balances()[0] == 100
    with pytest.raises((DBAPIError, LockLost)):
        connection.exec_driver_sql("SELECT 1")


def test_a_child_process_owns_nothing(router: LockRouter, accounts: Accounts, key: str) -> None:
    with router.transaction(key) as connection:
        pay(connection, 0, -10)
        child = os.fork()
        if not child:
            code = 1
            try:
                try:
                    pay(connection, 0, -10)
                except LockLost as lost:
                    code = 0 if lost.reason is LossReason.FORKED else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        pay(connection, 1, 10)
    assert accounts.balances()[:2] == [90, 110]


# -- an unknown COMMIT ------------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    with Proxy(cluster.port(0)) as made:
        yield made


@pytest.fixture
def far(routers: Routers, proxy: Proxy) -> LockRouter:
    """A router whose way to shard-0 is the proxy."""
    return routers.make(ports={0: proxy.port}, router={"ghost_timeout": 4})


def lose_reply(proxy: Proxy) -> Rule:
    return proxy.add(Rule(Way.DOWN, 0, Cut.RST, marker=b"\x03COMMIT"))


def lose_request(proxy: Proxy) -> Rule:
    return proxy.add(Rule(Way.UP, 0, Cut.RST, marker=b"\x03COMMIT"))


def test_a_lost_reply_to_commit_is_an_unknown_outcome(far: LockRouter, accounts: Accounts, proxy: Proxy) -> None:
    key = keys_on(far, 0)[0]
    with far.transaction(key, timeout=5.0) as connection:
        pay(connection, 0, 0)
    rule = lose_reply(proxy)
    with pytest.raises(OutcomeUnknown) as raised, far.transaction(key) as connection:
        pay(connection, 0, -10)
        pay(connection, 1, 10)
    assert rule.met.is_set()
    assert raised.value.shard == "shard-0"
    assert accounts.sum() == accounts.total
    assert eventually(lambda: free(far, key))


@pytest.mark.parametrize("way", list(Way), ids=lambda way: way.value)
def test_a_statement_that_is_lost_while_everything_else_goes_on(
    routers: Routers, accounts: Accounts, proxy: Proxy, way: Way
) -> None:
    """Its request never arrives, or its reply never comes, and no side learns of it; the shard answers all others."""
    far, other = routers.make(ports={0: proxy.port}, transaction={"idle": 6}), routers.make()
    key = keys_on(far, 0)[0]
    other.warm()
    told: list[tuple[LossReason, float]] = []

    def take() -> float:
        with other.lock(key, timeout=30.0):
            return time.monotonic()

    with pytest.raises(LockLost), far.transaction(key, timeout=5.0) as connection:
        lock_of(connection).on_lost(lambda reason: told.append((reason, time.monotonic())))
        assert balance(connection, 0) == 100
        rule = proxy.add(Rule(way, 0, Cut.STALL, marker=b"UPDATE account"))
        taking = in_thread(take)
        routers.observers[0].await_waiters()
        began = time.monotonic()
        with pytest.raises((DBAPIError, LockLost)):
            pay(connection, 0, -10)
        assert rule.met.is_set()
        assert time.monotonic() - began < 5.0, "before the server, too, has had enough"
        assert lock_of(connection).lost
    assert eventually(lambda: told)[0][0] is LossReason.SILENT
    assert told[0][1] < taking.result() < began + 5.5, "freed by a KILL, and not before its holder was told"
    assert accounts.balances()[0] == 100
    assert far.health()["shard-0"]["breaker"] == "closed"
    proxy.accept()
    with far.transaction(key, timeout=5.0) as connection:
        pay(connection, 0, -10)


def test_a_long_statement_behind_a_working_connection_is_waited_for(routers: Routers, accounts: Accounts) -> None:
    """However often the server is asked about it, and also where it began just before the idle bound."""
    router = routers.make(transaction={"idle": 2})
    with router.transaction(keys_on(router, 0)[0], timeout=5.0) as connection:
        pay(connection, 0, -10)
        time.sleep(1.35)
        execute(connection, "SELECT SLEEP(3)")
        assert not lock_of(connection).lost
        pay(connection, 1, 10)
    assert accounts.balances()[:2] == [90, 110]


@pytest.mark.parametrize("lose", [lose_reply, lose_request])
def test_run_settles_an_unknown_commit(
    far: LockRouter, accounts: Accounts, proxy: Proxy, lose: Callable[[Proxy], Rule]
) -> None:
    key = keys_on(far, 0)[0]
    calls: list[int] = []

    def transfer(connection: Connection) -> str:
        calls.append(balance(connection, 0))
        pay(connection, 0, -10)
        pay(connection, 1, 10)
        if len(calls) == 1:
            rules.append(lose(proxy))
        return f"moved in call {len(calls)}"

    rules: list[Rule] = []
    said = far.run(key, transfer, timeout=5.0)
    assert rules[0].met.is_set()
    assert accounts.balances()[:2] == [90, 110], "once, and only once"
    assert said == f"moved in call {len(calls)}"
    assert len(calls) == (1 if lose is lose_reply else 2)


def test_run_settles_an_unknown_commit_while_no_primary_is_known(
    far: LockRouter, accounts: Accounts, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several hosts none may be the primary for a moment: that says nothing of what was committed."""
    real, trouble = rerun._find, [ShardUnavailable("no host is the writable primary", shard="shard-0")]

    def find(*arguments: Any) -> Any:
        if trouble:
            raise trouble.pop()
        return real(*arguments)

    monkeypatch.setattr(rerun, "_find", find)
    rules: list[Rule] = []

    def transfer(connection: Connection) -> str:
        pay(connection, 0, -10)
        pay(connection, 1, 10)
        rules.append(lose_reply(proxy))
        return "moved"

    assert far.run(keys_on(far, 0)[0], transfer, timeout=5.0) == "moved"
    assert not trouble
    assert accounts.balances()[:2] == [90, 110]


def test_run_repeats_after_a_deadlock(router: LockRouter, server: Observer, accounts: Accounts, key: str) -> None:
    calls: list[int] = []

    def work(connection: Connection) -> int:
        calls.append(1)
        if len(calls) == 1:
            assert _deadlock(server, connection) is not None
        pay(connection, 0, -10)
        pay(connection, 1, 10)
        return len(calls)

    assert router.run(key, work) == 2
    assert accounts.balances()[:2] == [90, 110]


def test_run_gives_up_and_does_not_repeat_other_errors(router: LockRouter, accounts: Accounts, key: str) -> None:
    calls: list[int] = []

    def ends(connection: Connection) -> None:
        calls.append(1)
        execute(connection, "COMMIT")

    with pytest.raises(LockLost):
        router.run(key, ends, attempts=2)
    assert len(calls) == 2

    def fails(connection: Connection) -> None:
        calls.append(1)
        pay(connection, 0, -10)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        router.run(key, fails)
    assert len(calls) == 3
    assert accounts.sum() == accounts.total
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="attempts"):
            router.run(key, ends, attempts=wrong)


def test_markers_do_not_pile_up(router: LockRouter, server: Observer, accounts: Accounts, key: str) -> None:
    server.ask("DELETE FROM run_marker")
    for _ in range(20):
        router.run(key, lambda connection: pay(connection, 0, 0))
    assert server.ask("SELECT COUNT(*) FROM run_marker")[0][0] <= 1


def test_a_dead_shard_is_an_error_and_never_degrades(routers: Routers, proxy: Proxy) -> None:
    router = routers.make(ports={0: proxy.port})
    key = keys_on(router, 0)[0]
    proxy.refuse()
    with pytest.raises(ShardUnavailable), router.transaction(key, timeout=1.5):
        pass
    with pytest.raises(ShardUnavailable), router.transaction(key, timeout=1.5):
        pass
    proxy.accept()


def test_a_users_own_engine_does_not_meet_ours(
    routers: Routers, router: LockRouter, accounts: Accounts, key: str
) -> None:
    engine = engine_of(routers.config, 0)
    try:
        with router.transaction(key) as mine, engine.begin() as theirs:
            pay(mine, 0, -1)
            pay(theirs, 1, 1)
    finally:
        engine.dispose()
    assert accounts.balances()[:2] == [99, 101]
