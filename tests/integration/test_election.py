"""`election` on real servers: one leader, told when it is one and when it is none any more."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from lockrouter import LockRouter, LossReason, ShardUnavailable
from lockrouter.testing.cluster import Cluster
from tests.support.observe import Observer, Routers, eventually, in_thread, keys_on
from tests.support.proxy import Proxy

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("no_leases")]


@pytest.fixture
def name(router: LockRouter) -> str:
    return keys_on(router, 0, prefix="election")[0]


def test_one_leads_and_the_next_follows(routers: Routers, router: LockRouter, name: str) -> None:
    with router.election(name, ttl=5.0) as first:
        assert first.wait(10.0)
        assert first.is_leader
        token = first.token
        assert token is not None
        with routers.make().election(name, ttl=5.0) as second:
            assert not second.wait(0.5)
            assert not second.is_leader
            assert second.token is None
            assert first.is_leader
            first.__exit__(None, None, None)
            began = time.monotonic()
            assert second.wait(5.0)
            assert time.monotonic() - began < 3.0, "a leader that leaves frees its place at once"
            assert second.token is not None
            assert second.token > token
            assert not first.is_leader


def test_who_resigns_lets_others_go_first(routers: Routers, router: LockRouter, name: str) -> None:
    with router.election(name, ttl=2.0) as first, routers.make().election(name, ttl=2.0) as second:
        eventually(lambda: first.is_leader or second.is_leader)
        leader, other = (first, second) if first.is_leader else (second, first)
        before = leader.token
        leader.resign()
        assert not leader.is_leader
        assert other.wait(5.0)
        assert other.token is not None
        assert before is not None
        assert other.token > before


def test_alone_it_stands_again_after_a_ttl(router: LockRouter, name: str) -> None:
    with router.election(name, ttl=1.0) as alone:
        assert alone.wait(10.0)
        alone.resign()
        assert not alone.wait(0.5)
        assert alone.wait(5.0)


def test_it_tells_of_both(router: LockRouter, server: Observer, name: str) -> None:
    elected: list[int] = []
    deposed: list[LossReason | None] = []
    plain = threading.Event()
    with router.election(name, ttl=2.0) as leader:
        leader.on_elected(elected.append)
        leader.on_elected(plain.set)
        leader.on_deposed(deposed.append)
        assert leader.wait(10.0)
        assert plain.wait(5.0)
        eventually(lambda: elected == [leader.token])
        again: list[int] = []
        leader.on_elected(again.append)  # told at once: it is the leader already
        eventually(lambda: again == [leader.token])
        table = f"lease_{router.route(name).table:02d}"
        server.ask(f"UPDATE {table} SET owner = 'somebody' WHERE kind = 3")
        eventually(lambda: deposed == [LossReason.STOLEN])
        assert not leader.is_leader
        server.ask(f"UPDATE {table} SET owner = '' WHERE kind = 3")
        assert leader.wait(10.0)
        eventually(lambda: len(elected) == 2)
    eventually(lambda: deposed == [LossReason.STOLEN, None])


def test_a_leader_cut_off_is_deposed_by_its_own_clock(routers: Routers, router: LockRouter, name: str) -> None:
    with Proxy(routers.cluster.port(0)) as proxy:
        far = routers.make(ports={0: proxy.port})
        with far.election(name, ttl=2.0) as cut_off:
            assert cut_off.wait(10.0)
            with router.election(name, ttl=2.0) as near:
                proxy.stop()
                until = time.monotonic() + 10.0
                while not near.is_leader:
                    was = cut_off.is_leader
                    assert not (near.is_leader and was), "two leaders"
                    assert time.monotonic() < until
                    time.sleep(0.005)
                assert not cut_off.is_leader
                with pytest.raises(ShardUnavailable):
                    eventually(lambda: cut_off.wait(0.2))
            proxy.accept()
            assert cut_off.wait(15.0)
        far.close()


def test_it_lives_through_a_restart_of_the_server(router: LockRouter, cluster: Cluster, name: str) -> None:
    with router.election(name, ttl=15.0) as leader:
        assert leader.wait(10.0)
        token = leader.token
        cluster.kill(0)
        cluster.start(0)
        assert leader.token == token


def test_waiting_ends_with_leaving(routers: Routers, router: LockRouter, name: str) -> None:
    with router.election(name, ttl=5.0) as first:
        assert first.wait(10.0)
        with routers.make().election(name, ttl=5.0) as second:
            waiting = in_thread(second.wait)
        assert waiting.result() is False


def test_a_dropped_election_leaves_with_a_warning(router: LockRouter, other: LockRouter, name: str) -> None:
    def stand() -> None:
        dropped = router.election(name, ttl=600).__enter__()
        dropped.on_elected(lambda token: print(dropped, token))
        assert dropped.wait(5.0)

    with pytest.warns(ResourceWarning, match="dropped without leaving"):
        stand()
        for thread in threading.enumerate():
            if thread.name == "lockrouter-election-told":
                thread.join(5.0)
        gc.collect()
    with other.election(name, ttl=5) as candidate:
        assert candidate.wait(5.0)


def test_wrong_use(router: LockRouter, name: str) -> None:
    with pytest.raises(ValueError, match="ttl"):
        router.election(name, ttl=0.1)
    with router.election(name, ttl=5.0) as one, pytest.raises(RuntimeError, match="entered once"):
        one.__enter__()
