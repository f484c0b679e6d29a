"""Tokens rise: with the term before all, then with the server's clock, then with the hand-overs since a grant."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockrouter.tokens import EPOCH_US, MAX_PASS, MAX_TERM, base_token, micros, parts

LAST_US = EPOCH_US + ((1 << 48) - 1) * 4 + 3
"""The end of the ticks, in 2061."""
quick = settings(derandomize=True, max_examples=300, deadline=None, database=None)
terms = st.integers(0, MAX_TERM)
clocks = st.integers(EPOCH_US, LAST_US)
passes = st.integers(0, MAX_PASS)


def test_the_layout_is_that_of_the_design() -> None:
    assert base_token(1, EPOCH_US) == 1 << 54
    assert base_token(0, EPOCH_US + 4) == 1 << 6
    assert base_token(0, EPOCH_US + 3) == 0
    assert (MAX_PASS, MAX_TERM) == (63, 511)
    assert base_token(MAX_TERM, LAST_US) + MAX_PASS == (1 << 63) - 1


@quick
@given(terms, clocks, passes)
def test_a_token_tells_its_parts_and_fits_a_signed_column(term: int, clock: int, number: int) -> None:
    token = base_token(term, clock) + number
    assert 0 <= token < 1 << 63
    assert parts(token) == (term, clock - (clock - EPOCH_US) % 4, number)


@quick
@given(terms, clocks, passes, st.integers(4, 1 << 40))
def test_no_number_of_passes_reaches_a_later_grant(term: int, clock: int, number: int, later: int) -> None:
    # Wrong variant 3T.1b: token + 1 in the clock's own unit.
    if clock + later <= LAST_US:
        assert base_token(term, clock) + number < base_token(term, clock + later)


@quick
@given(terms, clocks, passes, clocks)
def test_a_higher_term_is_above_every_clock(term: int, clock: int, number: int, other: int) -> None:
    if term < MAX_TERM:
        assert base_token(term, clock) + number < base_token(term + 1, other)


@quick
@given(terms, st.integers(1, EPOCH_US - 1))
def test_a_clock_before_the_epoch_gives_no_token(term: int, clock: int) -> None:
    """A server that believes it is 1970 must not hand out a number that another term or sign explains."""
    try:
        token = base_token(term, clock)
    except ValueError:
        return
    assert token >= 0 and token >> 54 == term


@quick
@given(terms, st.integers(LAST_US + 1, LAST_US * 2))
def test_a_clock_beyond_the_ticks_gives_no_token_of_another_term(term: int, clock: int) -> None:
    try:
        token = base_token(term, clock)
    except ValueError:
        return
    assert token < 1 << 63 and token >> 54 == term


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"1767225600.000004", 1_767_225_600_000_004),
        (b"1767225600.5", 1_767_225_600_500_000),
        (b"1767225600", 1_767_225_600_000_000),
        (b"1767225600.", 1_767_225_600_000_000),
        (b"1767225600.0000049", 1_767_225_600_000_004),
        (b"0.000001", 1),
    ],
)
def test_seconds_as_the_server_prints_them_are_read_exactly(text: bytes, expected: int) -> None:
    assert micros(text) == expected


@quick
@given(st.integers(0, 1 << 52))
def test_every_microsecond_is_read_exactly(clock: int) -> None:
    assert micros(b"%d.%06d" % divmod(clock, 1_000_000)) == clock


@pytest.mark.parametrize("text", [b"", b".", b".5", b"x", b"1.x", b"1e9", b"1.5.5", b"NULL", b"0x10"])
def test_what_is_no_number_of_seconds_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        micros(text)


@pytest.mark.parametrize("text", [b"1.-5", b"1. 5", b"1_0", b"1.0_5"])
def test_what_only_python_reads_as_a_number_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        micros(text)
