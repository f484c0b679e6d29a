"""Account recharge with lock and version together: nobody's money is lost, whether they take the lock or not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, select

from lockrouter import LockRouter, optimistic
from lockrouter.testing.cluster import Cluster
from tests.support.accounts import engine_of
from tests.support.observe import Routers, in_thread, keys_on
from tests.support.tables import Business, wallet_table

pytestmark = pytest.mark.server

WALLET = wallet_table()
ACCOUNT = 42
TIMES = 40


class Recharger:
    """The service, and a repair script that knows nothing of its locks."""

    def __init__(self, router: LockRouter, engine: Engine) -> None:
        self.router = router
        self.engine = engine
        self.key = keys_on(router, 0, prefix="account")[0]
        self.attempts = 0

    @optimistic.retry(attempts=1000, jitter=0.002)
    def recharge(self, amount: int) -> bool:
        """As the service does it: one at a time, and only on what was read."""
        self.attempts += 1
        with self.router.transaction(self.key, timeout=20.0) as conn:
            row = conn.execute(select(WALLET).where(WALLET.c.id == ACCOUNT)).one()
            return optimistic.compare_and_set(conn, WALLET, ACCOUNT, row.version, {"balance": row.balance + amount})

    @optimistic.retry(attempts=1000, jitter=0.002)
    def repair(self, amount: int) -> bool:
        """As the script does it: by the version alone."""
        with self.engine.begin() as conn:
            row = conn.execute(select(WALLET).where(WALLET.c.id == ACCOUNT)).one()
            return optimistic.compare_and_set(conn, WALLET, ACCOUNT, row.version, {"balance": row.balance + amount})


@pytest.fixture
def recharger(cluster: Cluster) -> Iterator[Recharger]:
    routers = Routers(cluster)
    business = Business(routers.observers[0], WALLET)
    routers.observers[0].ask(f"INSERT INTO wallet VALUES ({ACCOUNT}, 100, 1)")
    engine = engine_of(routers.config, 0, pool_size=4)
    yield Recharger(routers.make(), engine)
    engine.dispose()
    business.drop()
    routers.finish()


def in_threads(recharger: Recharger, repairs: int) -> tuple[int, int]:
    """Balance and version after four threads recharged and others repaired."""
    work = [in_thread(lambda: [recharger.recharge(1) for _ in range(TIMES)]) for _ in range(4)]
    work += [in_thread(lambda: [recharger.repair(1) for _ in range(TIMES)]) for _ in range(repairs)]
    for thread in work:
        thread.result(60.0)
    with recharger.engine.connect() as conn:
        row = conn.execute(select(WALLET.c.balance, WALLET.c.version)).one()
    return row.balance, row.version


def test_under_the_lock_nobody_works_in_vain(recharger: Recharger) -> None:
    assert in_threads(recharger, repairs=0) == (100 + 4 * TIMES, 1 + 4 * TIMES)
    assert recharger.attempts == 4 * TIMES


def test_who_takes_no_lock_is_kept_apart_by_the_version(recharger: Recharger) -> None:
    assert in_threads(recharger, repairs=2) == (100 + 6 * TIMES, 1 + 6 * TIMES)
