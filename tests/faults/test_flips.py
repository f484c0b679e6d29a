"""What was taken is what is released, in whatever order a shard comes and goes meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from lockrouter import LockRouter, NoToken, RowLock, ShardUnavailable
from tests.support.observe import Routers, eventually, keys_on

pytestmark = pytest.mark.server

NAME = "shard-0"
OWNERS = st.sampled_from(["one", "two"])
KEYS = st.sampled_from([0, 1])


class Flip:
    """Makes one router believe that a shard is dead, and that it is alive again, without touching a connection."""

    def __init__(self, router: LockRouter) -> None:
        self.shard = router._core.shards[NAME]
        self.away = False

    def go(self) -> None:
        breaker: Any = self.shard.breaker
        breaker.success, breaker.take_probe = lambda: False, lambda: False
        while breaker.closed:
            self.shard.fault(ConnectionError("as if it were dead"))
        self.away = True

    def come(self) -> None:
        breaker: Any = self.shard.breaker
        del breaker.success, breaker.take_probe
        breaker._probe_at = 0.0
        self.shard.poke_control()
        eventually(lambda: breaker.closed and self.shard.rights is not None)
        self.away = False


class Held:
    """What the model knows of one row that is held."""

    def __init__(self, owner: str, *, local: bool) -> None:
        self.owner = owner
        self.taken_local = local
        self.local = local
        self.handles: list[RowLock] = []


class Flips(RuleBasedStateMachine):
    """One process with two owners; `outside` stands for another process, `twin` for another router of this one."""

    routers: Routers
    router: LockRouter
    outside: LockRouter
    twin: LockRouter
    flip: Flip

    def __init__(self) -> None:
        super().__init__()
        self.keys = keys_on(self.router, 0, 2, prefix="flip")
        self.held: dict[int, Held] = {}
        self.before = self.counts()
        self.ended = {"row": 0, "local": 0}

    def counts(self) -> dict[str, float]:
        return {
            mode: self.routers.metric(self.router, "lockrouter_hold_seconds_count", shard=NAME, mode=mode)
            for mode in ("row", "local")
        }

    @precondition(lambda self: not self.flip.away)
    @rule()
    def goes(self) -> None:
        self.flip.go()

    @precondition(lambda self: self.flip.away)
    @rule()
    def comes(self) -> None:
        self.flip.come()

    @rule(at=KEYS, owner=OWNERS, waits=st.booleans())
    def take(self, at: int, owner: str, waits: bool) -> None:
        key, held = self.keys[at], self.held.get(at)
        if held is not None and held.owner != owner:
            assert self.router.try_lock(key, owner=owner) is None
            return
        got = self.router.lock(key, timeout=5.0, owner=owner) if waits else self.router.try_lock(key, owner=owner)
        assert got is not None
        if held is None:
            held = self.held[at] = Held(owner, local=self.flip.away)
        held.handles.append(got)
        assert got.degraded is held.taken_local

    @precondition(lambda self: self.held)
    @rule(data=st.data(), confirm=st.booleans())
    def release(self, data: st.DataObject, confirm: bool) -> None:
        at = data.draw(st.sampled_from(sorted(self.held)))
        held = self.held[at]
        handle = held.handles.pop(data.draw(st.integers(0, len(held.handles) - 1)))
        handle.release(confirm=confirm)
        if not held.handles:
            del self.held[at]
            self.ended["local" if held.local else "row"] += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        held = self.held[data.draw(st.sampled_from(sorted(self.held)))]
        handle = data.draw(st.sampled_from(held.handles))
        if held.local and self.flip.away:
            with pytest.raises(ShardUnavailable):
                handle.promote(timeout=1.0)
            return
        assert handle.promote(timeout=5.0)
        if held.local:
            held.local = False
            self.ended["local"] += 1

    @invariant()
    def what_was_taken_is_what_excludes(self) -> None:
        for at, key in enumerate(self.keys):
            held = self.held.get(at)
            # The row itself, seen from another process: locked by real and promoted locks alone.
            seen = eventually(lambda: (self.looks(self.outside, key) is (held is not None and not held.local)) or None)  # noqa: B023
            assert seen
            # The gate of degraded locks, seen from another router of this process.
            assert self.looks(self.twin, key) is (held is not None and held.taken_local)
            for handle in held.handles if held is not None else ():
                assert handle.degraded is held.taken_local and not handle.lost  # type: ignore[union-attr]
                if held.local:  # type: ignore[union-attr]
                    with pytest.raises(NoToken):
                        _ = handle.token
                else:
                    assert handle.token > 0

    @staticmethod
    def looks(router: LockRouter, key: str) -> bool:
        """Whether the row is locked for that router."""
        got = router.try_lock(key)
        if got is None:
            return True
        got.release()
        return False

    def teardown(self) -> None:
        for held in self.held.values():
            for handle in held.handles:
                handle.release()
            self.ended["local" if held.local else "row"] += 1
        if self.flip.away:
            self.flip.come()
        after = self.counts()
        assert {mode: after[mode] - self.before[mode] for mode in after} == self.ended


def test_what_was_taken_is_what_is_released(routers: Routers) -> None:
    breaker = {"failures": 2, "probe_after": 600.0}
    router, outside, twin = routers.make(breaker=breaker), routers.make(), routers.make(breaker=breaker)
    for each in (router, outside, twin):
        each.warm()
    away = Flip(twin)
    away.go()

    class Here(Flips):
        pass

    Here.routers, Here.router, Here.outside, Here.twin, Here.flip = routers, router, outside, twin, Flip(router)
    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    away.come()
