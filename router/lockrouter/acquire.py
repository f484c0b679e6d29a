"""Taking one row: the gate, then the server, or, where the shard file says so in an outage, this process alone.

The steps of `take_row`:

1. Enter the gate of the row: nested, lead, or queued (then wait until lead, handed over, or the deadline).
2. The lead asks its shard (`ask_shard`): a closed breaker, a session, one locking statement, bounded on the server.
3. Only the complete and exact reply is a grant (`judge`); everything else is rolled back, or its session closed,
   before the caller hears anything.
4. A shard that does not answer at all is degraded around, or refused, by the class of the key.
"""

from __future__ import annotations

import enum
import logging
import weakref
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn

from lockrouter import tokens
from lockrouter.deadline import GRACE, Deadline, now
from lockrouter.errors import (
    ConfigError,
    Frozen,
    LockLost,
    LockTimeout,
    MaintenanceStall,
    NotSeeded,
    Overloaded,
    PoolTimeout,
    RouterClosed,
    ShardError,
    ShardUnavailable,
    TopologyMismatch,
    WouldDeadlock,
)
from lockrouter.gate import Gates, Hold, Place, Request
from lockrouter.owners import describe, own_holds, running
from lockrouter.pool import Borrower, Exhausted, PoolClosed
from lockrouter.protocol.effects import CALL, SLEEP, WAIT, Operation
from lockrouter.protocol.packets import IN_TRANSACTION, Err, Reply, Rows, is_off
from lockrouter.routing import Routing
from lockrouter.session import ROWS, Answered, Garbled, Gone, Session, Silent, State, driver_error
from lockrouter.sql.statements import MAX_STATEMENT_WAIT, bucket_state, probe_table, read_bucket

if TYPE_CHECKING:
    from collections.abc import Hashable

    from lockrouter.config import ResolvedClass
    from lockrouter.core import Core
    from lockrouter.routing import Address
    from lockrouter.shard import Shard

__all__ = [
    "REFRESH_AFTER",
    "SERVER_MARGIN",
    "TRY_FOR",
    "Ask",
    "Sent",
    "Unlocked",
    "abandon",
    "as_shard_error",
    "ask_shard",
    "await_rights",
    "closed_error",
    "enter",
    "follow",
    "judge",
    "lock_on",
    "outcome_of",
    "queue_at",
    "read_moved_to",
    "refuse_frozen",
    "require_row_mode",
    "statement",
    "take_row",
]

_log = logging.getLogger("lockrouter")

SERVER_MARGIN = 0.005
TRY_FOR = 0.05
_LATEST = 0.09
_OPENS_SOON = 0.05
REFRESH_AFTER = 1.0
_GONE_CODES = frozenset({1053, 1927, 2006, 2013, 4031})
_READ_ONLY_CODES = frozenset({1290, 1792, 1836, 1874, 3100})
_DENIED_CODES = frozenset({1044, 1045, 1142, 1143, 1227, 1698})
_MISSING_CODES = frozenset({1049, 1146})
_REPEAT_CODES = frozenset({1020, 1213, 1317})
_UNPREPARED_CODES = frozenset({1210, 1243, 1615})
_CROWDED_CODES = frozenset({1040, 1203, 1226})


class Unlocked(enum.Enum):
    """How a statement that granted nothing ended, its transaction being over."""

    BUSY = "busy"
    BOUND = "bound"
    STALLED = "stalled"
    REPEAT = "repeat"
    SUSPENDED = "suspended"
    CLOSED = "closed"


_ROWLESS = (Unlocked.BUSY, Unlocked.BOUND, Unlocked.STALLED)
_LEAD, _NESTED, _HOLDING = Place.LEAD, Place.NESTED, State.HOLDING


class Sent(NamedTuple):
    """A locking statement on its way: on which session, since when, and where the row's last ROLLBACK went out."""

    session: Session
    at: float
    releasing: Session | None


