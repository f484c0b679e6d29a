"""The judges of the chaos run find what is wrong in wrong histories, and its plans replay."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.chaos.checkup import Checkup
from tests.chaos.invariants import TEXTS, Findings, invariants
from tests.chaos.plan import ENDS_SESSIONS, OUTAGES, SHARD_KINDS, WORKER_KINDS, make_plan
from tests.chaos.storm import Struck
from tests.chaos.story import Story
from tests.support.history import Event, judge
from tests.support.judges import Overlap, Verdict, judge_nesting, judge_rows, judge_set, judge_sum

ROW = "mysql-0/row/7"
LEASE = "mysql-0/lease/lease:1"
GATE = "mysql-0/gate/gate:1"
A, B = "100-0", "200-0"


def call(who: str, number: int, key: str, *told: tuple[Any, ...]) -> list[Event]:
    return [Event(at, who, number, what, key, *rest) for at, what, *rest in told]


def row(
    who: str, number: int, start: float, end: float, token: int, *more: tuple[float, str], note: str = ""
) -> list[Event]:
    """A row that was asked for a little before `start`, and released, unproved, at `end`."""
    told = [
        (start - 0.1, "invoke"),
        (start, "ok", token, note),
        *more,
        (end, "left"),
        (end, "release"),
        (end + 0.1, "released"),
    ]
    return call(who, number, ROW, *told)


# -- rows ----------------------------------------------------------------------------------------------------------


def test_rows_one_after_the_other_are_in_order() -> None:
    verdict = judge_rows(row(A, 1, 1, 2, 10, (1.9, "proved")) + row(B, 1, 2, 3, 11) + row(A, 2, 3.5, 4, 12))
    assert verdict == Verdict(3, [])


def test_nobody_comes_in_while_a_row_is_proved() -> None:
    told = row(A, 1, 1, 3, 10, (2.5, "proved")) + row(B, 1, 2, 2.2, 11)
    assert "held until 2.5" in judge_rows(told, lambda _: True).violations[0], "no fault excuses that"
    told = row(A, 1, 1, 3, 10, (2.5, "confirmed")) + row(B, 1, 2, 2.2, 11)
    assert judge_rows(told, lambda _: True).violations


def test_unproved_holds_overlap_only_where_it_is_excused() -> None:
    told = row(A, 1, 1, 3, 10) + row(B, 1, 2, 2.5, 11)
    assert len(judge_rows(told).violations) == 1
    seen: list[Overlap] = []

    def excused(overlap: Overlap) -> bool:
        seen.append(overlap)
        return True

    assert not judge_rows(told, excused).violations
    assert (seen[0].since, seen[0].at, seen[0].seconds) == (1, 2, 1)


@pytest.mark.parametrize("second", [9, 10])
def test_tokens_of_rows_rise_in_real_time(second: int) -> None:
    told = row(A, 1, 1, 2, 10) + row(B, 1, 3, 4, second)
    assert any("token" in text for text in judge_rows(told).violations)


def test_tokens_of_calls_at_the_same_time_may_come_in_any_order_but_not_twice() -> None:
    late = call(A, 1, ROW, (1.0, "invoke"), (3.0, "ok", 10, ""))
    assert not judge_rows(late + row(B, 1, 2, 2.5, 11), lambda _: True).violations
    assert judge_rows(late + row(B, 1, 2, 2.5, 10), lambda _: True).violations


def test_readers_share_and_exclude_writers() -> None:
    readers = row(A, 1, 1, 3, 10, (2.9, "proved"), note="shared") + row(B, 1, 2, 4, 11, note="shared")
    assert not judge_rows(readers).violations
    assert judge_rows(readers + row(A, 2, 2.5, 2.6, 12)).violations
    assert judge_rows(row(A, 1, 1, 3, 10) + row(B, 1, 2, 4, 11, note="shared")).violations


def test_a_writer_after_readers_has_the_higher_token() -> None:
    told = row(A, 1, 1, 2, 10, note="shared") + row(B, 1, 3, 4, 9)
    assert any("token" in text for text in judge_rows(told).violations)


# -- leases, nesting, money, sets ---------------------------------------------------------------------------------


def lease(who: str, start: float, until: float, token: int, *more: tuple[float, str], key: str = LEASE) -> list[Event]:
    return call(who, 1, key, (start - 0.1, "invoke"), (start, "ok", token, ""), (until, "until"), *more)


def test_a_lease_is_its_holders_until_its_deadline_though_it_was_killed() -> None:
    assert judge(lease(A, 1, 5, 10) + lease(B, 4, 6, 11)).violations
    assert not judge(lease(A, 1, 5, 10) + lease(B, 5, 6, 11)).violations


def test_a_lease_that_was_given_back_or_found_lost_is_nobodys() -> None:
    assert not judge(lease(A, 1, 5, 10, (3, "release")) + lease(B, 4, 6, 11)).violations
    assert not judge(lease(A, 1, 5, 10, (3, "lost")) + lease(B, 4, 6, 11)).violations


def test_a_nested_lock_has_the_token_it_is_nested_in() -> None:
    assert judge_nesting([*row(A, 1, 1, 2, 10), Event(1.5, A, 1, "nested", ROW, 10)]) == Verdict(1, [])
    assert judge_nesting([*row(A, 1, 1, 2, 10), Event(1.5, A, 1, "nested", ROW, 11)]).violations
    assert judge_nesting([Event(1.5, A, 1, "nested", ROW, 11)]).violations


def test_money() -> None:
    assert not judge_sum(600, 600, 10, 9, 2).violations
    assert judge_sum(599, 600, 10, 10, 0).violations
    assert judge_sum(600, 600, 9, 10, 0).violations, "a confirmed transfer is missing"
    assert judge_sum(600, 600, 12, 10, 1).violations, "a transfer happened twice"


def test_sets() -> None:
    assert judge_set(["a", "b"], ["a"], ["b", "c"]) == Verdict(1, [])
    assert judge_set(["b"], ["a"], ["a", "b"]).violations == ["a was added and is lost"]
    assert judge_set(["a", "x"], ["a"], []).violations == ["x was never added"]
    assert judge_set(["a", "a"], ["a"], []).violations == ["a is there 2 times"]


# -- the whole --------------------------------------------------------------------------------------------------------


def well(**changes: object) -> Checkup:
    """A process at rest as it should be."""
    fine: dict[str, object] = {
        "left": {}, "gauge": 4.0, "held": 4, "kept": 10, "leases": 10, "survived": 10, "renewals": 40.0,
        "late_renewals": 0.0, "new_series": 0, "fresh": 100, "routes": "r", "threads": 9, "trouble": [],
    }  # fmt: skip
    return Checkup(**{**fine, **changes})  # type: ignore[arg-type]


def findings(**changes: object) -> Findings:
    """A run as it should be."""
    fine: dict[str, object] = {
        "checkups": [well()], "routes": "r", "left": Verdict(4, []), "probes": {}, "sets": {"0/0": ["m"]},
        "sums": {"mysql-0": (600, 0)}, "money": 600, "bugs": {},
    }  # fmt: skip
    return Findings(**{**fine, **changes})  # type: ignore[arg-type]


FINE = [
    *row(A, 1, 1, 2, 10, (1.5, "proved")),
    *lease(B, 1, 3, 10, (2, "release")),
    Event(1, A, 0, "adding", "0/0", 0, "m"),
    Event(2, A, 0, "added", "0/0", 0, "m"),
    Event(1, A, 0, "result", "message:1", 0, "one"),
    Event(2, A, 0, "fork", ROW, 0, "0 alive"),
]


def broken(events: list[Event], struck: list[Struck], **changes: object) -> set[str]:
    """The invariants that do not hold."""
    verdicts = invariants(Story([*FINE, *events], struck), findings(**changes))
    assert set(verdicts) == set(TEXTS)
    return {name for name, verdict in verdicts.items() if verdict.violations}


def test_a_run_in_order_breaks_nothing() -> None:
    assert broken([], []) == set()


def took(verb: str, timeout: float, seconds: float) -> Event:
    return Event(50.0, B, 9, "took", ROW, 0, f"{verb} {timeout} {seconds}")


def attempt(what: str, note: str = "") -> list[Event]:
    """One that comes when its process is long there."""
    return call(B, 9, ROW, (49.0, "invoke"), (50.0, what, 0, note))


WHY = Event(50.0, B, 9, "why", ROW, 0, "shard mysql-0: did not answer within the caller's timeout")
FREEZE = Struck("freeze worker", "300", 20.0, 24.0)
SILENCE = Struck("silence", "mysql-0", 20.0, 26.0)
OLD = [(19.0, "invoke"), (19.5, "ok", 99, "")]

FOUR_PERMITS = [
    event
    for number in range(4)
    for event in call(B, 20 + number, GATE, (5.0, "invoke"), (6.0, "ok", number, ""), (7.0, "held"))
]

WRONG: list[tuple[str, list[Event], list[Struck], dict[str, object]]] = [
    ("I1", row(B, 2, 1.2, 1.4, 11), [], {}),
    ("I1", row(A, 2, 1.5, 2.5, 0, note="degraded") + row(A, 3, 2.2, 2.4, 0, note="degraded"), [], {}),
    ("I1", call(A, 5, LEASE, (1.5, "invoke"), (1.9, "ok", 11, "")), [], {}),
    ("I2", row(B, 2, 3, 4, 9), [], {}),
    ("I2", [Event(1.5, A, 1, "nested", ROW, 12)], [], {}),
    ("I3", [], [], {"sets": {"0/0": []}}),
    ("I3", [Event(2, A, 0, "stale", "0/0", 0, "m")], [], {}),
    ("I3", [Event(3, B, 0, "result", "message:1", 0, "two")], [], {}),
    ("I3", [], [], {"sums": {"mysql-0": (601, 0)}}),
    ("I3", [Event(1, A, 0, "moving", "mysql-0"), Event(1, A, 0, "moved", "mysql-0")], [], {}),
    ("I4", [Event(9.0, B, 1, "told", LEASE, 0, "expired 0.9")], [], {}),
    ("I4", call("300-0", 1, "mariadb-2/row/1", *OLD, (24.5, "held")), [FREEZE], {}),
    ("I4", call("300-0", 1, "mysql-0/row/1", *OLD, (24.5, "held")), [SILENCE], {}),
    ("I5", [], [], {"left": Verdict(4, ["mysql-0: a row"])}),
    ("I5", [], [], {"checkups": [well(left={"busy": 1.0})]}),
    ("I6", [*attempt("fail", "LockTimeout"), took("row", 1.0, 1.6)], [], {}),
    ("I6", [*attempt("fail", "LockTimeout"), took("row", 0.0, 1.6)], [], {}),
    ("I7", [], [], {"bugs": {"WouldDeadlock": 1}}),
    ("I8", [], [], {"checkups": [well(routes="s")]}),
    ("I9", [], [], {"checkups": [well(kept=11)]}),
    ("I9", [], [], {"checkups": [well(survived=9)]}),
    ("I9", [], [], {"checkups": [well(late_renewals=1.0)]}),
    ("I10", [Event(2, A, 0, "fork", ROW, 0, "1 alive")], [], {}),
    ("I10", [Event(2, A, 0, "fork", ROW, 0, "0 forked")], [Struck("fin", "mysql-0", 1.9, 1.9)], {}),
    ("I10", [Event(2, A, 0, "fork", ROW, 0, "0 closed")], [], {}),
    ("I10", [Event(2, A, 0, "green"), Event(9, A, 0, "stall", "", 0, "1.5")], [], {}),
    ("I11", attempt("fail", "ShardUnavailable"), [Struck("refuse", "mysql-1", 45.0, 49.0)], {}),
    ("I11", [*attempt("fail", "ShardUnavailable"), WHY, took("row", 2.0, 2.0)], [], {}),
    ("I12", attempt("ok", "degraded"), [Struck("refuse", "mysql-1", 45.0, 49.0)], {}),
    ("I13", [], [], {"checkups": [well(new_series=1)]}),
    ("I13", [], [], {"checkups": [well(gauge=3.0)]}),
    ("I14", FOUR_PERMITS, [], {}),
    ("I15", call(B, 9, "mariadb-3/row/1", (49.0, "invoke")), [], {}),
    ("I15", [], [], {"bugs": {"KeyError": 1}}),
    ("I15", [], [], {"checkups": [well(trouble=["ShardUnavailable"])]}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "events", "struck", "changes"), WRONG, ids=[f"{n}-{case[0]}" for n, case in enumerate(WRONG)]
)
def test_each_kind_of_violation_is_found(
    name: str, events: list[Event], struck: list[Struck], changes: dict[str, object]
) -> None:
    assert name in broken(events, struck, **changes)


def test_every_invariant_has_a_wrong_history() -> None:
    assert {name for name, *_ in WRONG} == set(TEXTS)


def test_probes_count() -> None:
    assert broken([], [], probes={"I8": Verdict(1, ["granted with another map"])}) == {"I8"}


KILLED = Struck("kill worker", "400", 50.0, 51.0)
AWAKE = Event(50.0, B, 0, "stall", "", 0, "3")
EXCUSED: list[tuple[str, list[Event], list[Struck]]] = [
    ("its session was killed", row(B, 2, 1.8, 1.9, 11), [Struck("kill sessions", "mysql-0", 1.7, 1.7)]),
    ("the shard was away", attempt("fail", "ShardUnavailable"), [Struck("refuse", "mysql-0", 45.0, 49.0)]),
    (
        "another of its shards was away",
        [*attempt("fail", "ShardUnavailable"), Event(50, B, 9, "why", ROW, 0, "shard mysql-1: does not answer")],
        [Struck("refuse", "mysql-1", 45.0, 49.0)],
    ),
    ("it had no time", [*attempt("fail", "ShardUnavailable"), WHY, took("row", 0.05, 0.1)], []),
    ("its process was killed", call("400-0", 1, "mariadb-3/row/1", (49.0, "invoke")), [KILLED]),
    ("its process was frozen", [*attempt("fail", "LockTimeout"), took("row", 1.0, 4.0), AWAKE], []),
]


@pytest.mark.parametrize(("why", "events", "struck"), EXCUSED, ids=[case[0] for case in EXCUSED])
def test_what_a_fault_explains_is_no_violation(why: str, events: list[Event], struck: list[Struck]) -> None:
    assert broken(events, struck) == set(), why


# -- plans ------------------------------------------------------------------------------------------------------------


def test_a_plan_replays() -> None:
    assert make_plan(7, 2, 60.0, 4, 8) == make_plan(7, 2, 60.0, 4, 8)
    assert make_plan(7, 2, 60.0, 4, 8) != make_plan(8, 2, 60.0, 4, 8)
    assert make_plan(7, 2, 60.0, 4, 8) != make_plan(7, 3, 60.0, 4, 8)


def test_the_faults_of_a_lane_do_not_meet_and_leave_time_to_recover() -> None:
    plan = make_plan(3, 0, 60.0, 4, 8)
    lanes: dict[str, float] = {}
    for fault in plan:
        assert fault.at > lanes.get(fault.lane, 0.0)
        lanes[fault.lane] = fault.at + fault.length
        assert lanes[fault.lane] <= 54.0
    assert len(lanes) == 6


def test_every_kind_of_fault_comes_in_a_few_minutes() -> None:
    kinds = Counter(fault.kind for number in range(6) for fault in make_plan(1, number, 30.0, 4, 8))
    assert set(kinds) == set(SHARD_KINDS) | set(WORKER_KINDS)
    assert set(SHARD_KINDS) >= ENDS_SESSIONS | OUTAGES
