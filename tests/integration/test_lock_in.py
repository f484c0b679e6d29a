"""`lock_in`: the row lock inside the caller's own transaction, with SQLAlchemy's own engine and pool."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from lockrouter import ConfigError, LockIn, LockLost, LockRouter, LockTimeout, LossReason, WouldDeadlock
from lockrouter.sql.statements import MARIADB, MYSQL
from lockrouter.testing.binaries import Vendor
from lockrouter.testing.cluster import Cluster
from tests.support.accounts import Accounts, balance, engine_of, pay
from tests.support.observe import Observer, Routers, eventually, in_thread, keys_on
from tests.support.servers import provision

pytestmark = pytest.mark.server


@pytest.fixture
def accounts(server: Observer) -> Iterator[Accounts]:
    made = Accounts(server)
    yield made
    made.drop()


def test_the_clock_of_a_grant_is_read_in_utc_whatever_the_sessions_zone(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("SET SESSION time_zone = '+05:00'")
        dialect = MARIADB if connection.dialect.is_mariadb else MYSQL  # type: ignore[attr-defined]
        for packet in (dialect.lock(0, 0, 1.0, b"0" * 16), dialect.try_lock(0, 0, b"0" * 16)):
            statement = dialect.in_utc(packet[5:]).decode().replace("slot, epoch", "@@session.time_zone, epoch", 1)
            assert connection.exec_driver_sql(statement).one()[0] == "+00:00"


@pytest.fixture
def engine(routers: Routers, accounts: Accounts) -> Iterator[Engine]:
    """The application's own engine, at the servers' default isolation."""
    made = engine_of(routers.config, 0)
    yield made
    made.dispose()


@pytest.fixture
def key(router: LockRouter) -> str:
    return keys_on(router, 0)[0]


def token_of(router: LockRouter, key: str, timeout: float = 5.0) -> int:
    """Of a lock that somebody else of this process takes."""

    def take() -> int:
        with router.lock(key, timeout=timeout) as held:
            return held.token

    return int(in_thread(take).result())


def is_free(router: LockRouter, key: str) -> bool:
    try:
        return token_of(router, key, 0.1) > 0
    except LockTimeout:
        return False


@pytest.mark.parametrize("end", ["commit", "rollback", "close", "invalidate", "collect"])
def test_every_end_of_the_transaction_frees_it(
    routers: Routers, router: LockRouter, engine: Engine, key: str, end: str
) -> None:
    other = routers.make()
    connection: Connection | None = engine.connect()
    assert connection is not None
    held = router.lock_in(connection, key)
    assert isinstance(held, LockIn)
    assert (held.key, held.address, held.degraded, held.lost) == (key, router.route(key), False, False)
    pay(connection, 0, -1)
    assert not is_free(router, key)
    assert not is_free(other, key)
    if end == "collect":
        connection = None
        gc.collect()
    else:
        getattr(connection, end)()
    assert held.lost
    assert token_of(router, key, 5.0) > held.token
    assert token_of(other, key, 5.0) > held.token
    if connection is not None:
        connection.close()


def test_blocks_and_one_connection_again_and_again(router: LockRouter, engine: Engine, key: str) -> None:
    tokens = []
    with engine.connect() as connection:
        for _ in range(3):
            with connection.begin():
                tokens.append(router.lock_in(connection, key).token)
        with pytest.raises(ZeroDivisionError), connection.begin():
            tokens.append(router.lock_in(connection, key).token)
            raise ZeroDivisionError
    assert tokens == sorted(set(tokens))
    assert is_free(router, key)


def test_orm_sessions(router: LockRouter, engine: Engine, key: str) -> None:
    with Session(engine) as session, session.begin():
        held = router.lock_in(session, key)
        session.execute(text("UPDATE account SET balance = 1 WHERE id = 0"))
        assert not is_free(router, key)
    assert held.lost
    registry = scoped_session(sessionmaker(engine))
    held = router.lock_in(registry, key)
    assert not is_free(router, key)
    registry.remove()
    assert held.lost
    assert is_free(router, key)


def test_it_shows_the_balances_of_after_the_lock(router: LockRouter, engine: Engine, key: str) -> None:
    with engine.connect() as reader, engine.connect() as writer:
        with writer.begin():
            router.lock_in(writer, key)
            pay(writer, 0, -30)
            waiting = in_thread(lambda: (router.lock_in(reader, key, timeout=5.0), balance(reader, 0)))
            waiting.join(0.2)
            assert waiting.is_alive()
        assert waiting.result()[1] == 70
        reader.rollback()


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_snapshot_taken_before_is_refused(router: LockRouter, engine: Engine, key: str, isolation: str) -> None:
    with engine.connect().execution_options(isolation_level=isolation) as connection:
        assert balance(connection, 0) == 100
        with pytest.raises(ConfigError, match="first statement"):
            router.lock_in(connection, key)
        connection.rollback()
        router.lock_in(connection, key)
    assert is_free(router, key)


def test_read_committed_may_have_read_before(router: LockRouter, engine: Engine, key: str) -> None:
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
        assert balance(connection, 0) == 100
        first = router.lock_in(connection, key)
        other = keys_on(router, 0, 2)[1]
        router.lock_in(connection, other)
        again = router.lock_in(connection, key)
        assert again.token == first.token
        connection.commit()
        assert first.lost and again.lost
        assert is_free(router, key) and is_free(router, other)


def test_autocommit_savepoints_and_wrong_places_are_refused(
    routers: Routers, router: LockRouter, engine: Engine, key: str
) -> None:
    autocommit = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    with autocommit as connection, pytest.raises(ConfigError, match="autocommit"):
        router.lock_in(connection, key)
    with engine.connect() as connection, connection.begin_nested(), pytest.raises(ConfigError, match="savepoint"):
        router.lock_in(connection, key)
    with Session(engine) as session, session.begin_nested(), pytest.raises(ConfigError, match="savepoint"):
        router.lock_in(session, key)
    elsewhere = engine_of(routers.config, 1)
    with elsewhere.connect() as connection, pytest.raises(ConfigError, match="another server"):
        router.lock_in(connection, key)
    elsewhere.dispose()
    with engine.connect() as connection:
        connection.execute(text("USE information_schema"))
        with pytest.raises(ConfigError, match="database"):
            router.lock_in(connection, key)
        connection.invalidate()
    foreign = create_engine("sqlite://")
    with foreign.connect() as connection, pytest.raises(ConfigError, match="sqlite"):
        router.lock_in(connection, key)
    foreign.dispose()
    with pytest.raises(TypeError):
        router.lock_in(engine, key)  # type: ignore[arg-type]
    assert is_free(router, key)


def test_the_callers_other_locks(router: LockRouter, engine: Engine, key: str) -> None:
    with router.lock(key), engine.connect() as connection, pytest.raises(WouldDeadlock):
        router.lock_in(connection, key)
    with router.transaction(key, timeout=5.0), engine.connect() as connection, pytest.raises(WouldDeadlock):
        router.lock_in(connection, key)
    with engine.connect() as first, engine.connect() as second:
        held = router.lock_in(first, key)
        with pytest.raises(WouldDeadlock):
            router.lock_in(second, key)
        with router.lock(key) as nested:
            assert nested.token == held.token
        with pytest.raises(WouldDeadlock), router.transaction(key):
            pass
        assert not is_free(router, key)
        outliving = router.lock(key)
        first.commit()
        assert outliving.lost
        with pytest.raises(LockLost):
            outliving.release()
    assert is_free(router, key)


def test_a_commit_that_sqlalchemy_does_not_know_of_ends_the_lock_too(
    routers: Routers, router: LockRouter, engine: Engine, key: str
) -> None:
    with engine.begin() as connection:
        router.lock_in(connection, key, timeout=5.0)
        connection.exec_driver_sql("COMMIT")
        with routers.make().lock(key, timeout=5.0), pytest.raises(LockTimeout):
            router.lock_in(connection, key, timeout=0.3)


def test_busy_rows(routers: Routers, router: LockRouter, engine: Engine, key: str) -> None:
    other = routers.make()
    with other.lock(key, confirm=True), engine.connect() as connection:
        began = time.monotonic()
        with pytest.raises(LockTimeout):
            router.lock_in(connection, key, timeout=0.3)
        assert 0.25 < time.monotonic() - began < 1.5
        connection.rollback()
        with pytest.raises(LockTimeout):
            router.lock_in(connection, key, timeout=0)
        connection.rollback()
    with engine.connect() as connection:
        router.lock_in(connection, key, timeout=0)
    assert is_free(router, key)


def test_a_wait_outlasts_the_callers_own_lock_wait(
    routers: Routers, router: LockRouter, engine: Engine, key: str
) -> None:
    other = routers.make()
    held = other.lock(key)
    with engine.connect() as connection:
        connection.execute(text("SET SESSION innodb_lock_wait_timeout = 1"))
        waiting = in_thread(lambda: router.lock_in(connection, key, timeout=10.0))
        time.sleep(2.5)
        held.release()
        assert waiting.result().token > held.token
        connection.invalidate()


def test_a_killed_connection(router: LockRouter, server: Observer, engine: Engine, key: str) -> None:
    with engine.connect() as connection:
        held = router.lock_in(connection, key)
        server.kill(connection.execute(text("SELECT CONNECTION_ID()")).scalar_one())
        with pytest.raises(DBAPIError):
            eventually(lambda: pay(connection, 0, -1) > 1)
        assert held.lost, "SQLAlchemy has thrown the connection away"
        connection.rollback()
    assert is_free(router, key)


def test_after_a_fork_or_a_closed_router(routers: Routers, engine: Engine) -> None:
    router = routers.make(router={"close_timeout": 0.1})
    key = keys_on(router, 0)[0]
    with engine.connect() as connection:
        held = router.lock_in(connection, key)
        router.close()
        assert held.lost
        connection.rollback()


def test_an_error_that_ends_the_transaction_ends_the_lock(
    router: LockRouter, server: Observer, engine: Engine, key: str
) -> None:
    """A deadlock rolls the whole transaction back, the lock's row included, whoever swallows the error."""
    with engine.connect() as connection, engine.connect() as victor:
        held = router.lock_in(connection, key)
        pay(victor, 1, 1)
        pay(victor, 2, 1)
        pay(victor, 3, 1)
        pay(connection, 0, -5)
        with pytest.raises(DBAPIError, match="syntax"):
            connection.execute(text("SELECT nonsense FROM FROM"))
        assert not held.lost, "an error of the statement alone"
        thread = in_thread(lambda: pay(victor, 0, 1))
        server_waits(server)
        with pytest.raises(DBAPIError, match="1213"):
            pay(connection, 1, 5)
        thread.result()
        victor.rollback()
        assert held.lost
        assert token_of(router, key) > held.token
        connection.rollback()
        again = router.lock_in(connection, key)
        assert not again.lost
        connection.commit()
    assert is_free(router, key)