class Ask(Request):
    """One caller's request for one row, from its first look at the gate to its hold."""

    local: Hold | None = None
    # True where the rows must be on the shard that the map names: nothing is followed that has moved.
    fixed = False
    # Where a closed row's bucket went, by the shard that was asked last, and how often that was followed.
    moved_to = ""
    hops = 0
    # What the quick path met and left to the steps below: an error, or a session whose reply is not all decoded yet.
    early: Gone | Silent | Answered | Sent | None = None

    def __init__(
        self,
        core: Core,
        key: bytes,
        rule: ResolvedClass,
        deadline: Deadline,
        *,
        wait: bool,
        owner: Hashable = None,
        reentrant: bool = True,
        shared: bool = False,
        alone: bool = True,
        lane: int = ROWS,
        address: Address | None = None,
    ) -> None:
        me = running()
        if address is None:
            address = core.routing.route(key)
        self.slot = address.slot
        self.key = key
        self.thing = me
        self.owner = owner
        self.owns = own_holds(me)
        # A row passes on without the server only from one who holds nothing else to one who asks for nothing else.
        self.may_receive = alone and not shared
        self.shared = shared
        self.core = core
        self.rule = rule
        self.deadline = deadline
        self.wait = wait
        self.reentrant = reentrant
        self.lane = lane
        self.address = address
        self.shard: Shard = core.shards[address.shard]

    @property
    def io_until(self) -> float:
        """The end of connecting and of everything else that is not waiting for another holder."""
        return self.deadline.at if self.wait else self.deadline.started + self.core.config.pool.connect_timeout

    @property
    def last(self) -> float:
        """The end of all that the call still has to ask once its time is up; the contract allows it 0.1 s."""
        return self.io_until + _LATEST

    def timed_out(self, gates: Gates) -> LockTimeout:
        """The error of a row that stayed busy, naming who holds it where that is known."""
        hold = gates.holder_of(self.address.slot)
        if hold is not None:
            holder = f"{describe(hold.thing)} of this process, for {now() - hold.granted_at:.3f} s"
        else:
            holder = f"another process; ask: lockrouter holders {self.core.config.path or 'FILE'} KEY"
        waited = self.deadline.waited()
        where = f"row {self.address.slot} of lock_{self.address.table:02d} on shard {self.address.shard}"
        return LockTimeout(
            f"{where} stayed busy for {waited:.3f} s (key {self.core.shown(self.key)}); held by {holder}",
            key=self.key,
            address=self.address,
            waited=waited,
            holder=holder,
        )


def require_row_mode(rule: ResolvedClass) -> None:
    """Refuse a key whose class is for leases.

    Raises:
        ConfigError: it is.
    """
    if rule.mode != "row":
        raise ConfigError(f"the class of this key has mode {rule.mode!r}; a row lock was asked for", field="mode")


def refuse_frozen(ask: Ask, key: bytes) -> None:
    """Refuse a key that the shard file or an operator has frozen.

    Raises:
        Frozen: it is.
    """
    if ask.rule.frozen or key.startswith(ask.shard.frozen):
        raise Frozen(f"key {ask.core.shown(key)} is frozen: the operators' emergency stop")


def take_row(ask: Ask) -> Operation[Hold | None]:
    """Return the caller's hold of the row, or None where it is busy and the caller would not wait.

    An error that strikes when the row is already the caller's leaves it in `ask.hold`, for the face that
    called to give up: only it knows whether a handle was made of it.

    Raises:
        LockTimeout: busy for the whole timeout.
        LockLost: the caller's own hold, which it would have entered again, is lost.
        Frozen, WouldDeadlock, Overloaded, RouterClosed, or a ShardError: as the contract says.
    """
    if ask.rule.frozen or ask.shard.frozen:
        refuse_frozen(ask, ask.key)
    try:
        return (yield from _take(ask, ask.core.gates))
    except BaseException:
        abandon(ask)
        raise


def _take(ask: Ask, gates: Gates) -> Operation[Hold | None]:
    place = ask.place if ask.place is not Place.GONE else enter(ask, gates)
    if place is _NESTED:
        return (yield from _nested(ask))
    if place is not _LEAD:
        _count_collision(ask, gates)
        if place is Place.BUSY:
            return None
        place = yield from queue_at(ask, gates, ask)
        if place is Place.HOLDER:
            return ask.hold
        if place is Place.GONE:
            raise ask.timed_out(gates)
    hold = yield from ask_shard(ask)
    if hold is None:
        gates.leave_queue(ask)
        return None
    gates.granted(ask, hold)
    return hold


