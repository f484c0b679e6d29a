"""Several rows at once, where rows, sessions and gates of several shards are wanted by many in different orders."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from lockrouter import LockLost, LockRouter, LockTimeout, PoolTimeout, ShardUnavailable, TopologyMismatch, WouldDeadlock
from lockrouter.testing.binaries import Vendor
from lockrouter.testing.cluster import Cluster
from tests.support.observe import Routers, eventually, in_thread, keys_on
from tests.support.proxy import Proxy, Way
from tests.support.servers import Clusters
from tests.support.shards import Shards, drop, make

pytestmark = pytest.mark.server


@pytest.fixture
def shards(clusters: Clusters, vendor: Vendor, tmp_path: Path) -> Iterator[Shards]:
    """Eight rows in four buckets; each of the two shards has every second bucket, so slots alternate between them."""
    made = make(clusters.get(vendor, 2), tmp_path, "few", 2, 4, 2, turns=True)
    yield made.create()
    drop(made)


class Small:
    """Routers on those eight rows, closed with the test."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.made: list[LockRouter] = []
        self.registries: list[CollectorRegistry] = []

    def make(self, **pool: Any) -> LockRouter:
        config, replace = self.shards.config, msgspec.structs.replace
        config = replace(config, pool=replace(config.pool, min_idle=1, **pool))
        self.registries.append(CollectorRegistry())
        self.made.append(LockRouter(config, registry=self.registries[-1]))
        return self.made[-1]

    def sum(self, index: int, name: str, **labels: str) -> float:
        samples = [sample for family in self.registries[index].collect() for sample in family.samples]
        return sum(one.value for one in samples if one.name == name and labels.items() <= one.labels.items())


@pytest.fixture
def small(shards: Shards) -> Iterator[Small]:
    kept = Small(shards)
    yield kept
    for router in kept.made:
        router.close()


def one_per_row(router: LockRouter) -> dict[int, str]:
    """A key for each of the eight rows, by slot."""
    found: dict[int, str] = {}
    number = 0
    while len(found) < 8:
        found.setdefault(router.route(f"row:{number}").slot, f"row:{number}")
        number += 1
    return dict(sorted(found.items()))


def test_two_callers_that_need_sessions_of_the_same_shards(small: Small) -> None:
    """One session per shard: whoever had taken one of each in the order of the rows would wait for the other's."""
    router = small.make(size=1)
    keys = one_per_row(router)
    of = {slot: router.route(key).shard for slot, key in keys.items()}
    low = next(slot for slot in keys if of[slot] == "s0"), [slot for slot in keys if of[slot] == "s1"][-1]
    high = next(slot for slot in keys if of[slot] == "s1"), [slot for slot in keys if of[slot] == "s0"][-1]
    assert low[0] < low[1] and high[0] < high[1], "in the order of slots they ask the shards in opposite orders"
    turns = 150

    def work(slots: tuple[int, int]) -> None:
        for _ in range(turns):
            with router.lock_all([keys[slot] for slot in slots], timeout=20.0):
                pass

    threads = [in_thread(lambda slots=slots: work(slots)) for slots in (low, high)]  # type: ignore[misc]
    for thread in threads:
        thread.result(40.0)
    assert small.sum(0, "lockrouter_acquires_total", outcome="acquired") == 2 * 2 * turns


def test_a_single_lock_that_waits_for_the_pool_is_in_nobodys_way(small: Small) -> None:
    """A row's first caller waits for the only session, whose holder wants that row next: no ring, nobody times out."""
    router = small.make(size=1)
    keys = one_per_row(router)
    mine = [key for key in keys.values() if router.route(key).shard == "s0"]
    turns = 60

    def both() -> None:
        for _ in range(turns):
            router.lock_all(mine[:3], timeout=20.0).release()

    def single(key: str) -> None:
        for _ in range(turns):
            router.lock(key, timeout=20.0).release()

    threads = [in_thread(both), *(in_thread(lambda key=key: single(key)) for key in mine[1:])]  # type: ignore[misc]
    for thread in threads:
        thread.result(40.0)


