"""The four verbs on stored leases, and their one real implementation: a connection of its own to a shard.

`acquire` takes free rows (new, released or expired ones), `renew` prolongs, `release` frees, `read` looks. The
algorithms above know nothing of SQL, the statements nothing of waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

from lockrouter.deadline import now
from lockrouter.leases.rows import Answer, Item, Said, Seen
from lockrouter.protocol.effects import Operation
from lockrouter.protocol.packets import Err, Ok, Reply, Rows
from lockrouter.session import Answered, Gone, Session, Silent, State
from lockrouter.sql import leases as sql
from lockrouter.sql.leases import Wanted
from lockrouter.sql.statements import Dialect, bucket_state, read_bucket

if TYPE_CHECKING:
    from lockrouter.shard import Shard

__all__ = ["CONTENDED", "SqlStore", "Store"]

CONTENDED = frozenset({1020, 1205, 1213})
"""Errors of a row that somebody else has locked, or of a deadlock: nothing was changed, and another try may do."""
_IDLE_FOR = 300.0
_SERVER_WAIT = 2.0
"""Seconds a statement waits at most on the server: one for a row's lock, one for a metadata lock."""


class Store(Protocol):
    """Where leases are. Each verb answers for its items in their order; all items of a call have the verb's kind.

    `until` bounds connecting alone. An `Answered` of `CONTENDED` says that nothing was done for that item.

    Raises:
        Gone, Silent: what was done is not known; the connection is closed.
        Answered: no connection could be had.
    """

    def acquire(self, items: Sequence[Item], until: float) -> Operation[list[Answer]]: ...

    def renew(self, items: Sequence[Item], until: float) -> Operation[list[Answer]]: ...

    def release(self, items: Sequence[Item], until: float) -> Operation[list[Answer]]: ...

    def read(self, items: Sequence[Item], until: float) -> Operation[list[Answer]]: ...

    def locked(self, items: Sequence[Item], until: float) -> Operation[set[bytes]]:
        """The digests of those rows that somebody has locked just now; never waits for them."""

    def rest(self) -> None:
        """Let go of a connection that nobody has used for long; not while a verb is on its way."""