def enter(ask: Ask, gates: Gates) -> Place:
    """Step 1: the caller's place at the gate of its row."""
    return gates.enter(ask, wait=ask.wait, reentrant=ask.reentrant, max_waiters=ask.rule.max_waiters)


def abandon(ask: Ask) -> None:
    """Leave nothing of a failed request, the session first: its row must be on its way to be free before the next asks.

    What is the caller's already stays in `ask.hold`.
    """
    if ask.place is Place.HOLDER or ask.place is Place.NESTED:
        return
    if ask.session is not None:
        # Nothing is known of what it holds: the server frees it when it sees the end of the stream.
        ask.session.die()
        _drop(ask, kill=True)
    for session in ask.shard.pool.borrowed(ask):
        session.die()
        ask.shard.pool.give_back(session)
    if ask.local is not None:
        ask.core.local_gates.leave(ask.local)
    ask.core.gates.leave_queue(ask)


def _nested(ask: Ask) -> Operation[Hold]:
    hold = ask.hold
    assert hold is not None
    reason = ask.core.loss_of(hold)
    if reason is not None:
        raise LockLost(
            f"the row is held through a lock that is lost: {reason.value} (key {ask.core.shown(ask.key)})",
            key=ask.key,
            reason=reason,
        )
    if hold.passes > tokens.MAX_PASS:
        if hold.session is None:
            raise WouldDeadlock("the tokens of this row are used up inside the caller's own transaction")
        yield (CALL, lambda: ask.core.read_clock_again(hold, ask.key), None)
    return hold


def _count_collision(ask: Ask, gates: Gates) -> None:
    holder = gates.holder_of(ask.address.slot)
    if holder is not None and holder.key != ask.key:
        ask.shard.stats.collided()


def queue_at(ask: Ask, gates: Gates, request: Request) -> Operation[Place]:
    """Wait at a gate; returns LEAD, HOLDER, or GONE when the deadline passed and the place was given up."""
    waiter = request.waiter
    assert waiter is not None
    while True:
        yield (WAIT, waiter, ask.deadline.at)
        place = gates.place_of(request)
        if place is not Place.QUEUED:
            return place
        if ask.core.closed:
            raise RouterClosed("the router was closed while waiting")
        if ask.deadline.left() <= 0:
            return gates.leave_queue(request)


def ask_shard(ask: Ask) -> Operation[Hold | None]:
    """Repeat attempts within the deadline until one is a grant, or None where the row is busy and `wait` is off."""
    shard = ask.shard
    faults = 0
    fresh = False
    stalled = False
    while True:
        if ask.early is None:
            if ask.core.closed:
                raise RouterClosed("the router was closed while waiting")
            if not shard.breaker.closed:
                local = yield from _in_outage(ask)
                if local is Unlocked.REPEAT:
                    continue
                return local
            error = shard.refusal_error()
            if error is not None:
                raise error
        try:
            outcome = yield from (_attempt(ask, fresh=fresh) if ask.early is None else _go_on(ask))
        except Gone as gone:
            if ask.session is None and isinstance(gone, Garbled):
                raise ShardUnavailable(f"is no server of ours: {gone}", shard=shard.id) from driver_error(gone)
            if ask.session is None:
                faults = yield from _faulted(ask, gone, faults)
                continue
            # An established session that the server ended, idle or by a KILL: no fault. Its fellows may be closed too.
            _drop(ask)
            shard.pool.purge()
            if fresh:
                yield from _pause(ask)
            if fresh and (ask.deadline.left() <= 0 or not ask.wait):
                raise ShardUnavailable(f"ended the connection: {gone}", shard=shard.id) from driver_error(gone)
            fresh = True
            continue
        except Silent as silent:
            proven = ask.session is None or ask.session.proven
            _drop(ask, kill=True)
            faults = yield from _silent(ask, silent, faults, proven=proven)
            continue
        except Answered as answered:
            if answered.code not in _CROWDED_CODES or not ask.wait or faults >= shard.config.breaker.retries:
                raise _shard_error(shard, answered) from driver_error(answered)
            faults += 1
            yield from _pause(ask)
            continue
        if isinstance(outcome, Hold):
            if outcome.session is not None:
                try:
                    outcome.session.occupy(outcome)
                except Gone:
                    _drop(ask)
                    continue
            return outcome
        if outcome is Unlocked.BUSY:
            return None
        if outcome is Unlocked.CLOSED:
            yield from follow(ask)
            shard = ask.shard
            continue
        stalled = outcome is Unlocked.STALLED
        if stalled and not ask.wait and now() < ask.io_until and not (yield from _metadata_locked(ask)):
            continue  # a slow server, not a metadata lock: the bound of a try is short
        if now() + SERVER_MARGIN >= ask.io_until or (stalled and not ask.wait):
            if not ask.wait and outcome is Unlocked.REPEAT:
                return None
            yield from _give_up_waiting(ask, outcome, stalled=stalled)


