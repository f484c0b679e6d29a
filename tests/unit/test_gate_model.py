"""The gate under every order of its blocks: random walks of a small world, checked after each block.

The world is that of the model-checked protocol: callers with nested row locks, one server whose rows belong to
sessions, another process that takes rows too, sessions that die unseen, a watcher that looks for them. Callers are
generators that stop between any two blocks; the scheduler draws who goes on, whose deadline passes, whom a
cancellation strikes, and what dies. Wrong variants of the rules show that the checks see what they must.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from lockrouter.deadline import now
from lockrouter.errors import LossReason, WouldDeadlock
from lockrouter.gate import Gates, Handle, Hold, Place, Request
from lockrouter.session import Session

RUNS = 2_000
"""Walks of each kind of world; about a second."""
FOREIGN = "another process"


class Fault(AssertionError):
    """A rule was broken."""


class Cancelled(BaseException):
    """A cancellation, a greenlet's kill, an interrupt."""


class Deadline(Exception):
    """The server's own bound: what the lead meets when its time is up."""


class FakeSession:
    def __init__(self) -> None:
        self.hold: Hold | None = None
        self.lease = 0
        self.dead = False
        # Known to be lost: found dead by the watcher, or its server is no longer the primary.
        self.condemned = False
        self.given_back = False


@dataclass
class Sleep:
    """The caller sleeps until its request is woken, or its deadline."""

    request: Request


@dataclass
class AtServer:
    """The lead waits at the server for a row."""

    slot: int


Stop = Sleep | AtServer | None
"""Where a caller stands between two blocks; None: it goes on whenever it is drawn."""


@dataclass
class Rules:
    """What the callers and the watcher do right, and may be told to do wrong."""

    heed_grant_when_cancelled: bool = True
    look_before_handing_over: bool = True
    look_up_inside_the_block: bool = True
    roll_back: bool = True


@dataclass
class World:
    gates: Gates
    draw: random.Random
    rules: Rules
    slots: int
    deadlines: bool = True
    cancellations: bool = True
    deaths: bool = True
    foreign: bool = True
    names: bool = False
    rows: dict[int, FakeSession | str] = field(default_factory=dict)
    sessions: list[FakeSession] = field(default_factory=list)
    inside: dict[int, list[tuple[Caller, Hold]]] = field(default_factory=dict)
    reported: list[Request] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    waits_for: dict[int, int] = field(default_factory=dict)
    picked: Hold | None = None
    received: int = 0
    told: int = 0
    refused: int = 0

    # -- the server -----------------------------------------------------------------------------------------------

    def free_rows_of(self, session: FakeSession) -> None:
        for slot in [slot for slot, owner in self.rows.items() if owner is session]:
            del self.rows[slot]

    def kill(self, session: FakeSession) -> None:
        session.dead = True
        self.free_rows_of(session)

    def give_back(self, session: FakeSession) -> None:
        if session.given_back:
            raise Fault("a session was given back twice")
        session.given_back = True

    # -- checks ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        for slot, gate in self.gates._gates.items():
            if gate.queue and gate.holder is None and gate.lead is None:
                raise Fault(f"the queue of {slot} has neither a holder nor a lead")
            if not gate.queue and gate.holder is None and gate.lead is None:
                raise Fault(f"the gate of {slot} serves nobody")
            if gate.holder is not None and gate.lead is not None:
                raise Fault(f"the gate of {slot} has a holder and a lead")
            for request in gate.queue:
                if request.place is not Place.QUEUED:
                    raise Fault("in the queue, but not queued")
        for request in self.requests:
            self.check_request(request)
        for slot, inside in self.inside.items():
            self.check_inside(slot, inside)
        for request in self.reported:
            if request.place is not Place.GONE or request.hold is not None:
                raise Fault("granted after its deadline was reported")

    def check_request(self, request: Request) -> None:
        gate = self.gates._gates.get(request.slot)
        if request.place is Place.QUEUED and (gate is None or request not in gate.queue):
            raise Fault("queued, but at no gate")
        if request.place is Place.LEAD and (gate is None or gate.lead is not request):
            raise Fault("lead, but of no gate")

    def check_inside(self, slot: int, inside: list[tuple[Caller, Hold]]) -> None:
        if len({id(caller.owner) for caller, _ in inside}) > 1:
            raise Fault(f"two owners inside {slot}")
        for _, hold in inside:
            if self.gates.holder_of(slot) is not hold:
                raise Fault(f"who is inside {slot} is not its holder")
            session = cast(FakeSession, hold.session)
            if not session.dead and self.rows.get(slot) is not session:
                raise Fault(f"the row of {slot} is not its live holder's")
            if session.condemned and hold.lost is None:
                raise Fault("the holder of a session known to be lost was not told")

    def closes_a_ring(self, caller: Caller, slot: int) -> bool:
        """Whether waiting at `slot` would close a ring, by the world's own account of who is inside and who sleeps."""
        seen: set[int] = set()
        ahead = [slot]
        while ahead:
            at = ahead.pop()
            if at in seen:
                continue
            seen.add(at)
            for holder, _ in self.inside.get(at, ()):
                if holder is caller:
                    return True
                if isinstance(holder.stop, Sleep) and holder.stop.request.place is Place.QUEUED:
                    ahead.append(holder.stop.request.slot)
        return False


