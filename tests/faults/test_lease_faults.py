"""Leases when something breaks: late and lost messages, silence, restarts, strangers' locks; and the wrong variants."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from lockrouter import (
    Lease,
    LockLost,
    LockRouter,
    LockRouterError,
    LockTimeout,
    LossReason,
    MaintenanceStall,
    OutcomeUnknown,
    ShardError,
    ShardUnavailable,
)
from lockrouter.leases.entry import Entry
from lockrouter.leases.keeper import Keeper
from lockrouter.leases.rows import Item, Kind, Said, Verb, digest
from lockrouter.leases.service import Leases
from lockrouter.leases.store import SqlStore
from lockrouter.protocol.effects import drive
from lockrouter.protocol.packets import query
from lockrouter.session import State
from lockrouter.sql import leases as sql
from lockrouter.sql.leases import Wanted
from lockrouter.testing.cluster import Cluster
from tests.support.history import judge, read
from tests.support.leases import lease_row, owned, place, settled, tombs
from tests.support.observe import Observer, Routers, elapsed, eventually, in_thread, keys_on, soon_enough
from tests.support.proxy import Cut, Proxy, Rule, Way
from tests.support.workers import Workers

pytestmark = pytest.mark.server

SHARD = 2
NAME = f"shard-{SHARD}"
NEVER = {"failures": 10_000}


@pytest.fixture
def routers(cluster: Cluster) -> Iterator[Routers]:
    """Routers on the session's cluster; whoever breaks a server mends it."""
    kept = Routers(cluster)
    for server in kept.observers:
        for table in range(8):
            server.ask(f"DELETE FROM lease_{table:02d}")
    yield kept
    kept.finish()


@pytest.fixture
def server(routers: Routers) -> Observer:
    """The server that gets broken."""
    return routers.observers[SHARD]


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    """A proxy in front of it."""
    with Proxy(cluster.port(SHARD)) as between:
        yield between


@pytest.fixture
def router(routers: Routers, proxy: Proxy) -> LockRouter:
    """A router that reaches the server through the proxy, and has done so."""
    made = routers.make(ports={SHARD: proxy.port}, breaker=NEVER)
    made.lease(keys_on(made, SHARD, prefix="warm")[0], ttl=2, timeout=10).release()
    return made


@pytest.fixture
def key(router: LockRouter) -> str:
    """A key of that server."""
    return keys_on(router, SHARD, prefix="fault")[0]


def free(server: Observer, router: LockRouter, key: str) -> bool:
    """The row is nobody's on the server."""
    row = lease_row(server, router, key)
    return row is None or not row.owner


def late_acquisition(cluster: Cluster, server: Observer, router: LockRouter, key: str) -> None:
    """2.08: the request arrives after the caller was told no; the row is freed all the same, and nobody keeps it."""
    server.ask("SELECT 1")
    cluster.pause(SHARD)
    try:
        with pytest.raises((OutcomeUnknown, ShardUnavailable, LockTimeout)):
            router.lease(key, ttl=60, timeout=0.4)
        assert not router._core.leases.entries
    finally:
        cluster.resume(SHARD)
    time.sleep(0.3)  # what was on its way has arrived by then; in the wrong variant the row stays owned for a minute
    eventually(lambda: free(server, router, key), 3.0)
    assert not router._core.leases.entries


def test_a_request_that_arrives_late_is_undone(
    cluster: Cluster, routers: Routers, server: Observer, router: LockRouter, key: str
) -> None:
    late_acquisition(cluster, server, router, key)
    settled(routers, router)
    router.lease(key, ttl=2, timeout=10).release()


def test_a_release_that_arrives_late_frees_nobody_elses(
    cluster: Cluster, routers: Routers, server: Observer, router: LockRouter, key: str
) -> None:
    lease = router.lease(key, ttl=60)
    cluster.pause(SHARD)
    try:
        with pytest.raises(ShardError):
            lease.release()
    finally:
        cluster.resume(SHARD)
    eventually(lambda: free(server, router, key), 3.0)
    with routers.make().lease(key, ttl=30, timeout=10) as other:
        time.sleep(1.0)  # the tombstones of the first one go on meanwhile
        other.check()
    settled(routers, router)


