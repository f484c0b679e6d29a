"""Combining, alone: leader and followers on a store in memory, under interrupts, deadlines and strangers' locks."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from lockrouter.deadline import now
from lockrouter.leases import lane
from lockrouter.leases.lane import MAX_BYTES, MAX_ROWS, Lane
from lockrouter.leases.rows import Item, Said, Seen, Verb
from lockrouter.protocol.effects import RECEIVE, WAIT, Operation, Waiter, drive
from lockrouter.session import Answered, Gone, Silent
from tests.support.fakestore import FakeStore, item
from tests.support.interrupts import interrupted
from tests.support.observe import eventually, in_thread


class Rig:
    """A lane on a fake store, and what it told of orphans; `work` is what its background would do."""

    def __init__(self) -> None:
        self.store = FakeStore()
        self.orphans: list[Item] = []
        self.adopted = threading.Event()
        self.lane = Lane(self.store, self.orphans.append, self.adopted.set)

    def submit(self, one: Item, seconds: float = 10.0) -> bool:
        return drive(self.lane.submit(one, now() + seconds))

    def queued(self) -> int:
        return len(self.lane._queue)

    def hold(self) -> Waiter:
        """From now on each call of the store waits until the returned waiter is woken, once per call."""
        self.store.gate = Waiter()
        return self.store.gate

    def idle(self) -> bool:
        return self.lane.idle and not self.lane._queue and not self.lane._adopted and not self.store.active


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A rig whose lane is idle and empty after the test."""
    made = Rig()
    yield made
    eventually(made.idle)


def behind_a_leader(rig: Rig, followers: Sequence[Item], *, seconds: float = 10.0) -> tuple[Any, list[Any], Waiter]:
    """A leader whose statement is on its way, and callers who queue behind it, in order."""
    gate = rig.hold()
    leader = in_thread(lambda: rig.submit(item(Verb.ACQUIRE, "leader")))
    eventually(lambda: rig.store.active)
    threads = []
    for one in followers:
        threads.append(in_thread(lambda one=one: rig.submit(one, seconds)))  # type: ignore[misc]
        eventually(lambda: rig.queued() == len(threads))
    return leader, threads, gate


def finish(rig: Rig, gate: Waiter, threads: Sequence[Any]) -> list[Any]:
    rig.store.gate = None
    gate.wake()
    return [thread.result() for thread in threads]


def test_one_caller_waits_for_nobody(rig: Rig) -> None:
    one = item(Verb.ACQUIRE, "a")
    assert rig.submit(one)
    assert isinstance(one.answer, Seen)
    assert one.answer.owner == one.row.owner
    assert rig.store.calls == [(Verb.ACQUIRE, [b"a"])]


def test_who_comes_meanwhile_goes_together(rig: Rig) -> None:
    items = [item(Verb.ACQUIRE, name) for name in "cab"]
    leader, threads, gate = behind_a_leader(rig, items)
    assert finish(rig, gate, [leader, *threads]) == [True] * 4
    assert [len(names) for _, names in rig.store.calls] == [1, 3]
    assert all(one.answer.owner == one.row.owner for one in items if isinstance(one.answer, Seen))


def test_a_batch_has_releases_then_renewals_then_acquisitions(rig: Rig) -> None:
    for name in ("x", "y"):
        assert rig.submit(item(Verb.ACQUIRE, name))
    rig.store.calls.clear()
    items = [
        item(Verb.READ, "x"),
        item(Verb.ACQUIRE, "x", "new owner"),
        item(Verb.RENEW, "y"),
        item(Verb.RELEASE, "x"),
    ]
    leader, threads, gate = behind_a_leader(rig, items)
    finish(rig, gate, [leader, *threads])
    assert [verb for verb, _ in rig.store.calls[1:]] == [Verb.RELEASE, Verb.RENEW, Verb.ACQUIRE, Verb.READ]
    assert rig.store.owner("x") == "new owner"


def test_one_key_twice_in_a_batch_has_one_owner(rig: Rig) -> None:
    items = [item(Verb.ACQUIRE, "a", owner) for owner in ("first", "second")]
    leader, threads, gate = behind_a_leader(rig, items)
    finish(rig, gate, [leader, *threads])
    assert rig.store.owner("a") == "first"
    assert [one.answer.owner for one in items if isinstance(one.answer, Seen)] == [b"first", b"first"]