class Caller:
    """One simulated caller: a program of nested locks, as blocks."""

    def __init__(self, world: World, owner: str | None) -> None:
        self.world = world
        self.owner: object = owner or self
        self.named = owner
        self.handles: list[tuple[Hold, bytes]] = []
        self.stop: Stop = None
        self.begun = False
        self.program = self.run()

    # -- the program ----------------------------------------------------------------------------------------------

    def run(self) -> Generator[Stop, None, None]:
        draw, world = self.world.draw, self.world
        for _ in range(draw.randrange(1, 4)):
            try:
                for _ in range(draw.choice((1, 1, 2, 3))):
                    yield from self.lock(draw.randrange(world.slots), b"ab"[draw.randrange(2) :][:1])
                    yield None
            except (Cancelled, WouldDeadlock):
                pass
            draw.shuffle(self.handles)
            while self.handles:
                try:
                    yield from shielded(self.release(*self.handles.pop()))
                except Cancelled:
                    pass

    def lock(self, slot: int, key: bytes) -> Generator[Stop, None, None]:
        world, gates = self.world, self.world.gates
        owns = tuple({hold: None for hold, _ in self.handles if hold.count})
        may_receive = world.draw.random() < 0.9
        request = Request(slot, key, self, self.named, owns, may_receive=may_receive)
        try:
            if self.named is None and world.draw.random() < 0.4:
                place = yield from self.lead_at_once(request)
            else:
                place = Place.GONE
            if place is Place.GONE:
                place = gates.enter(request, wait=world.draw.random() < 0.85)
        except WouldDeadlock:
            world.refused += 1
            if not world.closes_a_ring(self, slot):
                raise Fault("refused a wait that closes no ring") from None
            raise
        world.requests.append(request)
        try:
            if place is Place.QUEUED:
                if world.closes_a_ring(self, slot):
                    raise Fault("a ring of waiting was not seen")
                place = yield from self.queue(request)
            if place is Place.LEAD:
                place = yield from self.lead(request)
        except Cancelled:
            if gates.leave_queue(request) is Place.HOLDER and world.rules.heed_grant_when_cancelled:
                yield from shielded(self.give_up(request))
            raise
        if place in (Place.HOLDER, Place.NESTED):
            self.enter_row(request)

    def lead_at_once(self, request: Request) -> Generator[Stop, None, Place]:
        """The usual case: GONE, somebody is at the gate; HOLDER; or LEAD, the request goes on step by step."""
        world, gates, slot, caller = self.world, self.world.gates, request.slot, object()
        if not gates.lead(slot, caller):
            return Place.GONE
        session, hold = FakeSession(), None
        world.sessions.append(session)
        try:
            yield None
            if world.draw.random() < 0.3:
                world.give_back(session)
                gates.succeed(caller, request)
                return Place.LEAD
            yield AtServer(slot)
            if session.dead:
                raise Deadline
            world.rows[slot] = session
            yield None
            hold = Hold(slot, request.key, self, None, None, cast(Session, session), base=1 << 10)
            session.hold = hold
            gates.settle(slot, hold)
            yield None
        except (Cancelled, Deadline) as error:
            world.free_rows_of(session)
            world.give_back(session)
            session.hold = None
            if isinstance(error, Cancelled):
                if hold is not None:
                    hold.count = 0
                gates.withdraw(slot, caller, hold)
                raise
            gates.succeed(caller, request)
            return Place.LEAD
        request.hold, request.place = hold, Place.HOLDER
        return Place.HOLDER

    def queue(self, request: Request) -> Generator[Stop, None, Place]:
        world, gates = self.world, self.world.gates
        while True:
            try:
                yield Sleep(request)
            except Deadline:
                place = gates.leave_queue(request)
                if place is Place.GONE:
                    world.reported.append(request)
                else:
                    self.note_received(request)
                return place
            place = gates.place_of(request)
            if place is Place.HOLDER:
                self.note_received(request)
            if place is not Place.QUEUED:
                return place

    def note_received(self, request: Request) -> None:
        self.world.received += 1
        if not request.may_receive:
            raise Fault("handed to a request that must ask the server")

    def lead(self, request: Request) -> Generator[Stop, None, Place]:
        world, gates, slot = self.world, self.world.gates, request.slot
        session = FakeSession()
        world.sessions.append(session)
        try:
            yield None
            yield AtServer(slot)
            if session.dead:
                raise Deadline
            world.rows[slot] = session
            yield None
            hold = Hold(slot, request.key, self, self.named, shard=None, session=cast(Session, session), base=1 << 10)
            session.hold = hold
            gates.granted(request, hold)
            return Place.HOLDER
        except (Cancelled, Deadline) as error:
            # Closed, or rolled back, before the next lead asks.
            world.free_rows_of(session)
            world.give_back(session)
            session.hold = None
            if isinstance(error, Cancelled):
                raise
            place = gates.leave_queue(request)
            world.reported.append(request)
            return place

    # -- inside ---------------------------------------------------------------------------------------------------

    def enter_row(self, request: Request) -> None:
        hold = request.hold
        assert hold is not None
        self.handles.append((hold, request.key))
        self.world.inside.setdefault(hold.slot, []).append((self, hold))

    def give_up(self, request: Request) -> Generator[Stop, None, None]:
        hold, request.hold = request.hold, None
        if hold is not None:
            yield from self.uncount(hold, request.key)

    def release(self, hold: Hold, key: bytes) -> Generator[Stop, None, None]:
        self.world.inside[hold.slot].remove((self, hold))
        yield None
        yield from self.uncount(hold, key)

    def uncount(self, hold: Hold, key: bytes) -> Generator[Stop, None, None]:
        world, gates = self.world, self.world.gates
        if not gates.uncount(hold, key):
            return
        session = cast(FakeSession, hold.session)
        yield None
        if gates.has_heir(hold) and hold.passes < 3:
            yield None
            clean = not session.dead or not world.rules.look_before_handing_over
            if clean and gates.hand_over(hold):
                if session.condemned:
                    raise Fault("handed over on a session known to be lost")
                return
            yield None
        session.hold = None
        if world.rules.roll_back:
            world.free_rows_of(session)
        yield None
        world.give_back(session)
        yield None
        gates.leave(hold)