def test_a_renewal_that_arrives_late_revives_nothing(
    cluster: Cluster, routers: Routers, server: Observer, router: LockRouter, key: str
) -> None:
    told: list[tuple[LossReason, float]] = []
    lease = router.lease(key, ttl=1.5)
    lease.on_lost(lambda reason: told.append((reason, time.monotonic())))
    deadline = time.monotonic() + lease.remaining()
    cluster.pause(SHARD)
    try:
        eventually(lambda: told, 4.0)
    finally:
        cluster.resume(SHARD)
    assert told[0][0] is LossReason.EXPIRED
    assert told[0][1] <= deadline + 0.02
    eventually(lambda: free(server, router, key) and server.meta("term"), 3.0)
    assert lease.lost
    assert lease.remaining() == 0.0
    with pytest.raises(LockLost):
        lease.release()
    settled(routers, router)
    assert len(told) == 1


@pytest.mark.parametrize("ways", [(Way.DOWN,), (Way.UP,), (Way.UP, Way.DOWN)], ids=["replies", "requests", "all"])
def test_with_every_packet_dropped_the_holder_is_told_in_time(
    routers: Routers, router: LockRouter, proxy: Proxy, key: str, ways: tuple[Way, ...]
) -> None:
    told: list[float] = []
    lease = router.lease(key, ttl=2)
    lease.on_lost(lambda _: told.append(time.monotonic()))
    deadline = time.monotonic() + lease.remaining()
    proxy.stop(*ways)
    try:
        eventually(lambda: told, 4.0)
        assert told[0] <= deadline + 0.02
        assert lease.lost
    finally:
        proxy.accept()
    # What was held back has passed now, the answer to a renewal too.
    routers.make().lease(key, ttl=2, timeout=10).release()
    assert lease.lost
    with pytest.raises(LockLost):
        lease.release()
    settled(routers, router)


def test_a_paused_process_finds_out_the_moment_it_wakes(routers: Routers, router: LockRouter, key: str) -> None:
    """The answer came, then the process slept past its deadline: nothing it does then counts as holding."""
    lease = router.lease(key, ttl=1, keep_alive=False)
    entry = lease._held_as
    assert entry is not None
    entry.deadline -= 5.0  # as if five seconds had passed in one instant: the background has not run yet
    assert lease.lost
    assert lease.remaining() == 0.0
    with pytest.raises(LockLost):
        lease.release()
    settled(routers, router)


def test_survives_one_failed_renewal(router: LockRouter, proxy: Proxy, routers: Routers, key: str) -> None:
    with router.lease(key, ttl=3) as lease:
        before = routers.metric(router, "lockrouter_renewals_total", shard=NAME, outcome="renewed")
        proxy.refuse()
        eventually(lambda: routers.metric(router, "lockrouter_renewals_total", shard=NAME, outcome="failed"), 4.0)
        proxy.accept()
        eventually(
            lambda: routers.metric(router, "lockrouter_renewals_total", shard=NAME, outcome="renewed") > before, 4.0
        )
        assert not lease.lost
        lease.check()


def test_a_reply_that_is_lost_is_settled_by_asking_again(
    routers: Routers, server: Observer, router: LockRouter, proxy: Proxy, key: str
) -> None:
    rule = proxy.add(Rule(Way.DOWN, 0, Cut.RST, marker=b"INSERT INTO lease"))
    with router.lease(key, ttl=30, timeout=5) as lease:
        assert rule.struck.is_set()
        row = lease_row(server, router, key)
        assert row is not None
        assert row.owner.hex() == lease.owner
        lease.check()
        # Its deadline is that of the first request.
        assert lease.remaining() <= (row.expires - server.clock_us()) / 1e6
    settled(routers, router)


