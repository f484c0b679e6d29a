"""Combining: callers that come while a statement of their lane is on its way form the next batch together.

1. The first caller of an idle lane leads: it carries out a batch of its own item, at once, with no delay.
2. Who comes meanwhile queues. When the batch ends, the queue's head is named the leader of all that fits into one
   batch, before anybody is told its result: the server is never idle while callers wait.
3. A caller whose deadline comes leaves: out of the queue, or out of the batch, whose answer for it is then an orphan's.
4. A leader whose deadline comes hands the batch, as it is, to the background.
5. A leader that is interrupted closes the connection. The items that have no answer yet queue again, first, marked as
   sent: whatever they ask for carries an owner id of their own, so asking again settles what the first asking did.
6. A leader that vanished without a word (an interrupt hit its own clean-up) is found by whoever comes next, when its
   batch has stood still for longer than any statement takes.
7. No thread, no timer: a lane that nobody uses is a few empty lists.

The pattern is flat combining (Hendler, Incze, Shavit, Tzafrir, 2010), with a leader per batch instead of one for ever.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from lockrouter.deadline import now
from lockrouter.leases.batch import Batch
from lockrouter.leases.rows import Item
from lockrouter.leases.store import Store
from lockrouter.protocol.effects import WAIT, Operation
from lockrouter.session import Gone

__all__ = ["MAX_BYTES", "MAX_ROWS", "Lane"]

MAX_ROWS = 256
MAX_BYTES = 128 * 1024
_ROW_BYTES = 200
_VANISHED_AFTER = 30.0
_AT_ONCE = 4
"""How many callers of an ended batch are woken by its leader; each wakes the next. All at once they would fight for the
interpreter, which costs more than their work (measured: a quarter of all CPU with 256 threads)."""
_LOOK_AGAIN = 1.0
"""Seconds after which a waiting caller looks for itself: a wake-up is a hint, an interrupt may have swallowed it."""


class Lane:
    """One connection to a shard, shared by all callers of some verbs.

    Args:
        orphan: told, without any mutex, of each item that got an answer nobody waits for.
        adopt: told that `finish` has work for the background.
    """

    def __init__(self, store: Store, orphan: Callable[[Item], None], adopt: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._store = store
        self._orphan = orphan
        self._adopt = adopt
        self._queue: deque[Item] = deque()
        self._current: Batch | None = None
        self._adopted: deque[Batch] = deque()
        self._suspects: set[bytes] = set()

    def submit(self, item: Item, until: float) -> Operation[bool]:
        """Have the item carried out; True: it has its answer or error; False: `until` came first.

        Then `item.sent_at` says whether the server may still do what was asked.
        """
        batch: Batch | None = None
        try:
            batch = self._join(item)
            while True:
                if batch is not None:
                    if (yield from batch.drive(until)):
                        self._ended(batch)
                    else:
                        self._hand_over(batch, item)
                    batch = None
                if item.done:
                    return True
                if now() >= until:
                    return self._leave(item)
                yield (WAIT, item.waiter, min(until, now() + _LOOK_AGAIN))
                if not item.done:
                    batch = self._named(item)
        except BaseException:
            self._interrupted(item, batch)
            raise
        finally:
            if item.next_to_wake is not None:
                item.next_to_wake.waiter.wake()

    def finish(self) -> Operation[None]:
        """In the background: carry to their ends the batches whose leaders had to go."""
        while self._adopted:
            batch = self._adopted.popleft()
            try:
                yield from batch.drive(float("inf"))
            finally:
                self._ended(batch)

    def rest(self) -> None:
        """Let go of a connection that nobody has used for long."""
        with self._lock:
            if self._current is None:
                self._store.rest()

    @property
    def idle(self) -> bool:
        """True while nothing is on its way."""
        return self._current is None

    def _join(self, item: Item) -> Batch | None:
        with self._lock:
            if self._current is not None and now() - self._current.touched > _VANISHED_AFTER and self._current.stop():
                self._dissolve(self._current)
            if self._current is not None:
                self._queue.append(item)
                return None
            self._current = Batch(self._store, [item], self._suspects)
            return self._current

    def _named(self, item: Item) -> Batch | None:
        """The batch this caller has been named the leader of, if it has."""
        with self._lock:
            if self._current is None:
                self._next()  # an interrupt hit whoever was to name one
            batch = self._current
            return batch if batch is not None and batch.leader is item and not batch.begun and not item.done else None

    def _next(self) -> None:
        """Under `_lock`: let the head of the queue lead what fits into one batch."""
        self._current = None
        queue = self._queue
        while queue and queue[0].done:
            queue.popleft()  # an interrupt came below, when they were in a batch, and still here
        items: list[Item] = []
        size = 0
        for item in queue:
            size += _ROW_BYTES + 2 * (len(item.row.key) + len(item.row.payload))
            if len(items) == MAX_ROWS or (items and size > MAX_BYTES):
                break
            items.append(item)
        if not items:
            return
        # In the batch first: what is in neither would wait for nobody.
        self._current = Batch(self._store, items, self._suspects)
        for _ in items:
            queue.popleft()
        items[0].waiter.wake()

    def _ended(self, batch: Batch) -> None:
        with self._lock:
            waiting, left = self._conclude(batch)
            if self._current is batch:
                self._next()
        self._tell(waiting, left)

    def _conclude(self, batch: Batch) -> tuple[list[Item], list[Item]]:
        """Under `_lock`: every item is done; those whose callers wait for it, and those whose callers have gone."""
        waiting = [item for item in batch.items if not item.left and not item.done]
        for item, later in zip(waiting, waiting[_AT_ONCE:], strict=False):
            item.next_to_wake = later
        for item in batch.items:
            if not item.settled and item.error is None:
                item.error = Gone("the batch was abandoned")
            item.done = True
        return waiting, [item for item in batch.items if item.left]

    def _tell(self, items: Sequence[Item], left: Sequence[Item]) -> None:
        for item in items[:_AT_ONCE]:
            item.waiter.wake()
        for item in left:
            self._orphan(item)

    def _hand_over(self, batch: Batch, item: Item) -> None:
        with self._lock:
            batch.leader = None
            self._adopted.append(batch)
        self._adopt()

    def _leave(self, item: Item) -> bool:
        """The caller goes; True: it had its answer in this very moment."""
        with self._lock:
            if item.done:
                return True
            item.left = True
            if item in self._queue:
                self._queue.remove(item)
            elif self._current is not None and self._current.leader is item and not self._current.begun:
                self._pass_on(self._current)
            return False

    def _pass_on(self, batch: Batch) -> None:
        """Under `_lock`: another member leads a batch that nobody has begun."""
        batch.items = [item for item in batch.items if not item.left]
        if batch.items:
            batch.leader = batch.items[0]
            batch.leader.waiter.wake()
        else:
            self._next()

    def _interrupted(self, item: Item, batch: Batch | None) -> None:
        """The caller goes, wherever it was: nothing may be left that waits for it."""
        if batch is None:
            batch = self._named(item)
        with self._lock:
            item.left = True
            if item in self._queue:
                self._queue.remove(item)
            if batch is None or batch in self._adopted:
                return
            if self._current is batch:
                left = [one for one in batch.items if one.left]
                answered = self._dissolve(batch)
            else:  # it had ended, and its end was interrupted
                _, left = self._conclude(batch)
                answered = batch.items
                for one in answered:
                    one.waiter.wake()
        self._tell(answered, left)

    def _dissolve(self, batch: Batch) -> list[Item]:
        """Under `_lock`: who has no answer queues again, first; returns those that have one, for they are done."""
        answered = [one for one in batch.items if one.settled or one.error is not None]
        again = [one for one in batch.items if one not in answered and not one.left]
        for one in answered:
            one.done = True
            one.waiter.wake()
        for one in again:
            if one in self._queue:
                self._queue.remove(one)
        self._queue.extendleft(reversed(again))
        self._next()
        return answered
