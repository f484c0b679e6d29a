"""Interrupts (Ctrl-C, a greenlet's timeout, a thread's asynchronous error) at every instant of every verb.

A handle may be dropped by one, a row may not stay: afterwards the same thing can be had again, by the same router and
by another one, and nothing of the call is left in the process.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from lockrouter import SKIPPED, InProgress, LockLost, LockRouter, LockRouterError, LockTimeout, ShardError, core
from lockrouter.leases import keeper
from lockrouter.session import Gone
from tests.support.accounts import engine_of
from tests.support.interrupts import interrupted
from tests.support.observe import Routers, eventually, keys_on

pytestmark = pytest.mark.server

SHARD = 2
NAME = f"shard-{SHARD}"


class Stage(NamedTuple):
    """What a form is played with."""

    router: LockRouter
    holder: LockRouter
    key: str
    second: str
    engine: Engine


def lock(stage: Stage) -> None:
    with stage.router.lock(stage.key, timeout=3.0):
        pass


def confirmed(stage: Stage) -> None:
    with stage.router.lock(stage.key, timeout=3.0, confirm=True):
        pass


def shared(stage: Stage) -> None:
    with stage.router.lock(stage.key, timeout=3.0, shared=True):
        pass


def nested(stage: Stage) -> None:
    with stage.router.lock(stage.key, timeout=3.0), stage.router.lock(stage.key, timeout=3.0):
        pass


def lock_all(stage: Stage) -> None:
    with stage.router.lock_all([stage.key, stage.second], timeout=3.0):
        pass


def timed_out(stage: Stage) -> None:
    with stage.holder.lock(stage.key, timeout=3.0), contextlib.suppress(LockTimeout, ShardError):
        stage.router.lock(stage.key, timeout=0.01)


def timed_out_lock_all(stage: Stage) -> None:
    with stage.holder.lock(stage.second, timeout=3.0), contextlib.suppress(LockTimeout, ShardError):
        stage.router.lock_all([stage.key, stage.second], timeout=0.05)


def timed_out_transaction(stage: Stage) -> None:
    with (
        stage.holder.lock(stage.second, timeout=3.0),
        contextlib.suppress(LockTimeout, ShardError),
        stage.router.transaction([stage.key, stage.second], timeout=0.01),
    ):
        pass


def transaction(stage: Stage) -> None:
    with stage.router.transaction([stage.key, stage.second], timeout=3.0) as connection:
        connection.exec_driver_sql("SELECT 1")


def nested_in_a_transaction(stage: Stage) -> None:
    with stage.router.transaction(stage.key, timeout=3.0), stage.router.lock(stage.key, timeout=3.0):
        pass


def failing_transaction(stage: Stage) -> None:
    try:
        with stage.router.transaction(stage.key, timeout=3.0):
            raise ValueError
    except ValueError:
        pass


def run(stage: Stage) -> None:
    stage.router.run(stage.key, lambda connection: connection.exec_driver_sql("SELECT 1"), attempts=1, timeout=3.0)


def lock_in(stage: Stage) -> None:
    with stage.engine.begin() as connection:
        stage.router.lock_in(connection, stage.key, timeout=3.0)


def promote(stage: Stage) -> None:
    shard = stage.router._core.shards[NAME]
    while shard.breaker.closed:
        shard.fault(Gone("as if"))
    with stage.router.lock(stage.key, timeout=3.0) as held:
        eventually(lambda: shard.breaker.closed)
        held.promote(timeout=3.0)


def once(stage: Stage) -> None:
    stage.router.once(stage.key, lambda: 1, ttl=600)


def once_in_a_transaction(stage: Stage) -> None:
    stage.router.once(stage.key, lambda connection: 1, transaction=True)


class Busy(Exception):
    """Somebody else has it."""


def guard(stage: Stage) -> None:
    if stage.router.guard(stage.key, ttl=600)(lambda: None)() is SKIPPED:
        raise Busy


def guard_at_least(stage: Stage) -> None:
    with stage.router.guard(stage.key, ttl=1, at_least=0.001) as held:
        if not held:
            raise Busy


def election(stage: Stage) -> None:
    with stage.router.election(stage.key, ttl=600) as candidate:
        if not candidate.wait(3.0):
            raise Busy


def semaphore(stage: Stage) -> None:
    with stage.router.semaphore(stage.key, permits=1, ttl=600).acquire(timeout=3.0):
        pass


def lease(stage: Stage) -> None:
    with stage.router.lease(stage.key, ttl=600, timeout=3.0):
        pass


ROWS = [lock, confirmed, shared, nested, lock_all, timed_out, timed_out_lock_all, promote]
TRANSACTIONS = [transaction, failing_transaction, nested_in_a_transaction, timed_out_transaction, run, lock_in]
LEASES = [lease, once, once_in_a_transaction, guard, guard_at_least, election, semaphore]
EVERY: dict[Callable[[Stage], None], int] = {
    once_in_a_transaction: 3,
    promote: 7,
    guard_at_least: 5,
    once: 3,
    semaphore: 11,
}
"""Of the forms with very many instants, or slow ones, only one in so many is struck."""


@pytest.fixture
def engine(routers: Routers, caplog: pytest.LogCaptureFixture) -> Iterator[Engine]:
    """The application's own, for `lock_in`."""
    # What SQLAlchemy's pool logs of an interrupt comes with a traceback: kept, it would keep the connection open.
    caplog.set_level(logging.CRITICAL + 1, "sqlalchemy.pool")
    made = engine_of(routers.config, SHARD, poolclass=NullPool)
    yield made
    made.dispose()