def test_a_release_whose_reply_is_lost_is_settled(
    routers: Routers, server: Observer, router: LockRouter, proxy: Proxy, key: str
) -> None:
    lease = router.lease(key, ttl=30)
    rule = proxy.add(Rule(Way.DOWN, 0, Cut.RST, marker=b"LEAST(l.expires"))
    lease.release()
    assert rule.struck.is_set()
    assert free(server, router, key)
    settled(routers, router)


def test_what_cannot_be_settled_is_outcome_unknown_and_given_up(
    routers: Routers, server: Observer, router: LockRouter, proxy: Proxy, key: str
) -> None:
    rule = proxy.add(Rule(Way.DOWN, 0, Cut.RST, marker=b"INSERT INTO lease"))
    call = in_thread(lambda: router.lease(key, ttl=60, timeout=1.0))
    assert rule.met.wait(5)
    proxy.refuse(cut=None)
    try:
        with pytest.raises(OutcomeUnknown) as caught:
            call.result()
        assert caught.value.shard == NAME
        assert not router._core.leases.entries
    finally:
        proxy.accept()
    eventually(lambda: free(server, router, key), 5.0)
    settled(routers, router)


def test_a_connection_with_an_unread_reply_carries_nothing_more(
    router: LockRouter, server: Observer, proxy: Proxy, key: str
) -> None:
    store = router._core.leases.lanes(router._core.shards[NAME]).stores[0]
    router.lease(key, ttl=2).release()
    assert store.session is not None
    before = store.session.connection_id
    silent = store.session
    proxy.stop(Way.DOWN)
    with pytest.raises(ShardError):
        router.lease(key, ttl=2, timeout=0.3)
    eventually(lambda: silent.state is State.DEAD)  # the background has waited for that reply, and given it up
    proxy.accept()
    eventually(lambda: router.health()[NAME]["state"] == "ok")  # its writes had been silenced, too
    router.lease(key, ttl=2, timeout=20).release()
    assert store.session is not None
    assert store.session.connection_id != before


def test_an_outage_is_an_error_never_an_answer(routers: Routers, proxy: Proxy) -> None:
    router = routers.make(ports={SHARD: proxy.port}, router={"on_outage": "local"})
    keys = keys_on(router, SHARD, 2, prefix="outage")
    held = router.lease(keys[0], ttl=60)
    proxy.refuse()
    try:
        for _ in range(8):
            with pytest.raises(ShardUnavailable):
                router.try_lease(keys[1], ttl=2)
        eventually(lambda: router.health()[NAME]["breaker"] != "closed")
        soon_enough(0.1, lambda: router.try_lease(keys[1], ttl=2))
        with pytest.raises(ShardUnavailable):
            router.lease(keys[1], ttl=2, timeout=5)
        assert not held.lost  # until its own deadline
        with pytest.raises(ShardError):
            held.check()
        assert not held.lost
    finally:
        proxy.accept()
    eventually(lambda: router.health()[NAME]["state"] == "ok")
    held.check()
    held.release()
    router.lease(keys[1], ttl=2, timeout=10).release()


def test_a_silent_shard_bounds_every_verb(router: LockRouter, proxy: Proxy, routers: Routers, key: str) -> None:
    held = router.lease(key + "+", ttl=60) if router.route(key + "+").shard == NAME else None
    proxy.stop()
    try:
        assert elapsed(lambda: router.lease(key, ttl=2, timeout=0.5)) < 0.9
        assert elapsed(lambda: router.try_lease(key, ttl=2)) < 2.0
        if held is not None:
            assert elapsed(held.release) < 4.0
    finally:
        proxy.accept()
    settled(routers, router)


def test_who_is_held_off_until_the_end_is_told_so_though_the_last_look_is_not_answered(
    router: LockRouter, proxy: Proxy, routers: Routers, key: str
) -> None:
    with routers.make().lease(key, ttl=30):
        waiting = in_thread(lambda: router.lease(key, ttl=2, timeout=2.0))
        name = (Kind.LEASE, key.encode())
        queues = router._core.leases.queues._queues
        eventually(lambda: name in queues and (lead := queues[name].lead) is not None and lead.polls)
        proxy.stop()
        try:
            with pytest.raises(LockTimeout):
                waiting.result()
        finally:
            proxy.accept()
    settled(routers, router)