def _drop(ask: Ask, *, kill: bool = False) -> None:
    """Give a closed session's place back, and have the server end what may still wait there."""
    session, ask.session = ask.session, None
    if session is not None:
        ask.shard.pool.give_back(session)
        if kill:
            ask.shard.kill(session)


def _faulted(ask: Ask, error: Gone | Silent, faults: int) -> Operation[int]:
    """Count a fault of the shard; returns how many this call has met, after a pause, or raises."""
    shard = ask.shard
    shard.fault(error)
    if shard.breaker.closed and (faults >= shard.config.breaker.retries or ask.deadline.left() <= 0):
        raise ShardUnavailable(f"does not answer: {error}", shard=shard.id) from driver_error(error)
    if shard.breaker.closed:
        yield from _pause(ask)
        if ask.wait and ask.deadline.left() <= 0:
            raise ShardUnavailable(f"does not answer: {error}", shard=shard.id) from driver_error(error)
    return faults + 1


def _silent(ask: Ask, error: Silent, faults: int, *, proven: bool) -> Operation[int]:
    """No reply in time: a fault where the session had just been proven alive, or could not be had at all.

    Near the caller's deadline silence proves nothing either; the control session will find out.
    """
    if proven and (ask.deadline.left() > 0 or not ask.wait):
        return (yield from _faulted(ask, error, faults))
    ask.shard.poke_control()
    if ask.deadline.left() > 0 and ask.wait:
        return faults  # a session that had been idle for long and was cut: another one will tell
    raise ShardUnavailable("did not answer within the caller's timeout", shard=ask.shard.id) from driver_error(error)


def _pause(ask: Ask) -> Operation[None]:
    pause = ask.shard.config.breaker.retry_delay if ask.wait else 0.0
    yield (SLEEP, min(now() + pause, ask.deadline.at), None)


def _give_up_waiting(ask: Ask, outcome: Unlocked, *, stalled: bool) -> Operation[NoReturn]:
    shard = ask.shard
    if outcome is Unlocked.SUSPENDED:
        raise shard.unready_error()
    if not stalled and ask.wait:
        stalled = yield from _metadata_locked(ask)
    if stalled:
        raise MaintenanceStall("a metadata lock (ALTER, a backup) holds the lock table", shard=shard.id)
    raise ask.timed_out(ask.core.gates)


def _metadata_locked(ask: Ask) -> Operation[bool]:
    """Tell a table under a metadata lock from a busy row, for waits too short for the server to tell: one more trip."""
    borrower = Borrower()
    try:
        until = min(now() + GRACE, ask.last)
        session = yield from ask.shard.pool.check_out(until, wait=False, borrower=weakref.ref(borrower))
    except (Exhausted, PoolClosed, Gone, Silent, Answered, ShardError):
        return False
    try:
        reply = yield from session.exchange(probe_table(session.dialect, ask.address.table), until)
        session.state = State.BUSY
        session.send_rollback()
    except (Gone, Silent):
        return False
    finally:
        ask.shard.pool.give_back(session)
    return isinstance(reply, Err) and reply.code == session.dialect.bound_code


def _attempt(ask: Ask, *, fresh: bool) -> Operation[Hold | Unlocked]:
    """One locking statement on one session; the session is idle again, or closed, unless it is a grant."""
    shard, address = ask.shard, ask.address
    releasing = ask.core.affinity.get(address.slot)
    session = None if fresh else shard.pool.take(releasing, ask.lane, ask, now())
    if session is None:
        session = yield from _check_out(ask, fresh=fresh, prefer=releasing)
    ask.session = session
    if shard.rights is None:
        ask.session = None
        shard.pool.give_back(session)
        yield from await_rights(ask)
        return Unlocked.SUSPENDED
    outcome = yield from lock_on(ask, session)
    return (yield from _conclude(ask, session, outcome, releasing))


