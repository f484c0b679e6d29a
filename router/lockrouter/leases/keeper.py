"""What the background does for leases: renewing them in time, saying in time that they are lost, freeing what was left.

1. One heap for all leases of a router, one task that looks at it. An entry has one moment in it at a time: when its
   renewal is due, a third of its ttl after the last, or when it counts as lost. Moments of renewal lie on a grid, so
   that those of many leases come together; those of loss do not.
2. What is due is renewed by one task per shard, in batches, on a connection of its own: no lock of a row, no caller and
   no full pool stands before it. An answer counts for the statement it belongs to, sent when that was sent.
3. No answer: the entry keeps its deadline, and is due again soon. Refused: lost, and that is final.
4. A tombstone is an owner id nobody uses any more, whose requests may still be on their way: it is released, again and
   again with growing pauses, until its ttl has passed. It is never renewed.

Keyed by acquisition, never by key. Nothing is armed before a handle is given out, and nothing after it was taken back.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import random
import threading
from typing import TYPE_CHECKING

from lockrouter.deadline import now
from lockrouter.errors import LossReason
from lockrouter.leases.entry import Entry
from lockrouter.leases.renewer import Renewer
from lockrouter.leases.store import SqlStore
from lockrouter.protocol.effects import SLEEP, Operation
from lockrouter.watcher import Task

if TYPE_CHECKING:
    from lockrouter.leases.service import Leases
    from lockrouter.shard import Shard
    from lockrouter.sql.leases import Wanted
    from lockrouter.watcher import Watcher

__all__ = ["Keeper"]

_log = logging.getLogger("lockrouter")

_GRID = 0.25
_REST = 60.0
_SWEEP_EVERY = 5.0
_TICK = 0.005


class Keeper:
    """The background of the leases of one router."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int, Entry]] = []
        self._order = itertools.count()
        self._offset = random.random()
        self._renewers = {shard.id: Renewer(leases, shard) for shard in leases.shards.values()}
        self._watcher: Watcher | None = None
        self._timer: Task | None = None
        self._wakes_at = self._sweeps_at = 0.0

    def tasks(self, watcher: Watcher) -> list[Task]:
        """The endless operations, to be run by `watcher`."""
        self._watcher = watcher
        self._timer = Task("lockrouter-leases", self._time)
        return [self._timer, *(task for each in self._renewers.values() for task in (each.renewing, each.finishing))]

    def _poke(self, task: Task | None) -> None:
        if self._watcher is not None and task is not None:
            self._watcher.poke(task)

    def watch(self, entry: Entry) -> None:
        """From now on the entry is renewed, where that is wanted, and found lost in time."""
        over_at = entry.over_at
        if entry.keep_alive:
            # A grid of its own per process, so that many processes do not come together.
            grid = min(_GRID, entry.ttl / 30)
            due = entry.deadline - entry.ttl * 2 / 3
            over_at = min(over_at, math.floor((due - self._offset) / grid) * grid + self._offset)
        if entry.kill_at is not None:
            over_at = min(over_at, entry.kill_at)
        self.arm(entry, over_at)

    def arm(self, entry: Entry, when: float) -> None:
        """Look at the entry then, and not before; whatever was to be looked at earlier is forgotten."""
        with self._lock:
            entry.next_at = when
            heapq.heappush(self._heap, (when, next(self._order), entry))
            sooner = when < self._wakes_at
            if sooner:
                self._wakes_at = when
        if sooner:
            self._poke(self._timer)

    def bury(self, shard: Shard, table: int, row: Wanted, ttl: float, *, not_before: float = 0.0) -> None:
        """Release this owner id, again and again, until `ttl` has passed."""
        renewer = self._renewers[shard.id]
        renewer.bury(table, row, ttl, not_before)
        self._poke(renewer.renewing)

    def adopt(self, shard: Shard) -> None:
        """A lane of the shard has a batch whose leader had to go."""
        self._poke(self._renewers[shard.id].finishing)

    def tombs(self) -> int:
        """How many owner ids are still being released."""
        return sum(len(renewer.tombs) for renewer in self._renewers.values())

    def flush(self, until: float) -> None:
        """Wait, until then, for each tombstone to have been sent once; only where the background runs."""
        pause = threading.Event()
        while self._watcher is not None and now() < until:
            tombs = [tomb for renewer in self._renewers.values() for tomb in tuple(renewer.tombs.values())]
            if all(tomb.tries for tomb in tombs):
                return
            pause.wait(0.005)

    def stores(self) -> list[SqlStore]:
        """The connections' owners."""
        return [renewer.store for renewer in self._renewers.values()]

    def close(self) -> None:
        """Close every connection. Idempotent."""
        for renewer in self._renewers.values():
            renewer.store.shut()

    def _time(self) -> Operation[None]:
        while True:
            self._leases.reap()
            if now() >= self._sweeps_at:
                self._sweeps_at = now() + _SWEEP_EVERY
                self._leases.sweep()
            for entry in self._take_due():
                self._look_at(entry)
            with self._lock:
                soonest = self._heap[0][0] if self._heap else now() + _REST
                soonest = min(soonest, self._sweeps_at)
                self._wakes_at = max(soonest, now() + _TICK)
            yield (SLEEP, self._wakes_at, None)

    def _take_due(self) -> list[Entry]:
        due, at = [], now()
        with self._lock:
            while self._heap and self._heap[0][0] <= at:
                when, _, entry = heapq.heappop(self._heap)
                if entry.held and entry.next_at == when:
                    due.append(entry)
        return due

    def _look_at(self, entry: Entry) -> None:
        at = now()
        if at >= entry.over_at:
            self._leases.lose(entry, LossReason.EXPIRED)
            return
        if entry.kill_at is not None and at >= entry.kill_at:
            self._leases.lose(entry, LossReason.KILLED)
            return
        if entry.overdue_at is not None and at >= entry.overdue_at:
            entry.overdue_at = None
            _log.warning("the lease of key %s is held for half its max_hold", self._leases.shown(entry.key))
        if entry.handle is not None and entry.handle() is None:
            self._leases.drop(entry)
            return
        self.arm(entry, entry.over_at)
        if entry.keep_alive and not entry.renewing:
            renewer = self._renewers[entry.shard.id]
            entry.renewing = True
            renewer.due.append(entry)
            self._poke(renewer.renewing)