def test_who_meets_a_locked_row_until_the_end_is_told_so_though_the_last_look_is_not_answered(
    router: LockRouter, proxy: Proxy, routers: Routers, server: Observer, key: str
) -> None:
    router.lease(key, ttl=2).release()
    table, bucket, k = place(router, key)
    stranger = server.connect()
    with stranger.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(f"SELECT * FROM {table} WHERE bucket = %s AND k = %s FOR UPDATE", (bucket, k))
        # A look that begins just before the end has no time for its answer.
        proxy.delay(0.015)
        with pytest.raises(MaintenanceStall):
            router.lease(key, ttl=2, timeout=2.0)
        proxy.delay(0.0)
    stranger.close()
    settled(routers, router)


def test_what_nobody_waits_for_any_more_is_freed_though_its_caller_had_no_reason_to(
    router: LockRouter, server: Observer, routers: Routers, key: str
) -> None:
    """A caller that leaves a batch before it is sent does not know that the batch goes on with it."""
    core, address = router._core, router.route(key)
    shard, raw, owner = core.shards[NAME], key.encode(), b"nobody knows me."
    row = Wanted(address.bucket, digest(core.config.topology.name, Kind.LEASE, raw), 1, raw, owner, 0, 600_000_000, b"")
    left = Item(Verb.ACQUIRE, address.table, row)
    store = SqlStore(shard)
    drive(store.acquire([left], time.monotonic() + 5.0))
    store.shut()
    assert not free(server, router, key)
    core.leases.lanes(shard).taking._orphan(left)
    eventually(lambda: free(server, router, key))
    settled(routers, router)


def test_closing_waits_for_what_is_being_asked_for(
    routers: Routers, router: LockRouter, proxy: Proxy, server: Observer, key: str
) -> None:
    proxy.delay(0.05)
    asking = in_thread(lambda: router.lease(key, ttl=600, timeout=5.0))
    eventually(lambda: router._core.leases.asking)
    router.close()
    with pytest.raises(LockRouterError):
        asking.result()
    assert free(server, router, key)


def test_a_server_that_restarts_keeps_the_leases(cluster: Cluster, routers: Routers, server: Observer) -> None:
    router = routers.make(breaker=NEVER)
    key = keys_on(router, SHARD, prefix="restart")[0]
    with router.lease(key, ttl=30) as lease:
        cluster.kill(SHARD)
        cluster.start(SHARD)
        lease.check()
        lease.renew()
        other = routers.make()
        other.lease(keys_on(router, SHARD, prefix="after")[0], ttl=2, timeout=20).release()
        assert other.try_lease(key, ttl=2) is None
    router.lease(key, ttl=2, timeout=20).release()


def test_a_read_only_server_takes_nothing_and_loses_nothing(
    routers: Routers, server: Observer, router: LockRouter, key: str
) -> None:
    other = keys_on(router, SHARD, 2, prefix="readonly")[1]
    with router.lease(key, ttl=30) as lease:
        server.ask("SET GLOBAL read_only = 1")
        try:
            with pytest.raises(ShardUnavailable):
                router.lease(other, ttl=2, timeout=0.5)
            eventually(lambda: router.health()[NAME]["state"] == "refused")
            with pytest.raises(ShardUnavailable):
                router.try_lease(other, ttl=2)
            assert not lease.lost
        finally:
            server.ask("SET GLOBAL read_only = 0")
        eventually(lambda: router.health()[NAME]["state"] == "ok")
        lease.check()
    router.lease(other, ttl=2, timeout=5).release()


def test_a_drained_shard_keeps_what_is_held(routers: Routers, server: Observer, router: LockRouter, key: str) -> None:
    with router.lease(key, ttl=1.5) as lease:
        server.ask("UPDATE lock_meta SET drained = term_identity")
        try:
            eventually(lambda: router.health()[NAME]["state"] == "refused")
            with pytest.raises(ShardUnavailable):
                router.try_lease(keys_on(router, SHARD, 2, prefix="drained")[1], ttl=2)
            time.sleep(2.5)  # well past the ttl: only renewals explain that it is still held
            assert not lease.lost
        finally:
            server.ask("UPDATE lock_meta SET drained = ''")
        eventually(lambda: router.health()[NAME]["state"] == "ok")
        lease.check()


