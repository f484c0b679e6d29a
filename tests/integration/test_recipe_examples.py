"""The examples in the recipes' docstrings and README do what they say."""

from __future__ import annotations

import doctest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, String, Table

import lockrouter.optimistic
from lockrouter import LockRouter, load, optimistic
from lockrouter.recipes import verbs
from lockrouter.testing.binaries import Vendor
from tests.support.accounts import engine_of
from tests.support.observe import Routers
from tests.support.servers import Clusters
from tests.support.tables import Business, wallet_table

pytestmark = pytest.mark.server

README = Path(verbs.__file__).with_name("README.md")
WALLET = wallet_table()
METADATA = MetaData()
ORDERS = Table(
    "orders", METADATA, Column("id", Integer, primary_key=True), Column("state", String(10)), mysql_engine="InnoDB"
)
LEDGER = Table(
    "ledger",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("order_id", Integer),
    Column("amount", Integer),
    mysql_engine="InnoDB",
)


@pytest.fixture
def names(clusters: Clusters, vendor: Vendor) -> Iterator[dict[str, Any]]:
    """What the examples take for granted: a router, and an engine of the one shard, which has some tables."""
    cluster = clusters.get(vendor, 1)
    routers = Routers(cluster)
    business = Business(routers.observers[0], WALLET, ORDERS, LEDGER)
    for server in routers.observers:
        for (table,) in [*server.ask("SHOW TABLES LIKE 'lease%'"), ("once",)]:
            server.ask(f"DELETE FROM {table}")
    routers.observers[0].ask("INSERT INTO wallet VALUES (42, 100, 1)")
    routers.observers[0].ask("INSERT INTO orders VALUES (77, 'open')")
    engine = engine_of(load(cluster.shards_file), 0)
    yield {"router": routers.make(), "engine": engine, "wallet": WALLET, "orders": ORDERS, "ledger": LEDGER}
    engine.dispose()
    business.drop()
    routers.finish()


def run(text: str, names: dict[str, Any], where: str) -> int:
    """Run examples; how many there were."""
    test = doctest.DocTestParser().get_doctest(text, names, where, where, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF)
    said: list[str] = []
    runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)
    return len(test.examples)


@pytest.mark.parametrize("name", ["once", "guard", "election", "semaphore"])
def test_the_docstring(name: str, names: dict[str, Any]) -> None:
    assert run(getattr(LockRouter, name).__doc__, names, name)


def test_the_docstrings_of_optimistic(names: dict[str, Any]) -> None:
    names |= {"retry": optimistic.retry, "compare_and_set": optimistic.compare_and_set}
    assert run(str(lockrouter.optimistic.compare_and_set.__doc__), names, "compare_and_set")
    assert run(str(lockrouter.optimistic.retry.__doc__), names, "retry")


def test_the_readme(names: dict[str, Any]) -> None:
    text = README.read_text().replace("```pycon", "").replace("```", "")
    assert run(text, names, "README.md") > 15
