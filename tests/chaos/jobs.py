"""What a worker of the chaos run does with the recipes, and with fork."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress

from lockrouter import InProgress, LockLost, LockTimeout, NotHeld, RowLock, ShardError
from lockrouter.deadline import now
from tests.chaos.money import Payments
from tests.chaos.process import is_green
from tests.support.crew import EXPECTED
from tests.support.history import Call

__all__ = ["GATES", "GUARDS", "PERMITS", "Jobs"]

PERMITS = 3
GATES = 2
GUARDS = 3
MESSAGES_A_SECOND = 10
ELECTIONS = 2
_TTL = 1.0
_UNDECIDED: tuple[type[BaseException], ...] = (InProgress, *EXPECTED)
_CHILD = 5
"""Seconds after which a child that has not ended is killed."""


class Jobs(Payments):
    """Recipes, and fork."""

    def __init__(self, shards: str, folder: str, seed: int) -> None:
        super().__init__(shards, folder, seed)
        self._standing = threading.Lock()

    def once(self, dice: random.Random) -> None:
        """A message that is delivered many times: everybody is told the same result."""
        message = f"message:{int(now() * MESSAGES_A_SECOND) - dice.randrange(20)}"
        run = f"{self.history.process}-{dice.random()}"

        def work() -> str:
            self.history.note("ran", message, run)
            time.sleep(dice.uniform(0.0, 0.05))
            return run

        try:
            self.history.note("result", message, self.router.once(message, work, ttl=_TTL))
            self.count("once")
        except _UNDECIDED as error:
            self.count(f"once {type(error).__name__}")

    def guard(self, dice: random.Random) -> None:
        """A job that one process at a time does, and not again for a moment."""
        name = f"guard:{dice.randrange(GUARDS)}"
        call = self.history.invoke(self.place(name), "guard")
        guard = self.router.guard(name, ttl=_TTL, at_least=0.3)
        try:
            with guard as held:
                at = now()
                if not held:
                    call.say("fail", note="skipped")
                    return
                if held.lost:
                    call.say("unknown", note="lost by the time it came")
                    return
                call.say("ok", token=held.token, at=at)
                self.count("guard")
                time.sleep(dice.uniform(0.0, 0.1))
                # No release: what `at_least` keeps is nobody's until then, so the claim ends with the last look.
                call.look(held)
        except EXPECTED as error:
            self.unless_ended(call, "guard", error)

    def permit(self, dice: random.Random) -> None:
        """One of few permits."""
        name, timeout = f"gate:{dice.randrange(GATES)}", dice.choice([0.3, 1.0, 2.0])
        call = self.history.invoke(self.place(name), "semaphore")
        try:
            with call.timed("semaphore", timeout):
                permit = self.router.semaphore(name, permits=PERMITS, ttl=_TTL).acquire(timeout=timeout)
        except EXPECTED as error:
            self.failed(call, "semaphore", error)
            return
        at = now()
        if permit.lost:
            call.say("unknown", note="lost by the time it came")
        else:
            call.say("ok", token=permit.token, at=at)
            self.count("semaphore")
        time.sleep(dice.uniform(0.0, 0.03))
        if call.look_ahead(permit):
            call.say("release")
        with suppress(*EXPECTED):
            permit.release()

    def stand(self, dice: random.Random) -> None:
        """One candidate of this process stands for election, leads for a while, and leaves."""
        if not self._standing.acquire(blocking=False):
            return
        try:
            name = f"election:{dice.randrange(ELECTIONS)}"
            with self.router.election(name, ttl=_TTL) as candidate:
                call = self.history.invoke(self.place(name), "election")
                try:
                    candidate.wait(timeout=0.5)
                except ShardError as error:
                    self.failed(call, "election", error)
                    return
                at, token = now(), candidate.token
                if token is None:
                    call.say("fail", note="another leads")
                    return
                call.say("ok", token=token, at=at)
                self.count("election")
                until = now() + dice.uniform(0.0, 1.0)
                while call.look(lambda: candidate.token != token) and now() < until:
                    time.sleep(0.05)
                call.say("release" if candidate.token == token else "lost")
        finally:
            self._standing.release()

    # -- fork -------------------------------------------------------------------------------------------------------

    def fork(self, dice: random.Random) -> None:
        """A child owns nothing and works on its own; its parent loses nothing."""
        self.hold_row(f"fork:{self.seed}", dice, body=self._fork)

    def _fork(self, _: Call, held: RowLock) -> None:
        child = os.fork()
        if not child:
            signal.alarm(_CHILD)
            os._exit(self._in_child(held))
        status = os.waitpid(child, 0)[1]
        code = os.waitstatus_to_exitcode(status)
        alive = "degraded"
        if not held.degraded:
            try:
                held.check()
                alive = "alive"
            except (LockLost, NotHeld) as error:
                alive = str(getattr(error, "reason", error))
        self.history.note("fork", self.place(str(held.key)), f"{code} {alive}")
        self.count("fork")

    def _in_child(self, held: RowLock) -> int:
        """0: right; 1: it owns the parent's lock; 2: a lock of its own is wrong."""
        try:
            if not held.lost:
                return 1
            held.release()  # does nothing here
            if is_green(self.seed):
                return 0  # whoever waits in this child lets the parent's other greenlets run here, too
            with self.router.lock(f"child:{os.getpid()}", timeout=1.0) as own:
                return 0 if own.degraded or not own.lost else 2
        except (LockLost, LockTimeout, ShardError):
            return 0