def _go_on(ask: Ask) -> Operation[Hold | Unlocked]:
    """Take over from the quick path: raise what it met, or go on with the reply it has begun to read."""
    early, ask.early = ask.early, None
    if isinstance(early, Sent):
        session, sent_at, releasing = early
        reply = yield from session.exchange(b"", ask.io_until + GRACE, since=sent_at)
        outcome = judge(ask, session, reply, sent_at)
    else:
        assert early is not None
        raise early
    if isinstance(outcome, Hold) and now() - sent_at > REFRESH_AFTER:
        yield from session.ping(ask.last)
    return (yield from _conclude(ask, session, outcome, releasing))


def _conclude(
    ask: Ask, session: Session, outcome: Hold | Unlocked | ShardError, releasing: Session | None
) -> Operation[Hold | Unlocked]:
    """Unless it is a hold: end the transaction, keep the session, and say what the attempt came to."""
    shard, address = ask.shard, ask.address
    if isinstance(outcome, Hold):
        return outcome
    try:
        if outcome is Unlocked.CLOSED:
            yield from read_moved_to(ask, session)
        if outcome in _ROWLESS:
            session.send_rollback()  # it frees nothing, so that nobody waits for the answer
        else:
            yield from session.rollback(ask.last)
    except (Gone, Silent):
        # The answer is known; the session is closed, and the server frees what it may hold. No fault of the shard.
        shard.poke_control()
    rights = shard.rights
    elsewhere = rights is not None and session.incarnation != rights.incarnation
    if elsewhere:
        session.die()  # it leads to another server than the one that may grant, whose errors say nothing of that
    ask.session = None
    shard.pool.give_back(session)
    if isinstance(outcome, ShardError):
        if elsewhere:
            return Unlocked.REPEAT
        raise outcome
    if outcome is Unlocked.SUSPENDED:
        yield from await_rights(ask)
    if outcome is Unlocked.BUSY and releasing is not None and releasing is not session:
        # The row's ROLLBACK of a moment ago may still be on its way on another session: that is not "busy".
        if ask.core.affinity.get(address.slot) is releasing and ask.deadline.waited() < TRY_FOR:
            yield (SLEEP, now() + 0.0005, None)
            return Unlocked.REPEAT
        if ask.core.affinity.get(address.slot) is None and ask.deadline.waited() < TRY_FOR:
            return Unlocked.REPEAT
    return outcome


def lock_on(ask: Ask, session: Session) -> Operation[Hold | Unlocked | ShardError]:
    """Send the locking statement on a session and judge its reply; only a hold leaves a row locked for certain.

    Raises:
        Gone, Silent: the session is closed.
    """
    sent_at = now()
    packet, until = statement(ask, session, sent_at)
    reply = yield from session.exchange(packet, until)
    outcome = judge(ask, session, reply, sent_at)
    if isinstance(outcome, Hold) and now() - sent_at > REFRESH_AFTER:
        # The server's patience with an idle holder began with this grant; ours began when the statement was sent.
        yield from session.ping(ask.last)
    return outcome


def statement(ask: Ask, session: Session, at: float) -> tuple[bytes, float]:
    """The locking packet for a row, sent at `at`, and the end of waiting for its reply."""
    address, dialect = ask.address, session.dialect
    patience = ask.core.config.pool.connect_timeout
    tag = Routing.tag(ask.key)
    if not ask.wait:
        return dialect.try_lock(address.table, address.slot, tag, ask.shared), ask.last
    deadline = ask.deadline.at
    longest = session.longest_wait or MAX_STATEMENT_WAIT
    left = deadline - at - SERVER_MARGIN
    packet = dialect.lock(address.table, address.slot, left if left < longest else longest, tag, ask.shared)
    if 0.0 < left <= longest:
        return packet, deadline + GRACE
    return packet, ask.last if left <= 0.0 else at + longest + patience


