"""Recipes and the sweeper go where a bucket went: moves made by hand, as `reshard` is to make them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from lockrouter import SKIPPED, LockRouter, TopologyMismatch
from lockrouter.admin.sweep import AGE
from lockrouter.admin.sweeper import Sweeper
from lockrouter.sql.recipes import FIRST_OPEN_BUCKET
from lockrouter.tokens import base_token
from tests.support.observe import Observer, Routers, keys_on

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("no_leases")]

SOURCE, TARGET = 2, 3


class Move:
    """Of the bucket of one key, from one shard to another."""

    def __init__(self, routers: Routers, router: LockRouter, key: str) -> None:
        self.source, self.target = routers.observers[SOURCE], routers.observers[TARGET]
        self.bucket = router.route(key).bucket
        self.table = f"lease_{router.route(key).table:02d}"

    def close(self, target: str = f"shard-{TARGET}") -> None:
        """The source gives the bucket up."""
        self.source.ask("UPDATE lock_bucket SET epoch = 0, moved_to = %s WHERE bucket = %s", target, self.bucket)

    def open(self) -> None:
        """The target has what was copied, and the bucket is open there."""
        for table, condition in ((self.table, f"bucket = {self.bucket}"), ("once", "TRUE")):
            for row in self.source.ask(f"SELECT * FROM {table} WHERE {condition}"):
                self.target.ask(f"INSERT INTO {table} VALUES ({', '.join(['%s'] * len(row))})", *row)
        self.target.ask("INSERT INTO lock_bucket (bucket, epoch) VALUES (%s, 2)", self.bucket)

    def go(self) -> None:
        """Both."""
        self.close()
        self.open()

    def undo(self) -> None:
        """The map is right again."""
        self.source.ask("UPDATE lock_bucket SET epoch = 1, moved_to = '' WHERE bucket = %s", self.bucket)
        self.target.ask("DELETE FROM lock_bucket WHERE bucket = %s", self.bucket)
        for server in (self.source, self.target):
            server.ask("DELETE FROM once")
            server.ask(f"DELETE FROM {self.table}")


@pytest.fixture
def router(routers: Routers) -> LockRouter:
    """One that does not wait for long where a bucket does not open."""
    return routers.make(router={"timeout": 0.4}, pool={"connect_timeout": 0.4})


@pytest.fixture
def key(router: LockRouter) -> str:
    return keys_on(router, SOURCE, prefix="moves")[0]


@pytest.fixture
def move(routers: Routers, router: LockRouter, key: str) -> Iterator[Move]:
    """Of the bucket of `key`."""
    made = Move(routers, router, key)
    yield made
    made.undo()


def never() -> Any:
    raise AssertionError("it has been done before")


def results(server: Observer) -> int:
    return int(server.ask("SELECT COUNT(*) FROM once")[0][0])


def test_a_stored_result_is_found_where_its_bucket_went(
    routers: Routers, router: LockRouter, key: str, move: Move
) -> None:
    assert router.once(key, lambda: 7) == 7
    move.go()
    assert router.once(key, never) == 7
    assert routers.make().once(key, never) == 7


def test_a_bucket_that_moves_while_the_work_is_done_takes_the_result_along(
    router: LockRouter, other: LockRouter, key: str, move: Move
) -> None:
    def work() -> int:
        move.go()
        return 8

    assert router.once(key, work) == 8
    assert (results(move.source), results(move.target)) == (0, 1)
    assert other.once(key, never) == 8


def test_once_waits_for_a_bucket_that_is_on_its_way_and_names_one_that_is_nowhere(
    router: LockRouter, key: str, move: Move
) -> None:
    move.close("")
    began = time.monotonic()
    with pytest.raises(TopologyMismatch, match="moving"):
        router.once(key, never)
    assert time.monotonic() - began > 0.3
    move.close("shard-77")
    with pytest.raises(TopologyMismatch, match="shard-77"):
        router.once(key, never)


def test_guards_elections_and_semaphores_follow_their_bucket(
    router: LockRouter, other: LockRouter, key: str, move: Move
) -> None:
    work = router.guard(key, ttl=30, at_least=20)
    held = router.semaphore(key, permits=1).acquire(timeout=3.0)
    with work as lease, router.election(key, ttl=30) as candidate:
        assert lease and candidate.wait(5.0)
        move.go()
        assert other.semaphore(key, permits=1).try_acquire() is None
        with other.election(key, ttl=30) as second:
            assert not second.wait(0.3)
        held.release()
        other.semaphore(key, permits=1).acquire(timeout=3.0).release()
    ended = "SELECT expires - acquired FROM {} WHERE bucket = %s AND owner <> '' AND kind = 2"
    assert move.target.ask(ended.format(move.table), move.bucket) == [(20_000_000,)]
    assert other.guard(key, ttl=30)(never)() is SKIPPED


def test_a_shard_whose_first_bucket_went_elsewhere_is_swept_all_the_same(routers: Routers, router: LockRouter) -> None:
    server = routers.observers[0]
    first = server.ask(FIRST_OPEN_BUCKET)[0][0]
    server.ask("UPDATE lock_bucket SET epoch = 0, moved_to = 'shard-77' WHERE bucket = %s", first)
    long_ago = server.clock_us() - 2 * int(AGE * 1e6)
    server.ask(
        "INSERT INTO lease_00 VALUES (%s, %s, 1, 'key', '', %s, 30000000, %s, %s, '')",
        *(0, bytes(16), base_token(1, long_ago), long_ago, long_ago),
    )
    try:
        with (
            Sweeper(routers.config, registry=CollectorRegistry()) as sweeper,
            Sweeper(routers.config, registry=CollectorRegistry()) as second,
        ):
            swept = sweeper.sweep(every=30.0)[0]
            assert (swept.skipped, swept.deleted["lease"]) == (None, 1)
            assert second.sweep(every=30.0)[0].skipped, "they meet in the same bucket"
    finally:
        server.ask("UPDATE lock_bucket SET epoch = 1, moved_to = '' WHERE bucket = %s", first)
        server.ask("DELETE FROM lease_00")
