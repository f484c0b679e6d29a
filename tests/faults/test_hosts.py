"""One shard on two hosts, a primary and its asynchronous replica: which is used, and what a promotion costs."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockrouter import (
    Lease,
    LockLost,
    LockRouter,
    LockTimeout,
    LossReason,
    NoToken,
    RowLock,
    ShardError,
    ShardUnavailable,
)
from lockrouter.admin.drain import drain, undo
from lockrouter.breaker import BreakerState
from lockrouter.testing.binaries import Vendor
from lockrouter.tokens import parts
from tests.support.observe import elapsed, eventually, in_thread
from tests.support.proxy import Cut
from tests.support.replicated import Replicas
from tests.support.switch_worker import counted_through

pytestmark = pytest.mark.server

NAME = "shard-0"
QUICK = {"role_check": 0.2}
CONNECT = 1.0
"""The default of `connect_timeout`, in seconds."""


@pytest.fixture(scope="module")
def both(vendor: Vendor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """Two servers of the vendor for this module."""
    pair = Replicas(tmp_path_factory.mktemp("pair"), vendor, 2)
    yield pair
    pair.close()


@pytest.fixture
def pair(both: Replicas) -> Iterator[Replicas]:
    """They replicate, the first one writable, when a test begins; afterwards no router of it is left."""
    if both.primary or both.members[0].read_only or not both.members[1].read_only:
        both.mend()
    for member in both.members:
        member.proxy.accept()
    yield both
    both.close_routers()
    both.mend()


def term_of(router: LockRouter) -> int:
    """The term that the router grants in."""
    term = router.health()[NAME]["term"]
    assert isinstance(term, int)
    return term


def take(router: LockRouter, key: str = "key", timeout: float = 10.0) -> int:
    """The token of one short lock."""
    with router.lock(key, timeout=timeout, confirm=True, owner=object()) as held:
        return held.token


def lost(held: RowLock) -> None:
    """The lock is known to be lost, and its holder leaves."""
    with pytest.raises(LockLost):
        held.release()


def why(router: LockRouter) -> str:
    """Why the shard grants nothing."""
    return str(router.health()[NAME]["why"])


@pytest.mark.parametrize("hosts", [[0, 1], [1, 0]], ids=["first", "last"])
def test_the_writable_one_of_several_hosts_is_used(pair: Replicas, hosts: list[int]) -> None:
    router = pair.router(hosts=hosts)
    with router.lock("key", timeout=5):
        rows = pair.members[0].sql("SELECT COUNT(*) FROM information_schema.INNODB_TRX")
        assert [tuple(row) for row in rows] == [(1,)]
    router.lease("key", ttl=5, timeout=5).release()
    with router.transaction("key", timeout=5) as connection:
        server = connection.exec_driver_sql("SELECT @@server_id").scalar()
    assert server == pair.members[0].sql("SELECT @@server_id")[0][0]


def test_a_demoted_host_is_left_at_once_and_the_new_primary_found(pair: Replicas) -> None:
    """Unplanned failover of API section 0, row lock: told within `role_check` + 0.5 s of the demotion."""
    router = pair.router(router=QUICK)
    told: list[tuple[LossReason, float]] = []
    held = router.lock("key", timeout=5)
    held.on_lost(lambda reason: told.append((reason, time.monotonic())))
    lease = router.lease("key", ttl=30, timeout=5)
    term = term_of(router)
    assert pair.caught_up()
    began = time.monotonic()
    pair.members[0].sql("SET GLOBAL read_only = 1")
    eventually(lambda: told)
    assert told[0][0] is LossReason.DEMOTED
    assert told[0][1] - began < 0.2 * 1.1 + 0.5
    with pytest.raises(ShardUnavailable, match="read-only"):
        router.lock("other", timeout=3)
    pair.demote()
    pair.promote()
    promoted = time.monotonic()
    eventually(lambda: router.health()[NAME]["state"] == "ok", 3.0, lambda: why(router))
    again = time.monotonic() - promoted
    print(f"demoted: told after {told[0][1] - began:.2f} s, granting {again:.2f} s after promotion")
    lost(held)
    assert take(router) > held.token
    assert term_of(router) == term + 1
    lease.check()
    assert not lease.lost
    lease.release()
    assert len(told) == 1


def test_planned_switchover_after_drain_never_two_holders_and_leases_are_kept(pair: Replicas, tmp_path: Path) -> None:
    """API section 0, row "planned switchover after `lockrouter drain`": several processes count under the lock."""
    router = pair.router()
    lease = router.lease("lease", ttl=30, timeout=10)
    term = term_of(router)

    def switchover() -> None:
        report = drain(pair.config, pair.admin, NAME)
        assert report.still_held == ()
        drained = time.monotonic()
        pair.demote()
        pair.promote()
        eventually(lambda: router.health()[NAME]["term"] == term + 1, 20.0)
        print(f"switchover: drained in {report.seconds:.2f} s, granting again {time.monotonic() - drained:.2f} s later")

    done = counted_through(pair.file, tmp_path, switchover)
    assert {parts(token)[0] for *_, token in done} == {term, term + 1}
    lease.check()
    lease.release()
    assert undo(pair.config, pair.admin, NAME)


@pytest.mark.slow
def test_planned_switchover_after_drain_row_lock_of_who_stays_is_lost_and_told(pair: Replicas) -> None:
    """API section 0, the same row: a holder that did not let go, where the operator went on all the same."""
    router = pair.router(router=QUICK)
    held = router.lock("key", timeout=5)
    assert drain(pair.config, pair.admin, NAME, timeout=4).still_held
    began = time.monotonic()
    told: list[float] = []
    held.on_lost(lambda _: told.append(time.monotonic()))
    pair.demote()
    eventually(lambda: told)
    assert told[0] - began < 0.2 * 1.1 + 0.5 + CONNECT
    pair.promote()
    lost(held)
    assert eventually(lambda: _maybe(router)) > held.token


@pytest.mark.slow
def test_unplanned_failover_asynchronous_lease_two_until_the_next_renewal_and_the_token_orders_them(
    pair: Replicas,
) -> None:
    """API section 0, column "lease, asynchronous replication": what the replica had not got is lost."""
    router, other = pair.router(router=QUICK), pair.router(router=QUICK)
    kept = router.lease("kept", ttl=6, timeout=5)
    assert pair.caught_up()
    pair.stop_following(1)
    reasons: list[LossReason] = []
    first = router.lease("unseen", ttl=6, timeout=5)
    first.on_lost(reasons.append)
    pair.members[0].kill()
    pair.members[1].sql("SET GLOBAL read_only = 0")
    began = time.monotonic()
    second = eventually(lambda: _lease(other, "unseen"), 10.0)
    print(f"killed and promoted: leases again {time.monotonic() - began:.2f} s after promotion")
    assert second.token > first.token
    eventually(lambda: reasons, 6 / 3 + 2.0)
    assert reasons[0] in (LossReason.STOLEN, LossReason.EXPIRED)
    kept.check()
    second.check()
    assert not kept.lost
    with pytest.raises(LockLost):
        first.release()
    second.release()
    kept.release()


def _lease(router: LockRouter, key: str) -> Lease | None:
    try:
        return router.lease(key, ttl=6, timeout=1.0)
    except (ShardError, LockTimeout):
        return None


@pytest.mark.slow
def test_unplanned_failover_row_lock_lossless_semi_sync_without_its_replica_grants_nothing_after_the_window(
    pair: Replicas,
) -> None:
    """API section 0: an old server that can no longer commit; the replica has left, and may be primary elsewhere."""
    source = "rpl_semi_sync_source" if pair.vendor is Vendor.MYSQL else "rpl_semi_sync_master"
    pair.semi_sync()
    router = pair.router(hosts=[0], router={**QUICK, "grant_window": 2.0})
    tokens = [take(router)]
    reasons: list[LossReason] = []
    held = router.lock("held", timeout=5)
    held.on_lost(reasons.append)
    pair.stop_following(1)
    began = time.monotonic()
    last = began
    while not reasons and time.monotonic() < began + 10.0:
        token = _maybe(router)
        if token is not None:
            tokens.append(token)
            last = time.monotonic()
    print(f"semi-sync: told after {time.monotonic() - began:.2f} s, last grant after {last - began:.2f} s")
    assert reasons == [LossReason.DEMOTED]
    assert last - began < 2.0 + 0.5
    assert _maybe(router) is None
    lost(held)
    pair.members[0].sql(f"SET GLOBAL {source}_enabled = 0")
    assert eventually(lambda: _maybe(router)) > max(tokens)


@pytest.mark.slow
def test_server_restarts_row_lock_is_lost_and_told_and_leases_are_kept(pair: Replicas) -> None:
    """API section 0, row "server restarts": the replica is there all the time, and is no primary for that."""
    router = pair.router(router=QUICK)
    held = router.lock("key", timeout=5)
    lease = router.lease("lease", ttl=30, timeout=5)
    told: list[LossReason] = []
    held.on_lost(told.append)
    began = time.monotonic()
    pair.members[0].kill()
    eventually(lambda: told, 1.0)
    print(f"restart: told after {time.monotonic() - began:.2f} s")
    lost(held)
    with pytest.raises(ShardUnavailable):
        router.lock("key", timeout=1.0)
    pair.members[0].start()
    began = time.monotonic()
    token = eventually(lambda: _maybe(router), 15.0)
    print(f"restart: granting {time.monotonic() - began:.2f} s after it answered")
    assert token > held.token
    assert parts(token)[0] == parts(held.token)[0]
    lease.check()
    assert not lease.lost
    lease.release()


@pytest.mark.slow
def test_a_waiter_on_the_old_primary_goes_on_at_the_new_one(pair: Replicas) -> None:
    """Of two routers one holds the row on the old primary and stays; the other one's waiter gets it on the new one."""
    holder, router = pair.router(router=QUICK), pair.router(router=QUICK)
    held = holder.lock("key", timeout=5)
    waiter = in_thread(lambda: take(router, timeout=20))
    eventually(lambda: pair.members[0].sql("SELECT 1 FROM information_schema.INNODB_TRX WHERE trx_state = 'LOCK WAIT'"))
    assert pair.caught_up()
    pair.stop_following(1)
    pair.members[0].send(signal.SIGSTOP)
    pair.members[1].sql("SET GLOBAL read_only = 0")  # before the silence is a fault: who waits then is refused
    assert waiter.result(15) > held.token
    eventually(lambda: held.lost, CONNECT + 1.0)
    lost(held)