def _check_out(ask: Ask, *, fresh: bool, prefer: Session | None) -> Operation[Session]:
    shard = ask.shard
    beyond = any(hold.shard is shard and hold.session is not None for hold in ask.owns)
    until = ask.io_until
    try:
        return (
            yield from shard.pool.check_out(
                until, wait=ask.wait, beyond=beyond, prefer=prefer, fresh=fresh, lane=ask.lane, borrower=ask
            )
        )
    except Exhausted:
        raise PoolTimeout(
            f"no free connection ({shard.pool.size} allowed) within {ask.deadline.waited():.3f} s", shard=shard.id
        ) from None
    except PoolClosed:
        raise RouterClosed("the router is closed") from None
    except Silent as error:
        if ask.wait and ask.deadline.left() <= 0:
            raise PoolTimeout("could not connect within the caller's timeout", shard=shard.id) from driver_error(error)
        raise


def read_moved_to(ask: Ask, session: Session) -> Operation[None]:
    """Learn, on the session that found the row closed, what its shard knows of the bucket."""
    reply = yield from session.exchange(read_bucket(ask.address.bucket), ask.last)
    _, ask.moved_to = bucket_state(reply)


def follow(ask: Ask) -> Operation[None]:
    """Turn to the shard that a closed row's bucket went to; wait a little where it is on its way.

    Raises:
        TopologyMismatch: the shard file does not list that shard, or the bucket did not open in time.
    """
    core, shard = ask.core, ask.shard
    target = core.shards.get(ask.moved_to)
    left = ask.io_until - now()
    if target is shard or ask.fixed or left <= 0 or (target is None and (ask.moved_to or not ask.hops)):
        raise closed_error(ask)
    if target is None or ask.hops > len(core.shards):
        yield (SLEEP, now() + min(left, _OPENS_SOON), None)
    if target is not None:
        if not ask.hops:
            _log.info("bucket %d went from shard %s to %s", ask.address.bucket, shard.id, target.id)
        ask.hops += 1
        ask.shard, ask.address = target, ask.address._replace(shard=target.id)


def closed_error(ask: Ask) -> TopologyMismatch:
    """The error of a row that may not be locked where it was looked for."""
    where = f", to shard {ask.moved_to}" if ask.moved_to else ""
    return TopologyMismatch(
        f"bucket {ask.address.bucket} is closed on this shard: it has moved, or is moving{where}", shard=ask.shard.id
    )


def outcome_of(error: BaseException, ask: Ask) -> str:
    """What the metrics call an acquisition that ended with this error."""
    if isinstance(error, LockTimeout):
        return "timeout" if ask.wait else "busy"
    refused = isinstance(error, Overloaded) or (isinstance(error, ShardError) and not ask.shard.breaker.closed)
    return "refused" if refused else "error"


def await_rights(ask: Ask) -> Operation[None]:
    """Wait until the shard's right to grant, its refusal or its breaker changes, or the call's deadline."""
    shard = ask.shard
    waiter = shard.watch_for_change()
    try:
        shard.poke_control()
        yield (WAIT, waiter, min(ask.io_until, now() + shard.config.router.role_check))
    finally:
        shard.unwatch(waiter)


def judge(ask: Ask, session: Session, reply: Reply, sent_at: float) -> Hold | Unlocked | ShardError:
    """Decide what a reply is; only the exact one is a hold."""
    if isinstance(reply, Err):
        return _judge_error(ask, session, reply)
    if not isinstance(reply, Rows):
        raise Gone("an OK for a SELECT", answered=True)
    if not reply.rows:
        return NotSeeded(f"row {ask.address.slot} of lock_{ask.address.table:02d} is missing", shard=ask.shard.id)
    if len(reply.rows) != 1 or not reply.status & IN_TRANSACTION:
        raise Gone("not exactly one row inside a transaction", answered=True)
    try:
        slot, epoch, clock, read_only = reply.rows[0]
        numbers = int(slot or b""), int(epoch or b""), tokens.micros(clock or b"")
    except ValueError:
        raise Gone("the reply is not what was asked for", answered=True) from None
    if numbers[0] != ask.address.slot:
        raise Gone("the reply is for another row", answered=True)
    return _judge_grant(ask, session, numbers[1], numbers[2], read_only, sent_at)


