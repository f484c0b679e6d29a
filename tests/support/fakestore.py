"""A store of leases in memory, with faults on demand, for the logic above it; it obeys the rules of the real one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from lockrouter.deadline import now
from lockrouter.leases.rows import Answer, Item, Said, Seen, Verb
from lockrouter.protocol.effects import SLEEP, WAIT, Operation, Waiter
from lockrouter.session import Answered
from lockrouter.sql.leases import Wanted

__all__ = ["FakeStore", "item"]


def item(verb: Verb, name: str, owner: str = "", *, token: int = 0, ttl: float = 30.0) -> Item:
    """An item of a key; its owner id is as readable as the key."""
    k = name.encode().ljust(16, b".")
    return Item(verb, 0, Wanted(0, k, 1, name.encode(), (owner or name).encode(), token, int(ttl * 1e6), b""))


class FakeStore:
    """Rows by digest. `before` is called with each call's items and may raise; `rounds` effects pass inside a call."""

    def __init__(self) -> None:
        self.rows: dict[bytes, Seen] = {}
        self.calls: list[tuple[Verb, list[bytes]]] = []
        self.looks = 0
        self.rows_locked: set[bytes] = set()
        self.before: Callable[[Sequence[Item]], None] | None = None
        self.gate: Waiter | None = None
        """Each call waits for it, where there is one."""
        self.active = 0
        self._tokens = itertools.count(1)

    def acquire(self, items: Sequence[Item], until: float) -> Operation[list[Answer]]:
        return self._call(Verb.ACQUIRE, items, self._acquire)

    def renew(self, items: Sequence[Item], until: float) -> Operation[list[Answer]]:
        return self._call(Verb.RENEW, items, self._renew)

    def release(self, items: Sequence[Item], until: float) -> Operation[list[Answer]]:
        return self._call(Verb.RELEASE, items, self._release)

    def read(self, items: Sequence[Item], until: float) -> Operation[list[Answer]]:
        return self._call(Verb.READ, items, lambda row: self.rows.get(row.k))

    def locked(self, items: Sequence[Item], until: float) -> Operation[set[bytes]]:
        self.looks += 1
        yield (SLEEP, now(), None)
        return {one.row.k for one in items} & self.rows_locked

    def rest(self) -> None:
        """There is no connection to let go of."""

    def owner(self, name: str) -> str:
        """Who has a key; empty: nobody."""
        seen = self.rows.get(name.encode().ljust(16, b"."))
        return seen.owner.decode() if seen is not None else ""

    def _call(self, verb: Verb, items: Sequence[Item], one: Callable[[Wanted], Answer]) -> Operation[list[Answer]]:
        assert self.active == 0, "two calls on one connection"
        self.active += 1
        try:
            self.calls.append((verb, [each.row.key for each in items]))
            for each in items:
                each.sent_at = each.sent_at if each.sent_at is not None else now()
            if self.gate is not None:
                yield (WAIT, self.gate, now() + 10)
            else:
                yield (SLEEP, now(), None)
            if self.before is not None:
                self.before(items)
            if verb is not Verb.READ and {each.row.k for each in items} & self.rows_locked:
                return [Answered(1205, "Lock wait timeout exceeded")] * len(items)
            return [one(each.row) for each in items]
        finally:
            self.active -= 1

    def _acquire(self, row: Wanted) -> Answer:
        seen = self.rows.get(row.k)
        if seen is None or not seen.owner:
            self.rows[row.k] = Seen(row.owner, next(self._tokens), row.kind, row.key, row.ttl / 1e6, 0.0, True)
        return self.rows[row.k]

    def _mine(self, row: Wanted) -> bool:
        seen = self.rows.get(row.k)
        return seen is not None and seen.owner == row.owner and row.token in (0, seen.token)

    def _renew(self, row: Wanted) -> Answer:
        return Said.DONE if self._mine(row) else self.rows.get(row.k)

    def _release(self, row: Wanted) -> Answer:
        if not self._mine(row):
            return self.rows.get(row.k)
        self.rows[row.k] = self.rows[row.k]._replace(owner=b"", left=0.0)
        return Said.DONE
