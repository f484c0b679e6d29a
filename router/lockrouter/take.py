"""Taking one row for a handle: at once where the usual case is met, step by step where it is not.

The usual case is a free gate, a session, one statement, and the reply it should have: `acquire.take_row` with no wait
but that for a session. Between two locks the server and other threads use the same caches, so what a lock costs is less
the work it does than the code and data it touches: few functions, few objects. The gate, the pool and the packets are
the same; of the judgement it knows only what a plain grant is. Where anything else comes, it makes a request of what it
has done so far, and `take_row` goes on from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockrouter.acquire import (
    REFRESH_AFTER,
    SERVER_MARGIN,
    Ask,
    Sent,
    abandon,
    outcome_of,
    require_row_mode,
    take_row,
)
from lockrouter.deadline import GRACE, Deadline, checked_timeout, now
from lockrouter.errors import LockTimeout, Overloaded, ShardError
from lockrouter.gate import Hold
from lockrouter.owners import own_holds, record, running
from lockrouter.pool import Exhausted, PoolClosed
from lockrouter.protocol.effects import drive
from lockrouter.routing import encode
from lockrouter.rowlock import RowLock
from lockrouter.session import ROWS, Answered, Gone, Silent, State
from lockrouter.sql.statements import MAX_STATEMENT_WAIT
from lockrouter.tokens import END_US, EPOCH_US, base_token

if TYPE_CHECKING:
    from collections.abc import Hashable

    from lockrouter.core import Core
    from lockrouter.routing import Address
    from lockrouter.session import Session
    from lockrouter.shard import Shard

__all__ = ["take"]

_LEAST_BOUND = 0.1
"""Seconds: who waits for less says so in the statement itself, for the session's own bound is on all it does."""
_NEAR = 0.9
"""A session's bound that is this part of what it should be, or more, stays: who meets it with time left asks again."""


def take(
    core: Core,
    key: str | bytes,
    timeout: float | None,
    owner: Hashable,
    reentrant: bool,
    shared: bool,
    confirm: bool,
    required: bool,
) -> RowLock | None:
    """Return the handle of a row lock; None, unless it is `required`: the row is busy.

    Raises:
        What `LockRouter.lock` raises.
    """
    raw = encode(key)
    rule = core.class_of(raw)
    seconds = rule.timeout if timeout is None else checked_timeout(timeout, rule.timeout)
    if rule.mode != "row":
        require_row_mode(rule)
    if core.closed or not core.started or core.orphans:
        core.ready()
    at = sent_at = now()
    left = seconds
    address = core.routing.route(raw)
    bucket, shard_id, table, slot = address
    shard = core.shards[shard_id]
    session: Session | None = None
    ask: Ask | None = None
    hold: Hold | None = None
    early: Gone | Silent | Answered | Sent | None = None
    led = False
    try:
        if (
            owner is None
            and reentrant
            and not shared
            and shard.rights is not None
            and not rule.frozen
            and not shard.frozen
            and shard.refusal is None
            and shard.breaker.closed
            and seconds <= MAX_STATEMENT_WAIT
        ):
            # The address is this call's alone: until there is a hold it stands for the caller at gate and pool.
            led = core.gates.lead(slot, address)
            if led:
                releasing = core.affinity.get(slot)
                session = shard.pool.take(releasing, ROWS, address, at)
                if session is None and seconds >= _LEAST_BOUND:
                    try:
                        session = _await_session(core, shard, at + seconds, releasing, address)
                    except (Gone, Silent, Answered) as error:
                        early = error
                    sent_at = now()
                    left = at + seconds - sent_at
        if session is not None:
            executes = session.prepared.get(table) if left >= _LEAST_BOUND else None
            if executes is not None:
                until = at + seconds + GRACE
                packet = executes + slot.to_bytes(4, "little")
                bound = int((left - SERVER_MARGIN) * 1000)
                if not bound * _NEAR <= session.bound <= bound:
                    packet = session.dialect.bind(bound) + packet
                    session.unread += 1
                    session.bound = bound
            elif seconds:
                until = at + seconds + GRACE
                packet = session.dialect.lock(table, slot, left - SERVER_MARGIN, core.routing.tag(raw))
            else:
                until = at + core.config.pool.connect_timeout + GRACE
                packet = session.dialect.try_lock(table, slot, core.routing.tag(raw))
            try:
                data = session.talk_now(packet, until, sent_at)
                if executes is not None:
                    clock = session.grants.clock_executed(data, table, slot, session.unread)
                else:
                    clock = session.grants.clock(data, table, slot, session.unread)
                rights = shard.rights
                if (
                    clock
                    and rights is not None
                    and EPOCH_US <= clock < END_US
                    and rights.lowest(sent_at) <= clock < rights.clock_high
                    and session.incarnation == rights.incarnation
                    and (answered_at := now()) - sent_at < REFRESH_AFTER
                ):
                    base = base_token(rights.term, clock)
                    hold = Hold(slot, raw, running(), None, shard, session, base, at=answered_at)
                    session.grant(hold, sent_at, answered_at)
                    if executes is None and session.may_prepare and table not in session.prepared:
                        _prepare(session, table, until)
                else:
                    session.keep(data, executes is not None)
                    early = Sent(session, sent_at, releasing)
            except (Gone, Silent) as error:
                session.hold = None
                early, hold = error, None
            if hold is not None:
                if rule.max_hold is not None:
                    core.limit(hold, rule)
                if shard.breaker.in_a_row:
                    shard.breaker.answered()
                core.gates.settle(slot, hold)
                record(hold)
                shard.stats.row.acquired.append((answered_at - at, core.segments[bucket]))
                return RowLock(core, key, raw, address, confirm, hold, base)
        ask = Ask(
            core,
            raw,
            rule,
            Deadline(seconds, started=at),
            wait=seconds > 0,
            owner=owner,
            reentrant=reentrant,
            shared=shared,
            address=address,
        )
        if led:
            core.gates.succeed(address, ask)
            ask.session, ask.early = session, early
            if session is not None:
                session.borrower = ask
        return _take_slowly(key, ask, confirm, required)
    except BaseException:
        if hold is not None:
            hold.count = 0
        for mine in shard.pool.borrowed(address):
            mine.die()
            shard.pool.give_back(mine)
        if ask is not None:
            abandon(ask)
        core.gates.withdraw(slot, address, hold)
        raise


