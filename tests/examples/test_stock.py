"""A stock is never oversold, and sold to the last piece, in each of the three ways."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockrouter.testing.cluster import Cluster
from tests.examples.stock import SOLD, STOCK, WAYS, Shop, sell
from tests.support.accounts import engine_of
from tests.support.observe import Routers
from tests.support.tables import Business

pytestmark = pytest.mark.server


@pytest.fixture
def shop(cluster: Cluster) -> Iterator[Shop]:
    routers = Routers(cluster)
    business = Business(routers.observers[0], STOCK, SOLD)
    engine = engine_of(routers.config, 0, pool_size=16, isolation_level="READ COMMITTED")
    yield Shop(routers.make(), engine)
    engine.dispose()
    business.drop()
    routers.finish()


@pytest.mark.parametrize("way", WAYS)
def test_a_stock_is_sold_once(shop: Shop, way: str) -> None:
    sale = sell(shop, way, stock=40, buyers=600, threads=16)
    assert (sale.bought, sale.left, sale.receipts) == (40, 0, 40)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_hundred_pieces_and_ten_thousand_buyers(shop: Shop, way: str) -> None:
    sale = sell(shop, way)
    print(sale)
    assert (sale.bought, sale.left, sale.receipts) == (100, 0, 100)
