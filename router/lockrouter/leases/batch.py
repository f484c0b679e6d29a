"""One batch of a lane: the items of several callers, carried out by whoever drives it at the moment.

A batch is an operation of its own with its own pending effect, so it can change hands between two effects: the caller
whose deadline comes goes, and the background goes on from the very byte where it stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lockrouter.deadline import now
from lockrouter.leases.rows import Answer, Item, Said, Verb
from lockrouter.leases.store import CONTENDED, Store
from lockrouter.protocol.effects import RECEIVE, SEND, TALK, Effect, Operation
from lockrouter.session import Answered, Gone, Silent

__all__ = ["Batch", "carry_out"]

_log = logging.getLogger("lockrouter")

_ROUNDS = 12


def carry_out(store: Store, items: Sequence[Item], until: float, suspects: set[bytes]) -> Operation[None]:
    """Give each item its answer, whatever the others meet.

    1. Releases first, then renewals, then acquisitions, then readings; each kind is one call of the store.
    2. Rows that were found locked a moment ago (`suspects`) are looked at first, and left out while they are.
    3. Where others' locks made part of a call fail, its rows are looked at without waiting: those that are locked are
       `LOCKED`, and the rest is repeated; if none is seen to be locked, it is repeated in halves. A row that fails
       alone is `LOCKED`.
    """
    verbs = {item.verb for item in items}
    for verb in sorted(verbs):
        mine = [item for item in items if item.verb is verb] if len(verbs) > 1 else list(items)
        if verb is Verb.READ:
            _settle(mine, (yield from store.read(mine, until)))
            continue
        watched = [item for item in mine if item.row.k in suspects] if suspects else None
        if watched:
            mine = yield from _leave_out_locked(store, watched, mine, until, suspects)
        todo, rounds = [mine] if mine else [], 0
        while todo:
            part, rounds = todo.pop(), rounds + 1
            failed = _settle(part, (yield from _call(store, verb, part, until)))
            if failed and len(part) > 1:
                _tell_early(part)
            if len(failed) == 1 or rounds > _ROUNDS:
                suspects.update(item.row.k for item in failed)
                _answer(failed, Said.LOCKED)
            elif failed:
                free = yield from _leave_out_locked(store, failed, failed, until, suspects)
                half = (len(free) + 1) // 2 if len(free) == len(failed) else len(free)
                todo += [half_of for half_of in (free[half:], free[:half]) if half_of]


def _call(store: Store, verb: Verb, items: Sequence[Item], until: float) -> Operation[list[Answer]]:
    if verb is Verb.ACQUIRE:
        return store.acquire(items, until)
    return store.release(items, until) if verb is Verb.RELEASE else store.renew(items, until)


def _leave_out_locked(
    store: Store, looked_at: Sequence[Item], items: Sequence[Item], until: float, suspects: set[bytes]
) -> Operation[list[Item]]:
    locked = yield from store.locked(looked_at, until)
    suspects.difference_update(item.row.k for item in looked_at)
    suspects.update(locked)
    _answer([item for item in items if item.row.k in locked], Said.LOCKED)
    return [item for item in items if item.row.k not in locked]


def _answer(items: Sequence[Item], answer: Answer) -> None:
    for item in items:
        item.answer = answer
        item.settled = True


def _settle(items: Sequence[Item], answers: Sequence[Answer]) -> list[Item]:
    """Note the answers; returns the items that others' locks kept from one."""
    failed = []
    for item, answer in zip(items, answers, strict=True):
        if isinstance(answer, Answered) and answer.code in CONTENDED:
            failed.append(item)
        else:
            item.answer = answer
            item.settled = True
    return failed


def _tell_early(items: Sequence[Item]) -> None:
    """Let those go that have their answers, while the rest takes longer."""
    for item in items:
        if item.settled:
            item.done = True
            item.waiter.wake()


class Batch:
    """Items of one lane on their way; at any moment one caller, or the background, drives it."""

    def __init__(self, store: Store, items: list[Item], suspects: set[bytes]) -> None:
        self.items = items
        # Who drives it, or is to; None: the background.
        self.leader: Item | None = items[0]
        self.begun = False
        # When somebody last got it on: a leader that vanished leaves it standing.
        self.touched = now()
        self._store = store
        self._suspects = suspects
        self._operation: Operation[None] | None = None
        self._effect: Effect | None = None

    def drive(self, until: float) -> Operation[bool]:
        """Go on until every item has its answer or error (True); False: somebody else has to go on.

        That is so when `until` comes while the server is silent, and when the leader's own item is answered already.

        Raises:
            What interrupts the driver; the connection is closed then, and the items have what they had.
        """
        try:
            if self._operation is None:
                self.begun = True
                self._operation = carry_out(self._store, self.items, until, self._suspects)
                self._effect = self._operation.send(None)
            while True:
                assert self._effect is not None
                self.touched = now()
                value, error = yield from self._perform(self._effect, until)
                if error is None and value is _LATE:
                    return False
                step = self._operation
                self._effect = step.throw(error) if error is not None else step.send(value)
                if self.leader is not None and self.leader.done:
                    return False
        except StopIteration:
            pass
        except (Gone, Silent, Answered) as failure:
            self._fail(failure)
        except Exception as failure:  # noqa: BLE001 - every member must hear of it, not the leader alone
            _log.exception("a batch of leases failed")
            self._fail(failure)
        except BaseException:
            if self._operation is not None:
                self._operation.close()
            raise
        return True

    def stop(self) -> bool:
        """Close the connection under an operation nobody drives any more; False: somebody does."""
        if self._operation is not None:
            try:
                self._operation.close()
            except ValueError:  # it runs at this very moment
                return False
        return True

    def _perform(self, effect: Effect, until: float) -> Operation[tuple[Any, Exception | None]]:
        kind, subject, detail = effect
        try:
            if kind == TALK:
                data, end, _ = detail
                yield (SEND, subject, data)
                # Should the driver change now, the next one waits for the reply and sends nothing again.
                kind, detail = RECEIVE, end
                self._effect = (kind, subject, detail)
            if kind != RECEIVE:
                return (yield effect), None
            try:
                return (yield (RECEIVE, subject, min(detail, until))), None
            except TimeoutError:
                if now() < detail and until < detail:
                    return _LATE, None
                raise
        except Exception as error:  # noqa: BLE001 - thrown into the operation, which decides
            return None, error

    def _fail(self, error: Exception) -> None:
        for item in self.items:
            if not item.settled:
                item.error = error


_LATE = object()
