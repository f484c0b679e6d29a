"""The gates: in this process, one caller per row is inside, one is at the server, the others queue here.

The rules were explored exhaustively in a small model; tests/unit/test_gate_model.py walks through them at random. Every
public method of `Gates` is one of their atomic blocks, run under the one mutex of all gates. After each block: a gate
with a queue has a holder or a lead.

1. `enter`: the holder's owner comes in again; an empty gate makes its caller the lead; others queue, unless that would
   close a cycle of waiting.
2. The lead asks the server. `granted` makes its hold the holder; `leave_queue` passes the lead on. `lead`, `settle`,
   `succeed`, `withdraw` and `release` are the same blocks for the usual lock, which finds and leaves nobody here.
3. `leave_queue`, at a deadline or an interruption, decides by the gate's state, never by the waiter's own memory.
4. `leave` hands the row over to the head of the queue where that is allowed, else names the head as the next lead.
   Readers (shared requests) at the head become leads together; none passes a writer that waits.
5. `lose` looks up, inside the block, who holds through a session now. The gate stays closed until that holder leaves.

An interrupt may come wherever a block calls something. So no block leaves a request in neither the queue nor its next
place; one that stands in both, or was not woken, `mend` finds.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol

from lockrouter.deadline import now
from lockrouter.errors import LossReason, NotHeld, Overloaded, RouterClosed, WouldDeadlock
from lockrouter.protocol.effects import Waiter
from lockrouter.session import Session

__all__ = ["Gates", "Group", "Hold", "Party", "Place", "Request", "Share", "StepBack", "Told"]


class Place(enum.Enum):
    """Where a request stands at its gate."""

    NESTED = "nested"
    LEAD = "lead"
    QUEUED = "queued"
    HOLDER = "holder"
    BUSY = "busy"
    GONE = "gone"


# Looking a member up in its class costs more than the rest of a block; the blocks use these.
_NESTED, _LEAD, _QUEUED = Place.NESTED, Place.LEAD, Place.QUEUED
_HOLDER, _BUSY, _GONE = Place.HOLDER, Place.BUSY, Place.GONE


_NOT_WAITING = frozenset({_NESTED, _HOLDER, _BUSY, _GONE})


class Hold:
    """One occupation of a row by one owner, from the grant until the last of its handles is released."""

    # Defaults of the class, not slots: what most locks never set costs them nothing.
    count = 1
    owner: Hashable = None
    lease = passes = 0
    degraded = shared = False
    party: Party | None = None
    lost: LossReason | None = None
    # The class's limit in seconds, whether passing it ends the session, and what was said of it so far.
    max_hold: float | None = None
    kill = False
    overdue = told = False
    callbacks: tuple[weakref.ref[Told], ...] = ()
    # Keys of this row that were held and released inside this hold.
    seen: frozenset[bytes] = frozenset()
    mode = "row"
    _keys: dict[bytes, list[int]] | None = None
    # The identity of the server, where the row is locked through a connection of the caller's.
    server = b""

    def __init__(
        self,
        slot: int,
        key: bytes,
        thing: object,
        owner: Hashable,
        shard: Any,
        session: Session | None,
        base: int = 0,
        *,
        passes: int = 0,
        at: float | None = None,
        row_at: float | None = None,
    ) -> None:
        self.slot = slot
        self.key = key
        self.thing = thing
        self.shard = shard
        self.session = session
        self.base = base
        self.granted_at = self.row_at = now() if at is None else at
        if session is not None:
            self.lease = session.lease
        else:
            self.degraded = True
        if owner is not None:
            self.owner = owner
        if row_at is not None:
            self.row_at, self.passes = row_at, passes

    @property
    def keys(self) -> dict[bytes, list[int]]:
        """Per key: how many handles are open, and their token. Made when more than the first is asked for, under the
        gates' mutex and before anything is counted.
        """
        made = self._keys
        if made is None:
            made = self._keys = {self.key: [self.count, self.base + self.passes]}
        return made

    @property
    def local(self) -> bool:
        """True while the hold excludes this process only."""
        return self.degraded and self.session is None


class Handle(Protocol):
    """What the gates know of a caller's handle: whether it still has a hold to release."""

    attached: bool
    generation: object


class Told:
    """A callback for the loss of a hold, kept by the handle it was given to, and by nobody else: one that refers to its
    handle must not keep that from being dropped.
    """

    __slots__ = ("__weakref__", "callback")

    def __init__(self, callback: Callable[[LossReason], object]) -> None:
        self.callback = callback