@pytest.mark.slow
def test_a_waiter_does_not_keep_its_server_from_being_demoted(pair: Replicas) -> None:
    """MySQL waits with `read_only` for every statement that waits for a row; the drain ends those at once."""
    holder, router = pair.router(router=QUICK), pair.router(router=QUICK)
    held = holder.lock("key", timeout=5)
    waiter = in_thread(lambda: take(router, timeout=20))
    eventually(lambda: pair.members[0].sql("SELECT 1 FROM information_schema.INNODB_TRX WHERE trx_state = 'LOCK WAIT'"))
    pair.members[0].sql("UPDATE lock_meta SET drained = term_identity", database="locks_0")
    with pytest.raises(ShardUnavailable, match="drained"):
        waiter.result(5)
    pair.demote()
    eventually(lambda: held.lost)
    lost(held)


def test_two_writable_hosts_make_the_shard_unavailable(pair: Replicas) -> None:
    router = pair.router(router=QUICK)
    take(router)
    held = router.lock("held", timeout=5)
    pair.stop_following(1)
    pair.members[1].sql("SET GLOBAL read_only = 0")
    eventually(lambda: "two writable primaries" in why(router))
    for one in (router, pair.router(), pair.router(hosts=[1, 0])):
        with pytest.raises(ShardUnavailable, match="two writable primaries"):
            one.lock("key", timeout=3)
        with pytest.raises(ShardUnavailable, match="two writable primaries"):
            one.lease("key", ttl=5, timeout=3)
    assert not held.lost  # the second one has granted nothing: its lock_meta does not name it
    pair.members[1].sql("SET GLOBAL read_only = 1")
    eventually(lambda: router.health()[NAME]["state"] == "ok")
    assert take(router)
    held.release(confirm=True)


