"""`once` on real servers: one result per key, and none of what did not happen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Column, Connection, Integer, MetaData, Table, insert

from lockrouter import (
    InProgress,
    InvalidKey,
    KeyCollision,
    LockLost,
    LockRouter,
    LossReason,
    ShardUnavailable,
)
from lockrouter.recipes.record import MAX_RESULT, Record
from lockrouter.testing.cluster import Cluster
from tests.support.observe import Observer, Routers, eventually, in_thread, keys_on
from tests.support.proxy import Cut, Proxy, Rule, Way
from tests.support.tables import Business

pytestmark = pytest.mark.server

EFFECT = Table(
    "effect",
    MetaData(),
    Column("id", Integer, primary_key=True),
    Column("message", Integer, nullable=False),
    mysql_engine="InnoDB",
)


class Work:
    """A function that counts its calls, and can be held up in the middle."""

    def __init__(self, result: Any = None) -> None:
        self.result = result
        self.calls = 0
        self.inside = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self) -> Any:
        self.calls += 1
        self.inside.set()
        assert self.go_on.wait(20.0)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


def slow(result: Any = None) -> Work:
    """Work that waits to be let go on."""
    made = Work(result)
    made.go_on.clear()
    return made


@pytest.fixture
def routers(cluster: Cluster) -> Iterator[Routers]:
    kept = Routers(cluster)
    clear(kept.observers)
    yield kept
    kept.finish()
    clear(kept.observers)


def clear(servers: list[Observer]) -> None:
    for server in servers:
        server.ask("DELETE FROM once")


@pytest.fixture
def key(router: LockRouter) -> str:
    return keys_on(router, 0, prefix="once")[0]


def records(server: Observer) -> int:
    return int(server.ask("SELECT COUNT(*) FROM once")[0][0])


def owned(server: Observer, key: str) -> list[tuple[Any, ...]]:
    """The rows of the key's leases that somebody owns."""
    tables = [row[0] for row in server.ask("SHOW TABLES LIKE 'lease%'")]
    asked = " UNION ALL ".join(f"SELECT key_text FROM {name} WHERE owner <> '' AND kind = 7" for name in tables)
    return [row for row in server.ask(asked) if row[0] == key.encode()]


@pytest.mark.parametrize("result", [None, 0, "text ü", [1, 2.5, True], {"a": {"b": None}}, "x" * 300_000], ids=str)
def test_the_first_result_is_everybody_s(routers: Routers, router: LockRouter, key: str, result: Any) -> None:
    first, second = Work(result), Work("another")
    assert router.once(key, first) == result
    assert router.once(key, second) == result
    assert routers.make().once(key.encode(), second) == result
    assert (first.calls, second.calls) == (1, 0)


def test_all_callers_get_what_json_makes_of_it(router: LockRouter, key: str) -> None:
    assert router.once(key, lambda: {1: (2, 3)}) == {"1": [2, 3]}
    assert router.once(key, Work()) == {"1": [2, 3]}


def test_while_one_runs_the_others_are_told_so(
    routers: Routers, router: LockRouter, server: Observer, key: str
) -> None:
    first, second = slow("done"), Work()
    running = in_thread(lambda: router.once(key, first, ttl=1.0))
    assert first.inside.wait(10.0)
    for other in (router, routers.make()):
        with pytest.raises(InProgress):
            other.once(key, second)
    # Kept alive for longer than its ttl.
    threading.Event().wait(2.0)
    with pytest.raises(InProgress):
        routers.make().once(key, second)
    first.go_on.set()
    assert running.result() == "done"
    assert routers.make().once(key, second) == "done"
    assert second.calls == 0
    assert owned(server, key) == []


def test_an_error_stores_nothing_and_frees_the_key(
    routers: Routers, router: LockRouter, server: Observer, key: str
) -> None:
    with pytest.raises(ZeroDivisionError):
        router.once(key, Work(ZeroDivisionError("in the work")))
    assert records(server) == 0
    assert routers.make().once(key, Work("after")) == "after"


@pytest.mark.parametrize(
    ("result", "error", "says"),
    [
        (object(), TypeError, "is not JSON"),
        (float("nan"), ValueError, "is not JSON"),
        ({(1, 2): 3}, TypeError, "is not JSON"),
        ("x" * MAX_RESULT, ValueError, "524,290 bytes"),
    ],
    ids=["object", "nan", "key", "large"],
)
def test_what_cannot_be_stored_is_not_and_says_that_it_ran(
    router: LockRouter, server: Observer, key: str, result: Any, error: type[Exception], says: str
) -> None:
    work = Work(result)
    with pytest.raises(error) as raised:
        router.once(key, work)
    assert says in str(raised.value)
    assert "has run, and nothing was stored" in str(raised.value)
    assert work.calls == 1
    assert records(server) == 0
    assert router.once(key, Work(1)) == 1