def shielded(operation: Generator[Stop, None, None]) -> Generator[Stop, None, None]:
    """A release goes to its end: cancellations wait."""
    cancelled = False
    for stop in operation:
        try:
            yield stop
        except Cancelled:
            cancelled = True
    if cancelled:
        raise Cancelled


class Scheduler:
    """Draws the next block until every caller is through."""

    def __init__(self, world: World, callers: list[Caller]) -> None:
        self.world = world
        self.callers = callers
        self.left = [*callers]

    def advance(self, caller: Caller, error: BaseException | None = None) -> None:
        caller.begun = True
        try:
            caller.stop = next(caller.program) if error is None else caller.program.throw(error)
        except (StopIteration, Cancelled):
            caller.stop = None
            self.left.remove(caller)
            if caller.handles:
                raise Fault("a program ended while it held") from None

    def ready(self) -> Iterator[Caller]:
        for caller in self.left:
            stop = caller.stop
            if isinstance(stop, Sleep):
                waiter = stop.request.waiter
                assert waiter is not None
                if not waiter._lock.locked():
                    yield caller
                elif stop.request.place is not Place.QUEUED:
                    raise Fault("a lost wake-up: the sleeper's place has changed")
            elif not isinstance(stop, AtServer) or stop.slot not in self.world.rows:
                yield caller

    def run(self) -> None:
        world, draw = self.world, self.world.draw
        for _ in range(2_000):
            if not self.left:
                break
            if draw.random() < 0.25:
                self.disturb()
            else:
                ready = [*self.ready()]
                if ready:
                    caller = draw.choice(ready)
                    if isinstance(caller.stop, Sleep):
                        waiter = caller.stop.request.waiter
                        assert waiter is not None and waiter.wait(now())
                    self.advance(caller)
                elif FOREIGN in world.rows.values():
                    self.foreigner_leaves()
                else:
                    raise Fault("nothing moves any more but by deadlines")
            world.check()
        if self.left:
            raise Fault("no end")
        self.check_end()

    def disturb(self) -> None:
        world, draw = self.world, self.world.draw
        kind = draw.randrange(5)
        if kind == 0 and world.deadlines:
            waiting = [caller for caller in self.left if isinstance(caller.stop, (Sleep, AtServer))]
            if waiting:
                self.advance(draw.choice(waiting), Deadline())
        elif kind == 1 and world.cancellations:
            begun = [caller for caller in self.left if caller.begun]
            if begun:
                self.advance(draw.choice(begun), Cancelled())
        elif kind == 2 and world.deaths:
            alive = [session for session in world.sessions if not session.dead and not session.given_back]
            if alive and draw.random() < 0.3:
                world.kill(draw.choice(alive))
        elif kind == 3:
            self.watch()
        elif kind == 4 and world.foreign:
            free = [slot for slot in range(world.slots) if slot not in world.rows]
            if FOREIGN in world.rows.values():
                self.foreigner_leaves()
            elif free:
                world.rows[draw.choice(free)] = FOREIGN

    def foreigner_leaves(self) -> None:
        for slot in [slot for slot, owner in self.world.rows.items() if owner is FOREIGN]:
            del self.world.rows[slot]

    def watch(self) -> None:
        """The watcher finds a dead session, or is told that a server was demoted, and marks who holds through it."""
        world, draw = self.world, self.world.draw
        if world.picked is not None:
            hold, world.picked = world.picked, None
            cast(FakeSession, hold.session).condemned = True
            world.gates.lose_hold(hold, LossReason.CLOSED)
            return
        held = [session for session in world.sessions if session.hold is not None]
        found = [session for session in held if session.dead] or (held if draw.random() < 0.1 else [])
        if not found or not world.deaths:
            return
        session = draw.choice(found)
        if not world.rules.look_up_inside_the_block:
            world.picked = session.hold
            return
        session.condemned = True
        if world.gates.lose(cast(Session, session), LossReason.CLOSED):
            world.told += 1

    def check_end(self) -> None:
        world = self.world
        self.foreigner_leaves()
        if world.gates._gates or world.gates._waiting:
            raise Fault("a gate is left")
        if world.rows:
            raise Fault("a row is left locked by an idle session")
        if not all(session.given_back for session in world.sessions):
            raise Fault("a session is left")