def _judge_grant(
    ask: Ask, session: Session, epoch: int, clock: int, read_only: bytes | None, sent_at: float
) -> Hold | Unlocked | ShardError:
    """Decide what a complete reply with the caller's row, locked, is worth."""
    shard = ask.shard
    if not is_off(read_only):
        shard.poke_control()
        return ShardUnavailable("the server is read-only", shard=shard.id)
    if not tokens.EPOCH_US <= clock < tokens.END_US:
        return ShardUnavailable("the server's clock is out of the years that tokens can tell", shard=shard.id)
    if not epoch:
        return Unlocked.CLOSED
    rights = shard.rights
    if (
        rights is None
        or rights.incarnation != session.incarnation
        or clock >= rights.clock_high
        or shard.note_clock(clock, sent_at)
    ):
        return Unlocked.SUSPENDED
    shard.breaker.answered()
    hold = Hold(
        ask.address.slot,
        ask.key,
        ask.thing,
        ask.owner,
        shard=shard,
        session=session,
        base=tokens.base_token(rights.term, clock),
    )
    if ask.shared:
        hold.shared = True
    return hold


def _judge_error(ask: Ask, session: Session, error: Err) -> Unlocked | ShardError:
    if not ask.wait and error.code in session.dialect.busy_codes:
        return Unlocked.BUSY
    if error.code == session.dialect.bound_code:
        return Unlocked.BOUND if ask.wait else Unlocked.STALLED
    if error.code == 1205:
        return Unlocked.STALLED
    if error.code in _REPEAT_CODES:
        return Unlocked.REPEAT
    if error.code in _UNPREPARED_CODES and session.prepared:
        session.prepared.clear()  # the server has forgotten them: from now on this session sends the text
        session.may_prepare = False
        return Unlocked.REPEAT
    if error.code in _GONE_CODES:
        raise Gone(f"({error.code}) {error.message}", answered=True)
    return _shard_error(ask.shard, Answered(error.code, error.message))


def as_shard_error(shard: Shard, error: Exception) -> ShardError:
    """The contract's error for a connection that could not be had."""
    if isinstance(error, Answered):
        return _shard_error(shard, error)
    made = (
        PoolTimeout(f"no free connection ({shard.pool.size} allowed)", shard=shard.id)
        if isinstance(error, Exhausted)
        else ShardUnavailable(f"does not answer: {error}", shard=shard.id)
    )
    made.__cause__ = driver_error(error)
    return made


def _shard_error(shard: Shard, error: Answered) -> ShardError:
    """The contract's error for an answer of the server that is an error."""
    made: ShardError
    if error.code in _MISSING_CODES:
        made = NotSeeded(str(error), shard=shard.id)
    else:
        if error.code in _READ_ONLY_CODES:
            shard.poke_control()
        made = ShardUnavailable(str(error), shard=shard.id)
    made.__cause__ = driver_error(error)
    return made


def _in_outage(ask: Ask) -> Operation[Hold | Literal[Unlocked.REPEAT] | None]:
    """The breaker is open: refuse, or exclude this process only, as the key's class says.

    REPEAT: it is not as it was when the caller began to wait; others may be granted the row by now.
    """
    shard, core = ask.shard, ask.core
    if shard.breaker.refusal is not None:
        raise ShardUnavailable(shard.breaker.refusal, shard=shard.id) from shard.cause
    if ask.rule.on_outage == "refuse":
        raise ShardUnavailable(f"does not answer, its breaker is open: {shard.cause}", shard=shard.id) from shard.cause
    if core.storm():
        raise ShardUnavailable(
            "does not answer, and neither does most of the topology", shard=shard.id
        ) from shard.cause
    gates = core.local_gates
    request = Request(ask.address.slot, ask.key, ask.thing, None, ())
    request.shared = ask.shared
    try:
        place = gates.enter(request, wait=ask.wait)
        if place is Place.BUSY:
            return None
        if place is Place.QUEUED:
            place = yield from queue_at(ask, gates, request)
            if place is Place.GONE:
                raise ask.timed_out(gates)
            if shard.breaker.closed or shard.breaker.refusal is not None or core.storm():
                gates.leave_queue(request)
                return Unlocked.REPEAT
        ask.local = Hold(ask.address.slot, ask.key, ask.thing, ask.owner, shard=shard, session=None)
        ask.local.shared = ask.shared
        gates.granted(request, ask.local)
    except BaseException:
        gates.forsake(request)
        raise
    return ask.local