def test_a_result_is_kept_for_as_long_as_asked(router: LockRouter, server: Observer, key: str) -> None:
    assert router.once(key, Work(1), keep=3600) == 1
    kept = server.ask(f"SELECT keep_until - {server.clock_us()} FROM once")[0][0]
    assert 3590e6 < kept <= 3600e6
    server.ask("UPDATE once SET keep_until = 1")
    assert router.once(key, Work(2)) == 2
    assert router.once(key, Work(3)) == 2
    assert records(server) == 1


def test_lost_before_storing_overwrites_nobody(
    routers: Routers, router: LockRouter, server: Observer, key: str
) -> None:
    first = slow("first")
    running = in_thread(lambda: router.once(key, first, ttl=30.0))
    assert first.inside.wait(10.0)
    table = f"lease_{router.route(key).table:02d}"
    server.ask(f"UPDATE {table} SET owner = '' WHERE kind = 7 AND key_text = %s", key)  # as an operator releases
    assert routers.make().once(key, Work("second")) == "second"
    first.go_on.set()
    with pytest.raises(LockLost):
        running.result()
    assert router.once(key, Work("third")) == "second"


def test_lost_with_nobody_after_it_stores_nothing(router: LockRouter, server: Observer, key: str) -> None:
    first = slow("first")
    running = in_thread(lambda: router.once(key, first, ttl=30.0))
    assert first.inside.wait(10.0)
    table = f"lease_{router.route(key).table:02d}"
    server.ask(f"DELETE FROM {table} WHERE kind = 7 AND key_text = %s", key)
    first.go_on.set()
    with pytest.raises(LockLost) as raised:
        running.result()
    assert raised.value.reason in LossReason
    assert records(server) == 0


def test_who_is_cut_off_is_replaced_after_its_ttl_and_told(routers: Routers, router: LockRouter) -> None:
    with Proxy(routers.cluster.port(0)) as proxy:
        far = routers.make(ports={0: proxy.port})
        key = keys_on(far, 0, prefix="cut-off")[0]
        first = slow("first")
        running = in_thread(lambda: far.once(key, first, ttl=1.0))
        assert first.inside.wait(10.0)
        proxy.stop()
        with pytest.raises(InProgress):
            router.once(key, Work("second"))
        assert eventually(lambda: answer_of(router, key), 10.0, every=0.1) == "second"
        proxy.accept()
        first.go_on.set()
        with pytest.raises((LockLost, ShardUnavailable)):
            running.result()
        assert router.once(key, Work()) == "second"
        eventually(lambda: far.health()["shard-0"]["state"] == "ok")
        far.close()


def answer_of(router: LockRouter, key: str) -> Any:
    """What `once` answers, or None while another caller computes it."""
    try:
        return router.once(key, Work("second"))
    except InProgress:
        return None


def test_the_work_is_given_its_lease_if_it_asks(router: LockRouter, key: str) -> None:
    assert router.once(key, lambda lease: lease.token > 0) is True
    default = router.once(key + "default", lambda message=5: message)
    assert default == 5


