"""What a worker of the chaos run does with row locks and leases, and how it tells of it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from lockrouter import LockLost, LockRouter, LockTimeout, OutcomeUnknown, RowLock
from lockrouter.deadline import now
from tests.chaos.site import SHARDS
from tests.support.crew import EXPECTED
from tests.support.history import Call
from tests.support.lease_worker import Worker as LeaseWorker

__all__ = ["ROWS", "RowUse", "row_keys"]

ROWS = 5
"""Rows of each shard that all processes want."""
LEASES = 8
_KEPT = 5.0
"""Seconds for which each process holds something, most of the time."""


def row_keys(router: LockRouter) -> dict[str, list[str]]:
    """Keys of each shard on so many different rows, and one more on the row of the first."""
    found: dict[str, dict[int, str]] = {shard: {} for shard in SHARDS}
    twins: dict[str, str] = {}
    for number in range(1_000_000):
        key = f"row:{number}"
        address = router.route(key)
        mine = found[address.shard]
        if len(mine) < ROWS:
            mine.setdefault(address.slot, key)
        elif address.slot == next(iter(mine)):
            twins.setdefault(address.shard, key)
        if len(twins) == len(SHARDS):
            return {shard: [*mine.values(), twins[shard]] for shard, mine in found.items()}
    raise AssertionError("no such keys")


class RowUse(LeaseWorker):
    """Rows and leases, recorded."""

    def __init__(self, shards: str, folder: str, seed: int) -> None:
        super().__init__(shards, folder, seed)
        self.rows = row_keys(self.router)
        self._keeping = threading.Lock()

    def place(self, key: str) -> str:
        """Shard, kind of key, and the key: rows by their slot."""
        address = self.router.route(key)
        kind = key.partition(":")[0]
        return f"{address.shard}/row/{address.slot}" if kind == "row" else f"{address.shard}/{kind}/{key}"

    def lease(self, dice: random.Random) -> None:
        """A lease that all processes want."""
        self.use(f"lease:{dice.randrange(LEASES)}", dice)

    def row(self, dice: random.Random) -> None:
        """One row, exclusive or shared."""
        keys = self.rows[dice.choice(SHARDS)]
        key = keys[0] if dice.random() < 0.3 else dice.choice(keys)
        self.hold_row(key, dice, shared=dice.random() < 0.2)

    def hold_row(
        self,
        key: str,
        dice: random.Random,
        *,
        shared: bool = False,
        body: Callable[[Call, RowLock], object] | None = None,
    ) -> None:
        """Take a row, do something under it, release it; all of it is in the history."""
        call = self.history.invoke(self.place(key), "shared lock" if shared else "lock")
        timeout = dice.choice([0.0, 0.05, 0.3, 1.0, 2.0])
        try:
            with call.timed("row", timeout):
                if timeout:
                    held = self.router.lock(key, timeout=timeout, shared=shared)
                else:
                    taken = self.router.try_lock(key, shared=shared)
                    if taken is None:
                        call.say("fail", note="busy")
                        return
                    held = taken
        except EXPECTED as error:
            self.failed(call, "row", error)
            return
        self.granted(call, held, "shared" if shared else "")
        if not held.degraded:
            held.on_lost(lambda reason: call.say("told", note=reason))
        try:
            if body:
                body(call, held)
            else:
                self.stay(call, held, dice, shared=shared)
        finally:
            self.leave(call, held, confirm=dice.random() < 0.5)

    def failed(self, call: Call, verb: str, error: BaseException) -> None:
        """It was not granted, or nobody knows; breathe before the next attempt at a shard that is down."""
        call.say("unknown" if isinstance(error, OutcomeUnknown) else "fail", note=type(error).__name__)
        self.count(f"{verb} {type(error).__name__}")
        if not isinstance(error, LockTimeout):
            call.say("why", note=str(error))
            time.sleep(0.03)

    def unless_ended(self, call: Call, verb: str, error: BaseException) -> None:
        """An error of leaving says nothing of the acquisition, which has its outcome already."""
        if call.ended:
            self.count(f"{verb} {type(error).__name__}")
        else:
            self.failed(call, verb, error)

    def granted(self, call: Call, held: RowLock, note: str = "") -> None:
        """It was granted; unless it is lost by now, its holder thinks from here on that it holds."""
        at = now()
        if held.degraded:
            call.say("ok", note=f"degraded {note}".strip(), at=at)
            self.count("row degraded")
        elif held.lost:
            call.say("unknown", note="lost by the time it came")
        else:
            call.say("ok", token=held.token, note=note, at=at)
            self.count("row shared" if note else "row")

    def stay(self, call: Call, held: RowLock, dice: random.Random, *, shared: bool = False) -> None:
        """Hold it for a moment."""
        for _ in range(dice.randrange(3)):
            if dice.random() < 0.2:
                self.check(call, held)
            elif dice.random() < 0.2 and not shared:
                self.nest(call, held)
            else:
                time.sleep(dice.uniform(0.0, 0.005))
            if not held.degraded and not call.look(held):
                return

    def keep(self, dice: random.Random) -> None:
        """Hold a row that nobody else wants, or a lease, for longer than a silent holder can; one in each process."""
        if not self._keeping.acquire(blocking=False):
            return
        try:
            if dice.random() < 0.7:
                self.hold_row(f"keep:{self.seed}:{dice.randrange(20)}", dice, body=self._keep)
            else:
                self.use(f"kept:{self.seed}:{dice.randrange(20)}", dice, patience=_KEPT)
        finally:
            self._keeping.release()

    def _keep(self, call: Call, held: RowLock) -> None:
        until = time.monotonic() + _KEPT
        while time.monotonic() < until and self.going:
            time.sleep(0.05)
            if not held.degraded and not call.look(held):
                return

    def check(self, call: Call, held: RowLock) -> None:
        """Ask the server."""
        at = now()
        with suppress(LockLost):
            held.check()
            if not held.degraded:
                call.say("proved", at=at)

    def nest(self, call: Call, held: RowLock) -> None:
        """Take it once more: at once, with the same token."""
        try:
            with call.timed("nested", 0.0), self.router.lock(held.key, timeout=0.0) as inner:
                if not inner.degraded:
                    call.say("nested", token=inner.token)
        except LockLost:
            call.look(held)

    def leave(self, call: Call, held: RowLock, *, confirm: bool) -> None:
        """Release it, and say what that proves."""
        call.say("left")
        at = now()
        if not held.degraded and not confirm and call.look(held):
            call.say("release")
        try:
            held.release(confirm=confirm)
        except LockLost as error:
            call.say("lost")
            self.count(f"lost {error.reason}")
            return
        if confirm and not held.degraded:
            call.say("confirmed", at=at)

    def together(self, dice: random.Random) -> None:
        """Several rows of any shards at once, in any order; sometimes two keys of one row."""
        keys = [dice.choice(self.rows[dice.choice(SHARDS)]) for _ in range(dice.randrange(2, 6))]
        calls = {place: self.history.invoke(place, "lock_all") for place in {self.place(key) for key in keys}}
        timeout = dice.choice([0.0, 0.3, 1.0, 2.0])
        try:
            with next(iter(calls.values())).timed("lock_all", timeout):
                held = self.router.lock_all(keys, timeout=timeout)
        except EXPECTED as error:
            for call in calls.values():
                self.failed(call, "lock_all", error)
            return
        taken = []
        for member in held:
            found = calls.pop(self.place(str(member.key)), None)
            if found is not None:
                self.granted(found, member)
                taken.append((found, member))
        self.count("lock_all")
        time.sleep(dice.uniform(0.0, 0.01))
        confirm, at = dice.random() < 0.5, now()
        for call, member in taken:
            call.say("left")
            if not confirm and not member.degraded and call.look(member):
                call.say("release")
        try:
            held.release(confirm=confirm)
        except LockLost as error:
            self.count(f"lost {error.reason}")
            return
        if confirm and not held.degraded:
            for call, _ in taken:
                call.say("confirmed", at=at)
