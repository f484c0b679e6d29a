"""Tokens and the right to grant on real servers: terms, restarts, the grant window on disk, unusable clocks."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from lockrouter import LockLost, LockRouter, LossReason, ShardUnavailable, TopologyMismatch
from lockrouter.testing.cluster import Cluster
from lockrouter.tokens import MAX_TERM, parts
from tests.support.observe import Observer, Routers, eventually, in_thread, keys_on

pytestmark = pytest.mark.server

SHARD = 3
BORROWED = "drained, fingerprint"


@pytest.fixture
def routers(cluster: Cluster) -> Iterator[Routers]:
    """Routers on the session's cluster; `lock_meta` of the shard is as before when the test is over."""
    kept = Routers(cluster)
    server = kept.observers[SHARD]
    term, *before = server.ask(f"SELECT term, {BORROWED} FROM lock_meta")[0]
    yield kept
    try:
        server.ask("UPDATE lock_meta SET drained = %s, fingerprint = %s", *before)
        server.ask("UPDATE lock_meta SET term = %s WHERE term = %s", term, MAX_TERM)
    finally:
        kept.finish()


@pytest.fixture
def server(routers: Routers) -> Observer:
    """The server of the shard these tests play with."""
    return routers.observers[SHARD]


@pytest.fixture
def key(routers: Routers) -> str:
    """A key of that shard."""
    return keys_on(routers.make(), SHARD, prefix="token")[0]


def take(router: LockRouter, key: str, timeout: float = 15.0) -> int:
    """The token of one short lock."""
    with router.lock(key, timeout=timeout, confirm=True) as held:
        return held.token


def take_and_pass_on(router: LockRouter, key: str) -> int:
    """The same, with a release that may hand the row over."""
    with router.lock(key, timeout=15.0) as held:
        return held.token


def clock_of(token: int) -> int:
    """The server's clock in a token."""
    return parts(token)[1]


def test_a_token_is_term_clock_and_pass(routers: Routers, server: Observer, key: str) -> None:
    router = routers.make()
    before = server.clock_us()
    token = take(router, key)
    term, clock, passes = parts(token)
    assert 0 < token < 1 << 63
    assert term == server.meta("term")
    assert before <= clock + 4
    assert clock <= server.clock_us()
    assert passes == 0


def test_a_row_passed_on_inside_the_process_raises_the_token(routers: Routers, key: str) -> None:
    router = routers.make(router={"handover_time": 5.0})
    held = router.lock(key, timeout=5.0)
    waiters = []
    for number in range(3):
        waiters.append(in_thread(lambda: take_and_pass_on(router, key)))
        eventually(lambda: routers.waiting(router, SHARD) == number + 1)  # noqa: B023 - called now
    tokens = [held.token]
    held.release()
    tokens += [waiter.result() for waiter in waiters]
    assert [parts(token)[2] for token in tokens] == [0, 1, 2, 3]
    assert len({clock_of(token) for token in tokens}) == 1
    assert take(router, key) > max(tokens)


def test_another_identity_starts_a_term(routers: Routers, server: Observer, key: str) -> None:
    router, other = routers.make(), routers.make()
    first = max(take(router, key), take(other, key))
    term = server.meta("term")
    server.ask("UPDATE lock_meta SET term_identity = 'another server'")
    for caller in (router, other):
        eventually(lambda: caller.health()[f"shard-{SHARD}"]["term"] == term + 1)  # noqa: B023 - called now
    for caller in (router, other, routers.make()):
        token = take(caller, key)
        assert parts(token)[0] == term + 1
        assert token > first
        first = token
    assert server.meta("term") == term + 1
    assert server.meta("term_identity") != b"another server"
    assert server.meta("term_started") > 0


def test_many_routers_start_one_term(routers: Routers, server: Observer, key: str) -> None:
    term = server.meta("term")
    server.ask("UPDATE lock_meta SET term_identity = 'another server'")
    fresh = [routers.make() for _ in range(5)]
    threads = [in_thread(lambda caller=caller: take(caller, key, 30.0)) for caller in fresh]  # type: ignore[misc]
    assert {parts(thread.result())[0] for thread in threads} == {term + 1}
    assert server.meta("term") == term + 1


def test_no_term_is_left(routers: Routers, server: Observer, key: str) -> None:
    server.ask("UPDATE lock_meta SET term = %s, term_identity = 'another server'", MAX_TERM)
    router = routers.make()
    with pytest.raises(ShardUnavailable):
        router.lock(key, timeout=1.5)
    assert server.meta("term") == MAX_TERM


