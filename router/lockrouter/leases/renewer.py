"""What the background does for the leases of one shard, on its own connection: renewing, and freeing what is left."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from lockrouter.backoff import jittered
from lockrouter.deadline import now
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

__all__ = ["Renewer", "Tomb"]

_log = logging.getLogger("lockrouter")

_REST = 60.0
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


class Renewer:
    """One shard's part of the keeper."""

    def __init__(self, leases: Leases, shard: Shard) -> None:
        self._leases = leases
        self.shard = shard
        self.store = SqlStore(shard)
        # Entries to be renewed now, and owner ids to be released, by id.
        self.due: deque[Entry] = deque()
        self.tombs: dict[bytes, Tomb] = {}
        self._suspects: set[bytes] = set()
        self._failures = 0
        self.renewing = Task(f"lockrouter-{shard.id}-renew", self.work)
        self.finishing = Task(f"lockrouter-{shard.id}-finish", self.finish)

    def bury(self, table: int, row: Wanted, ttl: float, not_before: float) -> None:
        """Release this owner id, again and again, until `ttl` has passed."""
        tomb = Tomb(table, row, ttl)
        tomb.next_at = max(tomb.next_at, not_before)
        self.tombs[row.owner] = tomb

    def work(self) -> Operation[None]:
        """Renew and release what is due, for ever; to be poked when something is."""
        while True:
            entries = [self.due.popleft() for _ in range(min(MAX_ROWS, len(self.due)))]
            entries = [entry for entry in entries if entry.held]
            tombs = self._due_tombs()
            if entries:
                yield from self._renew_all(entries)
            if tombs:
                yield from self._release_all(tombs)
            if not self.due and not entries and not tombs:
                self.store.rest()
            if not self.due:
                soonest = min((tomb.next_at for tomb in self.tombs.values()), default=now() + _REST)
                yield (SLEEP, soonest if not self._failures else max(soonest, now() + _FIRST_PAUSE), None)

    def _renew_all(self, entries: list[Entry]) -> Operation[None]:
        items = [Item(Verb.RENEW, entry.table, entry.row) for entry in entries]
        yield from self._carry_out(items)
        lost = renewed = failed = 0
        for entry, item in zip(entries, items, strict=True):
            entry.renewing = False
            if not item.settled or item.answer is Said.LOCKED or isinstance(item.answer, Answered):
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
                    self._leases.keeper.watch(entry)
        for outcome, count in (("renewed", renewed), ("lost", lost), ("failed", failed)):
            if count:
                self.shard.stats.renewed(outcome, count)

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
            self._leases.keeper.arm(entry, min(entry.over_at, now() + jittered(min(0.5, entry.ttl / 20))))

    def _carry_out(self, items: list[Item]) -> Operation[None]:
        """Have the items renewed or released; those that are not settled afterwards met trouble."""
        shard = self.shard
        refusal = shard.refusal
        if refusal is not None and not refusal.renews:
            return
        try:
            yield from carry_out(self.store, items, now() + shard.config.pool.connect_timeout, self._suspects)
        except (Gone, Silent, Answered) as error:
            if not self._failures:
                _log.warning("shard %s: leases could not be renewed: %s", shard.id, error)
            self._failures += 1
        except Exception:  # noqa: BLE001 - these leases must come up again, whatever it was: nobody else renews them
            _log.exception("shard %s: leases could not be renewed", shard.id)
            self._failures += 1
        else:
            self._failures = 0

    def _due_tombs(self) -> list[Tomb]:
        at, due = now(), []
        for owner, tomb in tuple(self.tombs.items()):
            if at > tomb.until and tomb.tries:
                self.tombs.pop(owner, None)
            elif at >= tomb.next_at:
                due.append(tomb)
        return due[:MAX_ROWS]

    def _release_all(self, tombs: list[Tomb]) -> Operation[None]:
        yield from self._carry_out([Item(Verb.RELEASE, tomb.table, tomb.row) for tomb in tombs])
        for tomb in tombs:
            tomb.sent()

    def finish(self) -> Operation[None]:
        """Carry on the batches of callers who had to go, for ever; to be poked when there is one."""
        lanes = self._leases.lanes(self.shard)
        while True:
            yield from lanes.taking.finish()
            yield from lanes.giving.finish()
            lanes.taking.rest()
            lanes.giving.rest()
            yield (SLEEP, now() + _REST, None)
