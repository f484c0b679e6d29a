"""A timeout is seconds, checked once; a deadline is one moment on one clock."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from lockrouter.deadline import Deadline, checked_timeout, now


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [(None, 2.5), (0, 0.0), (0.0, 0.0), (-0.0, 0.0), (0.0004, 0.0004), (3, 3.0), (1e8, 1e8)],
    ids=repr,
)
def test_a_timeout_is_seconds_and_none_is_the_default(timeout: float | None, seconds: float) -> None:
    checked = checked_timeout(timeout, 2.5)
    assert checked == seconds and type(checked) is float


@pytest.mark.parametrize("timeout", [1e12, float("inf"), 10**18, 1e308, 10**400], ids=str)
def test_a_very_large_timeout_means_long(timeout: float) -> None:
    seconds = checked_timeout(timeout, 2.5)
    assert 30 * 365 * 86_400 < seconds < float("inf")
    assert Deadline(seconds).left() > 1e8


@pytest.mark.parametrize("timeout", [-1, -0.0001, float("-inf"), float("nan")], ids=repr)
def test_a_negative_timeout_or_none_at_all_is_a_wrong_value(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        checked_timeout(timeout, 2.5)


@pytest.mark.parametrize("timeout", [True, False, "1", b"1", Decimal(1), 1j, [1], object], ids=repr)
def test_another_type_is_no_timeout(timeout: Any) -> None:
    with pytest.raises(TypeError, match="timeout"):
        checked_timeout(timeout, 2.5)


def test_a_deadline_is_made_once() -> None:
    deadline = Deadline(2.0, clock=lambda: 100.0)
    assert (deadline.started, deadline.at, deadline.timeout) == (100.0, 102.0, 2.0)


def test_a_deadline_counts_down_and_up_on_one_clock() -> None:
    before = now()
    deadline = Deadline(50.0)
    assert deadline.at == deadline.started + 50.0 and deadline.started >= before
    assert 49 < deadline.left() <= 50
    assert 0 <= deadline.waited() < 1
    past = Deadline(0.0)
    assert past.left() <= 0


def test_the_clock_never_goes_back() -> None:
    read = [now() for _ in range(10_000)]
    assert read == sorted(read)