def test_who_nests_single_locks_does_not_hurt_lock_all(small: Small) -> None:
    """The nester holds the last row and asks for the first, which lock_all has entered: lock_all steps back."""
    router = small.make()
    first, *_, last = one_per_row(router).values()
    inside, go, after = threading.Event(), threading.Event(), threading.Event()

    def nest() -> str:
        with router.lock(last, timeout=10.0):
            inside.set()
            assert go.wait(10.0)
            try:
                with router.lock(first, timeout=10.0):
                    return "nested"
            except WouldDeadlock:
                return "refused"
            finally:
                after.wait(10.0)

    def all_of_them() -> str:
        with router.lock_all([first, last], timeout=20.0):
            return "all"

    nesting = in_thread(nest)
    assert inside.wait(10.0)
    taking = in_thread(all_of_them)
    eventually(lambda: small.sum(0, "lockrouter_waiters") == 2)  # leads at the first row, queues at the last
    go.set()
    after.set()
    assert nesting.result() == "refused", "the one who nests closes the ring"
    assert taking.result() == "all"

    inside.clear()
    with router.lock(first, timeout=10.0):
        taking = in_thread(all_of_them)  # queues at the first row
        eventually(lambda: small.sum(0, "lockrouter_waiters") == 1)
        held = router.lock(last, timeout=10.0)
    eventually(lambda: small.sum(0, "lockrouter_waiters") == 2)
    held.release()
    assert taking.result() == "all"


def test_lock_all_steps_back_where_it_would_close_the_ring(small: Small) -> None:
    router = small.make()
    first, middle, *_, last = one_per_row(router).values()
    inside, go = threading.Event(), threading.Event()

    def nest() -> str:
        with router.lock(last, timeout=10.0):
            inside.set()
            assert go.wait(10.0)
            with router.lock(first, timeout=10.0):
                return "nested"

    nesting = in_thread(nest)
    assert inside.wait(10.0)
    with router.lock(middle, timeout=10.0):
        taking = in_thread(lambda: router.lock_all([first, middle, last], timeout=20.0).release())
        eventually(lambda: small.sum(0, "lockrouter_waiters") == 2)
        go.set()  # waits at the first row, where lock_all is ahead, which waits at the middle one
        eventually(lambda: small.sum(0, "lockrouter_waiters") == 3)
    assert nesting.result() == "nested"
    taking.result()


def test_a_failed_call_is_counted(small: Small, vendor: Vendor) -> None:
    router, other = small.make(size=1), small.make()
    keys = list(one_per_row(router).values())
    with other.lock(keys[-1], timeout=5.0):
        with pytest.raises(LockTimeout):
            router.lock_all(keys, timeout=0.3)
        with pytest.raises(LockTimeout):
            router.lock_all(keys, timeout=0)
        held = in_thread(lambda: router.lock(keys[0], timeout=5.0)).result()
        with pytest.raises((PoolTimeout, LockTimeout)):
            router.lock_all(keys[1:3], timeout=0.2)
        held.release()
    counted = {
        outcome: small.sum(0, "lockrouter_acquires_total", outcome=outcome)
        for outcome in ("acquired", "timeout", "busy", "error")
    }
    assert counted == {"acquired": 1, "timeout": 8, "busy": 8, "error": 2}
    router.lock_all(keys, timeout=5.0).release()