class Share:
    """What a transaction has of a hold that it took, or entered again, for one key: a handle that no caller sees."""

    __slots__ = ("attached", "generation", "hold", "key")

    def __init__(self, hold: Hold, key: bytes, generation: object) -> None:
        self.hold = hold
        self.key = key
        self.generation = generation
        self.attached = False


class Party:
    """The holds of several rows through one session: they are rolled back together, after the last is released."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.holds: list[Hold] = []
        self.granted_at = now()

    @property
    def open(self) -> bool:
        """True while any of the holds has a handle."""
        return any(hold.count for hold in self.holds)


class Group:
    """The requests of one call that wait at gate after gate before any of them asks the server."""


class StepBack(Exception):
    """Waiting would close a cycle through gates the call itself keeps others from: it leaves them and begins anew."""


class Request:
    """One caller at a gate."""

    group: Group | None = None
    waiter: Waiter | None = None
    place = Place.GONE
    shared = False
    hold: Hold | None = None
    session: Session | None = None

    def __init__(
        self,
        slot: int,
        key: bytes,
        thing: object,
        owner: Hashable,
        owns: tuple[Hold, ...],
        *,
        may_receive: bool = True,
    ) -> None:
        self.slot = slot
        self.key = key
        self.thing = thing
        self.owner = owner
        self.owns = owns
        self.may_receive = may_receive


def _same_owner(holder: Hold, request: Request) -> bool:
    """A request that names its owner is the holder's by that name only, an unnamed one by its context."""
    if request.owner is not None:
        return holder.owner == request.owner
    return holder in request.owns


def _nodes(request: Request) -> tuple[Hold | Group, ...]:
    """What others may wait for while this request waits."""
    return request.owns if request.group is None else (*request.owns, request.group)


def _wake(request: Request) -> None:
    if request.waiter is not None:
        request.waiter.wake()


_NOBODY: deque[Request] = deque(maxlen=0)
_NONE: frozenset[Any] = frozenset()


class _Gate:
    # Defaults of the class: a gate is made for every lock, and most need only one of these.
    holder: Hold | None = None
    # The exclusive request at the server, or whatever else stands for its caller; see `Gates.lead`.
    lead: object = None
    queue: deque[Request] = _NOBODY
    readers: set[Hold] | frozenset[Hold] = _NONE
    reader_leads: set[Request] | frozenset[Request] = _NONE  # replaced, never changed

    def own(self, request: Request) -> Hold | None:
        """The hold of this gate that is the caller's own."""
        holder = self.holder
        if holder is not None:
            return holder if holder.count and _same_owner(holder, request) else None
        return next((hold for hold in self.readers if hold.count and _same_owner(hold, request)), None)

    def make_lead(self, request: Request) -> None:
        """Let a request go to the server."""
        if request.shared:
            if self.readers is _NONE:
                self.readers = set()
            self.reader_leads = {*self.reader_leads, request}
        else:
            self.lead = request
        request.place = _LEAD

    def admits(self, request: Request) -> bool:
        """True when nobody inside or at the server excludes the request."""
        if self.holder is not None or self.lead is not None:
            return False
        return request.shared or not (self.readers or self.reader_leads)

    def in_the_way(self) -> list[Hold | Group]:
        """Whom a waiter waits for: the holders, or the lead, where that waits at another gate."""
        found: list[Hold | Group] = [hold for hold in self.inside() if hold.count]
        if isinstance(self.lead, Request) and self.lead.group is not None:
            found.append(self.lead.group)
        return found

    def inside(self) -> Iterable[Hold]:
        """Who holds the row in this process."""
        return self.readers if self.holder is None else (self.holder,)