def server_waits(server: Observer) -> None:
    eventually(server.waiters)


@pytest.fixture
def harsh(vendor: Vendor, tmp_path: Path) -> Iterator[Cluster]:
    """One server that rolls a whole transaction back when one of its statements has waited too long for a row."""
    with Cluster.up(tmp_path / "harsh", 1, vendor, options={"innodb-rollback-on-timeout": True}) as cluster:
        provision(cluster)
        yield cluster


def test_a_timeout_that_rolls_the_transaction_back_is_a_loss(harsh: Cluster) -> None:
    """Neither "held", nor a mere timeout: what the transaction did before is gone, and so are its other rows."""
    kept = Routers(harsh)
    accounts = Accounts(kept.observers[0])
    engine = engine_of(kept.config, 0, isolation_level="READ COMMITTED")
    try:
        router, other = kept.make(), kept.make()
        busy, mine, third = keys_on(router, 0, 3, prefix="harsh")
        with other.lock(busy, timeout=5.0), engine.connect() as connection:
            connection.execute(text("SET SESSION innodb_lock_wait_timeout = 1"))
            connection.commit()
            held = router.lock_in(connection, mine)
            pay(connection, 0, -10)
            with pytest.raises(LockLost) as caught:
                router.lock_in(connection, busy, timeout=8.0)
            assert caught.value.reason is LossReason.TRANSACTION_ENDED
            assert held.lost, "with the transaction went its other rows"
            assert token_of(router, mine) > held.token
            connection.rollback()
            with pytest.raises(LockTimeout):
                router.lock_in(connection, busy, timeout=2.5)  # first statement of its transaction: nothing was lost
            connection.rollback()
            pay(connection, 0, -10)
            held = router.lock_in(connection, third)
            with pytest.raises((LockLost, LockTimeout)) as either:
                router.lock_in(connection, busy, timeout=0)
            assert held.lost is isinstance(either.value, LockLost), "which of the two, the server's own error decides"
            connection.rollback()
            assert accounts.balances() == [100] * 4
        with engine.begin() as connection:
            assert not router.lock_in(connection, busy, timeout=5.0).lost
        kept.quiet()
    finally:
        engine.dispose()
        accounts.drop()
        kept.finish()