@pytest.mark.slow
def test_a_second_primary_that_grants_ends_what_is_held_on_the_first(pair: Replicas) -> None:
    """Split brain: a router that sees only the second host has begun to grant there."""
    router = pair.router(router=QUICK)
    held = router.lock("key", timeout=5)
    pair.stop_following(1)
    pair.members[1].sql("SET GLOBAL read_only = 0")
    elsewhere = pair.router(hosts=[1])
    token = take(elsewhere)
    eventually(lambda: held.lost)
    assert token > held.token
    lost(held)
    # The first one's term is lower than one that was seen: it is no primary any more, and no rival.
    assert eventually(lambda: parts(_maybe(router) or 0)[0] == parts(token)[0])


def test_a_host_with_a_lower_term_than_one_seen_is_refused(pair: Replicas) -> None:
    router = pair.router(router=QUICK)
    take(router)
    term = term_of(router)
    pair.stop_following(1)
    pair.members[1].sql(f"UPDATE lock_meta SET term = {term - 1}", database="locks_0")
    pair.members[0].kill()
    pair.members[1].sql("SET GLOBAL read_only = 0")
    eventually(lambda: f"its term is {term - 1}, {term} was seen before" in why(router), 10.0, lambda: why(router))
    with pytest.raises(ShardUnavailable, match="older server"):
        router.lock("key", timeout=3)
    with pytest.raises(ShardUnavailable):
        router.try_lock("key")


@pytest.mark.slow
def test_a_term_that_two_servers_started_is_followed_by_another(pair: Replicas) -> None:
    """The last term was lost with the old primary, and the new one counted on from the one before."""
    router = pair.router(router=QUICK)
    token = take(router)
    term = term_of(router)
    pair.stop_following(1)
    pair.members[1].sql(f"UPDATE lock_meta SET term = {term - 1}, term_identity = ''", database="locks_0")
    pair.members[0].kill()
    pair.members[1].sql("SET GLOBAL read_only = 0")
    assert parts(take(pair.router(hosts=[1])))[0] == term
    after = eventually(lambda: taken if (taken := _maybe(router)) else None)
    assert after > token
    assert parts(after)[0] == term + 1


