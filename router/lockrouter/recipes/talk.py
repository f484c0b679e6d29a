"""Statements of recipes on a shard: one short transaction on one pooled session, in one go."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockrouter.acquire import as_shard_error
from lockrouter.deadline import GRACE, now
from lockrouter.errors import RouterClosed, ShardError, ShardUnavailable
from lockrouter.pool import Borrower, Exhausted, PoolClosed
from lockrouter.protocol.effects import WAIT, Operation, drive
from lockrouter.protocol.packets import Err, Ok, Reply
from lockrouter.session import Answered, Gone, Session, Silent, State, driver_error
from lockrouter.sql.recipes import COMMIT

if TYPE_CHECKING:
    from lockrouter.shard import Shard

__all__ = ["Refused", "patience", "talk"]


class Refused(Exception):
    """The server answered one of the statements with an error; nothing of them was committed."""

    def __init__(self, error: Err) -> None:
        super().__init__(error.message)
        self.code = error.code

    def as_shard_error(self, shard: Shard) -> ShardError:
        """The contract's error for it."""
        return as_shard_error(shard, Answered(self.code, str(self)))


def patience(shard: Shard, timeout: float) -> float:
    """The end, from now, of a question that may take `timeout` seconds, but is given the time to connect."""
    return now() + max(timeout, shard.config.pool.connect_timeout)


def talk(shard: Shard, packets: Sequence[bytes], until: float, *, commit: bool = False) -> list[Reply]:
    """Return the replies of all statements, which were one transaction of the shard's primary, committed if asked.

    A connection that fails is replaced, and all begins anew, until `until`: only for what may be repeated.

    Raises:
        Refused: a statement met an error of the server's.
        ShardError: the shard does not answer, or not as the primary it should be.
        RouterClosed: the router was closed meanwhile.
    """
    faults = 0
    while True:
        if not shard.breaker.closed:
            raise shard.refusal_error() or ShardUnavailable(
                f"does not answer, its breaker is open: {shard.cause}", shard=shard.id
            ) from shard.cause
        try:
            return drive(_talk(shard, packets, until, commit=commit))
        except PoolClosed:
            raise RouterClosed("the router is closed") from None
        except (Gone, Silent) as error:
            faults += 1
            if faults > shard.config.breaker.retries or now() >= until:
                raise as_shard_error(shard, error) from driver_error(error)
            shard.poke_control()
        except (Answered, Exhausted) as error:
            raise as_shard_error(shard, error) from driver_error(error)


def _talk(shard: Shard, packets: Sequence[bytes], until: float, *, commit: bool) -> Operation[list[Reply]]:
    borrower = Borrower()
    session = yield from _check_out(shard, until, weakref.ref(borrower))
    try:
        yield from _rights(shard, session, until)
        if session.bound:  # a lock's, and it would cut these statements short
            session.bound = 0
            yield from session.exchange(session.dialect.bind(0), until + GRACE)
        replies: list[Reply] = []
        for packet in packets:
            reply = yield from session.exchange(packet, until + GRACE)
            if isinstance(reply, Err):
                session.send_rollback()
                raise Refused(reply)
            replies.append(reply)
        if commit:
            done = yield from session.exchange(COMMIT, until + GRACE)
            if not isinstance(done, Ok):
                raise Gone("the COMMIT was refused")
            session.state = State.IDLE
        else:
            session.send_rollback()  # all is known: nobody waits for the answer
        return replies
    except Silent:
        shard.kill(session)  # what it waits for there, it waits for nobody
        raise
    finally:
        shard.pool.give_back(session)


def _check_out(shard: Shard, until: float, borrower: object) -> Operation[Session]:
    """A session of the pool; one beyond its size where that stays exhausted: its holders may be waiting for us."""
    try:
        soon = now() + min(shard.config.pool.connect_timeout, (until - now()) / 2)
        return (yield from shard.pool.check_out(soon, borrower=borrower))
    except Exhausted:
        pass
    try:
        return (yield from shard.pool.check_out(until, beyond=True, borrower=borrower))
    except Exhausted:
        return (yield from shard.pool.check_out(until, borrower=borrower))


def _rights(shard: Shard, session: Session, until: float) -> Operation[None]:
    """Wait until the session's server is known to be the primary."""
    while True:
        rights = shard.rights
        if rights is not None:
            if rights.incarnation == session.incarnation:
                return
            session.die()
            raise Gone("the connection leads to another server than the shard's primary")
        waiter = shard.watch_for_change()
        try:
            if shard.rights is not None:
                continue
            error = shard.refusal_error()
            if error is None and shard.breaker.closed and now() < until:
                yield (WAIT, waiter, until)
                continue
            raise error or shard.unready_error()
        finally:
            shard.unwatch(waiter)