@pytest.mark.parametrize("size", [1, 4])
def test_sixteen_callers_on_eight_rows_lose_nothing(small: Small, size: int) -> None:
    """Random sets in random order, with single locks between them, over two routers: no error, no lost increment."""
    routers = [small.make(size=size), small.make(size=size)]
    keys = one_per_row(routers[0])
    counters: Counter[int] = Counter()
    expected: Counter[int] = Counter()
    guard = threading.Lock()

    def add(slots: set[int]) -> None:
        seen = {slot: counters[slot] for slot in slots}
        time.sleep(0.0005)
        for slot in slots:
            counters[slot] = seen[slot] + 1
        with guard:
            expected.update(slots)

    def work(seed: int) -> None:
        dice, router = random.Random(seed), routers[seed % 2]
        for _ in range(20):
            chosen = [f"any:{dice.randrange(10_000)}" for _ in range(dice.randint(1, 6))]
            if dice.random() < 0.3:
                chosen = chosen[:1]
                with router.lock(chosen[0], timeout=60.0):
                    add({router.route(chosen[0]).slot})
            else:
                with router.lock_all(chosen, timeout=60.0) as held:
                    add({member.address.slot for member in held})

    threads = [in_thread(lambda seed=seed: work(seed)) for seed in range(16)]  # type: ignore[misc]
    for thread in threads:
        thread.result(90.0)
    assert counters == expected
    assert sum(expected.values()) > 16 * 20
    assert set(expected) == set(keys)
    for index in (0, 1):
        assert small.sum(index, "lockrouter_acquires_total", outcome="error") == 0
        assert small.sum(index, "lockrouter_acquires_total", outcome="timeout") == 0


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    """The way to the first shard."""
    with Proxy(cluster.port(0)) as between:
        yield between


def test_an_opening_breaker_wakes_who_waits_for_a_later_row(proxy: Proxy, routers: Routers) -> None:
    router = routers.make(
        ports={0: proxy.port}, breaker={"failures": 1, "probe_after": 0.3}, pool={"connect_timeout": 0.3}
    )
    other = routers.make()
    keys = keys_on(router, 0, 2, prefix="woken")
    last = max(keys, key=lambda key: router.route(key).slot)
    with other.lock(last, timeout=5.0):
        waiting = in_thread(lambda: router.lock_all(keys, timeout=60.0))
        routers.observers[0].await_waiters()
        proxy.stop(Way.DOWN)
        began = time.monotonic()
        held = waiting.result(10.0)  # the shard file says "local": the whole call degrades, rows it had included
        assert time.monotonic() - began < 5.0
        assert all(member.degraded for member in held)
        held.release()
    proxy.accept()
    strict = routers.make(ports={0: proxy.port}, router={"on_outage": "refuse"}, breaker={"failures": 1})
    with other.lock(last, timeout=5.0):
        waiting = in_thread(lambda: strict.lock_all(keys, timeout=60.0))
        routers.observers[0].await_waiters()
        proxy.stop(Way.DOWN)
        with pytest.raises(ShardUnavailable):
            waiting.result(10.0)
    proxy.accept()


def test_one_lost_session_keeps_no_other_row_locked(routers: Routers) -> None:
    """Rows of two shards; the connection to one is killed. Release frees the others, whatever it raises."""
    router, other = routers.make(), routers.make()
    keys = [*keys_on(router, 0, 2, prefix="mixed"), *keys_on(router, 1, 2, prefix="mixed")]
    held = router.lock_all(keys, timeout=5.0)
    routers.observers[0].kill(eventually(routers.observers[0].holders)[0])
    eventually(lambda: held.lost)
    assert [held[key].lost for key in keys] == [True, True, False, False]
    assert other.try_lock(keys[2]) is None
    with pytest.raises(LockLost):
        held.release()
    with other.lock_all(keys, timeout=5.0, confirm=True):
        pass


def test_the_error_of_the_block_wins_over_a_loss(routers: Routers) -> None:
    router = routers.make()
    keys = keys_on(router, 0, 2, prefix="mixed")
    with pytest.raises(ValueError, match="business") as raised, router.lock_all(keys, timeout=5.0) as held:
        routers.observers[0].kill(eventually(routers.observers[0].holders)[0])
        eventually(lambda: held.lost)
        raise ValueError("business")
    assert any("lost" in note for note in raised.value.__notes__)


# -- buckets that moved -----------------------------------------------------------------------------------------------


