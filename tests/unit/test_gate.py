"""The gate, rule by rule: one caller of this process inside a row, one at its server, the others in line."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any, cast

import pytest

from lockrouter.deadline import now
from lockrouter.errors import LossReason, Overloaded, RouterClosed, WouldDeadlock
from lockrouter.gate import Gates, Group, Hold, Place, Request, StepBack, Told
from lockrouter.session import Session


class FakeSession:
    """What a gate knows of a session: which hold it serves."""

    def __init__(self) -> None:
        self.hold: Hold | None = None
        self.lease = 0


class Caller:
    """A running thing with its own context: what it holds it records."""

    def __init__(self, gates: Gates, owner: Hashable = None) -> None:
        self.gates = gates
        self.owner = owner
        self.holds: tuple[Hold, ...] = ()

    def ask(self, slot: int, *, key: bytes = b"k", may_receive: bool = True, owner: Hashable = None) -> Request:
        owns = tuple(hold for hold in self.holds if hold.count)
        return Request(slot, key, self, owner or self.owner, owns, may_receive=may_receive)

    def enter(self, slot: int, *, key: bytes = b"k", wait: bool = True, **options: Any) -> tuple[Request, Place]:
        request = self.ask(slot, key=key)
        return request, self.gates.enter(request, wait=wait, **options)

    def queue(self, slot: int, *, may_receive: bool = True) -> Request:
        request = self.ask(slot, may_receive=may_receive)
        assert self.gates.enter(request, wait=True) is Place.QUEUED
        return request

    def grant(self, request: Request, *, base: int = 1000) -> Hold:
        session = FakeSession()
        hold = Hold(request.slot, request.key, self, request.owner, shard=None, session=real(session), base=base)
        session.hold = hold
        self.gates.granted(request, hold)
        self.holds += (hold,)
        return hold

    def take(self, slot: int, *, key: bytes = b"k", base: int = 1000) -> Hold:
        request, place = self.enter(slot, key=key)
        assert place is Place.LEAD
        return self.grant(request, base=base)

    def received(self, request: Request) -> Hold:
        hold = request.hold
        assert hold is not None and self.gates.place_of(request) is Place.HOLDER
        self.holds += (hold,)
        return hold


def real(session: FakeSession) -> Session:
    return cast(Session, session)


def session_of(hold: Hold) -> Session:
    assert hold.session is not None
    return hold.session


def woken(request: Request) -> bool:
    """Whether a sleeping caller would get up now; uses the wake-up."""
    return request.waiter is not None and request.waiter.wait(now())


def is_empty(gates: Gates) -> bool:
    return not gates._gates and not gates._waiting


@pytest.fixture
def gates() -> Gates:
    return Gates()


# 1. Enter


def test_the_first_at_an_empty_gate_leads(gates: Gates) -> None:
    request, place = Caller(gates).enter(1)
    assert place is Place.LEAD and request.hold is None
    assert gates.holder_of(1) is None and list(gates.waiters()) == [(1, 1)]


def test_different_rows_have_different_gates(gates: Gates) -> None:
    one, two = Caller(gates), Caller(gates)
    assert one.enter(1)[1] is two.enter(2)[1] is Place.LEAD


def test_others_queue_behind_a_lead_and_behind_a_holder(gates: Gates) -> None:
    first = Caller(gates)
    request, _ = first.enter(1)
    early = Caller(gates).queue(1)
    first.grant(request)
    late = Caller(gates).queue(1)
    assert gates.place_of(early) is gates.place_of(late) is Place.QUEUED
    assert not woken(early) and not woken(late)


def test_who_may_not_wait_hears_busy_and_leaves_no_trace(gates: Gates) -> None:
    first = Caller(gates)
    request, _ = first.enter(1)
    assert Caller(gates).enter(1, wait=False)[1] is Place.BUSY
    hold = first.grant(request)
    assert Caller(gates).enter(1, wait=False)[1] is Place.BUSY
    gates.uncount(hold, b"k")
    gates.leave(hold)
    assert is_empty(gates)


def test_the_holder_comes_in_again_past_the_queue(gates: Gates) -> None:
    holder = Caller(gates)
    hold = holder.take(1)
    waiter = Caller(gates).queue(1)
    request, place = holder.enter(1, wait=False)
    assert place is Place.NESTED and request.hold is hold and hold.count == 2
    assert gates.place_of(waiter) is Place.QUEUED
    assert not gates.uncount(hold, b"k")
    assert gates.uncount(hold, b"k"), "the last handle releases the row"


def test_nested_keys_of_one_row_are_counted_each(gates: Gates) -> None:
    holder = Caller(gates)
    hold = holder.take(1, key=b"a")
    holder.enter(1, key=b"b")
    holder.enter(1, key=b"a")
    assert {key: count for key, (count, _) in hold.keys.items()} == {b"a": 2, b"b": 1}
    assert gates.token_of(hold, b"a") == gates.token_of(hold, b"b") == 1000
    assert [gates.uncount(hold, key) for key in (b"a", b"b", b"a")] == [False, False, True]


def test_a_key_that_was_released_inside_the_hold_gets_a_higher_token(gates: Gates) -> None:
    holder = Caller(gates)
    hold = holder.take(1, key=b"a", base=5000)
    last = gates.token_of(hold, b"a")
    for _ in range(3):
        holder.enter(1, key=b"b")
        gates.uncount(hold, b"a")
        holder.enter(1, key=b"a")
        assert gates.token_of(hold, b"a") > last
        last = gates.token_of(hold, b"a")
        gates.uncount(hold, b"b")
    gates.rebase(hold, b"a", 9000)
    assert gates.token_of(hold, b"a") == 9000 and (hold.base, hold.passes) == (9000, 0)


def test_who_asked_not_to_enter_again_is_refused_and_not_counted(gates: Gates) -> None:
    holder = Caller(gates)
    hold = holder.take(1)
    with pytest.raises(WouldDeadlock):
        holder.enter(1, reentrant=False)
    assert hold.count == 1 and hold.keys[b"k"][0] == 1


def test_a_named_owner_nests_from_any_context(gates: Gates) -> None:
    hold = Caller(gates, "job 7").take(1)
    request, place = Caller(gates, "job 7").enter(1)
    assert place is Place.NESTED and request.hold is hold
    assert Caller(gates, "job 8").enter(1, wait=False)[1] is Place.BUSY
    assert Caller(gates).enter(1, wait=False)[1] is Place.BUSY, "nobody by name is not everybody"


def test_two_names_in_one_context_exclude_each_other(gates: Gates) -> None:
    server = Caller(gates)
    first = server.ask(1, owner="client a")
    gates.enter(first, wait=True)
    server.grant(first)
    assert gates.enter(server.ask(1, owner="client b"), wait=False) is Place.BUSY
    with pytest.raises(WouldDeadlock):
        gates.enter(server.ask(1, owner="client b"), wait=True)
    assert gates.enter(server.ask(1, owner="client a"), wait=False) is Place.NESTED


def test_nobody_nests_into_a_hold_that_is_being_released(gates: Gates) -> None:
    holder = Caller(gates, "job 7")
    hold = holder.take(1)
    owned = holder.ask(1)
    unnamed = Request(1, b"k", holder, None, (hold,))
    assert gates.uncount(hold, b"k")
    # The releaser is about to send the ROLLBACK: the row is no longer anybody's.
    assert gates.enter(owned, wait=False) is gates.enter(unnamed, wait=False) is Place.BUSY
    assert gates.enter(owned, wait=True) is gates.enter(unnamed, wait=True) is Place.QUEUED
    gates.leave(hold)
    assert gates.place_of(owned) is Place.LEAD and woken(owned)
    assert gates.place_of(unnamed) is Place.QUEUED


def test_max_waiters_counts_who_is_in_line(gates: Gates) -> None:
    holder = Caller(gates)
    hold = holder.take(1)
    assert Caller(gates).enter(1, max_waiters=1)[1] is Place.QUEUED
    with pytest.raises(Overloaded):
        Caller(gates).enter(1, max_waiters=1)
    assert holder.enter(1, max_waiters=0)[1] is Place.NESTED, "the owner's own requests do not wait"
    assert Caller(gates).enter(1, wait=False, max_waiters=0)[1] is Place.BUSY
    assert list(gates.waiters()) == [(1, 1)]
    assert hold.count == 2
    assert Caller(gates).enter(2, max_waiters=0)[1] is Place.LEAD


# 2. Lead


def test_a_granted_lead_is_the_holder(gates: Gates) -> None:
    caller = Caller(gates)
    request, _ = caller.enter(1)
    hold = caller.grant(request)
    assert gates.place_of(request) is Place.HOLDER and request.hold is hold
    assert gates.holder_of(1) is hold and gates.holds() == [hold] and hold.passes == 0


def test_a_lead_that_gives_up_passes_the_lead_on(gates: Gates) -> None:
    # Wrong variants 3.21 and 3.22: an expired lead, or a release, that names nobody.
    lead, _ = Caller(gates).enter(1)
    first, second = Caller(gates).queue(1), Caller(gates).queue(1)
    assert gates.leave_queue(lead) is Place.GONE
    assert gates.place_of(first) is Place.LEAD and woken(first)
    assert gates.place_of(second) is Place.QUEUED and not woken(second)
    assert gates.leave_queue(first) is Place.GONE
    assert gates.place_of(second) is Place.LEAD and woken(second)
    assert gates.leave_queue(second) is Place.GONE
    assert is_empty(gates)


def test_the_lead_goes_through_fifty_waiters_that_all_give_up(gates: Gates) -> None:
    lead, _ = Caller(gates).enter(1)
    line = [lead, *(Caller(gates).queue(1) for _ in range(50))]
    for request in line:
        assert gates.place_of(request) is Place.LEAD
        gates.leave_queue(request)
    assert is_empty(gates)


# 3. Deadline or interruption of a waiter


def test_a_waiter_whose_time_is_up_leaves_the_line_for_good(gates: Gates) -> None:
    holder = Caller(gates)
    hold = holder.take(1)
    first, second = Caller(gates).queue(1), Caller(gates).queue(1)
    assert gates.leave_queue(first) is Place.GONE
    gates.uncount(hold, b"k")
    assert gates.hand_over(hold)
    assert gates.place_of(first) is Place.GONE and first.hold is None and not woken(first)
    assert gates.place_of(second) is Place.HOLDER and woken(second)
    assert gates.leave_queue(first) is Place.GONE, "giving up twice is giving up once"


def test_a_waiter_that_expires_as_the_lead_passes_the_lead_on(gates: Gates) -> None:
    # Wrong variant 3.20: it leaves the queue by its own memory of being in the queue.
    lead, _ = Caller(gates).enter(1)
    waiter, next_one = Caller(gates).queue(1), Caller(gates).queue(1)
    gates.leave_queue(lead)
    assert gates.leave_queue(waiter) is Place.GONE
    assert gates.place_of(next_one) is Place.LEAD and woken(next_one)


def test_a_waiter_that_expires_as_the_holder_has_the_row(gates: Gates) -> None:
    # Wrong variant 3.28: cancelled after the grant, it just raises. The gate says whose the row is.
    holder, heir = Caller(gates), Caller(gates)
    hold = holder.take(1)
    request = heir.queue(1)
    gates.uncount(hold, b"k")
    assert gates.hand_over(hold)
    assert gates.leave_queue(request) is Place.HOLDER
    mine = heir.received(request)
    assert gates.uncount(mine, b"k")
    gates.leave(mine)
    assert is_empty(gates)


def test_only_the_gate_decides_between_grant_and_deadline(gates: Gates) -> None:
    caller = Caller(gates)
    request, _ = caller.enter(1)
    caller.grant(request)
    assert gates.leave_queue(request) is Place.HOLDER
    nested, _ = caller.enter(1)
    assert gates.leave_queue(nested) is Place.NESTED


# 4. Release and hand-over


def test_a_release_without_heirs_leaves_no_gate(gates: Gates) -> None:
    hold = Caller(gates).take(1)
    assert gates.uncount(hold, b"k") and not gates.has_heir(hold)
    assert not gates.hand_over(hold)
    gates.leave(hold)
    assert is_empty(gates)


def test_a_hand_over_goes_to_the_head_through_the_same_session(gates: Gates) -> None:
    hold = Caller(gates).take(1, base=5000)
    first, second = Caller(gates), Caller(gates)
    one, two = first.queue(1), second.queue(1)
    assert gates.uncount(hold, b"k") and gates.has_heir(hold) and gates.hand_over(hold)
    heir = first.received(one)
    assert woken(one) and not woken(two)
    assert heir is gates.holder_of(1) and heir is not hold
    assert heir.session is hold.session and session_of(hold).hold is heir
    assert (heir.passes, heir.base, heir.row_at) == (1, 5000, hold.row_at)
    assert heir.thing is first and gates.token_of(heir, b"k") == 5001
    gates.uncount(heir, b"k")
    assert gates.hand_over(heir)
    assert second.received(two).passes == 2


def test_a_release_that_is_not_handed_over_names_the_head_as_the_lead(gates: Gates) -> None:
    hold = Caller(gates).take(1)
    one, two = Caller(gates).queue(1), Caller(gates).queue(1)
    gates.uncount(hold, b"k")
    gates.leave(hold)
    assert gates.holder_of(1) is None
    assert gates.place_of(one) is Place.LEAD and woken(one) and one.hold is None
    assert gates.place_of(two) is Place.QUEUED


def test_who_must_ask_the_server_is_not_handed_the_row_nor_passed_over(gates: Gates) -> None:
    # Wrong variant 3.26: a request of lock_all neither receives nor gives.
    hold = Caller(gates).take(1)
    strict = Caller(gates).queue(1, may_receive=False)
    eager = Caller(gates).queue(1)
    gates.uncount(hold, b"k")
    assert not gates.hand_over(hold)
    assert gates.place_of(strict) is gates.place_of(eager) is Place.QUEUED
    gates.leave(hold)
    assert gates.place_of(strict) is Place.LEAD and gates.place_of(eager) is Place.QUEUED


def test_leaving_or_handing_over_twice_does_not_touch_the_next_holder(gates: Gates) -> None:
    hold = Caller(gates).take(1)
    heir, later = Caller(gates), Caller(gates)
    request = heir.queue(1)
    waiting = later.queue(1)
    gates.uncount(hold, b"k")
    assert gates.hand_over(hold)
    gates.leave(hold)
    assert not gates.hand_over(hold)
    assert gates.holder_of(1) is heir.received(request)
    assert gates.place_of(waiting) is Place.QUEUED


# 5. Loss


def test_a_lost_holder_keeps_the_gate_closed_until_it_leaves(gates: Gates) -> None:
    # Wrong variant 3.23: the watcher frees the gate, and the next one enters while the loser is still inside.
    hold = Caller(gates).take(1)
    waiter = Caller(gates).queue(1)
    assert gates.lose(session_of(hold), LossReason.CLOSED) == [hold]
    assert hold.lost is LossReason.CLOSED and gates.holder_of(1) is hold
    assert gates.place_of(waiter) is Place.QUEUED and not woken(waiter)
    gates.uncount(hold, b"k")
    assert not gates.hand_over(hold), "the row is not this session's to give (3.25)"
    gates.leave(hold)
    assert gates.place_of(waiter) is Place.LEAD and woken(waiter)


def test_a_loss_is_told_once(gates: Gates) -> None:
    hold = Caller(gates).take(1)
    assert gates.lose(session_of(hold), LossReason.CLOSED) == [hold]
    assert gates.lose(session_of(hold), LossReason.SILENT) == []
    assert not gates.lose_hold(hold, LossReason.DEMOTED)
    assert hold.lost is LossReason.CLOSED


def test_the_loss_finds_who_holds_through_the_session_now(gates: Gates) -> None:
    # Wrong variant 3.24: the watcher picks the handle first and marks it after the hand-over.
    hold = Caller(gates).take(1)
    session = session_of(hold)
    heir = Caller(gates)
    request = heir.queue(1)
    gates.uncount(hold, b"k")
    gates.hand_over(hold)
    assert gates.lose(session, LossReason.CLOSED) == [heir.received(request)]
    assert hold.lost is None


def test_the_loss_of_a_session_that_holds_nothing_is_nobodys(gates: Gates) -> None:
    assert gates.lose(real(FakeSession()), LossReason.CLOSED) == []


def test_callbacks_are_kept_until_the_loss_and_answered_after_it(gates: Gates) -> None:
    hold = Caller(gates).take(1)
    told: list[LossReason] = []
    handle = Told(told.append)
    assert gates.subscribe(hold, handle) is None
    assert gates.lose_hold(hold, LossReason.DEMOTED)
    assert gates.subscribe(hold, handle) is LossReason.DEMOTED
    assert [found() for found in hold.callbacks] == [handle]
    del handle
    assert [found() for found in hold.callbacks] == [None], "its handle alone keeps it"


def test_a_lost_hold_is_entered_again_by_its_owner_only(gates: Gates) -> None:
    holder = Caller(gates)
    hold = holder.take(1)
    gates.lose_hold(hold, LossReason.CLOSED)
    assert holder.enter(1)[0].hold is hold
    assert Caller(gates).enter(1, wait=False)[1] is Place.BUSY


# 7. Nesting and cycles


def test_a_ring_of_two_is_refused_at_once_and_the_outer_hold_stays(gates: Gates) -> None:
    one, two = Caller(gates), Caller(gates)
    outer = one.take(1)
    two.take(2)
    waiting = one.queue(2)
    with pytest.raises(WouldDeadlock):
        two.enter(1)
    assert gates.place_of(waiting) is Place.QUEUED and gates.holder_of(1) is outer
    assert list(gates.waiters()) == [(1, 0), (2, 1)]


@pytest.mark.parametrize("size", [3, 4, 10])
def test_a_ring_of_any_size_is_refused(gates: Gates, size: int) -> None:
    callers = [Caller(gates) for _ in range(size)]
    for slot, caller in enumerate(callers):
        caller.take(slot)
    for slot, caller in enumerate(callers[:-1]):
        caller.queue(slot + 1)
    with pytest.raises(WouldDeadlock):
        callers[-1].enter(0)


def test_a_ring_through_gates_that_a_group_leads_is_refused_to_who_nests(gates: Gates) -> None:
    several, nesting = Caller(gates), Caller(gates)
    nesting.take(2)
    group = Group()
    lead, behind = several.ask(1), several.ask(2)
    lead.group = behind.group = group
    assert gates.enter(lead, wait=True) is Place.LEAD
    assert gates.enter(behind, wait=True) is Place.QUEUED
    with pytest.raises(WouldDeadlock):
        nesting.enter(1)
    assert gates.leave_queue(behind) is gates.leave_queue(lead) is Place.GONE
    assert nesting.enter(1)[1] is Place.LEAD, "a group that has left is in nobody's way"


def test_a_group_that_would_close_a_ring_steps_back_and_lets_the_other_go_first(gates: Gates) -> None:
    several, nesting = Caller(gates), Caller(gates)
    hold = nesting.take(2)
    lead, behind = several.ask(1), several.ask(2)
    lead.group = behind.group = Group()
    assert gates.enter(lead, wait=True) is Place.LEAD
    waiting = nesting.queue(1)
    with pytest.raises(StepBack):
        gates.enter(behind, wait=True)
    assert gates.leave_queue(behind) is Place.GONE, "it did not queue"
    assert gates.leave_queue(lead) is Place.GONE
    assert gates.place_of(waiting) is Place.LEAD and woken(waiting)
    gates.leave_queue(waiting)
    gates.uncount(hold, hold.key)
    gates.leave(hold)
    assert is_empty(gates)


def test_a_group_that_waits_for_nobody_who_waits_for_it_queues(gates: Gates) -> None:
    several, single = Caller(gates), Caller(gates)
    single.take(2)
    lead, behind = several.ask(1), several.ask(2)
    lead.group = behind.group = Group()
    gates.enter(lead, wait=True)
    Caller(gates).queue(1)
    assert gates.enter(behind, wait=True) is Place.QUEUED


def test_a_ring_through_a_handed_over_row_is_refused(gates: Gates) -> None:
    first, heir, other = Caller(gates), Caller(gates), Caller(gates)
    hold = first.take(1)
    request = heir.queue(1)
    other.take(2)
    gates.uncount(hold, b"k")
    gates.hand_over(hold)
    heir.received(request)
    other.queue(1)
    with pytest.raises(WouldDeadlock):
        heir.enter(2)


def test_a_ring_is_no_reason_to_refuse_who_does_not_wait(gates: Gates) -> None:
    one, two = Caller(gates), Caller(gates)
    one.take(1)
    two.take(2)
    one.queue(2)
    assert two.enter(1, wait=False)[1] is Place.BUSY
    assert two.enter(2)[1] is Place.NESTED


def test_another_context_that_waits_for_the_same_rows_is_no_ring(gates: Gates) -> None:
    one, two, stranger = Caller(gates), Caller(gates), Caller(gates)
    one.take(1)
    two.take(2)
    one.queue(2)
    assert stranger.enter(1)[1] is Place.QUEUED
    third = Caller(gates)
    third.take(3)
    assert third.enter(1)[1] is Place.QUEUED, "a chain that ends at somebody who runs is no ring"


def test_a_lead_waits_at_its_server_where_no_ring_can_close(gates: Gates) -> None:
    one, two = Caller(gates), Caller(gates)
    one.take(1)
    assert one.enter(2)[1] is Place.LEAD
    two.take(3)
    assert two.enter(2)[1] is Place.QUEUED
    assert one.ask(3).owns and gates.enter(two.ask(1), wait=False) is Place.BUSY


def test_a_waiter_that_left_is_no_part_of_a_ring(gates: Gates) -> None:
    one, two = Caller(gates), Caller(gates)
    one.take(1)
    two.take(2)
    waiting = one.queue(2)
    gates.leave_queue(waiting)
    assert two.enter(1)[1] is Place.QUEUED
    with pytest.raises(WouldDeadlock):
        one.enter(2)


def test_a_waiter_that_became_the_lead_is_no_part_of_a_ring(gates: Gates) -> None:
    one, two, three = Caller(gates), Caller(gates), Caller(gates)
    one.take(1)
    hold = two.take(2)
    waiting = one.queue(2)
    gates.uncount(hold, b"k")
    gates.leave(hold)
    assert gates.place_of(waiting) is Place.LEAD
    three.take(3)
    assert three.enter(1)[1] is Place.QUEUED
    assert two.enter(1)[1] is Place.QUEUED


def test_a_ring_of_holds_with_two_rows_each_is_seen_from_either(gates: Gates) -> None:
    one, two = Caller(gates), Caller(gates)
    one.take(1)
    one.take(11)
    two.take(2)
    two.take(12)
    one.queue(12)
    for slot in (1, 11):
        with pytest.raises(WouldDeadlock):
            two.enter(slot)
    assert is_waiting_exactly_for(gates, one)


def is_waiting_exactly_for(gates: Gates, caller: Caller) -> bool:
    return set(gates._waiting) == set(caller.holds)


# Close


def test_a_closed_gate_takes_nobody_and_wakes_all_who_wait(gates: Gates) -> None:
    holder = Caller(gates)
    hold = holder.take(1)
    line = [Caller(gates).queue(1) for _ in range(3)]
    gates.close()
    gates.close()
    for caller in (Caller(gates), holder):
        with pytest.raises(RouterClosed):
            caller.enter(1)
    with pytest.raises(RouterClosed):
        Caller(gates).enter(2)
    assert gates.holder_of(1) is hold, "holders stay"
    for request in line:
        assert woken(request) and gates.leave_queue(request) is Place.GONE
    gates.uncount(hold, b"k")
    gates.leave(hold)
    assert is_empty(gates)


# The same with threads


def test_threads_that_do_an_unprotected_count_inside_lose_none(gates: Gates) -> None:
    """Eight threads, one row: no two inside, whoever gets it by the lead or by hand-over."""
    server = threading.Lock()
    counted = [0]
    rounds, callers = 300, 8
    failures: list[BaseException] = []

    def run(caller: Caller) -> None:
        try:
            for turn in range(rounds):
                request = caller.ask(1)
                place = gates.enter(request, wait=True)
                while place is Place.QUEUED:
                    assert request.waiter is not None and request.waiter.wait(now() + 20), "a lost wake-up"
                    place = gates.place_of(request)
                if place is Place.LEAD:
                    assert server.acquire(timeout=20)
                    caller.grant(request)
                hold = request.hold
                assert hold is not None
                seen = counted[0]
                if turn % 16 == 0:
                    threading.Event().wait(0)
                counted[0] = seen + 1
                caller.holds = ()
                assert gates.uncount(hold, b"k")
                if not (turn % 3 and gates.has_heir(hold) and gates.hand_over(hold)):
                    server.release()
                    gates.leave(hold)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    threads = [threading.Thread(target=run, args=(Caller(gates),)) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    assert counted == [rounds * callers]
    assert is_empty(gates)