def walk(seed: int, make: Callable[[], Gates] = Gates, rules: Rules | None = None, **options: Any) -> World:
    """One random walk; raises what it finds wrong."""
    draw = random.Random(seed)
    world = World(make(), draw, rules or Rules(), slots=draw.randrange(1, 5), **options)
    callers = [Caller(world, "one owner" if world.names and number < 2 else None) for number in range(2 + seed % 3)]
    Scheduler(world, callers).run()
    return world


QUIET = {"deadlines": False, "cancellations": False, "deaths": False, "foreign": False}


@pytest.mark.parametrize(
    "options",
    [
        QUIET,
        {**QUIET, "deadlines": True},
        {**QUIET, "cancellations": True},
        {**QUIET, "deaths": True},
        {},
        {"names": True},
    ],
    ids=["quiet", "deadlines", "cancellations", "deaths", "all", "two threads of one owner"],
)
def test_every_rule_holds_after_every_block(options: dict[str, Any]) -> None:
    received = told = refused = reported = 0
    for seed in range(RUNS):
        try:
            world = walk(seed, **options)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        received += world.received
        told += world.told
        refused += world.refused
        reported += len(world.reported)
    # The walks must have been where it is interesting.
    assert received > RUNS / 20 and refused > RUNS / 200
    assert told > RUNS / 200 or not options.get("deaths", True)
    assert reported > RUNS / 20 or not options.get("deadlines", True)