def test_no_grant_after_a_restart_before_the_clock_has_passed_what_was_granted(
    routers: Routers, server: Observer, key: str, cluster: Cluster
) -> None:
    first = routers.make()
    before = take(first, key)
    term = server.meta("term")
    first.close()
    eventually(lambda: not server.sessions())
    cluster.kill(SHARD)
    cluster.start(SHARD)
    # As if the last grant had been made just now: the reservation ends 2.5 s ahead.
    server.ask("UPDATE lock_meta SET clock_high = CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS UNSIGNED) + 2500000")
    reserved = int(server.meta("clock_high"))
    router = routers.make()
    assert router.route(key).shard == f"shard-{SHARD}"
    with pytest.raises(ShardUnavailable):
        router.lock(key, timeout=0.2)
    with pytest.raises(ShardUnavailable):
        router.try_lock(key)
    token = take(router, key)
    assert token > before
    assert clock_of(token) >= reserved
    assert server.meta("term") == term == parts(token)[0]


def test_a_router_goes_on_over_a_restart(routers: Routers, server: Observer, key: str, cluster: Cluster) -> None:
    router = routers.make(breaker={"failures": 1000})
    tokens = [take(router, key)]
    held = router.lock(key, timeout=5.0)
    tokens.append(held.token)
    reserved = int(server.meta("clock_high"))
    cluster.kill(SHARD)
    eventually(lambda: held.lost)
    with pytest.raises(LockLost):
        held.release()
    cluster.start(SHARD)
    tokens.append(take(router, key, 30.0))
    assert tokens == sorted(tokens)
    assert clock_of(tokens[-1]) >= reserved
    assert parts(tokens[-1])[0] == parts(tokens[0])[0]


def test_another_start_of_the_server_counts_as_a_restart(routers: Routers, server: Observer, key: str) -> None:
    server.ask(
        "UPDATE lock_meta SET server_started = server_started - 3600000000, "
        "clock_high = CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS UNSIGNED) + 1500000"
    )
    reserved, started, term = int(server.meta("clock_high")), server.meta("server_started"), server.meta("term")
    token = take(routers.make(), key)
    assert clock_of(token) >= reserved
    assert server.meta("server_started") > started
    assert parts(token)[0] == term


def test_what_is_on_disk_is_above_every_grant(routers: Routers, server: Observer, key: str) -> None:
    """While nobody can write `lock_meta`, grants end before what was reserved there, and begin again afterwards."""
    router = routers.make()
    take(router, key)
    blocker = server.connect()
    try:
        with blocker.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute("SELECT clock_high FROM lock_meta FOR UPDATE")
            row = cursor.fetchone()
        assert row is not None
        reserved = int(row[0])
        reasons: list[LossReason] = []
        holder = router.lock(keys_on(router, SHARD, 2, prefix="token")[1], timeout=5.0)
        holder.on_lost(reasons.append)
        granted, until = [], time.monotonic() + 15.0
        with pytest.raises(ShardUnavailable):
            while time.monotonic() < until:
                granted.append(clock_of(take(router, key, 0.3)))
        assert granted
        assert max(granted) < reserved
        eventually(lambda: holder.lost, 5.0)
        eventually(lambda: reasons, 5.0)
        assert reasons == [LossReason.DEMOTED]
        with pytest.raises(ShardUnavailable):
            router.try_lock(key)
        with pytest.raises(ShardUnavailable):
            routers.make().lock(key, timeout=1.0)
    finally:
        blocker.close()
    with pytest.raises(LockLost):
        holder.release()
    eventually(lambda: router.health()[f"shard-{SHARD}"]["state"] == "ok")
    assert clock_of(take(router, key)) >= reserved


def test_the_reservation_stays_ahead_while_nobody_locks(routers: Routers, server: Observer, key: str) -> None:
    router = routers.make()
    take(router, key)
    until = time.monotonic() + 3.5
    while time.monotonic() < until:
        assert int(server.meta("clock_high")) > server.clock_us()
    assert take(router, key, 0.5)