def test_wrong_arguments(router: LockRouter, key: str) -> None:
    async def later() -> None:
        pass

    with pytest.raises(TypeError, match="coroutine"):
        router.once(key, later)
    for wrong in ({"ttl": 0.5}, {"keep": 0}, {"keep": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            router.once(key, Work(), **wrong)
    with pytest.raises(InvalidKey):
        router.once("", Work())


def test_another_key_of_the_same_digest_is_not_taken_for_this_one(
    router: LockRouter, server: Observer, key: str
) -> None:
    router.once(key, Work(1))
    server.ask("UPDATE once SET key_text = 'another'")
    with pytest.raises(KeyCollision):
        router.once(key, Work(2))
    with pytest.raises(KeyCollision):
        router.once(key, lambda conn: 2, transaction=True)


# -- in a transaction -----------------------------------------------------------------------------------------------


@pytest.fixture
def effects(server: Observer) -> Iterator[Business]:
    made = Business(server, EFFECT)
    yield made
    made.drop()


def write(conn: Connection) -> str:
    """One business row."""
    conn.execute(insert(EFFECT).values(message=1))
    return "written"


def written(server: Observer) -> int:
    return int(server.ask("SELECT COUNT(*) FROM effect")[0][0])


def test_record_and_rows_commit_together(router: LockRouter, server: Observer, effects: Business, key: str) -> None:
    for _ in range(3):
        assert router.once(key, write, transaction=True) == "written"
    assert (written(server), records(server)) == (1, 1)
    assert router.once(key, Work()) == "written"


def test_an_error_rolls_both_back(router: LockRouter, server: Observer, effects: Business, key: str) -> None:
    def fails(conn: Connection) -> Any:
        write(conn)
        return object()

    def divides(conn: Connection) -> Any:
        write(conn)
        raise ZeroDivisionError

    with pytest.raises(TypeError, match="is not JSON"):
        router.once(key, fails, transaction=True)
    with pytest.raises(ZeroDivisionError):
        router.once(key, divides, transaction=True)
    assert (written(server), records(server)) == (0, 0)
    assert router.once(key, write, transaction=True) == "written"


def test_others_are_told_while_the_transaction_is_open(
    routers: Routers, router: LockRouter, server: Observer, effects: Business, key: str
) -> None:
    work = slow()

    def waits(conn: Connection) -> str:
        work()
        return write(conn)

    running = in_thread(lambda: router.once(key, waits, transaction=True))
    assert work.inside.wait(10.0)
    with pytest.raises(InProgress):
        routers.make().once(key, write, transaction=True)
    with pytest.raises(InProgress):
        router.once(key, write, transaction=True)
    work.go_on.set()
    assert running.result() == "written"
    assert written(server) == 1


def test_ten_at_once_write_one_row(router: LockRouter, server: Observer, effects: Business, key: str) -> None:
    def ask() -> str:
        try:
            return str(router.once(key, write, transaction=True))
        except InProgress:
            return "in progress"

    answers = [thread.result() for thread in [in_thread(ask) for _ in range(10)]]
    assert "written" in answers
    assert set(answers) <= {"written", "in progress"}
    assert written(server) == 1


def test_a_lost_reply_to_the_commit_is_settled(routers: Routers, server: Observer, effects: Business) -> None:
    with Proxy(routers.cluster.port(0)) as proxy:
        router = routers.make(ports={0: proxy.port})
        key = keys_on(router, 0, prefix="lost-commit")[0]
        router.warm()
        rule = proxy.add(Rule(Way.DOWN, 0, Cut.RST, marker=b"\x03COMMIT"))
        assert router.once(key, write, transaction=True) == "written"
        assert rule.struck.is_set()
        assert router.once(key, write, transaction=True) == "written"
        assert written(server) == 1
        router.close()


def test_a_lost_reply_to_the_storing_is_settled(routers: Routers, server: Observer) -> None:
    with Proxy(routers.cluster.port(0)) as proxy:
        router = routers.make(ports={0: proxy.port})
        key = keys_on(router, 0, prefix="lost-store")[0]
        work = Work("kept")
        router.warm()
        rule = proxy.add(Rule(Way.DOWN, 0, Cut.RST, marker=b"\x03COMMIT"))
        assert router.once(key, work) == "kept"
        assert rule.struck.is_set()
        assert router.once(key, Work()) == "kept"
        assert (work.calls, records(server)) == (1, 1)
        router.close()


def test_an_outage_is_an_error(routers: Routers, key: str) -> None:
    with Proxy(routers.cluster.port(0)) as proxy:
        router = routers.make(ports={0: proxy.port}, router={"timeout": 1.0, "on_outage": "local"})
        work = slow("kept")
        running = in_thread(lambda: router.once(key, work, ttl=3.0))
        assert work.inside.wait(10.0)
        proxy.refuse()
        work.go_on.set()
        with pytest.raises((ShardUnavailable, LockLost)):
            running.result()
        for transaction in (False, True):
            with pytest.raises(ShardUnavailable):
                router.once(key, lambda *_: 1, transaction=transaction)
        proxy.accept()
        eventually(lambda: router.health()["shard-0"]["state"] == "ok")
        router.close()


def test_a_server_that_restarts_while_it_runs_changes_nothing(
    routers: Routers, cluster: Cluster, server: Observer, key: str
) -> None:
    router, work = routers.make(), slow("kept")
    running = in_thread(lambda: router.once(key, work, ttl=20.0))
    assert work.inside.wait(10.0)
    cluster.kill(0)
    try:
        work.go_on.set()
    finally:
        cluster.start(0)
    assert running.result() == "kept"
    assert (work.calls, records(server)) == (1, 1)


def test_the_record_says_where_it_is(router: LockRouter, key: str) -> None:
    router.warm()
    record = Record(router._core, key)
    assert record.read() is None
    router.once(key, Work(1))
    there = record.read()
    assert there is not None
    assert there.result == b"1"
    assert there.token > 0


def test_inside_row_locks_that_use_up_the_pool(routers: Routers) -> None:
    router = routers.make(pool={"size": 2})
    keys = keys_on(router, 0, 3, prefix="nested")
    with router.lock(keys[0]), router.lock(keys[1]):
        assert router.once(keys[2], Work(1)) == 1