class ExpiringLeadStays(Gates):
    """3.20: a waiter that expires only leaves the queue, also when it is the lead by now."""

    def leave_queue(self, request: Request) -> Place:
        if request.place is Place.LEAD:
            request.place = Place.GONE
            return Place.GONE
        return super().leave_queue(request)


class ExpiringLeadNamesNobody(Gates):
    """3.21: an expired lead does not pass the lead on."""

    def leave_queue(self, request: Request) -> Place:
        if request.place is Place.LEAD:
            self._gates[request.slot].lead = None
            request.place = Place.GONE
            return Place.GONE
        return super().leave_queue(request)


class ReleaseNamesNobody(Gates):
    """3.22."""

    def leave(self, hold: Hold) -> None:
        self._gates[hold.slot].holder = None


class WatcherFreesTheGate(Gates):
    """3.23."""

    def lose(self, session: Session, reason: LossReason) -> list[Hold]:
        holds = super().lose(session, reason)
        for hold in holds:
            super().leave(hold)
        return holds


class HandsOverWhatIsLost(Gates):
    """3.25."""

    def hand_over(self, hold: Hold, handle: Handle | None = None) -> bool:
        lost, hold.lost = hold.lost, None
        done = super().hand_over(hold, handle)
        hold.lost = lost
        return done


class HandsOverToAnybody(Gates):
    """3.26: also to requests that must ask the server."""

    def hand_over(self, hold: Hold, handle: Handle | None = None) -> bool:
        gate = self._gates[hold.slot]
        if not gate.queue:
            return False
        head = gate.queue[0]
        kept, head.may_receive = head.may_receive, True
        done = super().hand_over(hold, handle)
        head.may_receive = kept
        return done


class SeesNoRing(Gates):
    """3.07."""

    def _refuse_cycle(self, gate: Any, owns: tuple[Any, ...]) -> None:
        pass


class SeesRingsEverywhere(Gates):
    def _refuse_cycle(self, gate: Any, owns: tuple[Any, ...]) -> None:
        if gate.holder is not None:
            raise WouldDeadlock


class WakesNobody(Gates):
    def hand_over(self, hold: Hold, handle: Handle | None = None) -> bool:
        gate = self._gates[hold.slot]
        if not gate.queue:
            return False
        head = gate.queue[0]
        waiter, head.waiter = head.waiter, None
        done = super().hand_over(hold, handle)
        head.waiter = waiter
        return done


class NestsIntoWhatIsBeingReleased(Gates):
    def enter(self, request: Request, **options: Any) -> Place:
        holder = self.holder_of(request.slot)
        if holder is not None and not holder.count and request.owner is not None and holder.owner == request.owner:
            self._nest(holder, request)
            return Place.NESTED
        return super().enter(request, **options)


class ForgetsToForgetWaiting(Gates):
    def _forget_waiting(self, request: Request) -> None:
        pass


WRONG_GATES: tuple[type[Gates], ...] = (
    ExpiringLeadStays,
    ExpiringLeadNamesNobody,
    ReleaseNamesNobody,
    WatcherFreesTheGate,
    HandsOverWhatIsLost,
    HandsOverToAnybody,
    SeesNoRing,
    SeesRingsEverywhere,
    WakesNobody,
    NestsIntoWhatIsBeingReleased,
    ForgetsToForgetWaiting,
)
WRONG: list[tuple[str, Callable[[], Gates], Rules]] = [
    *((made.__name__, made, Rules()) for made in WRONG_GATES),
    ("watcher picks, then marks (3.24)", Gates, Rules(look_up_inside_the_block=False)),
    ("hands over without looking (3.25)", HandsOverWhatIsLost, Rules(look_before_handing_over=False)),
    ("cancelled after the grant, just raises (3.28)", Gates, Rules(heed_grant_when_cancelled=False)),
    ("no ROLLBACK (3.27)", Gates, Rules(roll_back=False)),
]


@pytest.mark.parametrize(("make", "rules"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_the_walks_find_what_is_wrong(make: Callable[[], Gates], rules: Rules) -> None:
    for seed in range(RUNS):
        try:
            walk(seed, make, rules, names=seed % 2 == 1)
        except (Fault, KeyError):
            return
    pytest.fail(f"{RUNS} walks saw nothing wrong")