def test_a_batch_is_capped(rig: Rig) -> None:
    items = [item(Verb.ACQUIRE, f"k{number}") for number in range(6)]
    for one in items:
        one.row = one.row._replace(payload=b"x" * (MAX_BYTES // 5))
    leader, threads, gate = behind_a_leader(rig, items)
    finish(rig, gate, [leader, *threads])
    assert [len(names) for _, names in rig.store.calls] == [1, 2, 2, 2]
    assert MAX_ROWS >= 64


def test_a_lost_reply_is_every_members(rig: Rig) -> None:
    def fail(items: Sequence[Item]) -> None:
        raise Gone("cut")

    items = [item(Verb.ACQUIRE, name) for name in "ab"]
    leader, threads, gate = behind_a_leader(rig, items)
    rig.store.before = fail
    finish(rig, gate, [leader, *threads])
    for one in items:
        assert isinstance(one.error, Gone)
        assert one.sent_at is not None
        assert one.answer is None


@pytest.mark.parametrize("error", [Silent("no reply"), Answered(1040, "too many connections"), ValueError("a bug")])
def test_no_error_of_one_batch_is_the_next_ones(rig: Rig, error: Exception) -> None:
    def fail(items: Sequence[Item]) -> None:
        rig.store.before = None
        raise error

    rig.store.before = fail
    first, second = item(Verb.ACQUIRE, "a"), item(Verb.ACQUIRE, "b")
    assert rig.submit(first)
    assert first.error is error
    assert rig.submit(second)
    assert second.error is None


def test_a_stranger_locks_one_row_of_many(rig: Rig) -> None:
    items = [item(Verb.ACQUIRE, f"k{number}") for number in range(40)]
    rig.store.rows_locked = {items[17].row.k}
    leader, threads, gate = behind_a_leader(rig, items)
    finish(rig, gate, [leader, *threads])
    for one in items:
        if one is items[17]:
            assert one.answer is Said.LOCKED
        else:
            assert isinstance(one.answer, Seen)
            assert one.answer.owner == one.row.owner
    # Found by looking, so once for all; later it is looked at first, and no statement waits for it.
    assert len(rig.store.calls) == 3
    again = item(Verb.ACQUIRE, "k17")
    assert rig.submit(again)
    assert again.answer is Said.LOCKED
    assert len(rig.store.calls) == 3
    rig.store.rows_locked.clear()
    assert rig.submit(again := item(Verb.ACQUIRE, "k17"))
    assert isinstance(again.answer, Seen)


def test_a_lock_nobody_can_see_is_found_by_halving(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [item(Verb.ACQUIRE, f"k{number}") for number in range(16)]
    rig.store.rows_locked = {items[5].row.k}
    monkeypatch.setattr(rig.store, "locked", nothing_locked)
    leader, threads, gate = behind_a_leader(rig, items)
    finish(rig, gate, [leader, *threads])
    assert [one.answer is Said.LOCKED for one in items] == [number == 5 for number in range(16)]
    assert [len(names) for _, names in rig.store.calls] == [1, 16, 8, 4, 2, 2, 1, 1, 4, 8] or len(rig.store.calls) < 12


def nothing_locked(items: Sequence[Item], until: float) -> Operation[set[bytes]]:
    return set()
    yield


def test_members_with_an_answer_do_not_wait_for_the_locked_one(rig: Rig) -> None:
    items = [item(Verb.ACQUIRE, name) for name in "ab"]
    rig.store.rows_locked = {items[1].row.k}
    leader, threads, gate = behind_a_leader(rig, items)
    gate.wake()  # the leader's own statement
    assert leader.result()
    eventually(lambda: len(rig.store.calls) == 2)
    gate.wake()  # both: the stranger's lock is met
    eventually(lambda: len(rig.store.calls) == 3)
    gate.wake()  # a alone
    assert threads[0].result()
    assert threads[1].result()
    assert items[1].answer is Said.LOCKED


def test_a_follower_whose_deadline_comes_in_the_queue_was_never_sent(rig: Rig) -> None:
    late = item(Verb.ACQUIRE, "late")
    leader, threads, gate = behind_a_leader(rig, [late], seconds=0.05)
    assert threads[0].result() is False
    assert late.sent_at is None
    finish(rig, gate, [leader])
    assert rig.store.owner("late") == ""


def test_a_follower_whose_deadline_comes_in_the_batch_leaves_an_orphan(rig: Rig) -> None:
    stays, goes = item(Verb.ACQUIRE, "stays"), item(Verb.ACQUIRE, "goes")
    gate = rig.hold()
    leader = in_thread(lambda: rig.submit(item(Verb.ACQUIRE, "leader")))
    eventually(lambda: rig.store.active)
    first = in_thread(lambda: rig.submit(stays))
    eventually(lambda: rig.queued() == 1)
    second = in_thread(lambda: rig.submit(goes, 0.3))
    eventually(lambda: rig.queued() == 2)
    gate.wake()
    eventually(lambda: goes.sent_at)
    assert second.result() is False
    assert goes.sent_at is not None
    finish(rig, gate, [leader, first])
    assert rig.orphans == [goes]
    assert rig.store.owner("goes") == "goes"  # to be released by whoever is told of the orphan


class SlowStore(FakeStore):
    """Answers when told, as a server does: the call waits in a RECEIVE, which only a wire can end."""

    def __init__(self) -> None:
        super().__init__()
        self.wire = SlowWire()

    def _call(self, verb: Verb, items: Sequence[Item], one: Any) -> Operation[Any]:
        for each in items:
            each.sent_at = now()
        yield (RECEIVE, self.wire, now() + 10)
        self.calls.append((verb, [each.row.key for each in items]))
        return [one(each.row) for each in items]


class SlowWire:
    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.waiting = 0

    def receive(self, until: float) -> bytes:
        self.waiting += 1
        if not self.arrived.wait(max(0.0, until - now())):
            raise TimeoutError
        return b"!"


def test_a_leader_whose_deadline_comes_hands_the_batch_to_the_background() -> None:
    orphans: list[Item] = []
    store, adopted = SlowStore(), threading.Event()
    lane = Lane(store, orphans.append, adopted.set)
    mine, other = item(Verb.ACQUIRE, "mine"), item(Verb.ACQUIRE, "other")
    began = now()
    assert drive(lane.submit(mine, now() + 0.1)) is False
    assert now() - began < 1.0
    assert adopted.is_set()
    follower = in_thread(lambda: drive(lane.submit(other, now() + 10)))
    eventually(lambda: len(lane._queue) == 1)
    store.wire.arrived.set()
    drive(lane.finish())
    assert follower.result() is True
    assert orphans == [mine]
    assert [names for _, names in store.calls] == [[b"mine"], [b"other"]]
    assert lane.idle


def test_a_leader_that_is_interrupted_leaves_the_batch_to_the_others(rig: Rig) -> None:
    followers = [item(Verb.ACQUIRE, name) for name in "abc"]
    gate = rig.hold()
    first = rig.lane.submit(item(Verb.ACQUIRE, "first"), now() + 10)
    first.send(None)
    leading = rig.lane.submit(followers[0], now() + 10)
    assert leading.send(None)[0] == WAIT
    threads = []
    for number, one in enumerate(followers[1:]):
        threads.append(in_thread(lambda one=one: rig.submit(one)))  # type: ignore[misc]
        eventually(lambda: rig.queued() == number + 2)  # noqa: B023 - called now
    with pytest.raises(StopIteration):
        first.send(True)
    leading.send(True)  # it leads all three, and its statement is on its way
    assert len(rig.store.calls) == 2
    rig.store.gate = None
    with pytest.raises(KeyboardInterrupt):
        leading.throw(KeyboardInterrupt())
    gate.wake()
    assert [thread.result() for thread in threads] == [True, True]
    assert [names for _, names in rig.store.calls[2:]] == [[b"b", b"c"]]
    assert followers[0].left
    assert all(one.sent_at is not None for one in followers)


def test_an_interrupt_at_any_instant_of_a_leader_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither who is in its batch nor who queues behind it: also while it names the next one, or tells of its end."""
    monkeypatch.setattr(lane, "_LOOK_AGAIN", 0.02)
    at, struck = 0, True
    while struck:
        rig = Rig()
        gate = rig.hold()
        led = in_thread(lambda rig=rig, at=at: interrupted(lambda: rig.submit(item(Verb.ACQUIRE, "led")), at))  # type: ignore[misc]
        eventually(lambda: rig.store.active or not led.is_alive())  # noqa: B023 - called now
        followers = [item(Verb.ACQUIRE, name) for name in "abc"]
        threads = [in_thread(lambda rig=rig, one=one: rig.submit(one, 5.0)) for one in followers]  # type: ignore[misc]
        eventually(lambda: rig.queued() or all(one.done for one in followers) or rig.store.active)  # noqa: B023
        rig.store.gate = None
        gate.wake()
        struck = led.result() is not None
        assert [thread.result() for thread in threads] == [True] * 3, led.result()
        assert all(one.error is None for one in followers), led.result()
        eventually(rig.idle)
        at += 1
    assert at > 20


def test_a_named_leader_that_goes_names_another(rig: Rig) -> None:
    rig.hold()
    first = rig.lane.submit(item(Verb.ACQUIRE, "first"), now() + 10)
    first.send(None)
    names = [rig.lane.submit(item(Verb.ACQUIRE, name), now() + 10) for name in "ab"]
    for one in names:
        one.send(None)
    with pytest.raises(StopIteration):
        first.send(True)
    names[0].close()  # it never woke up
    rig.store.gate = None
    with pytest.raises(StopIteration) as stopped:
        step = names[1].send(True)
        while True:
            assert step
            step = names[1].send(True)
    assert stopped.value.value is True
    assert rig.store.calls[-1] == (Verb.ACQUIRE, [b"b"])


@pytest.mark.parametrize("seed", range(60))
def test_interrupts_at_every_step_lose_nobody(seed: int) -> None:
    """Callers driven step by step in a random order, some interrupted anywhere: the others all get their answers."""
    dice = random.Random(seed)
    rig = Rig()
    callers = {number: item(Verb.ACQUIRE, f"k{number % 7}", f"owner{number}") for number in range(14)}
    running = {number: rig.lane.submit(one, now() + 60) for number, one in callers.items()}
    victims = set(dice.sample(sorted(callers), 4))
    waits: dict[int, Any] = {}
    ended: dict[int, bool] = {}
    steps = 0
    while running:
        steps += 1
        assert steps < 5000, "nobody gets on"
        ready = [n for n in running if n not in waits or waits[n][0] != WAIT or not waits[n][1]._lock.locked()]
        assert ready, "all wait, and nobody leads"
        number = dice.choice(ready)
        operation = running[number]
        try:
            if number in victims and dice.random() < 0.3:
                victims.discard(number)
                del running[number]
                with pytest.raises(KeyboardInterrupt):
                    operation.throw(KeyboardInterrupt())
                continue
            effect = waits.get(number)
            result = effect[1].wait(now()) if effect is not None and effect[0] == WAIT else None
            waits[number] = operation.send(result if effect is not None else None)
        except StopIteration as stop:
            ended[number] = stop.value
            running.pop(number, None)
    assert all(ended.values())
    assert rig.idle()
    for number in ended:
        answer = callers[number].answer
        assert isinstance(answer, Seen)
        assert answer.key == callers[number].row.key


def test_many_threads_each_get_their_own_answer(rig: Rig) -> None:
    won: list[bytes] = []

    def work(number: int) -> None:
        for turn in range(50):
            one = item(Verb.ACQUIRE, f"k{turn}", f"o{number}")
            assert rig.submit(one)
            assert isinstance(one.answer, Seen)
            assert one.answer.key == one.row.key
            if one.answer.owner == one.row.owner:
                won.append(one.row.key)

    for thread in [in_thread(lambda number=number: work(number)) for number in range(16)]:  # type: ignore[misc]
        thread.result()
    assert sorted(won) == sorted(f"k{turn}".encode() for turn in range(50))
    assert len(rig.store.calls) < 16 * 50
