"""The checker of histories finds what is wrong in wrong ones, and nothing in right ones."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.history import Event, Recorder, judge, read

Line = tuple[float, str, int, str, str, int]


def history(*lines: Line) -> list[Event]:
    return [Event(*line) for line in lines]


def hold(who: str, call: int, start: float, end: float, token: int, key: str = "k") -> list[Event]:
    """An acquisition that began a little before, held until `end`, and released."""
    return history(
        (start - 0.5, who, call, "invoke", key, 0),
        (start, who, call, "ok", key, token),
        (end, who, call, "release", key, 0),
        (end + 0.1, who, call, "released", key, 0),
    )


def test_one_after_the_other_is_in_order() -> None:
    report = judge(hold("a", 1, 1, 2, 10) + hold("b", 1, 2, 3, 11) + hold("a", 2, 3.5, 4, 12))
    assert report.violations == []
    assert str(report) == "6 operations, 3 of them acquisitions (3 ok): 0 violations"


def test_two_keys_do_not_meet() -> None:
    assert not judge(hold("a", 1, 1, 3, 10) + hold("b", 1, 2, 4, 10, key="other")).violations


def test_two_holders_at_once() -> None:
    found = judge(hold("a", 1, 1, 3, 10) + hold("b", 1, 2, 4, 11)).violations
    assert len(found) == 1
    assert "b/1 came in" in found[0] and "a/1" in found[0]


def test_a_hold_within_a_hold() -> None:
    assert judge(hold("a", 1, 1, 9, 10) + hold("b", 1, 2, 3, 11) + hold("c", 1, 4, 5, 12)).violations


@pytest.mark.parametrize("second", [9, 10])
def test_a_token_that_does_not_rise(second: int) -> None:
    found = judge(hold("a", 1, 1, 2, 10) + hold("b", 1, 3, 4, second)).violations
    assert found == [f"k: b/1 has token {second} after a/1 had 10"]


def test_permits() -> None:
    three = hold("a", 1, 1, 4, 10) + hold("b", 1, 2, 5, 11) + hold("c", 1, 3, 6, 12)
    assert not judge(three, permits=3).violations
    assert len(judge(three, permits=2).violations) == 1
    assert len(judge(three, permits={"k": 2}).violations) == 1
    assert "given 2 times" in judge(hold("a", 1, 1, 2, 10) + hold("b", 1, 3, 4, 10), permits=2).violations[0]


@settings(derandomize=True, max_examples=300, deadline=None, database=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=8), st.integers(1, 3))
def test_it_says_what_a_look_at_every_moment_says(spans: list[tuple[int, int]], permits: int) -> None:
    told = [event for n, (start, length) in enumerate(spans, 1) for event in hold("p", n, start, start + length, n)]
    most = max((sum(a <= at < a + n for a, n in spans) for at in range(42)), default=0)
    assert bool(judge(told, permits, tokens=False).violations) == (most > permits)


def test_a_frozen_holder_that_was_not_lost_held_all_the_time() -> None:
    frozen = history((0.5, "a", 1, "invoke", "k", 0), (1, "a", 1, "ok", "k", 10), (9, "a", 1, "held", "k", 0))
    assert judge(frozen + hold("b", 1, 5, 6, 11)).violations


def test_a_frozen_holder_that_found_itself_lost_claims_nothing_after_its_last_look() -> None:
    frozen = history(
        (0.5, "a", 1, "invoke", "k", 0),
        (1, "a", 1, "ok", "k", 10),
        (2, "a", 1, "held", "k", 0),
        (9, "a", 1, "lost", "k", 0),
    )
    assert not judge(frozen + hold("b", 1, 5, 6, 11)).violations


def test_lost_is_final() -> None:
    revived = history(
        (0.5, "a", 1, "invoke", "k", 0),
        (1, "a", 1, "ok", "k", 10),
        (2, "a", 1, "lost", "k", 0),
        (3, "a", 1, "held", "k", 0),
    )
    assert "lost is final" in judge(revived).violations[0]


def test_what_failed_or_is_unknown_or_never_ended_claims_nothing() -> None:
    others = history(
        (1, "b", 1, "invoke", "k", 0),
        (2, "b", 1, "fail", "k", 0),
        (1, "c", 1, "invoke", "k", 0),
        (2, "c", 1, "unknown", "k", 0),
        (1, "d", 1, "invoke", "k", 0),
    )
    report = judge(hold("a", 1, 1, 3, 10) + others)
    assert not report.violations
    assert report.calls == 4
    assert report.outcomes == {"ok": 1, "fail": 1, "unknown": 1}


def test_what_is_no_history() -> None:
    assert judge(history((1, "a", 1, "ok", "k", 10))).violations
    assert judge(hold("a", 1, 1, 2, 10) + hold("a", 1, 3, 4, 11)).violations


def test_what_a_killed_process_wrote_is_there(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        recorder = Recorder(tmp_path)
        call = recorder.invoke("k")
        call.ok(10)
        call.look(lambda: False)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    with next(tmp_path.iterdir()).open("ab") as file:
        file.write(b'[1.0,"cut sho')
    events = read(tmp_path)
    assert [event.what for event in events] == ["invoke", "ok", "held"]
    assert {event.process.split("-")[0] for event in events} == {str(pid)}
    assert not judge(events).violations