def test_killed_connections_are_replaced(routers: Routers, server: Observer, router: LockRouter, key: str) -> None:
    for _ in range(10):
        lease = router.lease(key, ttl=30, timeout=5)
        for session in router._core.leases.sessions():
            with contextlib.suppress(Exception):
                server.kill(session.connection_id)
        lease.release()
    settled(routers, router)


def test_the_writes_of_the_old_primary_are_lost_and_the_token_rises_all_the_same(
    routers: Routers, server: Observer, router: LockRouter, key: str
) -> None:
    table, bucket, k = place(router, key)
    where = f"WHERE bucket = {bucket} AND k = 0x{k.hex()}"
    router.lease(key, ttl=1).release()
    server.ask(f"CREATE TABLE replica AS SELECT * FROM {table} {where}")
    try:
        lost = router.lease(key, ttl=1, keep_alive=False)  # a grant the replica has not seen
        server.ask(f"DELETE FROM {table} {where}")
        server.ask(f"INSERT INTO {table} SELECT * FROM replica")
        server.ask("UPDATE lock_meta SET term_identity = 'the old primary'")
        with routers.make().lease(key, ttl=2, timeout=10) as lease:
            assert lease.token > lost.token
            with pytest.raises(LockLost) as caught:
                lost.check()
            assert caught.value.reason in (LossReason.STOLEN, LossReason.EXPIRED)
        with pytest.raises(LockLost):
            lost.release()
    finally:
        server.ask("DROP TABLE replica")


def test_a_stranger_locks_a_row_in_the_middle_of_a_batch(
    routers: Routers, server: Observer, router: LockRouter
) -> None:
    """Its caller alone fails; the others have their leases, renewals are in time, and later nobody waits for it."""
    keys = keys_on(router, SHARD, 33, prefix="stranger")
    victim = keys[7]
    router.lease(victim, ttl=2).release()
    kept = [router.lease(key, ttl=4) for key in keys[20:]]
    table, bucket, k = place(router, victim)
    stranger = server.connect()
    with stranger.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(f"SELECT * FROM {table} WHERE bucket = %s AND k = %s FOR UPDATE", (bucket, k))
        start = threading.Barrier(20)

        def work(key: str) -> str:
            start.wait(10)
            try:
                for _ in range(3):
                    router.lease(key, ttl=30, timeout=3.0).release()
            except MaintenanceStall:
                return "stalled"
            return "fine"

        threads = {key: in_thread(lambda key=key: work(key)) for key in keys[:20]}  # type: ignore[misc]
        outcomes = {key: thread.result() for key, thread in threads.items()}
        assert {key for key, outcome in outcomes.items() if outcome != "fine"} == {victim}
        other = keys[0]
        soon_enough(0.3, lambda: router.lease(other, ttl=30, timeout=3.0).release())
        assert elapsed(lambda: router.try_lease(victim, ttl=2)) < 1.5
        time.sleep(2.0)
        assert not any(lease.lost for lease in kept)
        cursor.execute("ROLLBACK")
    stranger.close()
    router.lease(victim, ttl=2, timeout=5).release()
    for lease in kept:
        lease.release()
    settled(routers, router)


def test_a_stranger_locks_the_row_of_a_kept_lease(routers: Routers, server: Observer, router: LockRouter) -> None:
    keys = keys_on(router, SHARD, 12, prefix="kept")
    leases = [router.lease(key, ttl=4) for key in keys]
    table, bucket, k = place(router, keys[3])
    stranger = server.connect()
    with stranger.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(f"SELECT * FROM {table} WHERE bucket = %s AND k = %s FOR UPDATE", (bucket, k))
        eventually(lambda: leases[3].lost, 6.0)
        assert [lease.lost for lease in leases].count(True) == 1
        cursor.execute("ROLLBACK")
    stranger.close()
    for number, lease in enumerate(leases):
        with pytest.raises(LockLost) if number == 3 else contextlib.nullcontext():
            lease.release()
    settled(routers, router)