def test_a_reservation_far_ahead_means_the_clock_went_back(routers: Routers, server: Observer, key: str) -> None:
    router = routers.make()
    before, term = take(router, key), server.meta("term")
    server.ask("UPDATE lock_meta SET clock_high = clock_high + 3600000000")
    eventually(lambda: router.health()[f"shard-{SHARD}"]["term"] == term + 1)
    for caller in (router, routers.make()):
        token = take(caller, key)
        assert token > before
        assert parts(token)[0] == term + 1
        before = token
    assert int(server.meta("clock_high")) < server.clock_us() + 10_000_000


def test_routers_of_different_grant_windows_share_a_term(routers: Routers, server: Observer, key: str) -> None:
    """A change of the shard file reaches the processes of a service one by one."""
    term, last = server.meta("term"), 0
    longer, shorter = (routers.make(router={"grant_window": seconds}) for seconds in (9.0, 3.0))
    until = time.monotonic() + 4.0
    while time.monotonic() < until:
        for caller in (longer, shorter):
            token = take(caller, key)
            assert token > last
            last = token
    assert take(routers.make(router={"grant_window": 3.0}), key) > last, "a process that starts meanwhile"
    assert server.meta("term") == term


def test_a_longer_reservation_that_nobody_renews_ends_in_a_term(routers: Routers, server: Observer, key: str) -> None:
    """Nobody says whether the clock went back, or somebody had a longer window."""
    with routers.make() as router:
        before, term = take(router, key), server.meta("term")
    server.ask(f"UPDATE lock_meta SET clock_high = {server.clock_us() + 9_000_000}")
    token = take(routers.make(pool={"connect_timeout": 0.3}), key)
    assert token > before
    assert parts(token)[0] == server.meta("term") == term + 1


def test_a_server_whose_sysdate_stands_still_is_refused(
    routers: Routers, server: Observer, key: str, cluster: Cluster
) -> None:
    cluster.kill(SHARD)
    cluster.start(SHARD, {"sysdate-is-now": True})
    try:
        router = routers.make()
        for _ in range(7):
            with pytest.raises(ShardUnavailable, match="sysdate"):
                router.lock(key, timeout=3.0)
        with pytest.raises(ShardUnavailable):
            router.try_lock(key)
        assert router.health()[f"shard-{SHARD}"]["state"] == "refused"
        assert "sysdate" in router.health()[f"shard-{SHARD}"]["why"]
        assert not server.holders()
        router.close()
    finally:
        cluster.kill(SHARD)
        cluster.start(SHARD)
    assert take(routers.make(), key)


def test_a_drained_server_grants_nothing_until_it_is_undrained(routers: Routers, server: Observer, key: str) -> None:
    router = routers.make()
    take(router, key)
    server.ask("UPDATE lock_meta SET drained = term_identity")
    eventually(lambda: router.health()[f"shard-{SHARD}"]["state"] == "refused")
    for caller in (router, routers.make()):
        with pytest.raises(ShardUnavailable, match="drain"):
            caller.lock(key, timeout=2.0)
        with pytest.raises(ShardUnavailable):
            caller.try_lock(key)
    server.ask("UPDATE lock_meta SET drained = ''")
    eventually(lambda: router.health()[f"shard-{SHARD}"]["state"] == "ok")
    assert take(router, key)


def test_a_database_of_another_topology_is_refused(routers: Routers, server: Observer, key: str) -> None:
    router = routers.make()
    take(router, key)
    server.ask("UPDATE lock_meta SET fingerprint = REVERSE(fingerprint)")
    with pytest.raises(TopologyMismatch) as caught:
        routers.make().lock(key, timeout=3.0)
    assert caught.value.shard == f"shard-{SHARD}"
    eventually(lambda: router.health()[f"shard-{SHARD}"]["state"] == "refused")
    with pytest.raises(TopologyMismatch):
        router.lock(key, timeout=3.0)


def test_a_closed_bucket_is_refused(routers: Routers, server: Observer, key: str) -> None:
    router = routers.make()
    address = router.route(key)
    where = f"lock_{address.table:02d} SET epoch = {{}} WHERE slot = {address.slot}"
    epoch = server.ask(f"SELECT epoch FROM lock_{address.table:02d} WHERE slot = {address.slot}")[0][0]
    server.ask(f"UPDATE {where.format(0)}")
    try:
        with pytest.raises(TopologyMismatch):
            router.lock(key, timeout=3.0)
        with pytest.raises(TopologyMismatch):
            router.try_lock(key)
        eventually(lambda: not server.holders())
    finally:
        server.ask(f"UPDATE {where.format(epoch)}")
    assert take(router, key)
