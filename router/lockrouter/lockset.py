"""Several rows at once: all or none, in one order everywhere, under one deadline, one session per shard.

The steps of `take_rows`:

1. One request per row, in the order of the slots, which is the same in every process.
2. All gates are entered first, in that order; a row that is the caller's own already is counted once more. Where that
   would close a cycle with callers that nest single locks, the gates are left and entered again.
3. Then the rows, shard by shard. The first row of a shard is taken like any single one; the shard's later rows go out
   on that session.
4. A session that is lost on the way takes its rows along: all rows are given back and taken anew inside the deadline.
   So they are after a deadlock, which only callers that nest single locks can cause.
5. Nothing is handed over, to this caller or by it: a ROLLBACK frees all rows of a session.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from msgspec import structs

from lockrouter.acquire import (
    Ask,
    Unlocked,
    abandon,
    ask_shard,
    await_rights,
    follow,
    lock_on,
    outcome_of,
    queue_at,
    read_moved_to,
    refuse_frozen,
    require_row_mode,
)
from lockrouter.deadline import Deadline, checked_timeout, now
from lockrouter.errors import LockLost, LossReason, MaintenanceStall, NotHeld, RouterClosed, ShardError, WouldDeadlock
from lockrouter.gate import Group, Hold, Party, Place, StepBack
from lockrouter.owners import record
from lockrouter.protocol.effects import Operation, drive
from lockrouter.routing import encode
from lockrouter.rowlock import RowLock
from lockrouter.session import Gone, Silent, State

if TYPE_CHECKING:
    from lockrouter.config import ResolvedClass
    from lockrouter.core import Core
    from lockrouter.shard import Shard

__all__ = ["MAX_KEYS", "LockSet", "lock_all", "name_keys", "strictest", "take_rows"]

MAX_KEYS = 1000


class _Again(Exception):
    """The rows taken so far are gone; nothing is wrong with the request."""


def take_rows(asks: Sequence[Ask]) -> Operation[None]:
    """Take every row of `asks`, which are in slot order, without doubles; each has its hold afterwards, or none has.

    Raises:
        WouldDeadlock: the caller holds a row already, and not all of these; where they may not be entered again: one.
        Everything that taking one row raises.
    """
    core = asks[0].core
    holds_some = any(core.shards.get(hold.shard.id) is hold.shard for hold in asks[0].owns)
    if holds_some and asks[0].reentrant and not core.gates.holds_all(asks):
        raise WouldDeadlock("the caller holds a row lock already, and not all of these: take them together")
    parties: dict[Shard, Party] = {}
    rows: dict[Ask, Hold] = {}
    try:
        yield from _enter_gates(asks)
        leads = [ask for ask in asks if ask.place is Place.LEAD]
        while len(rows) < len(leads):
            try:
                yield from _lock_rows(leads, parties, rows)
            except _Again:
                _let_go(core, leads, parties, rows)
                if now() >= asks[0].io_until:
                    raise asks[0].timed_out(core.gates) from None
        for ask, hold in rows.items():
            core.gates.granted(ask, hold)
    except BaseException:
        try:
            _let_go(core, asks, parties, rows)
        finally:
            _leave_gates(core, asks)
        raise


def _enter_gates(asks: Sequence[Ask]) -> Operation[None]:
    """Step 2. Nothing but gates is held meanwhile: who has a session, or a row, never waits for a gate."""
    group = Group()
    for ask in asks:
        ask.group = group
    entered = False
    while not entered:
        try:
            for ask in asks:
                yield from _enter(ask)
            entered = True
        except StepBack:
            _leave_gates(asks[0].core, asks)


def _enter(ask: Ask) -> Operation[None]:
    gates = ask.core.gates
    place = gates.enter(ask, wait=ask.wait, reentrant=ask.reentrant, max_waiters=ask.rule.max_waiters)
    if place is Place.QUEUED:
        place = yield from queue_at(ask, gates, ask)
    if place is Place.NESTED:
        assert ask.hold is not None
        reason = ask.core.loss_of(ask.hold)
        if reason is not None:
            raise LockLost("the row is held through a lock that is lost", key=ask.key, reason=reason)
    elif place is not Place.LEAD:
        raise ask.timed_out(gates)


def _leave_gates(core: Core, asks: Sequence[Ask]) -> None:
    """Leave every gate, latest first, and give back what was entered again; nothing here waits."""
    for ask in reversed(asks):
        hold, ask.hold = ask.hold, None
        if hold is None:
            core.gates.leave_queue(ask)
        elif ask.place is Place.NESTED:
            if core.gates.uncount(hold, ask.key):
                core.free(hold)
        else:
            core.gates.leave(hold)
        ask.place = Place.GONE


def _lock_rows(leads: Sequence[Ask], parties: dict[Shard, Party], rows: dict[Ask, Hold]) -> Operation[None]:
    """Steps 3 and 4, in one order of shards and slots: so neither rows nor sessions are waited for in a ring."""
    for ask in sorted(leads, key=lambda ask: (ask.shard.id, ask.slot)):
        party = parties.get(ask.shard)
        hold = yield from (_lock_first(ask, parties) if party is None else _lock_on_party(ask, party))
        if hold is None:
            raise ask.timed_out(ask.core.gates)
        rows[ask] = hold
    if any(hold.lost is not None for hold in rows.values()):
        raise _Again


def _let_go(core: Core, asks: Sequence[Ask], parties: dict[Shard, Party], rows: dict[Ask, Hold]) -> None:
    """Give back every row and session; nothing here waits."""
    for shard, party in parties.items():
        session = party.session
        lease = party.holds[0].lease if party.holds else None
        with session.mutex:
            if session.state is State.HOLDING and session.hold is party and party.holds:
                core.send_rollback(session, party.holds)
            elif not party.holds:
                session.die()  # interrupted before its first row was noted
        shard.pool.give_back(session, lease)  # once: an interrupt may have this begin again
    for ask in asks:
        left, ask.session = ask.session, None
        local, ask.local = ask.local, None
        if left is not None and all(left is not party.session for party in parties.values()):
            left.die()
            ask.shard.pool.give_back(left)
        if local is not None:
            core.local_gates.leave(local)
    parties.clear()
    rows.clear()


def _lock_first(ask: Ask, parties: dict[Shard, Party]) -> Operation[Hold | None]:
    try:
        hold = yield from ask_shard(ask)
    except BaseException:
        abandon(ask)
        raise
    if hold is not None and hold.session is not None:
        party = parties[ask.shard] = Party(hold.session)
        _join(party, hold)
    return hold


def _join(party: Party, hold: Hold) -> None:
    """Let the background thread watch over the rows so far, while the caller waits for the next ones."""
    party.holds.append(hold)
    hold.party = party
    party.session.hold = party
    party.session.state = State.HOLDING


def _lock_on_party(ask: Ask, party: Party) -> Operation[Hold | None]:
    shard = ask.shard
    while True:
        if ask.core.closed:
            raise RouterClosed("the router was closed while waiting")
        error = shard.refusal_error()
        if error is not None:
            raise error
        if not shard.breaker.closed:
            raise _Again  # the shard's first row finds out what an outage means for this call
        outcome = yield from _send_on_party(ask, party)
        if isinstance(outcome, Hold):
            _join(party, outcome)
            return outcome
        if isinstance(outcome, ShardError):
            raise outcome
        if outcome is Unlocked.BUSY:
            return None
        if outcome is Unlocked.SUSPENDED:
            yield from await_rights(ask)
        elif outcome is Unlocked.CLOSED:
            yield from follow(ask)
        if outcome in (Unlocked.REPEAT, Unlocked.SUSPENDED, Unlocked.CLOSED):
            raise _Again
        if ask.deadline.left() <= 0.005:
            if outcome is Unlocked.STALLED:
                raise MaintenanceStall("a metadata lock (ALTER, a backup) holds the lock table", shard=shard.id)
            return None


def _send_on_party(ask: Ask, party: Party) -> Operation[Hold | Unlocked | ShardError]:
    """One locking statement on a session that holds rows already; the background must not take it for a lost one."""
    session, shard = party.session, ask.shard
    with session.mutex:
        if session.state is not State.HOLDING:
            raise _Again
        session.waiting = True
        try:
            outcome = yield from lock_on(ask, session)
            if outcome is Unlocked.CLOSED:
                yield from read_moved_to(ask, session)
        except Gone:
            session.die()  # also where the reply had come, and was none
            raise _Again from None
        except Silent as error:
            shard.kill(session)
            shard.poke_control()
            raise shard.unready_error() from error
        finally:
            session.waiting = False
        session.state = State.HOLDING
    return outcome


def name_keys(keys: Iterable[str | bytes]) -> dict[bytes, str | bytes]:
    """The different keys by their bytes, as the caller wrote them.

    Raises:
        InvalidKey: one is none.
        ValueError: more than 1,000.
    """
    if isinstance(keys, str | bytes):
        raise TypeError("lock_all takes several keys; this is one")
    named = {encode(key): key for key in keys}
    if len(named) > MAX_KEYS:
        raise ValueError(f"lock_all takes at most {MAX_KEYS} keys, got {len(named)}")
    return named


def lock_all(core: Core, named: dict[bytes, str | bytes], timeout: float | None, *, confirm: bool) -> LockSet:
    """Take the rows of all keys, blocking, and return their handles."""
    if not named:
        return LockSet({}, confirm=confirm)
    rule = strictest([core.config.class_of(raw) for raw in named])
    deadline = Deadline(checked_timeout(timeout, rule.timeout))
    asks: dict[int, Ask] = {}
    members: dict[str | bytes, RowLock] = {}
    for raw, key in named.items():
        address = core.routing.route(raw)
        if address.slot not in asks:
            asks[address.slot] = Ask(core, raw, rule, deadline, wait=deadline.timeout > 0, alone=False)
        refuse_frozen(asks[address.slot], raw)
        members[key] = RowLock(core, key, raw, address, confirm=False)
    try:
        drive(take_rows([asks[slot] for slot in sorted(asks)]))
        for member in members.values():
            _attach(core, member, asks[member.address.slot])
    except BaseException as error:
        for ask in asks.values():
            ask.shard.stats.row.ended(outcome_of(error, ask), deadline.waited(), core.segments[ask.address.bucket])
        attached = {member.address.slot for member in members.values() if member.attached}
        for ask in asks.values():
            if ask.slot not in attached:
                core.give_up(ask)
                for borrowed in ask.shard.pool.borrowed(ask):  # an interrupt hit the giving back itself
                    borrowed.die()
                    ask.shard.pool.give_back(borrowed)
                core.gates.leave_queue(ask)
        raise
    for ask in asks.values():
        if ask.hold is not None and ask.hold not in ask.owns:
            record(ask.hold)
            core.limit(ask.hold, rule)
        stats = ask.shard.stats
        mode, outcome = (stats.local, "degraded") if ask.local else (stats.row, "acquired")
        mode.ended(outcome, deadline.waited(), core.segments[ask.address.bucket])
    return LockSet(members, confirm=confirm)


def _attach(core: Core, member: RowLock, ask: Ask) -> None:
    assert ask.hold is not None
    if encode(member.key) != ask.key:
        member.join(ask.hold)
    member.address = ask.address
    member.attach(ask.hold, core.gates.token_of(ask.hold, encode(member.key)))


def strictest(rules: Sequence[ResolvedClass]) -> ResolvedClass:
    """One class as strict as each of these."""
    for rule in rules:
        require_row_mode(rule)
    waiters = [rule.max_waiters for rule in rules if rule.max_waiters is not None]
    return structs.replace(
        rules[0],
        on_outage="refuse" if any(rule.on_outage == "refuse" for rule in rules) else "local",
        timeout=min(rule.timeout for rule in rules),
        max_waiters=min(waiters, default=None),
        max_hold=min((rule.max_hold for rule in rules if rule.max_hold is not None), default=None),
        kill=any(rule.kill for rule in rules),
        frozen=any(rule.frozen for rule in rules),
    )


class LockSet:
    """Several held row locks as one: their own context manager, degraded or lost if any of them is."""

    def __init__(self, members: dict[str | bytes, RowLock], *, confirm: bool) -> None:
        self._members = members
        self._confirm = confirm

    def __iter__(self) -> Iterator[RowLock]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, key: str | bytes) -> RowLock:
        return self._members[key]

    @property
    def tokens(self) -> dict[str | bytes, int]:
        """The fencing token of each key.

        Raises:
            NoToken: a member is degraded.
        """
        return {key: member.token for key, member in self._members.items()}

    @property
    def degraded(self) -> bool:
        """True if any member excludes this process only."""
        return any(member.degraded for member in self._members.values())

    @property
    def lost(self) -> bool:
        """True once any member is known to be lost; no I/O."""
        return any(member.lost for member in self._members.values())

    def on_lost(self, callback: Callable[[LossReason], object]) -> None:
        """Have `callback(reason)` called once when the first member is lost; at once if one is."""
        first = itertools.count()

        def once(reason: LossReason) -> None:
            if next(first) == 0:
                callback(reason)

        for member in self._members.values():
            member.on_lost(once)

    def check(self) -> None:
        """As `RowLock.check`, for every member."""
        for member in self._members.values():
            member.check()

    def release(self, *, confirm: bool = False) -> None:
        """Release every member that is not released yet, whatever happens to one of them.

        Raises:
            LockLost: of the first member that was lost.
        """
        first: LockLost | None = None
        for member in reversed(self._members.values()):
            if member.attached:
                try:
                    member.release(confirm=confirm)
                except LockLost as lost:
                    first = first or lost
                except NotHeld:
                    pass  # another thread was quicker
        if first is not None:
            raise first

    def __repr__(self) -> str:
        if not any(member.attached for member in self):
            state = "released"
        else:
            state = "lost" if self.lost else "degraded" if self.degraded else "held"
        return f"<LockSet of {len(self)} {state}>"

    def __enter__(self) -> LockSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release(confirm=self._confirm)
        except LockLost as lost:
            if error is None:
                raise
            error.add_note(f"and a lock was lost meanwhile: {lost}")
