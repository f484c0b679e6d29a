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
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from lockrouter.backoff import jittered
from lockrouter.deadline import now
from lockrouter.errors import LossReason
from lockrouter.leases.batch import carry_out
from lockrouter.leases.entry import Entry
from lockrouter.leases.lane import MAX_ROWS
from lockrouter.leases.rows import Item, Said, Seen, Verb
from lockrouter.leases.store import SqlStore
from lockrouter.protocol.effects import SLEEP, Operation
from lockrouter.session import Answered, Gone, Silent
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
_TICK = 0.005
_FIRST_PAUSE = 0.05


class Tomb:
    """An owner id to be released until `until`, whatever the server still grants to it."""

    __slots__ = ("buried_at", "next_at", "row", "table", "tries", "until")

    def __init__(self, table: int, row: Wanted, ttl: float) -> None:
        self.table = table
        self.row = row._replace(token=0, payload=b"")
        self.buried_at = self.next_at = now()
        self.until = self.buried_at + ttl
        self.tries = 0

    def sent(self) -> None:
        """Note that it was released just now: the next time in a while that grows with its age."""
        self.tries += 1
        age = now() - self.buried_at
        self.next_at = now() + jittered(max(_FIRST_PAUSE, min(age / 4, 30.0)))


class _Renewer:
    """What the background has to do on one shard."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.store = SqlStore(shard)
        self.due: deque[Entry] = deque()
        self.tombs: dict[bytes, Tomb] = {}
        self.suspects: set[bytes] = set()
        self.task: Task | None = None
        self.finisher: Task | None = None
        self.failures = 0


class Keeper:
    """The background of the leases of one router."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int, Entry]] = []
        self._order = itertools.count()
        self._offset = random.random()
        self._renewers = {shard.id: _Renewer(shard) for shard in leases.shards.values()}
        self._watcher: Watcher | None = None
        self._timer: Task | None = None
        self._wakes_at = 0.0

    def tasks(self, watcher: Watcher) -> list[Task]:
        """The endless operations, to be run by `watcher`."""
        self._watcher = watcher
        self._timer = Task("lockrouter-leases", self._time)
        tasks = [self._timer]
        for renewer in self._renewers.values():
            renewer.task = Task(f"lockrouter-{renewer.shard.id}-renew", self._for(renewer, self._renew))
            renewer.finisher = Task(f"lockrouter-{renewer.shard.id}-finish", self._for(renewer, self._finish))
            tasks += (renewer.task, renewer.finisher)
        return tasks

    def _for(self, renewer: _Renewer, make: Callable[[_Renewer], Operation[None]]) -> Callable[[], Operation[None]]:
        return lambda: make(renewer)

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
        self._arm(entry, over_at)

    def _arm(self, entry: Entry, when: float) -> None:
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
        tomb = Tomb(table, row, ttl)
        tomb.next_at = max(tomb.next_at, not_before)
        renewer.tombs[row.owner] = tomb
        self._poke(renewer.task)

    def hasten(self, shard: Shard, owner: bytes) -> None:
        """What was given up has just been granted after all: its tombstone is due."""
        renewer = self._renewers[shard.id]
        tomb = renewer.tombs.get(owner)
        if tomb is not None:
            tomb.next_at = now()
            self._poke(renewer.task)

    def adopt(self, shard: Shard) -> None:
        """A lane of the shard has a batch whose leader had to go."""
        self._poke(self._renewers[shard.id].finisher)

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
            for entry in self._take_due():
                self._look_at(entry)
            with self._lock:
                soonest = self._heap[0][0] if self._heap else now() + _REST
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
        self._arm(entry, entry.over_at)
        if entry.keep_alive and not entry.renewing:
            renewer = self._renewers[entry.shard.id]
            entry.renewing = True
            renewer.due.append(entry)
            self._poke(renewer.task)

    def _renew(self, renewer: _Renewer) -> Operation[None]:
        while True:
            entries = [renewer.due.popleft() for _ in range(min(MAX_ROWS, len(renewer.due)))]
            entries = [entry for entry in entries if entry.held]
            tombs = self._due_tombs(renewer)
            if entries:
                yield from self._renew_all(renewer, entries)
            if tombs:
                yield from self._release_all(renewer, tombs)
            if not renewer.due:
                soonest = min((tomb.next_at for tomb in renewer.tombs.values()), default=now() + _REST)
                yield (SLEEP, soonest if not renewer.failures else max(soonest, now() + _FIRST_PAUSE), None)

    def _renew_all(self, renewer: _Renewer, entries: list[Entry]) -> Operation[None]:
        items = [Item(Verb.RENEW, entry.table, entry.row) for entry in entries]
        failure = yield from self._carry_out(renewer, items)
        lost = renewed = failed = 0
        for entry, item in zip(entries, items, strict=True):
            entry.renewing = False
            if (
                not item.settled
                or failure is not None
                or item.answer is Said.LOCKED
                or isinstance(item.answer, Answered)
            ):
                failed += 1
                self._again_soon(entry)
                continue
            assert item.sent_at is not None
            reason = self._leases.renewed(entry, item.answer, item.sent_at, item.row.ttl / 1e6)
            if item.answer is not Said.DONE and (yield from self._moved(entry, item.answer)):
                failed += 1
                self._again_soon(entry)
            elif reason is not None:
                lost += 1
                self._leases.lose(entry, reason)
            else:
                renewed += 1
                if entry.held:
                    self.watch(entry)
        for outcome, count in (("renewed", renewed), ("lost", lost), ("failed", failed)):
            if count:
                renewer.shard.stats.renewed(outcome, count)

    def _moved(self, entry: Entry, answer: object) -> Operation[bool]:
        """Whether the row's bucket is closed here; then the entry follows it, as far as that is known."""
        if isinstance(answer, Seen) and answer.open:
            return False
        try:
            opened, target = yield from self._leases.whereabouts(entry.shard, entry.row.bucket, now() + 1.0)
        except Exception:  # noqa: BLE001 - nothing is known then, and nothing lost before its deadline
            return True
        shard = self._leases.shards.get(target)
        if shard is not None and not opened:
            entry.shard = shard
        return not opened

    def _again_soon(self, entry: Entry) -> None:
        if entry.held:
            self._arm(entry, min(entry.over_at, now() + jittered(min(0.5, entry.ttl / 20))))

    def _carry_out(self, renewer: _Renewer, items: list[Item]) -> Operation[Exception | None]:
        """Renew or release in the background; what went wrong, or None."""
        shard = renewer.shard
        refusal = shard.refusal
        if refusal is not None and not refusal.renews:
            return Silent(refusal.why)
        try:
            yield from carry_out(renewer.store, items, now() + shard.config.pool.connect_timeout, renewer.suspects)
        except (Gone, Silent, Answered) as error:
            if not renewer.failures:
                _log.warning("shard %s: leases could not be renewed: %s", shard.id, error)
            renewer.failures += 1
            return error
        except Exception as error:  # noqa: BLE001 - logged, and tried again
            # Whatever it was, these leases must come up again: nobody else renews them.
            _log.exception("shard %s: leases could not be renewed", shard.id)
            renewer.failures += 1
            return error
        renewer.failures = 0
        return None

    def _due_tombs(self, renewer: _Renewer) -> list[Tomb]:
        at, due = now(), []
        for owner, tomb in tuple(renewer.tombs.items()):
            if at > tomb.until and tomb.tries:
                renewer.tombs.pop(owner, None)
            elif at >= tomb.next_at:
                due.append(tomb)
        return due[:MAX_ROWS]

    def _release_all(self, renewer: _Renewer, tombs: list[Tomb]) -> Operation[None]:
        yield from self._carry_out(renewer, [Item(Verb.RELEASE, tomb.table, tomb.row) for tomb in tombs])
        for tomb in tombs:
            tomb.sent()

    def _finish(self, renewer: _Renewer) -> Operation[None]:
        lanes = self._leases.lanes(renewer.shard)
        while True:
            yield from lanes.taking.finish()
            yield from lanes.giving.finish()
            yield (SLEEP, now() + _REST, None)