class SqlStore:
    """The leases of one shard through one connection, which is opened when it is first needed."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._skew_us = int(shard.config.router.clock_skew * 1_000_000)
        self.session: Session | None = None
        self._shut = False

    def acquire(self, items: Sequence[Item], until: float) -> Operation[list[Answer]]:
        """As `Store.acquire`: one INSERT per table in one transaction, then one SELECT that says whose the rows are.

        What the others hold is read by a second SELECT.
        """
        session = yield from self._ready(until)
        groups = _by_table(items)
        packets = [sql.take(session.dialect, table, _rows(group), self._skew_us) for table, group in groups]
        whose = sql.owners([(table, _rows(group)) for table, group in groups])
        *written, found = yield from self._ask(session, items, [*_at_once(packets), whose])
        refused = next((reply for reply in (*written, found) if isinstance(reply, Err)), None)
        trouble = None if refused is None else Answered(refused.code, refused.message)
        answers = _granted(items, found)
        others = [item for item in items if id(item) not in answers]
        if others:
            (reply,) = yield from self._ask(session, (), [_find(_by_table(others))])
            for item, answer in zip(others, _read(others, reply), strict=True):
                # A statement that failed may have undone the others; what is somebody's for certain is so all the same.
                certain = isinstance(answer, Seen) and answer.free_in(self._skew_us / 1e6) > 0
                answers[id(item)] = answer if certain or trouble is None else trouble
        return [answers[id(item)] for item in items]

    def renew(self, items: Sequence[Item], until: float) -> Operation[list[Answer]]:
        """As `Store.renew`: one UPDATE per table; where it did not change every row, a SELECT says which."""
        return self._change(items, until, sql.keep)

    def release(self, items: Sequence[Item], until: float) -> Operation[list[Answer]]:
        """As `Store.release`: as `renew`."""
        return self._change(items, until, sql.free)

    def read(self, items: Sequence[Item], until: float) -> Operation[list[Answer]]:
        """As `Store.read`: one SELECT, which locks nothing."""
        session = yield from self._ready(until)
        (found,) = yield from self._ask(session, (), [_find(_by_table(items))])
        return _read(items, found)

    def locked(self, items: Sequence[Item], until: float) -> Operation[set[bytes]]:
        """As `Store.locked`: what a plain SELECT finds and SKIP LOCKED does not."""
        session = yield from self._ready(until)
        packets = [sql.find_unlocked(table, _rows(group)) for table, group in _by_table(items)]
        replies = yield from self._ask(session, (), packets, each=2)
        digests = [{row[0] or b"" for row in reply.rows} if isinstance(reply, Rows) else set() for reply in replies]
        return set().union(*(present - free for present, free in zip(digests[::2], digests[1::2], strict=True)))

    def moved(self, bucket: int, until: float) -> Operation[tuple[bool, str]]:
        """Whether this shard has the bucket open, and where it went as far as is known.

        Raises:
            Gone, Silent, Answered: it could not be read.
        """
        session = yield from self._ready(until)
        (reply,) = yield from self._ask(session, (), [read_bucket(bucket)])
        if isinstance(reply, Err):
            raise Answered(reply.code, reply.message)
        return bucket_state(reply)

    def rest(self) -> None:
        """As `Store.rest`."""
        if self.session is not None and now() - self.session.answered_at > _IDLE_FOR:
            self.close()

    def shut(self) -> None:
        """End the connection for good: verbs raise Gone from now on. Idempotent."""
        self._shut = True
        self.close()

    def close(self) -> None:
        """End the connection; the next verb opens another. Idempotent."""
        session, self.session = self.session, None
        if session is not None:
            session.close()

    def _ready(self, until: float) -> Operation[Session]:
        """The connection, looked at: nothing is sent into one that has ended, whose outcome nobody would know then."""
        session, rights = self.session, self._shard.rights
        if session is not None and (
            session.state is not State.IDLE
            or not session.drain()
            or (rights is not None and rights.incarnation != session.incarnation)
        ):
            self.close()
            session = None
        if session is None:
            if self._shut:
                raise Gone("the router is closed")
            session = yield from self._open(until)
            if self._shut:
                session.close()
                raise Gone("the router is closed")
            self.session = session
        return session

    def _open(self, until: float) -> Operation[Session]:
        at, patience = now(), self._shard.config.pool.connect_timeout
        try:
            return (yield from self._shard.open_for_leases(max(0.01, min(patience, until - at))))
        except (Gone, Silent) as error:
            # A shorter bound than usual says something of its caller, not of the shard.
            if isinstance(error, Gone) or until - at >= patience:
                self._shard.fault(error)
            raise

    def _ask(
        self, session: Session, items: Sequence[Item], packets: Sequence[bytes], *, each: int = 1
    ) -> Operation[list[Reply]]:
        """Send all packets in one train, and return their replies; `items` are those whose outcome hangs on it."""
        sent_at = now()
        for item in items:
            item.incarnation = session.incarnation
            if item.sent_at is None:
                item.sent_at = sent_at
        replies: list[Reply] = []
        packet, left = b"".join(packets), len(packets) * each
        patience = _SERVER_WAIT + self._shard.config.pool.connect_timeout
        try:
            while left:
                left -= 1
                replies.append((yield from session.exchange(packet, now() + patience, more=left > 0)))
                packet = b""
        except Gone:
            raise
        except BaseException as error:
            # What waits there may still be carried out, so it must not wait for long.
            self._shard.kill(session)
            if isinstance(error, Silent) and session.proven:
                self._shard.fault(error)
            raise
        session.state = State.IDLE
        return replies

    def _change(
        self, items: Sequence[Item], until: float, statement: Callable[[Dialect, int, list[Wanted]], bytes]
    ) -> Operation[list[Answer]]:
        session = yield from self._ready(until)
        groups = _by_table(items)
        packets = [statement(session.dialect, table, _rows(group)) for table, group in groups]
        replies = yield from self._ask(session, items, _at_once(packets))
        refused = next((reply for reply in replies if isinstance(reply, Err)), None)
        if refused is not None:
            return [Answered(refused.code, refused.message)] * len(items)
        if sum(reply.affected for reply in replies if isinstance(reply, Ok)) == len(items):
            return [Said.DONE] * len(items)
        (found,) = yield from self._ask(session, (), [_find(groups)])
        return _read(items, found)


def _at_once(packets: list[bytes]) -> list[bytes]:
    """The packets as one transaction: its one flush to the disk is what most of their time goes into."""
    return packets if len(packets) == 1 else [sql.BEGIN, *packets, sql.COMMIT]


def _rows(group: Sequence[Item]) -> list[Wanted]:
    return [item.row for item in group]


def _find(groups: Sequence[tuple[int, Sequence[Item]]]) -> bytes:
    return sql.find([(table, _rows(group)) for table, group in groups])


def _granted(items: Sequence[Item], reply: Reply) -> dict[int, Answer]:
    """The items, by identity, whose rows have their own owner by now."""
    if not isinstance(reply, Rows):
        return {}
    found = {(k, owner): int(token or b"0") for k, owner, token in reply.rows}
    granted: dict[int, Answer] = {}
    for item in items:
        row = item.row
        token = found.get((row.k, row.owner))
        if token is not None:
            granted[id(item)] = Seen(row.owner, token, row.kind, row.key, row.ttl / 1e6, 0.0, True)
    return granted


def _read(items: Sequence[Item], reply: Reply) -> list[Answer]:
    """What a reply to `sql.find` says of each item."""
    if not isinstance(reply, Rows):
        code, message = (reply.code, reply.message) if isinstance(reply, Err) else (0, "no rows came")
        return [Answered(code, message)] * len(items)
    found = {row[0]: _seen(row) for row in reply.rows}
    return [found.get(item.row.k) for item in items]


def _seen(row: tuple[bytes | None, ...]) -> Seen:
    _, owner, token, kind, key, left, term_left, epoch = (field or b"" for field in row)
    try:
        return Seen(owner, int(token), int(kind), key, int(left) / 1e6, int(term_left) / 1e6, epoch not in (b"", b"0"))
    except ValueError:
        raise Gone("the reply is not what was asked for", answered=True) from None


def _by_table(items: Sequence[Item]) -> list[tuple[int, list[Item]]]:
    """The items of each table, in the one order in which every batch of every process locks rows."""
    ordered = sorted(items, key=lambda item: (item.table, item.row.bucket, item.row.k))
    return [(table, list(group)) for table, group in groupby(ordered, key=lambda item: item.table)]
