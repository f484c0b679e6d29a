"""The version-column way: a write counts only if the row is as it was read, whatever the connection counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.orm.exc import StaleDataError

from lockrouter import load, optimistic
from lockrouter.optimistic import Conflict, compare_and_set, retry
from lockrouter.testing.cluster import Cluster
from tests.support.accounts import engine_of
from tests.support.observe import Observer
from tests.support.tables import Business, engine_counting_changes, wallet_table

pytestmark = pytest.mark.server

WALLET = wallet_table()
PAIR = Table(
    "pair",
    MetaData(),
    Column("shop", Integer, primary_key=True, autoincrement=False),
    Column("sku", String(20), primary_key=True),
    Column("stock", Integer, nullable=False),
    Column("rev", Integer, nullable=False),
    mysql_engine="InnoDB",
)


class Base(DeclarativeBase):
    pass


class Wallet(Base):
    __tablename__ = "wallet"
    number: Mapped[int] = mapped_column("id", primary_key=True)
    amount: Mapped[int] = mapped_column("balance")
    revision: Mapped[int] = mapped_column("version")
    __mapper_args__ = {"version_id_col": revision}  # noqa: RUF012 - SQLAlchemy reads it so


@pytest.fixture
def business(cluster: Cluster) -> Iterator[Business]:
    server = Observer(cluster, 0)
    made = Business(server, WALLET, PAIR)
    server.ask("INSERT INTO wallet VALUES (1, 100, 1), (2, 100, 1)")
    server.ask("INSERT INTO pair VALUES (1, 'a', 5, 7), (1, 'b', 5, 7)")
    yield made
    made.drop()
    server.close()


@pytest.fixture(params=["matched rows", "changed rows"])
def engine(request: pytest.FixtureRequest, cluster: Cluster, business: Business) -> Iterator[Engine]:
    """An engine of the application's, with and without CLIENT_FOUND_ROWS."""
    make = engine_of if request.param == "matched rows" else engine_counting_changes
    made = make(load(cluster.shards_file), 0, pool_size=10)
    yield made
    made.dispose()


def row(engine: Engine, number: int = 1) -> tuple[int, int]:
    with engine.connect() as conn:
        found = conn.execute(select(WALLET.c.balance, WALLET.c.version).where(WALLET.c.id == number)).one()
    return tuple(found)


def test_only_the_version_that_was_read_is_replaced(engine: Engine) -> None:
    with engine.begin() as conn:
        assert compare_and_set(conn, WALLET, 1, 1, {"balance": 150})
        assert not compare_and_set(conn, WALLET, 1, 1, {"balance": 999})
        assert not compare_and_set(conn, WALLET, 77, 1, {"balance": 1})
    assert row(engine) == (150, 2)
    assert row(engine, 2) == (100, 1)


def test_the_same_values_again_are_a_success_and_a_new_version(engine: Engine) -> None:
    with engine.begin() as conn:
        assert compare_and_set(conn, WALLET, 1, 1, {WALLET.c.balance: 100})
        assert compare_and_set(conn, WALLET, 1, 2, {})
    assert row(engine) == (100, 3)


def test_composite_keys_and_another_version_column(engine: Engine) -> None:
    with engine.begin() as conn:
        assert compare_and_set(conn, PAIR, (1, "a"), 7, {"stock": 4}, column="rev")
        assert compare_and_set(conn, PAIR, {"sku": "b", "shop": 1}, 7, {"stock": 3}, column=PAIR.c.rev)
        assert not compare_and_set(conn, PAIR, [1, "a"], 7, {"stock": 0}, column="rev")
        assert conn.execute(select(PAIR.c.stock, PAIR.c.rev).order_by(PAIR.c.sku)).all() == [(4, 8), (3, 8)]


def test_mapped_classes_by_their_own_names(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        wallet = session.get_one(Wallet, 1)
        assert compare_and_set(session, Wallet, wallet.number, wallet.revision, {Wallet.amount: 7})
        assert not compare_and_set(session, Wallet, 1, 1, {"amount": 8})
    assert row(engine) == (7, 2)


@pytest.mark.parametrize(
    ("error", "says", "change"),
    [
        (TypeError, "version: expected", {"version": "1"}),
        (TypeError, "version: expected", {"version": True}),
        (TypeError, "Table or a mapped class", {"table": "wallet"}),
        (ValueError, "no column 'colour'", {"values": {"colour": 1}}),
        (ValueError, "itself writes", {"values": {"version": 9}}),
        (ValueError, "one value for each of (id)", {"key": (1, 2)}),
        (ValueError, "one value for each of (shop, sku)", {"table": PAIR, "column": "rev", "values": {}}),
        (ValueError, "id is None", {"key": None}),
        (ValueError, "no column 'version'", {"table": PAIR, "key": (1, "a"), "values": {}}),
    ],
)
def test_what_does_not_fit_is_named(engine: Engine, error: type, says: str, change: dict[str, object]) -> None:
    given: dict[str, Any] = {"table": WALLET, "key": 1, "version": 1, "values": {"balance": 5}, **change}
    with engine.begin() as conn, pytest.raises(error) as raised:
        compare_and_set(conn, given.pop("table"), given.pop("key"), given.pop("version"), given.pop("values"), **given)
    assert says in str(raised.value)
    assert row(engine) == (100, 1)


def test_no_addition_is_lost(engine: Engine) -> None:
    @retry(attempts=1000, jitter=0.001)
    def recharge(amount: int) -> bool:
        with engine.begin() as conn:
            balance, version = conn.execute(select(WALLET.c.balance, WALLET.c.version).where(WALLET.c.id == 1)).one()
            return compare_and_set(conn, WALLET, 1, version, {"balance": balance + amount})

    threads = [threading.Thread(target=lambda: [recharge(1) for _ in range(25)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert row(engine) == (300, 201)


def test_the_orm_s_own_version_check_is_repeated_too(engine: Engine) -> None:
    calls = []

    @retry(attempts=2, jitter=0)
    def spend() -> None:
        calls.append(1)
        with Session(engine) as session, session.begin():
            wallet = session.get_one(Wallet, 1)
            if len(calls) == 1:
                with engine.begin() as other:
                    other.execute(text("UPDATE wallet SET version = version + 1 WHERE id = 1"))
            wallet.amount -= 10

    spend()
    assert calls == [1, 1]
    assert row(engine) == (90, 3)


def test_a_deadlock_is_repeated_and_another_error_is_not(engine: Engine) -> None:
    met: list[int] = []

    @retry(attempts=3, jitter=0)
    def fails(code: int) -> bool:
        met.append(code)
        if len(met) == 1:
            raise OperationalError("UPDATE", {}, Exception(code, "from the server"))
        return True

    assert fails(1213)
    assert met == [1213, 1213]
    met.clear()
    with pytest.raises(OperationalError):
        fails(1205)
    assert met == [1205]


def test_the_last_conflict_is_an_error() -> None:
    calls = []

    @retry(attempts=3, jitter=0)
    def slow() -> bool:
        calls.append(1)
        return False

    with pytest.raises(Conflict, match="each of 3 attempts"):
        slow()
    assert len(calls) == 3
    assert slow.__name__ == "slow"

    @retry(attempts=2, jitter=0)
    def stale() -> None:
        raise StaleDataError("stale")

    with pytest.raises(StaleDataError):
        stale()


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"jitter": -1}, {"jitter": float("nan")}])
def test_wrong_bounds(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        optimistic.retry(**wrong)


def test_falsy_results_are_results() -> None:
    assert retry(attempts=1)(lambda: 0)() == 0
    assert retry(attempts=1)(lambda: None)() is None
