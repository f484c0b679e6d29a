"""A MySQL replication group as one shard: what each way of losing its primary costs holders of rows and of leases."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockrouter import LockLost, LockRouter, LockTimeout, LossReason, RowLock, ShardUnavailable
from lockrouter.admin.drain import drain, undo
from lockrouter.admin.verify import verify
from lockrouter.errors import ShardError
from lockrouter.tokens import parts
from tests.support.observe import eventually, in_thread
from tests.support.replicated import Group, network
from tests.support.switch_worker import counted_through

pytestmark = pytest.mark.server

NAME = "shard-0"
ROLE_CHECK, WINDOW, GHOST = 0.5, 3.0, 10
"""The defaults of the shard file, in seconds."""
LATE = 1.0
"""Seconds that a crowded machine may add."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """A group on loopback."""
    group = Group(tmp_path_factory.mktemp("group"))
    yield group
    group.close()


@pytest.fixture(scope="module")
def walled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """A group whose members can be cut off from each other."""
    with network(3) as net:
        group = Group(tmp_path_factory.mktemp("walled"), net)
        yield group
        group.close()


@pytest.fixture
def group(walled: Group) -> Iterator[Group]:
    """Three members are online when a test begins; afterwards no router is left."""
    yield walled
    walled.close_routers()
    walled.mend()


class Watched:
    """A held lock, when its holder was told that it is lost, and why."""

    def __init__(self, router: LockRouter, key: str) -> None:
        self.lock: RowLock = router.lock(key, timeout=10)
        self.reasons: list[LossReason] = []
        self.at = 0.0
        self.lock.on_lost(self._told)

    def _told(self, reason: LossReason) -> None:
        self.at = time.monotonic()
        self.reasons.append(reason)

    def leave(self) -> None:
        """The holder finds out as the contract says."""
        with pytest.raises(LockLost):
            self.lock.release()


class Trying:
    """A caller that asks for a row again and again: when each grant was, and with which token."""

    def __init__(self, router: LockRouter, key: str) -> None:
        self.grants: list[tuple[float, int]] = []
        self._router, self._key = router, key
        self._over = threading.Event()
        self._thread = in_thread(self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                with self._router.lock(self._key, timeout=1.0) as held:
                    if not held.degraded:
                        self.grants.append((time.monotonic(), held.token))
            except (ShardError, LockLost, LockTimeout):
                pass
            self._over.wait(0.02)

    def end(self) -> None:
        """No more is asked for."""
        self._over.set()
        self._thread.result()


def freeze(group: Group, primary: int) -> None:
    group.members[primary].send(signal.SIGSTOP)


def cut(group: Group, primary: int) -> None:
    assert group.net is not None
    group.net.cut(primary)


def switch(group: Group, primary: int) -> None:
    group.switch((primary + 1) % 3)


FAILOVERS: dict[str, Callable[[Group, int], None]] = {
    "killed": lambda group, primary: group.members[primary].kill(),
    "frozen": freeze,
    "switched": switch,
    "cut-off": cut,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAILOVERS)
def test_unplanned_failover_row_lock_is_lost_in_time_and_lossless_leases_are_kept(group: Group, kind: str) -> None:
    """API section 0, row "unplanned failover", columns row lock and lease with lossless replication."""
    router, other = group.router(), group.router()
    leases = [router.lease(f"lease:{number}", ttl=60, timeout=10) for number in range(20)]
    held = Watched(router, "held")
    trying = Trying(other, "held:2")
    eventually(lambda: trying.grants)
    primary = group.primary()
    assert primary is not None
    witness = (primary + 1) % 3
    if kind == "frozen":
        assert group.primary(witness) == primary
    began = time.monotonic()
    FAILOVERS[kind](group, primary)
    eventually(lambda: held.reasons, 30.0)
    noticed = held.at - began
    held.leave()
    granted, token = eventually(lambda: _of_new_term(trying, held.lock.token), 40.0)
    trying.end()
    print(
        f"failover {kind}: told after {noticed:.2f} s ({held.reasons[0].value}), granting after {granted - began:.2f} s"
    )
    bound = {"killed": 0.5, "frozen": GHOST, "switched": ROLE_CHECK * 1.1 + 0.5, "cut-off": WINDOW + 2.0}[kind]
    assert noticed < bound + LATE
    assert parts(token)[0] == parts(held.lock.token)[0] + 1
    assert _rising(trying)
    # The other router was granted a row on the new primary; this one may still be looking for it.
    router.lock("found", timeout=10.0).release()
    for lease in leases:
        lease.check()
        assert not lease.lost
        assert other.try_lease(lease.key, ttl=5) is None
    fresh = other.lease("lease:new", ttl=5, timeout=10)
    assert fresh.token > max(lease.token for lease in leases)
    for lease in (*leases, fresh):
        lease.release()


def _of_new_term(trying: Trying, token: int) -> tuple[float, int] | None:
    return next((grant for grant in trying.grants if parts(grant[1])[0] > parts(token)[0]), None)


def _rising(trying: Trying) -> bool:
    tokens = [token for _, token in trying.grants]
    return tokens == sorted(set(tokens))


@pytest.mark.slow
def test_unplanned_failover_row_lock_a_primary_in_the_minority_grants_nothing_after_the_window(group: Group) -> None:
    """Measured: by itself it goes on granting for ever. One router reaches only it, the other ones all members."""
    primary = group.primary()
    assert primary is not None
    lone, router = group.router(hosts=[primary]), group.router()
    held = Watched(lone, "held")
    trying = Trying(lone, "other")
    eventually(lambda: trying.grants)
    began = time.monotonic()
    cut(group, primary)
    everywhere = Trying(router, "held")
    granted, token = eventually(lambda: _of_new_term(everywhere, held.lock.token), 40.0)
    time.sleep(WINDOW)  # it is asked meanwhile, and must not grant
    trying.end()
    everywhere.end()
    last = max(moment for moment, _ in trying.grants)
    print(
        f"minority: last grant after {last - began:.2f} s, told after {held.at - began:.2f} s, "
        f"granting elsewhere after {granted - began:.2f} s"
    )
    assert last - began < WINDOW + LATE
    assert held.at < granted, "two holders of one row"
    assert token > held.lock.token
    held.leave()


@pytest.mark.slow
def test_unplanned_failover_row_lock_a_woken_primary_is_left_when_it_says_that_it_is_demoted(group: Group) -> None:
    """The overlap of API section 0: its holder, who reaches nobody else, is told `role_check` + 0.5 s after that."""
    primary = group.primary()
    assert primary is not None
    lone, router = group.router(hosts=[primary], router={"ghost_timeout": 60}), group.router()
    held = Watched(lone, "held")
    group.members[primary].send(signal.SIGSTOP)
    trying = Trying(router, "held")
    granted, token = eventually(lambda: _of_new_term(trying, held.lock.token), 40.0)
    assert token > held.lock.token
    group.members[primary].send(signal.SIGCONT)
    awake = time.monotonic()
    said = eventually(lambda: time.monotonic() if group.members[primary].read_only else None, 20.0)
    eventually(lambda: held.reasons, 10.0)
    trying.end()
    print(
        f"woken: says so after {said - awake:.2f} s, told {held.at - said:.2f} s later, "
        f"overlapping for {held.at - granted:.2f} s"
    )
    assert held.at - said < ROLE_CHECK * 1.1 + 0.5 + LATE
    assert _rising(trying)
    held.leave()


@pytest.mark.slow
def test_unplanned_failover_a_killed_primary_comes_back_alone_and_writable(group: Group) -> None:
    """It was started without its group: it is neither used nor a rival, also where nobody else can be asked."""
    primary = group.primary()
    assert primary is not None
    router = group.router()
    with router.lock("key", timeout=10) as held:
        before = held.token
    group.members[primary].kill()
    trying = Trying(router, "key")
    eventually(lambda: _of_new_term(trying, before), 40.0)
    group.members[primary].start()
    if group.net is not None:
        group.members[primary].greet()
    assert not group.members[primary].read_only
    seen = len(trying.grants)
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        assert router.health()[NAME]["state"] == "ok"
        time.sleep(0.05)
    trying.end()
    assert len(trying.grants) > seen
    assert _rising(trying)
    with pytest.raises(ShardUnavailable, match="not in its replication group"):
        group.router(hosts=[primary]).lock("key", timeout=5.0)


@pytest.mark.slow
def test_a_group_with_several_primaries_is_refused(group: Group) -> None:
    router = group.router()
    router.lock("key", timeout=10).release()
    group.members[0].sql("SELECT group_replication_switch_to_multi_primary_mode()")
    try:
        eventually(lambda: "multi-primary" in str(router.health()[NAME]["why"]), 10.0)
        for one in (router, group.router(), group.router(hosts=[1])):
            with pytest.raises(ShardUnavailable, match="multi-primary"):
                one.lock("key", timeout=3)
    finally:
        group.members[0].sql("SELECT group_replication_switch_to_single_primary_mode()")
    eventually(lambda: router.health()[NAME]["state"] == "ok", 10.0)
    router.lock("key", timeout=10).release()


def test_verify_names_what_weakens_a_group_and_nothing_else(plain: Group) -> None:
    findings = verify(plain.config, plain.admin)
    assert {(finding.problem, finding.warning) for finding in findings} == {("group-setting", True)}
    named = sorted(finding.text.split(" ")[0].removeprefix("group_replication_") for finding in findings)
    assert named == ["exit_state_action", "unreachable_majority_timeout"]


def test_planned_switchover_of_a_group_after_drain_never_two_holders_and_leases_are_kept(
    plain: Group, tmp_path: Path
) -> None:
    """API section 0, row "planned switchover after `lockrouter drain`": several processes count under the lock."""
    router = plain.router()
    leases = [router.lease(f"lease:{number}", ttl=30, timeout=10) for number in range(5)]
    term = parts(leases[0].token)[0]
    primary = plain.primary()
    assert primary is not None

    def switchover() -> None:
        report = drain(plain.config, plain.admin, NAME)
        assert report.still_held == ()
        drained = time.monotonic()
        plain.switch((primary + 1) % 3)
        eventually(lambda: router.health()[NAME]["term"] == term + 1, 20.0)
        print(f"switchover: drained in {report.seconds:.2f} s, granting again {time.monotonic() - drained:.2f} s later")

    done = counted_through(plain.file, tmp_path, switchover)
    assert {parts(token)[0] for *_, token in done} == {term, term + 1}
    for lease in leases:
        lease.check()
        lease.release()
    assert undo(plain.config, plain.admin, NAME)
    plain.close_routers()