def test_releases_racing_renewals_leave_nothing(routers: Routers, router: LockRouter, proxy: Proxy) -> None:
    """2.10, 7272: no entry, no row, and no renewal of it after the release returned."""
    keys = keys_on(router, SHARD, 8, prefix="race")
    leases, dice = router._core.leases, random.Random(7)

    def race(key: str) -> None:
        for _ in range(60):
            lease = router.lease(key, ttl=30, timeout=10)
            entry = lease._held_as
            assert entry is not None
            leases.keeper._look_at(entry)  # its renewal is due now
            if dice.random() < 0.5:
                time.sleep(dice.random() * 0.003)
            lease.release()
            assert not entry.held

    for seconds in (0.0, 0.002):
        proxy.delay(seconds)
        for thread in [in_thread(lambda key=key: race(key)) for key in keys]:  # type: ignore[misc]
            thread.result(60)
    proxy.delay(0.0)
    assert not leases.entries
    settled(routers, router)
    for renewer in leases.keeper._renewers.values():
        eventually(lambda: not renewer.due)  # noqa: B023 - called now


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_interrupt_anywhere_leaves_no_lease(routers: Routers, server: Observer) -> None:
    router = routers.make()
    keys = keys_on(router, SHARD, 3, prefix="interrupt")
    router.lease(keys[0], ttl=2, timeout=10).release()
    dice, interrupted = random.Random(11), 0
    background = in_thread(lambda: others(router, keys[1:]))

    def strike(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def once(kept: list[Lease]) -> None:
        signal.setitimer(signal.ITIMER_REAL, dice.random() * 0.006 + 0.0001)
        with contextlib.suppress(LockRouterError):
            kept.append(router.lease(keys[0], ttl=600, timeout=10))
            kept[0].release()
        signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, strike)
    try:
        for _ in range(150):
            kept: list[Lease] = []
            try:
                once(kept)
            except KeyboardInterrupt:  # the timer strikes once
                interrupted += 1
            for lease in kept:
                with contextlib.suppress(LockRouterError):
                    lease.release()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert background.result(60) == 2
    assert interrupted > 20
    with router.lease(keys[0], ttl=2, timeout=10):
        pass
    settled(routers, router)
    # An interrupt inside PyMySQL's connect may leave a socket to the collector; it warns here, where that is expected.
    gc.collect()


def others(router: LockRouter, keys: list[str]) -> int:
    """Callers of the same lanes, whom no interrupt of another may touch."""
    for _ in range(150):
        for key in keys:
            router.lease(key, ttl=60, timeout=10).release()
    return len(keys)


@pytest.mark.slow
def test_processes_with_overlapping_keys_and_a_deleter(cluster: Cluster, routers: Routers, tmp_path: Path) -> None:
    """Exclusion by interval, tokens in order, no error but a caller's own, whatever is deleted meanwhile."""
    stop = threading.Event()
    with Workers("tests.support.lease_worker", [str(cluster.shards_file), str(tmp_path)], 3) as fleet:
        deleter = in_thread(lambda: purge(routers, stop))
        try:
            fleet.go()
            time.sleep(5.0)
            figures: Counter[str] = Counter()
            for said in fleet.finish():
                figures.update(json.loads(said))
        finally:
            stop.set()
    assert deleter.result() > 0
    assert judge(read(tmp_path)).violations == []
    assert figures["taken"] > 300, figures
    # With a few milliseconds only, a busy machine may not answer in time: that is said to be so, and of nothing else.
    assert set(figures) <= {"taken", "held", "LockTimeout", "PoolTimeout", "OutcomeUnknown"}, figures