class Gates:
    """All rows of one topology that somebody in this process holds, asks for or waits for; nothing of others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gates: dict[int, _Gate] = {}
        # Which gate the owner of a hold waits at, for those who wait while they hold: the edges a cycle is made of.
        # A group waits while it leads other gates, and is in the way there without a hold.
        self._waiting: dict[Hold | Group, _Gate] = {}
        self._closed = False

    def enter(
        self,
        request: Request,
        *,
        wait: bool,
        reentrant: bool = True,
        max_waiters: int | None = None,
    ) -> Place:
        """Place a request: NESTED (`request.hold` is set and counted), LEAD, QUEUED, or BUSY where it may not wait.

        Args:
            request: the caller; `request.owns` are the holds that are its own.
            wait: whether the caller may queue.
            reentrant: whether the caller's own hold is entered again, or refused.
            max_waiters: how many may wait at this gate.

        Raises:
            WouldDeadlock: waiting would close a cycle inside this process, or the caller's own hold is refused.
            StepBack: the cycle goes through what the request's group leads.
            Overloaded: `max_waiters` wait already.
            RouterClosed: the gates are closed.
        """
        with self._lock:
            if self._closed:
                raise RouterClosed("the router is closed")
            gate = self._gates.get(request.slot)
            if gate is None:
                gate = self._gates[request.slot] = _Gate()
            if not gate.queue and gate.admits(request) and not gate.readers:
                gate.make_lead(request)
                return _LEAD
            own = gate.own(request)
            if own is not None:
                if not reentrant:
                    raise WouldDeadlock("the caller holds this row already, and asked not to enter it again")
                if own.shared is not request.shared:
                    raise WouldDeadlock("the caller holds this row already, shared and exclusive do not mix")
                self._nest(own, request)
                return _NESTED
            if request.shared and not gate.queue and gate.admits(request):
                gate.make_lead(request)
                return _LEAD
            if not wait:
                request.place = _BUSY
                return _BUSY
            if max_waiters is not None and len(gate.queue) >= max_waiters:
                raise Overloaded(f"{max_waiters} callers of this process wait for the row already")
            nodes = _nodes(request)
            if nodes:
                self._refuse_cycle(gate, nodes)
            request.waiter = Waiter()
            if gate.queue is _NOBODY:
                gate.queue = deque()
            request.place = _QUEUED
            gate.queue.append(request)
            for node in nodes:
                self._waiting[node] = gate
            return _QUEUED

    def lead(self, slot: int, caller: object) -> bool:
        """As `enter` for the usual request, which finds nobody here: `caller` is the lead. False: it is not that.

        What stands for the caller goes on with `settle`, `succeed`, or `withdraw`.
        """
        with self._lock:
            if self._closed or slot in self._gates:
                return False
            gate = self._gates[slot] = _Gate()
            gate.lead = caller
            return True

    def settle(self, slot: int, hold: Hold) -> None:
        """`granted`, for what `lead` has let in."""
        with self._lock:
            gate = self._gates[slot]
            gate.lead = None
            gate.holder = hold

    def succeed(self, caller: object, request: Request) -> None:
        """Let a request be the lead in place of what stood for its caller."""
        with self._lock:
            gate = self._gates[request.slot]
            assert gate.lead is caller
            gate.lead = request
            request.place = _LEAD

    def withdraw(self, slot: int, caller: object, hold: Hold | None) -> None:
        """Take out what an interrupted call of `lead` or `settle` has left, if anything: the row is free by now."""
        with self._lock:
            gate = self._gates.get(slot)
            if gate is None:
                return
            if gate.lead is caller:
                gate.lead = None
            elif hold is not None and gate.holder is hold:
                gate.holder = None
            else:
                return
            self._advance(gate, slot)

    def _nest(self, holder: Hold, request: Request) -> None:
        self._count_in(holder, request.key)
        request.hold = holder
        request.place = _NESTED

    def _count_in(self, hold: Hold, key: bytes) -> None:
        counted = hold.keys.get(key)
        if counted is not None:
            counted[0] += 1
        else:
            # A key of this row that was held and released inside this very hold needs a token above its last one.
            hold.passes += key in hold.seen
            hold.keys[key] = [1, hold.base + hold.passes]
        hold.count += 1

    def _refuse_cycle(self, gate: _Gate, owns: tuple[Hold | Group, ...]) -> None:
        """Follow who waits for whom from `gate` on; a single lead waits at the server, where no chain goes on."""
        seen: set[Hold | Group] = set()
        ahead = gate.in_the_way()
        while ahead:
            node = ahead.pop()
            if node in owns:
                if isinstance(node, Group):
                    raise StepBack
                raise WouldDeadlock("waiting for this row would close a cycle of waiting inside this process")
            if node not in seen:
                seen.add(node)
                further = self._waiting.get(node)
                if further is not None:
                    ahead += further.in_the_way()

    def granted(self, request: Request, hold: Hold) -> None:
        """The server (or the outage) gave the lead its row: its hold is the holder."""
        with self._lock:
            gate = self._gates[request.slot]
            if request.shared:
                # No call stands between the assignments: an interrupt finds all of them done, or none.
                leads, readers = {*gate.reader_leads} - {request}, {*gate.readers, hold}
                gate.reader_leads = leads
                gate.readers = readers
            else:
                gate.lead = None
                gate.holder = hold
            request.hold = hold
            request.place = _HOLDER

    def leave_queue(self, request: Request) -> Place:
        """Give up waiting. HOLDER: the row was handed over before and is the caller's; else GONE, a lead passed on."""
        with self._lock:
            place = request.place
            if place in _NOT_WAITING:
                return place
            gate = self._gates.get(request.slot)
            if gate is not None:
                if place is _QUEUED:
                    if request in gate.queue:
                        gate.queue.remove(request)
                    self._forget_waiting(request)
                elif request.shared:
                    gate.reader_leads = {*gate.reader_leads} - {request}
                elif gate.lead is request:
                    gate.lead = None
                # A writer that leaves the queue, too, may have kept readers behind it waiting.
                self._advance(gate, request.slot)
            request.place = _GONE
            return _GONE

    def place_of(self, request: Request) -> Place:
        """Where the request stands now."""
        with self._lock:
            return request.place

    def _forget_waiting(self, request: Request) -> None:
        for node in _nodes(request):
            self._waiting.pop(node, None)

    def _advance(self, gate: _Gate, slot: int) -> None:
        """Let the head of the queue go to the server: a writer alone, readers together; forget an empty gate."""
        while gate.queue:
            head = gate.queue[0]
            if head.place is _QUEUED:
                if not gate.admits(head):
                    break
                self._forget_waiting(head)
                gate.make_lead(head)
            _wake(head)
            del gate.queue[0]
        if gate.holder is None and gate.lead is None and not (gate.readers or gate.reader_leads or gate.queue):
            del self._gates[slot]

    def uncount(self, hold: Hold, key: bytes, handle: Handle | None = None) -> bool:
        """One handle less; True when it was the last, of all rows of its session, and the caller is to free them.

        The handle, where there is one, is closed in the same step.

        Raises:
            NotHeld: it was closed before.
        """
        with self._lock:
            if handle is not None and not handle.attached:
                raise NotHeld("the lock was released before")
            counted = hold.keys[key]
            # No call stands between these: an interrupt finds all done, or none.
            if handle is not None:
                handle.attached = False
            hold.count -= 1
            counted[0] -= 1
            if not counted[0]:
                del hold.keys[key]
                if hold.count:
                    hold.seen |= {key}
            return not hold.count and (hold.party is None or not hold.party.open)

    def release(self, hold: Hold, handle: Handle) -> bool:
        """`uncount` and `leave` in one block, for the usual hold: one handle, nobody behind it. False: it is not that.

        The row's ROLLBACK follows: whoever comes now asks the server, and waits there for it.
        """
        with self._lock:
            gate = self._gates.get(hold.slot)
            if hold.count != 1 or gate is None or gate.holder is not hold or gate.queue or not handle.attached:
                return False
            handle.attached = False
            hold.count = 0
            del self._gates[hold.slot]
            return True

    def has_key(self, hold: Hold, key: bytes) -> bool:
        """True where a key of the hold's row has a handle."""
        with self._lock:
            return key in hold.keys

    def add_key(self, hold: Hold, key: bytes, handle: Handle | None = None) -> None:
        """Count one more handle of a hold, for a key of its row, and attach it in the same step."""
        with self._lock:
            self._count_in(hold, key)
            if handle is not None:
                handle.attached = True

    def forsake(self, request: Request) -> None:
        """Leave nothing of a request that was interrupted before anybody had a handle of its hold. Idempotent."""
        hold = request.hold
        if hold is not None and request.place is _HOLDER:
            hold.count = 0
            self.leave(hold)
        else:
            self.leave_queue(request)

    def holds_all(self, requests: Iterable[Request]) -> bool:
        """True when every request is for a row that is its caller's own already."""
        with self._lock:
            gates = [(self._gates.get(request.slot), request) for request in requests]
            return all(gate is not None and gate.own(request) is not None for gate, request in gates)

    def promote(self, hold: Hold, real: Hold, party: Party) -> bool:
        """Let a degraded hold have the row that was taken for it as `real`; False: it was released, or has one.

        It is a party of its own from then on, so that the row is rolled back, and never handed over: a waiter that
        degraded has its place at another gate, too.
        """
        with self._lock:
            if not hold.count or hold.session is not None or hold.lost is not None or real.lost is not None:
                return False
            for counted in hold.keys.values():
                counted[1] = real.base
            hold.shard, hold.lease, hold.base, hold.passes = real.shard, real.lease, real.base, 0
            party.holds.append(hold)
            hold.party = party
            party.session.hold = party
            hold.session = party.session
            return True

    def token_of(self, hold: Hold, key: bytes) -> int:
        """The token of a key that is held through this hold."""
        with self._lock:
            return hold.keys[key][1]

    def rebase(self, hold: Hold, key: bytes, base: int) -> None:
        """The server's clock was read again under the hold: `key` has that token now, and passes count from there."""
        with self._lock:
            counted = hold.keys[key]
            hold.base, hold.passes = base, 0
            counted[1] = base

    def has_heir(self, hold: Hold) -> bool:
        """A hint: somebody who could receive the row waits. Only `hand_over` decides."""
        gate = self._gates.get(hold.slot)
        return gate is not None and bool(gate.queue)

    def hand_over(self, hold: Hold, handle: Handle | None = None) -> bool:
        """Make the head of the queue the holder through the same session, one pass on; False: nobody may receive it.

        The caller holds the session's mutex and has found its socket clean, its time and its passes left. The handle,
        where it is given, is the only one of the hold, and is closed in the same step.
        """
        with self._lock:
            gate = self._gates.get(hold.slot)
            if gate is None or gate.holder is not hold or not gate.queue or hold.lost is not None:
                return False
            heir = gate.queue[0]
            if heir.place is not _QUEUED or not heir.may_receive:
                return False
            if handle is not None and (hold.count != 1 or not handle.attached):
                return False
            self._forget_waiting(heir)
            heir.hold = gate.holder = Hold(
                hold.slot,
                heir.key,
                heir.thing,
                heir.owner,
                shard=hold.shard,
                session=hold.session,
                base=hold.base,
                passes=hold.passes + 1,
                row_at=hold.row_at,
            )
            if hold.session is not None:
                hold.session.hold = heir.hold
            if handle is not None:
                handle.attached = False
                hold.count = 0
            heir.place = _HOLDER
            _wake(heir)
            del gate.queue[0]
            return True

    def leave(self, hold: Hold) -> None:
        """The row is released: the head of the queue becomes the lead."""
        with self._lock:
            gate = self._gates.get(hold.slot)
            if gate is None:
                return
            if gate.holder is hold:
                gate.holder = None
            elif hold in gate.readers:
                gate.readers.discard(hold)  # type: ignore[union-attr]
            else:
                return
            self._advance(gate, hold.slot)

    def mend(self) -> None:
        """Finish what interrupts have left half done: whoever is next goes on, and is told so."""
        with self._lock:
            for slot, gate in tuple(self._gates.items()):
                if gate.queue or (gate.holder is None and gate.lead is None):
                    self._advance(gate, slot)
                if isinstance(gate.lead, Request):
                    _wake(gate.lead)
                for reader in gate.reader_leads:
                    _wake(reader)

    def lose(self, session: Session, reason: LossReason) -> list[Hold]:
        """Mark who holds through `session` now as lost, once, and return them; their gates stay closed."""
        with self._lock:
            held: Hold | Party | None = session.hold
            holds = held.holds if isinstance(held, Party) else [held] if held is not None else []
            lost = [hold for hold in holds if hold.lost is None]
            for hold in lost:
                hold.lost = reason
            return lost

    def lose_hold(self, hold: Hold, reason: LossReason) -> bool:
        """Mark this hold as lost; False: it was already."""
        with self._lock:
            if hold.lost is not None:
                return False
            hold.lost = reason
            return True

    def subscribe(self, hold: Hold, told: Told) -> LossReason | None:
        """Add a callback for the loss; returns the reason instead when the hold is lost already."""
        with self._lock:
            if hold.lost is None:
                hold.callbacks += (weakref.ref(told),)
            return hold.lost

    def holder_of(self, slot: int) -> Hold | None:
        """Who holds the row in this process."""
        gate = self._gates.get(slot)
        return None if gate is None else next(iter(tuple(gate.inside())), None)

    def holds(self) -> list[Hold]:
        """All present holds."""
        with self._lock:
            return [hold for gate in self._gates.values() for hold in gate.inside()]

    def waiters(self) -> Iterable[tuple[int, int]]:
        """Slots and how many wait at each, leads included."""
        with self._lock:
            return [
                (slot, len(gate.queue) + len(gate.reader_leads) + (gate.lead is not None))
                for slot, gate in self._gates.items()
            ]

    def close(self) -> None:
        """Refuse new callers; holders stay. Idempotent."""
        with self._lock:
            self._closed = True
        self.wake_all()

    def wake_all(self) -> None:
        """Have every waiter look again at what it waits for."""
        with self._lock:
            queued = [request for gate in self._gates.values() for request in gate.queue]
        for request in queued:
            _wake(request)
