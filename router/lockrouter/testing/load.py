"""A mixed load on the locks of one shard file from several processes, each of them under the proof of exclusion.

`Fleet` starts the processes; each runs this module, speaks JSON lines on stdout, begins at the line `go` on stdin and
ends when stdin does: a fleet whose starter was killed ends too.
"""

from __future__ import annotations

import random
import select
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import msgspec

from lockrouter import LockRouter
from lockrouter.errors import LockLost, LockRouterError, LockTimeout, ShardUnavailable
from lockrouter.rowlock import RowLock
from lockrouter.testing.exclusion import Histogram, Proof, Words
from lockrouter.tokens import parts

__all__ = ["Figures", "Plan", "Report", "ShardReport", "outages", "work"]

_AFTER_REFUSAL = 0.02


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What one process of the load does; durations in seconds."""

    shards: str
    """The shard file."""
    folder: str
    """Where the proof lies; the same for all processes."""
    threads: int = 8
    hot: int = 16
    """Keys that share `hot_share` of the calls."""
    cold: int = 2000
    hot_share: float = 0.5
    prefixes: tuple[str, ...] = ("account:",)
    """Keys begin with these in turn."""
    hold: float = 0.004
    """Holds are spread between nothing and this."""
    timeout: float = 2.0
    every: float = 0.5
    """Between two reports."""
    unlocked: bool = False
    """Take no locks at all: shows that the proof notices."""

    @property
    def keys(self) -> int:
        """How many keys, and counters, there are."""
        return self.hot + self.cold

    def key(self, number: int) -> str:
        """The key of a counter."""
        return f"{self.prefixes[number % len(self.prefixes)]}{number}"


class Figures(msgspec.Struct):
    """How the calls for one shard ended."""

    acquired: int = 0
    degraded: int = 0
    busy: int = 0
    refused: int = 0
    errors: int = 0
    lost: int = 0
    undegraded: int = 0
    """Locks asked for and granted while the server was down, yet not marked degraded."""
    waits: Histogram = msgspec.field(default_factory=Histogram)
    """Of the calls that got a lock."""

    @property
    def granted(self) -> int:
        """Calls that got a lock of either kind."""
        return self.acquired + self.degraded

    @property
    def calls(self) -> int:
        """All calls."""
        return self.granted + self.busy + self.refused + self.errors

    def add(self, other: Figures) -> None:
        """Add what another one has counted."""
        for name in ("acquired", "degraded", "busy", "refused", "errors", "lost", "undegraded"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.waits.add(other.waits)


class ShardReport(msgspec.Struct):
    """One shard as one process sees it."""

    state: str
    breaker: str
    busy: int
    idle: int
    figures: Figures


class Report(msgspec.Struct):
    """All a process says, in full each time."""

    shards: dict[str, ShardReport]
    problems: dict[str, int]
    """Unexpected errors, by their text."""
    local_lost: int = 0
    """Increments of this process's own counters that were lost: degraded locks must exclude inside a process."""
    threads_left: tuple[str, ...] = ()
    done: bool = False


def outages(folder: str, shards: int) -> Words:
    """A word per shard in the proof's folder: 0 until its server is touched, odd while it is certainly down."""
    return Words(Path(folder, "outages.bin"), shards)


class _Caller:
    """One thread's loop and its figures."""

    def __init__(self, load: _Load) -> None:
        self._load = load
        self._random = random.Random()
        self.figures = {name: Figures() for name in load.shards}
        self.problems: dict[str, int] = {}
        self.added = 0

    def run(self) -> None:
        try:
            while not self._load.ending.is_set():
                self._call()
        except Exception as error:
            self._problem(error)
            raise

    def _problem(self, error: BaseException | str) -> None:
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.problems[text] = self.problems.get(text, 0) + 1

    def _call(self) -> None:
        load, plan, chance = self._load, self._load.plan, self._random
        number = chance.randrange(*((plan.hot,) if chance.random() < plan.hot_share else (plan.hot, plan.keys)))
        if plan.unlocked:
            load.proof.increment(number, pause=chance.random() * plan.hold)
            return
        shard = load.shard_of[number]
        figures, at = self.figures[shard], load.shards.index(shard)
        down = load.outages.view[at]
        began = time.monotonic()
        try:
            handle = load.router.lock(plan.key(number), plan.timeout)
        except LockTimeout:
            figures.busy += 1
        except ShardUnavailable as error:
            figures.refused += 1
            if not load.outages.view[at]:
                self._problem(error)
            load.ending.wait(_AFTER_REFUSAL)
        except LockRouterError as error:
            figures.errors += 1
            self._problem(error)
            load.ending.wait(_AFTER_REFUSAL)
        else:
            figures.waits.record(time.monotonic() - began)
            figures.undegraded += down & 1 and down == load.outages.view[at] and not handle.degraded
            self._hold(handle, number, figures)

    def _hold(self, handle: RowLock, number: int, figures: Figures) -> None:
        load = self._load
        pause = self._random.random() * load.plan.hold
        try:
            with handle:
                mine = load.mine[number]
                if handle.degraded:
                    figures.degraded += 1
                    time.sleep(pause)
                else:
                    figures.acquired += 1
                    step = load.proof.increment(number, token=handle.token, pause=pause)
                    if not step.rising:
                        self._problem(f"token {parts(handle.token)} after {parts(step.before)}")
                load.mine[number] = mine + 1
                self.added += 1
        except LockLost:
            figures.lost += 1


class _Load:
    """Everything of one process of the load."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.router = LockRouter.from_file(plan.shards)
        self.proof = Proof(plan.folder, plan.keys)
        self.shards = list(self.router.health())
        self.outages = outages(plan.folder, len(self.shards))
        self.shard_of = [self.router.route(plan.key(number)).shard for number in range(plan.keys)]
        self.mine = [0] * plan.keys
        self.ending = threading.Event()
        self.callers = [_Caller(self) for _ in range(plan.threads)]

    def report(self) -> Report:
        shards, problems = {}, Counter[str]()
        for name, health in self.router.health().items():
            figures = Figures()
            for caller in self.callers:
                figures.add(caller.figures[name])
            pool = health["pool"]
            shards[name] = ShardReport(health["state"], health["breaker"], pool["busy"], pool["idle"], figures)
        for caller in self.callers:
            problems.update(dict(caller.problems))
        return Report(shards, dict(problems))

    def end(self, threads: list[threading.Thread]) -> Report:
        self.ending.set()
        for thread in threads:
            thread.join(self.plan.timeout + 10.0)
        self.router.close()
        self.proof.close()
        self.outages.close()
        report = self.report()
        report.local_lost = sum(caller.added for caller in self.callers) - sum(self.mine)
        left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        report.threads_left = tuple(left)
        report.done = True
        return report


def work(plan: Plan) -> None:
    """Run one process of the load: report once, begin at `go`, report every while, end with stdin."""
    load = _Load(plan)
    load.router.warm()
    _say(load.report())
    threads = [threading.Thread(target=caller.run, name=f"caller-{i}") for i, caller in enumerate(load.callers)]
    if sys.stdin.readline().strip() == "go":
        for thread in threads:
            thread.start()
        while not select.select([sys.stdin], [], [], plan.every)[0]:
            _say(load.report())
    _say(load.end([thread for thread in threads if thread.ident is not None]))


def _say(report: Report) -> None:
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    work(msgspec.json.decode(sys.argv[1], type=Plan))
