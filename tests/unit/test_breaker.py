"""The breaker opens on faults in a row only, and lets exactly one probe through at a time."""

from __future__ import annotations

import threading

import pytest

from lockrouter.breaker import Breaker, BreakerState

LATER = 1.3
"""More than the longest jittered second."""


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(3, 1.0, clock=clock)


@pytest.fixture
def opened(breaker: Breaker) -> Breaker:
    for _ in range(3):
        breaker.fault()
    return breaker


def state_of(breaker: Breaker) -> BreakerState:
    return breaker.state


def test_it_opens_at_the_last_fault_in_a_row_and_says_so_once(breaker: Breaker) -> None:
    assert [breaker.fault() for _ in range(2)] == [False, False] and breaker.closed
    assert breaker.fault()
    assert not breaker.closed and breaker.state is BreakerState.OPEN and breaker.openings == 1
    assert not breaker.fault() and breaker.openings == 1


@pytest.mark.parametrize("between", ["success", "answered"])
def test_an_answer_between_faults_begins_the_count_anew(breaker: Breaker, between: str) -> None:
    for _ in range(10):
        breaker.fault()
        breaker.fault()
        getattr(breaker, between)()
    assert breaker.closed


def test_contention_is_not_its_business(breaker: Breaker) -> None:
    # A busy row, a timeout and a full pool call none of these; error replies neither count nor reset.
    breaker.fault()
    breaker.fault()
    for _ in range(10):
        breaker.refused("too many connections")
    assert breaker.closed
    assert breaker.fault()


def test_an_error_reply_is_remembered_until_the_shard_is_well_or_silent(breaker: Breaker) -> None:
    breaker.refused("read-only")
    assert breaker.refusal == "read-only" and breaker.closed
    assert not breaker.success(), "it was never open"
    assert breaker.refusal is None
    breaker.refused("read-only")
    breaker.fault()
    assert breaker.refusal is None


def test_no_probe_before_its_time(clock: Clock, opened: Breaker) -> None:
    assert not opened.take_probe()
    assert 0.8 <= opened.probe_in() <= 1.2
    clock.time += 0.79
    assert not opened.take_probe()
    clock.time += LATER
    assert opened.probe_in() == 0.0 and opened.take_probe()


def test_processes_that_failed_together_probe_apart(clock: Clock) -> None:
    due = set()
    for _ in range(100):
        breaker = Breaker(1, 1.0, clock=clock)
        breaker.fault()
        due.add(round(breaker.probe_in(), 2))
    assert len(due) > 20 and max(due) - min(due) > 0.2


def test_a_closed_breaker_needs_no_probe(breaker: Breaker) -> None:
    assert not breaker.take_probe() and breaker.probe_in() == 0.0


def test_one_probe_at_a_time(clock: Clock, opened: Breaker) -> None:
    clock.time += LATER
    assert opened.take_probe() and not opened.closed
    assert state_of(opened) is BreakerState.HALF_OPEN
    clock.time += 100
    assert not opened.take_probe()


def test_a_probe_that_succeeds_closes(clock: Clock, opened: Breaker) -> None:
    clock.time += LATER
    opened.take_probe()
    assert opened.success() and opened.closed
    assert not opened.success()
    opened.abandon_probe()
    assert opened.closed
    assert [opened.fault() for _ in range(3)] == [False, False, True], "the count began anew"
    assert opened.openings == 2


def test_a_probe_that_fails_waits_for_the_next(clock: Clock, opened: Breaker) -> None:
    clock.time += LATER
    opened.take_probe()
    assert not opened.fault(probe=True) and opened.openings == 1
    assert state_of(opened) is BreakerState.OPEN and not opened.take_probe()
    clock.time += LATER
    assert opened.take_probe()


def test_a_probe_that_is_refused_stays_open_and_knows_why(clock: Clock, opened: Breaker) -> None:
    clock.time += LATER
    opened.take_probe()
    opened.refused("access denied")
    assert state_of(opened) is BreakerState.OPEN and opened.refusal == "access denied"
    assert not opened.take_probe()
    clock.time += LATER
    assert opened.take_probe() and opened.success() and opened.refusal is None


def test_a_straggler_does_not_end_the_probe_that_is_out(clock: Clock, opened: Breaker) -> None:
    clock.time += LATER
    assert opened.take_probe()
    assert not opened.fault()
    clock.time += LATER
    assert not opened.take_probe(), "the first probe is still out"


def test_a_straggler_knows_less_than_the_probe(clock: Clock, opened: Breaker) -> None:
    """A call that began before the breaker opened times out after a probe was answered: the answer stands."""
    clock.time += LATER
    assert opened.take_probe()
    opened.refused("read-only")
    due = opened.probe_in()
    assert not opened.fault()
    assert opened.refusal == "read-only" and opened.probe_in() == due
    clock.time += LATER
    assert opened.take_probe()
    opened.fault(probe=True)
    assert opened.refusal is None


def test_an_abandoned_probe_gives_its_place_back(clock: Clock, opened: Breaker) -> None:
    clock.time += LATER
    assert opened.take_probe()
    opened.abandon_probe()
    assert state_of(opened) is BreakerState.OPEN and opened.take_probe()


def test_abandoning_no_probe_changes_nothing(breaker: Breaker) -> None:
    breaker.abandon_probe()
    assert breaker.closed


def test_an_answer_to_a_straggler_does_not_close_an_open_breaker(opened: Breaker) -> None:
    opened.answered()
    assert not opened.closed


def test_of_many_threads_exactly_one_gets_the_probe(clock: Clock, opened: Breaker) -> None:
    for _ in range(20):
        clock.time += LATER
        start = threading.Barrier(16)
        won: list[bool] = []

        def run(start: threading.Barrier = start, won: list[bool] = won) -> None:
            start.wait(20)
            won.append(opened.take_probe())

        threads = [threading.Thread(target=run) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert sorted(won) == [False] * 15 + [True]
        opened.fault(probe=True)


def test_many_threads_open_it_once(breaker: Breaker) -> None:
    start = threading.Barrier(16)
    opened: list[bool] = []

    def run() -> None:
        start.wait(20)
        opened.extend(breaker.fault() for _ in range(50))

    threads = [threading.Thread(target=run) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert opened.count(True) == 1 and breaker.openings == 1