def left(router: LockRouter) -> list[str]:
    """What is still occupied in the process of a router that nobody uses."""
    core, found = router._core, []
    for what, gates in (("gate", core.gates), ("local gate", core.local_gates)):
        found += [f"{what}: {vars(gate)}" for gate in gates._gates.values()]
    pool = router.health()[NAME]["pool"]
    if pool["busy"] or pool["waiting"]:
        found.append(f"pool: {pool}")
    found += [f"lease: {entry.key!r}" for entry in core.leases.entries.values()]
    if core.leases.queues._queues:
        found.append(f"queues: {core.leases.queues._queues}")
    return found


def quiet(router: LockRouter, seconds: float = 1.5) -> list[str]:
    """As `left`, once the background has had its time."""
    until = time.monotonic() + seconds
    while found := left(router):
        gc.collect()
        if time.monotonic() > until:
            return found
        time.sleep(0.005)
    return []


def again(form: Callable[[Stage], None], stage: Stage, seconds: float = 3.0) -> str | None:
    """The same once more, inside a time; else what it met."""
    until = time.monotonic() + seconds
    while True:
        try:
            form(stage)
        except (Busy, InProgress) as error:
            if time.monotonic() > until:
                return repr(error)
            time.sleep(0.01)
        except LockRouterError as error:
            return repr(error)
        else:
            return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("first", ["SELECT 41", "SET @answer = 41"])
def test_a_statement_that_was_interrupted_is_never_answered_by_another_ones_reply(routers: Routers, first: str) -> None:
    """Where the body swallows the interrupt and goes on, as after `gevent.Timeout`; also behind a savepoint."""
    router = routers.make()
    key = keys_on(router, SHARD, prefix="swallowed")[0]
    at, struck, answered = 0, True, 0
    while struck:
        try:
            with router.transaction(key, timeout=5.0) as connection:

                def ask(number: int, connection: Connection = connection) -> int:
                    return int(connection.exec_driver_sql(f"SELECT {number}").scalar_one())

                struck = interrupted(lambda: connection.exec_driver_sql(first), at) is not None
                assert ask(42) == 42
                assert ask(43) == 43
                answered += 1
        except (LockLost, SQLAlchemyError):
            pass
        at += 1
    assert 1 < answered < at


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "form",
    [
        lock,
        confirmed,
        *(pytest.param(form, marks=pytest.mark.slow) for form in (*ROWS[2:], *TRANSACTIONS, *LEASES)),
    ],
    ids=lambda form: form.__name__,
)
def test_an_interrupt_at_any_instant_leaves_nothing(
    routers: Routers, engine: Engine, monkeypatch: pytest.MonkeyPatch, form: Callable[[Stage], None]
) -> None:
    monkeypatch.setattr(core, "_MEND_EVERY", 0.05)
    monkeypatch.setattr(keeper, "_SWEEP_EVERY", 0.05)
    settings: dict[str, Any] = {
        "router": {"close_timeout": 0.1, "on_outage": "local", "role_check": 0.1},
        "breaker": {"probe_after": 0.02},
    }
    router, other, holder = (routers.make(**settings) for _ in range(3))
    key, second = keys_on(router, SHARD, 2, prefix=f"interrupt:{form.__name__}")
    for caller in (router, other, holder):
        caller.warm()
    for caller in (router, other):
        form(Stage(caller, holder, key, second, engine))
    stuck: dict[str, object] = {}
    for at in range(0, 50_000, EVERY.get(form, 1)):
        server = routers.observers[SHARD]
        server.ask("DELETE FROM once")
        place = interrupted(lambda: form(Stage(router, holder, key, second, engine)), at)  # noqa: B023 - called now
        if place is None:
            break
        server.ask("DELETE FROM once")
        trouble = (quiet(router) + quiet(holder)) or [
            f"{who}: {met}"
            for who, caller in (("other", other), ("same", router))
            if (met := again(form, Stage(caller, holder, key, second, engine)))
        ]
        if trouble:
            stuck[place] = trouble
            router.close()
            router = routers.make(**settings)
            router.warm()
            form(Stage(router, holder, key, second, engine))
    assert at > 50, "the instants were not found"
    assert not stuck, f"{len(stuck)} of {at}"
