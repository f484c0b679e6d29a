"""Many leases of one process, kept alive: on time, for little of a core, and none after its release."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

import pytest

from lockrouter import Lease, LockRouter
from lockrouter.testing.cluster import Cluster
from tests.support.leases import settled
from tests.support.observe import Routers, eventually, in_thread, keys_on

pytestmark = pytest.mark.server

SHARD = 0
NAME = f"shard-{SHARD}"


@pytest.fixture
def routers(cluster: Cluster) -> Iterator[Routers]:
    """Routers on the session's cluster."""
    kept = Routers(cluster)
    yield kept
    kept.finish()


def take_all(router: LockRouter, keys: list[str], ttl: float) -> list[Lease]:
    """A lease of each key, by many callers at once."""

    def work(part: list[str]) -> list[Lease]:
        return [router.lease(key, ttl=ttl, timeout=60) for key in part]

    threads = [in_thread(lambda part=keys[start::64]: work(part)) for start in range(64)]  # type: ignore[misc]
    return [lease for thread in threads for lease in thread.result(240)]


def release_all(leases: list[Lease]) -> None:
    def work(part: list[Lease]) -> None:
        for lease in part:
            lease.release()

    for thread in [in_thread(lambda part=leases[start::64]: work(part)) for start in range(64)]:  # type: ignore[misc]
        thread.result(240)


def renewals(routers: Routers, router: LockRouter, outcome: str = "renewed") -> int:
    return int(
        sum(
            routers.metric(router, "lockrouter_renewals_total", shard=f"shard-{index}", outcome=outcome)
            for index in range(len(routers.cluster))
        )
    )


def test_renewals_are_as_many_as_the_leases_and_none_after_release(routers: Routers) -> None:
    """I9: each lease three times per ttl, no more; nothing once all are released."""
    router = routers.make()
    leases = take_all(router, [f"kept:{number}" for number in range(600)], ttl=3)
    before, began = renewals(routers, router), time.monotonic()
    time.sleep(3.0)
    renewed, passed = renewals(routers, router) - before, time.monotonic() - began
    assert not any(lease.lost for lease in leases)
    assert 0.7 * len(leases) * passed <= renewed <= 1.6 * len(leases) * passed + len(leases)
    release_all(leases)
    settled(routers, router)
    after = renewals(routers, router)
    time.sleep(1.5)
    assert renewals(routers, router) == after
    assert renewals(routers, router, "lost") == 0


def test_a_pool_that_row_locks_have_emptied_delays_no_renewal(routers: Routers) -> None:
    router = routers.make(pool={"size": 2})
    keys = keys_on(router, SHARD, 3, prefix="emptied")
    with router.lease(keys[0], ttl=1.5) as lease, router.lock(keys[1]), router.lock(keys[2]):
        time.sleep(3.0)
        assert not lease.lost
        lease.check()


@pytest.mark.slow
def test_ten_thousand_leases_in_time_for_little_of_a_core(routers: Routers) -> None:
    """10,000 leases with a ttl of 10 s, renewed on time by one process at under 15 % of one core."""
    router = routers.make()
    leases = take_all(router, [f"ten thousand:{number}" for number in range(10_000)], ttl=10)
    try:
        time.sleep(4.0)  # the first round comes in the rhythm in which they were taken
        before, usage, began = renewals(routers, router), resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        lowest = 10.0
        while time.monotonic() < began + 20:
            time.sleep(1.0)
            lowest = min(lowest, *(lease.remaining() for lease in leases[::200]))
        after, passed = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - began
        cpu = (after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime) / passed
        renewed = renewals(routers, router) - before
        print(f"\n{renewed / passed:.0f} renewals/s, {cpu:.1%} of a core, {lowest:.1f} s left at the least")
        assert not any(lease.lost for lease in leases)
        assert renewed >= 0.9 * len(leases) * passed / 3.34
        assert lowest > 4.0
        assert cpu < 0.15
    finally:
        release_all(leases)
    eventually(lambda: not router._core.leases.entries)
