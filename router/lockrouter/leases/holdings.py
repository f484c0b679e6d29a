"""The leases a router holds, and what becomes of them: released, renewed, lost, given up.

Everything here is a block under one mutex, or follows one; nothing does I/O. Lost is final, and told once.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from lockrouter.deadline import now
from lockrouter.errors import LossReason
from lockrouter.leases import giving
from lockrouter.leases.entry import TELL_EARLIER, Entry
from lockrouter.leases.queues import Queues
from lockrouter.leases.rows import Answer, Said, Seen

if TYPE_CHECKING:
    from lockrouter.leases.keeper import Keeper
    from lockrouter.shard import Shard
    from lockrouter.sql.leases import Wanted

__all__ = ["Holdings", "OwnerIds"]

_log = logging.getLogger("lockrouter")


class OwnerIds:
    """Random ids of 16 bytes, fetched many at a time."""

    def __init__(self) -> None:
        self._ready: deque[bytes] = deque()

    def new(self) -> bytes:
        """One that nobody else has, anywhere."""
        try:
            return self._ready.popleft()
        except IndexError:
            many = os.urandom(16 * 64)
            self._ready.extend(many[at : at + 16] for at in range(16, len(many), 16))
            return many[:16]


class Holdings:
    """What the leases of one router are, without the ways to get them."""

    keeper: Keeper
    shown: Callable[[bytes], str]

    def __init__(self) -> None:
        self.queues = Queues()
        self._lock = threading.Lock()
        # By owner id: each acquisition that is held.
        self.entries: dict[bytes, Entry] = {}
        # Taken out, and not yet freed on the server.
        self._leaving: set[Entry] = set()
        # Whose question is on its way: it may be granted yet.
        self.asking: set[object] = set()
        # What dropped handles held.
        self.orphans: deque[Entry] = deque()
        # Of this object alone: a forked child has another, and so none of the ids its parent would use next.
        self.owner_ids = OwnerIds()

    def add(self, entry: Entry) -> None:
        """An acquisition is held from now on."""
        with self._lock:
            self.entries[entry.row.owner] = entry

    def drop(self, entry: Entry | None) -> None:
        """Give up a lease without waiting: a tombstone frees its row."""
        if entry is not None and self.take_out(entry):
            self.bury_entry(entry)
            self.left(entry)

    def let_be(self, entry: Entry) -> LossReason | None:
        """Hold a lease no more, without freeing its row: it ends by itself. Why it had been lost by then, or None."""
        if self.loss_of(entry) is not None or not self.take_out(entry):
            return entry.lost
        entry.shard.stats.lease.released(now() - entry.granted_at)
        self.left(entry)
        return None

    def reap(self) -> None:
        """Give up what dropped handles held."""
        while self.orphans:
            try:
                self.drop(self.orphans.popleft())
            except IndexError:
                return

    def sweep(self) -> None:
        """Give up what nobody has a handle of any more: an interrupt may have hit the finaliser itself."""
        for entry in (*tuple(self.entries.values()), *tuple(self._leaving)):
            if entry.handle is not None and entry.handle() is None:
                self.drop(entry)
                self.left(entry)
        self.queues.mend(self._leaving)

    def take_out(self, entry: Entry) -> bool:
        """Under the mutex: the entry is released; False: it was already, or is lost."""
        with self._lock:
            if not entry.held:
                return False
            entry.released = True
            self.entries.pop(entry.row.owner, None)
            self._leaving.add(entry)
            return True

    def left(self, entry: Entry) -> None:
        """What could be done about a released lease is done: whoever waits for it here may ask."""
        self._leaving.discard(entry)
        self.queues.freed(entry)

    @property
    def busy(self) -> bool:
        """True while anything is held, or on its way to be granted or freed."""
        return bool(self.entries or self._leaving or self.asking)

    def loss_of(self, entry: Entry) -> LossReason | None:
        """Why a lease is lost, by what is known and by the clock, or None; no I/O."""
        if entry.held and now() >= entry.over_at:
            self.lose(entry, LossReason.EXPIRED)
        return entry.lost

    def lose(self, entry: Entry, reason: LossReason) -> bool:
        """Mark a held lease as lost, for ever, and tell; False: it was not held any more."""
        with self._lock:
            if not entry.held:
                return False
            entry.lost = reason
            self.entries.pop(entry.row.owner, None)
            handle = entry.handle() if entry.handle is not None else None
            callbacks = () if handle is None else handle.callbacks
        entry.shard.stats.count_lost("lease", reason.value)
        _log.warning("lease lost: key %s on shard %s: %s", self.shown(entry.key), entry.shard.id, reason.value)
        for callback in callbacks:
            try:
                threading.Thread(target=callback, args=(reason,), name="lockrouter-on-lost", daemon=True).start()
            except RuntimeError:
                _log.exception("no thread could be started to tell a holder of its loss")
        self.bury_entry(entry)
        self.queues.freed(entry)
        return True

    def subscribe(self, entry: Entry, callback: Callable[[LossReason], object]) -> LossReason | None:
        """Have `callback` called when the lease is lost; the reason if it is, and nothing will be called then.

        Its handle keeps the callback: one that refers to the handle must not keep it from being dropped.
        """
        with self._lock:
            handle = entry.handle() if entry.handle is not None else None
            if entry.held and handle is not None:
                handle.callbacks += (callback,)
            return entry.lost

    def renewed(self, entry: Entry, answer: Answer, sent_at: float, ttl: float) -> LossReason | None:
        """Take note of the answer to one renewal sent at `sent_at`; why the lease is lost by it, or None.

        Nothing revives: an entry that is out, or past its own deadline, keeps what it has.
        """
        reason = giving.loss_in(entry, answer)
        if reason is not None or answer is Said.LOCKED or isinstance(answer, Exception):
            return reason
        left = min(ttl, answer.left) if isinstance(answer, Seen) else ttl
        with self._lock:
            if not entry.held or now() >= entry.over_at:
                return None
            entry.deadline = max(entry.deadline, sent_at + left)
            entry.ttl = ttl
        return None

    def bury(self, shard: Shard, table: int, row: Wanted, ttl: float) -> None:
        """Have the background release, by owner id, whatever may still be granted to it, until `ttl` has passed."""
        self.keeper.bury(shard, table, row, ttl)

    def bury_entry(self, entry: Entry) -> None:
        """As `bury`, for a lease that was held; one that expired is its holder's up to the last moment."""
        later = min(entry.deadline, now() + TELL_EARLIER) if entry.lost is LossReason.EXPIRED else 0.0
        self.keeper.bury(entry.shard, entry.table, entry.row, entry.ttl, not_before=later)