def _maybe(router: LockRouter) -> int | None:
    try:
        return take(router, timeout=1.0)
    except (ShardUnavailable, NoToken):
        return None


@pytest.mark.slow
@pytest.mark.parametrize("silent", [0, 1], ids=["first", "last"])
def test_a_black_holed_host_does_not_keep_the_others_from_being_found(pair: Replicas, silent: int) -> None:
    """The primary is the other one; it is found within one `connect_timeout`, and after that at once."""
    hosts = [1, 0] if silent == 0 else [0, 1]
    take(pair.router(), timeout=20)
    pair.members[1].proxy.stop()
    router = pair.router(hosts=hosts)
    took = elapsed(lambda: take(router, timeout=5.0))
    assert took < CONNECT + 0.5
    assert router.health()[NAME]["state"] == "ok"
    pair.members[0].proxy.cut(Cut.RST)
    assert elapsed(lambda: take(router, timeout=5.0)) < CONNECT
    with router.lock("key"), pytest.raises(LockTimeout):
        pair.router(hosts=hosts).lock("key", timeout=CONNECT + 1.0)


@pytest.mark.slow
def test_a_black_holed_primary_is_left_for_the_promoted_one(pair: Replicas) -> None:
    router = pair.router(router=QUICK)
    held = router.lock("key", timeout=5)
    assert pair.caught_up()
    began = time.monotonic()
    pair.members[0].proxy.stop()
    pair.promote()
    eventually(lambda: router.health()[NAME]["state"] == "ok" and held.lost, 5.0, lambda: why(router))
    print(f"black-holed and promoted: told, and granting, after {time.monotonic() - began:.2f} s")
    lost(held)
    assert take(router) > held.token
    assert term_of(router) > parts(held.token)[0]


@pytest.mark.slow
def test_a_replica_that_answers_keeps_the_shard_from_being_degraded(pair: Replicas) -> None:
    """The primary is dead, but the other host may know of one that grants: never a local lock, also by "local"."""
    router = pair.router(router=QUICK, breaker={"failures": 2, "probe_after": 0.3})
    take(router)
    pair.members[0].proxy.refuse()
    until = time.monotonic() + 2.5
    outcomes = set()
    while time.monotonic() < until:
        try:
            router.lock("key", timeout=0.3).release()
        except ShardUnavailable:
            outcomes.add(router.health()[NAME]["breaker"])
    assert outcomes
    pair.members[1].proxy.refuse()
    with eventually(lambda: _degraded(router)) as held:
        assert held.degraded
    fresh = pair.router(router=QUICK, breaker={"failures": 2, "probe_after": 0.3})
    for _ in range(3):  # its callers wait for the primary to be found when the breaker opens
        with fresh.lock("key", timeout=3.0) as held:
            assert held.degraded
    pair.members[0].proxy.accept()
    assert eventually(lambda: _maybe(router))


def _degraded(router: LockRouter) -> RowLock | None:
    try:
        return router.lock("key", timeout=1.0)
    except ShardUnavailable:
        return None


@pytest.mark.slow
def test_a_killed_control_connection_changes_nothing(pair: Replicas) -> None:
    router = pair.router(router=QUICK)
    held = router.lock("key", timeout=5)
    term = term_of(router)
    for proxy in (member.proxy for member in pair.members):
        proxy.cut(Cut.RST, said=b"clock_high")
    for _ in range(20):
        assert take(router, "other", timeout=2.0)
    assert term_of(router) == term
    held.release(confirm=True)


@pytest.mark.slow
def test_after_close_no_connection_of_the_hosts_is_left(pair: Replicas) -> None:
    router = pair.router()
    take(router)
    eventually(lambda: pair.members[1].proxy.living)
    router.close()
    for member in pair.members:
        eventually(lambda: not member.proxy.living)  # noqa: B023 - called now


@pytest.mark.slow
def test_a_frozen_primary_that_wakes_up_demoted_is_no_rival(pair: Replicas) -> None:
    """Promotion while it sleeps; awake it says that it is writable still, with the term of before."""
    router = pair.router(router=QUICK)
    held = router.lock("key", timeout=5)
    assert pair.caught_up()
    pair.members[0].send(signal.SIGSTOP)
    pair.promote()
    eventually(lambda: held.lost, 10.0)
    lost(held)
    token = eventually(lambda: _maybe(router), 10.0)
    pair.members[0].send(signal.SIGCONT)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        assert parts(take(router, timeout=1.0))[0] == parts(token)[0]
    assert router._core.shards[NAME].breaker.state is BreakerState.CLOSED