def move(shards: Shards, bucket: int, source: int, *, to: str, opened: bool = True) -> None:
    """What a change of the map leaves behind: closed rows on one shard, open ones of a later epoch on the other."""
    low, high, table = bucket * 2, bucket * 2 + 1, f"lock_{bucket % 2:02d}"
    fence(shards, bucket, source, to)
    target = 1 - source
    epoch = 4 if opened else 0
    shards.sql(
        target,
        f"REPLACE INTO {table} (slot, epoch, pad) VALUES ({low}, {epoch}, 0), ({high}, {epoch}, 0)",
        f"REPLACE INTO lock_bucket (bucket, epoch, moved_to) VALUES ({bucket}, {epoch}, '')",
        "SELECT 1",
    )


def fence(shards: Shards, bucket: int, source: int, to: str) -> None:
    rows = f"slot BETWEEN {bucket * 2} AND {bucket * 2 + 1}"
    shards.sql(
        source,
        f"UPDATE lock_{bucket % 2:02d} SET epoch = 0 WHERE {rows}",
        f"UPDATE lock_bucket SET epoch = 0, moved_to = '{to}' WHERE bucket = {bucket}",
        "SELECT 1",
    )


def test_a_bucket_that_moved_is_followed(small: Small, shards: Shards) -> None:
    router, other = small.make(), small.make()
    keys = list(one_per_row(router).values())
    moved = [key for key in keys if router.route(key).bucket == 0]
    assert {router.route(key).shard for key in moved} == {"s0"}
    with router.lock(moved[0], timeout=5.0) as before:
        pass
    move(shards, 0, 0, to="s1")
    for key in moved:
        with router.lock(key, timeout=5.0) as held:
            assert held.address == router.route(key)._replace(shard="s1")
            assert held.token > before.token or key != moved[0]
            held.check()
            assert other.try_lock(key) is None
            with router.lock(key, timeout=0) as nested:
                assert nested.token == held.token
        again = eventually(lambda: other.try_lock(key))  # noqa: B023 - called now
        again.release(confirm=True)
    with router.lock_all(keys, timeout=5.0) as everything:
        assert {member.address.shard for member in everything} == {"s0", "s1"}
        assert {everything[key].address.shard for key in moved} == {"s1"}
        assert all(other.try_lock(key) is None for key in keys)
    with pytest.raises(TopologyMismatch), router.transaction(moved[0], timeout=2.0):
        pass


def test_a_bucket_on_its_way_is_waited_for(small: Small, shards: Shards) -> None:
    router = small.make()
    key = next(key for key in one_per_row(router).values() if router.route(key).bucket == 2)
    router.lock(key, timeout=5.0).release(confirm=True)
    move(shards, 2, 0, to="s1", opened=False)
    began = time.monotonic()
    with pytest.raises(TopologyMismatch, match="closed"):
        router.lock(key, timeout=0.3)
    assert time.monotonic() - began < 0.3 + 0.5
    taking = in_thread(lambda: router.lock(key, timeout=20.0))
    eventually(lambda: small.sum(0, "lockrouter_waiters") == 1)
    move(shards, 2, 0, to="s1")
    held = taking.result()
    assert held.address.shard == "s1"
    held.release(confirm=True)


@pytest.mark.parametrize("to", ["", "s9", "s0"])
def test_a_bucket_that_went_where_the_file_does_not_know(small: Small, shards: Shards, to: str) -> None:
    router = small.make()
    key = next(key for key in one_per_row(router).values() if router.route(key).bucket == 0)
    fence(shards, 0, 0, to)
    for _ in range(2):
        with pytest.raises(TopologyMismatch, match=to or "moved"):
            router.lock(key, timeout=3.0)
        with pytest.raises(TopologyMismatch):
            router.try_lock(key)
        with pytest.raises(TopologyMismatch):
            router.lock_all([key], timeout=3.0)
    assert router.health()["s0"]["pool"]["busy"] == 0
