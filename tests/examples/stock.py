"""Worked example: a stock of 100 is sold to 10,000 buyers, in three ways, and never oversold.

Each way answers True to a buyer who got one, and False to one who came too late. They differ in who waits:

- `buy_locked`: buyers of one article queue at its row lock, in the process and fairly; any amount of work may follow.
- `buy_optimistic`: nobody waits, and of those who read the same version one wins; the others begin again.
- `buy_atomic`: one UPDATE that checks and takes. The fastest, as long as the whole decision fits into one statement.

    python -m tests.examples.stock mysql
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Column, Engine, Integer, MetaData, Table, insert, select, update

from lockrouter import LockRouter, optimistic
from lockrouter.testing.binaries import Vendor
from lockrouter.testing.cluster import Cluster
from tests.support.accounts import engine_of
from tests.support.observe import Observer, keys_on
from tests.support.servers import provision
from tests.support.tables import Business

__all__ = ["SOLD", "STOCK", "WAYS", "Sale", "sell"]

METADATA = MetaData()
STOCK = Table(
    "stock",
    METADATA,
    Column("sku", Integer, primary_key=True, autoincrement=False),
    Column("left", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    mysql_engine="InnoDB",
)
SOLD = Table(
    "sold",
    METADATA,
    Column("buyer", Integer, primary_key=True, autoincrement=False),
    Column("sku", Integer, nullable=False),
    mysql_engine="InnoDB",
)
SKU = 1


class Shop:
    """What the three ways need: the router, and an engine on the shard that the stock's key lives on."""

    def __init__(self, router: LockRouter, engine: Engine) -> None:
        self.router = router
        self.engine = engine
        # The stock's key must live on the shard whose database has the table: a real shop puts the table there.
        self.key = keys_on(router, 0, prefix="stock")[0]

    def sold_out(self) -> bool:
        """A look without a lock: it may let a buyer through in vain, but sends home no buyer who could have bought."""
        with self.engine.connect() as conn:
            return bool(conn.execute(select(STOCK.c.left).where(STOCK.c.sku == SKU)).scalar_one() == 0)

    def buy_locked(self, buyer: int) -> bool:
        """Under the row lock, in its very transaction."""
        if self.sold_out():
            return False
        with self.router.transaction(self.key, timeout=30.0) as conn:
            left = conn.execute(select(STOCK.c.left).where(STOCK.c.sku == SKU)).scalar_one()
            if left == 0:
                return False
            conn.execute(update(STOCK).where(STOCK.c.sku == SKU).values(left=left - 1))
            conn.execute(insert(SOLD).values(buyer=buyer, sku=SKU))
            return True

    def buy_optimistic(self, buyer: int) -> bool:
        """Read, and write only if the version is still the one that was read."""
        return self._try(buyer) == "bought"

    @optimistic.retry(attempts=1000, jitter=0.002)
    def _try(self, buyer: int) -> str | bool:
        with self.engine.begin() as conn:
            left, version = conn.execute(select(STOCK.c.left, STOCK.c.version).where(STOCK.c.sku == SKU)).one()
            if left == 0:
                return "sold out"
            if not optimistic.compare_and_set(conn, STOCK, SKU, version, {"left": left - 1}):
                return False
            conn.execute(insert(SOLD).values(buyer=buyer, sku=SKU))
            return "bought"

    def buy_atomic(self, buyer: int) -> bool:
        """Check and take in one statement; its row lock lasts until the COMMIT."""
        if self.sold_out():
            return False
        with self.engine.begin() as conn:
            taken = conn.execute(
                update(STOCK).where(STOCK.c.sku == SKU, STOCK.c.left > 0).values(left=STOCK.c.left - 1)
            )
            if taken.rowcount == 0:
                return False
            conn.execute(insert(SOLD).values(buyer=buyer, sku=SKU))
            return True


WAYS: dict[str, Callable[[Shop, int], bool]] = {
    "row lock": Shop.buy_locked,
    "optimistic": Shop.buy_optimistic,
    "atomic UPDATE": Shop.buy_atomic,
}


class Sale(NamedTuple):
    """What a sale came to."""

    way: str
    bought: int
    left: int
    receipts: int
    buyers: int
    seconds: float
    to_last: float
    """Seconds until the last piece was sold."""

    def __str__(self) -> str:
        return (
            f"{self.way:13}  {self.bought} sold, {self.left} left, {self.receipts} receipts;"
            f" the stock in {self.to_last * 1e3:.0f} ms, {self.buyers:,} buyers in {self.seconds:.1f} s"
        )


def sell(shop: Shop, way: str, *, stock: int = 100, buyers: int = 10_000, threads: int = 32) -> Sale:
    """Sell a fresh stock in one way, to buyers who all come at once, served by some threads."""
    with shop.engine.begin() as conn:
        conn.execute(SOLD.delete())
        conn.execute(STOCK.delete())
        conn.execute(insert(STOCK).values(sku=SKU, left=stock, version=1))
    sold_at: list[float] = []
    began = time.monotonic()

    def serve(buyer: int) -> bool:
        bought = WAYS[way](shop, buyer)
        if bought:
            sold_at.append(time.monotonic())
        return bought

    with ThreadPoolExecutor(threads) as pool:
        answers = Counter(pool.map(serve, range(buyers)))
    seconds = time.monotonic() - began
    with shop.engine.connect() as conn:
        left = conn.execute(select(STOCK.c.left)).scalar_one()
        receipts = len(conn.execute(select(SOLD.c.buyer)).all())
    return Sale(way, answers[True], left, receipts, buyers, seconds, max(sold_at) - began)


def main() -> None:
    """Sell the stock in each way on a throw-away server, and print the figures."""
    vendor = Vendor(sys.argv[1] if len(sys.argv) > 1 else "mysql")
    with tempfile.TemporaryDirectory() as home, Cluster.up(Path(home, "cluster"), 1, vendor) as cluster:
        provision(cluster)
        server = Observer(cluster, 0)
        Business(server, STOCK, SOLD)
        with LockRouter.from_file(cluster.shards_file) as router:
            engine = engine_of(router._core.config, 0, pool_size=32, isolation_level="READ COMMITTED")
            for way in WAYS:
                print(vendor, sell(Shop(router, engine), way), flush=True)
            engine.dispose()
        server.close()


if __name__ == "__main__":
    main()