def purge(routers: Routers, stop: threading.Event) -> int:
    """What a sweeper does, much too eagerly: deletes rows that nobody has, under the callers' hands."""
    deleted = 0
    while not stop.is_set():
        for server in routers.observers:
            for table in range(8):
                rows = server.ask(f"SELECT bucket, k FROM lease_{table:02d} WHERE owner = '' LIMIT 20")
                for bucket, k in rows:
                    server.ask(f"DELETE FROM lease_{table:02d} WHERE bucket = %s AND k = %s AND owner = ''", bucket, k)
                    deleted += 1
        stop.wait(0.05)
    return deleted


def test_without_tombstones_a_late_request_blocks_the_key(
    cluster: Cluster, server: Observer, router: LockRouter, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong variant 2.08."""
    monkeypatch.setattr(Keeper, "bury", lambda *_, **__: None)
    with pytest.raises(AssertionError):
        late_acquisition(cluster, server, router, key)
    monkeypatch.undo()
    server.ask(f"DELETE FROM {place(router, key)[0]}")


def stolen(server: Observer, router: LockRouter, key: str) -> None:
    """2.03b: a lease that another has by now is found lost by its next renewal."""
    lease = router.lease(key, ttl=1.2)
    table, bucket, k = place(router, key)
    try:
        server.ask(f"UPDATE {table} SET owner = 'somebody else 16' WHERE bucket = %s AND k = %s", bucket, k)
        eventually(lambda: lease.lost, 1.05)
        time.sleep(1.0)
        assert lease.lost
    finally:
        with contextlib.suppress(LockLost):
            lease.release()
        server.ask(f"DELETE FROM {table}")


def test_renewing_by_key_alone_keeps_two_holders(
    server: Observer, router: LockRouter, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong variant 2.03b, beside the right one."""
    stolen(server, router, key)
    right = sql.keep

    def by_key(*arguments: Any) -> bytes:
        packet = right(*arguments)[5:].replace(
            b" WHERE l.owner = v.owner AND (v.token = 0 OR l.token = v.token)", b" WHERE 1 "
        )
        return query(packet)

    monkeypatch.setattr(sql, "keep", by_key)
    with pytest.raises(AssertionError):
        stolen(server, router, key)


def deadline_from_the_request(router: LockRouter, proxy: Proxy, key: str) -> None:
    """2.02: however late the reply comes, the holder's deadline is counted from before the request."""
    proxy.delay(0.2)
    try:
        with router.lease(key, ttl=2, timeout=5, keep_alive=False) as lease:
            assert lease.remaining() <= 1.65
    finally:
        proxy.delay(0.0)


def test_a_deadline_from_the_reply_is_later_than_the_servers(
    router: LockRouter, proxy: Proxy, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong variant 2.02, beside the right one."""
    deadline_from_the_request(router, proxy, key)
    right = Leases.admit

    def from_reply(self: Leases, ask: Any, item: Any, seen: Any) -> Entry | None:
        ask.since = None
        return right(self, ask, item, seen)

    monkeypatch.setattr(Leases, "admit", from_reply)
    with pytest.raises(AssertionError):
        deadline_from_the_request(router, proxy, key)


def revived(router: LockRouter, key: str) -> None:
    """2.11: an OK that comes after the deadline changes nothing."""
    lease = router.lease(key, ttl=2, keep_alive=False)
    entry = lease._held_as
    assert entry is not None
    sent_at = entry.deadline - 1.0
    entry.deadline -= 5.0
    router._core.leases.renewed(entry, Said.DONE, sent_at, 60.0)
    try:
        assert lease.lost
    finally:
        with contextlib.suppress(LockLost):
            lease.release()


def test_a_late_ok_revives_nothing(router: LockRouter, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2.11, and its wrong variant."""
    revived(router, key)

    def wrong(self: Leases, entry: Entry, answer: Any, sent_at: float, ttl: float) -> None:
        entry.deadline = max(entry.deadline, sent_at + ttl)

    monkeypatch.setattr(Leases, "renewed", wrong)
    with pytest.raises(AssertionError):
        revived(router, key)


def test_nothing_is_left_of_all_that(routers: Routers, router: LockRouter, server: Observer) -> None:
    eventually(lambda: not owned(server, router), 5.0)
    assert tombs(router) == 0