def _await_session(core: Core, shard: Shard, until: float, prefer: Session | None, address: Address) -> Session | None:
    """A session for the caller at `address` once one is free or opened; None: `take_row` has to say.

    Raises:
        Gone, Silent, Answered: opening one failed, and there is time left.
    """
    if own_holds(running()):
        return None  # a caller that holds rows may not wait for sessions as others do
    try:
        session = drive(shard.pool.check_out(until, prefer=prefer, borrower=address))
    except (Exhausted, PoolClosed):
        return None
    except Silent:
        if now() < until:
            raise
        return None
    if not core.closed and shard.breaker.closed and until - now() > SERVER_MARGIN:
        return session
    shard.pool.give_back(session)
    return None


def _prepare(session: Session, table: int, until: float) -> None:
    """Once for each table and session that holds a row of it; raises Gone or Silent, and the row is lost then."""
    with session.mutex:
        drive(session.prepare(table, until))
        session.state = State.HOLDING


def _take_slowly(key: str | bytes, ask: Ask, confirm: bool, required: bool) -> RowLock | None:
    core, rule, deadline = ask.core, ask.rule, ask.deadline
    stats, segment = ask.shard.stats, core.segments[ask.address.bucket]
    handle: RowLock | None = None
    try:
        handle = RowLock(core, key, ask.key, ask.address, confirm)
        hold = drive(take_row(ask))
        handle.address = ask.address  # where it was found, if the bucket has moved
        if hold is not None:
            handle.attach(hold, core.gates.token_of(hold, ask.key))
    except (LockTimeout, Overloaded, ShardError) as error:
        stats.row.ended(outcome_of(error, ask), deadline.waited(), segment)
        raise
    except BaseException:
        abandon(ask)
        if handle is not None and handle.attached:
            handle.discard()
        else:
            core.give_up(ask)
        raise
    if hold is None:
        stats.row.ended("busy", deadline.waited(), segment)
        if required:
            raise ask.timed_out(core.gates)
        return None
    core.limit(hold, rule)
    if hold.thing is ask.thing and hold not in ask.owns:
        record(hold)
    if hold.local:
        stats.local.ended("degraded", deadline.waited(), segment)
    else:
        stats.row.ended("acquired", deadline.waited(), segment)
    return handle
