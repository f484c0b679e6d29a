"""Which of several hosts is the primary, by what they said: exactly one, or none."""

from __future__ import annotations

from typing import Any, cast

import pytest

from lockrouter.breaker import Breaker
from lockrouter.config import Endpoint
from lockrouter.hosts import Hosts
from lockrouter.reading import Reading
from lockrouter.session import Answered, Gone, Silent
from tests.support.switch_worker import overlaps, unordered

A, B, C = (Endpoint("10.0.0.1", port, "u", "", "d") for port in (1, 2, 3))


class Shard:
    """What `Hosts` asks of a shard, recorded."""

    def __init__(self) -> None:
        self.endpoints = (A, B, C)
        self.breaker = Breaker(3, 1.0)
        self.lost: list[bytes] = []
        self.searched: list[str] = []
        self.pokes = 0

    def lose_on(self, identity: bytes) -> None:
        self.lost.append(identity)

    def search(self, why: str) -> None:
        self.searched.append(why)

    def poke_control(self) -> None:
        self.pokes += 1

    def poke_hosts(self) -> None:
        self.pokes += 100


@pytest.fixture
def shard() -> Shard:
    return Shard()


@pytest.fixture
def hosts(shard: Shard) -> Hosts:
    return Hosts(cast(Any, shard))


def said(term: int, *, identity: str = "x", started_by: str = "x", not_primary: str | None = None) -> Reading:
    """A server's word; by default it is writable and the one its term was started on."""
    numbers: dict[str, Any] = dict.fromkeys(Reading._fields, 0)
    return Reading(
        **{
            **numbers,
            "incarnation": (identity.encode(), 0),
            "term": term,
            "term_identity": started_by.encode(),
            "not_primary": not_primary,
        }
    )


def test_the_only_writable_one_is_the_primary(hosts: Hosts) -> None:
    hosts.note(A, said(5, not_primary="read-only"))
    assert not hosts.asked
    hosts.note(B, said(5))
    hosts.note(C, failure=Silent("no reply"))
    assert hosts.asked
    assert hosts.primary() == B


def test_two_are_none(hosts: Hosts) -> None:
    hosts.note(A, said(5))
    hosts.note(C, said(5))
    with pytest.raises(Answered, match="two writable primaries"):
        hosts.primary()


def test_a_lower_term_is_no_candidate_and_no_rival(hosts: Hosts) -> None:
    hosts.note(A, said(5))
    hosts.note(B, said(6))
    assert hosts.primary() == B
    hosts.use(B)
    assert hosts.rival() is None
    hosts.note(A, said(6))
    rival = hosts.rival()
    assert rival is not None
    assert "10.0.0.1:1" in rival[0]


def test_the_highest_term_counts_also_when_its_server_has_gone(hosts: Hosts) -> None:
    hosts.note(A, said(7))
    hosts.note(A, failure=Gone("closed"))
    hosts.note(B, said(6))
    with pytest.raises(Answered, match="its term is 6, 7 was seen before"):
        hosts.primary()
    assert (hosts.highest_term, hosts.highest_identity) == (7, b"x")


def test_none_that_answers_is_an_answer_and_none_at_all_a_fault(hosts: Hosts) -> None:
    hosts.note(A, failure=Gone("refused"))
    hosts.note(B, failure=Silent("no reply"))
    hosts.note(C, failure=Silent("no reply"))
    assert hosts.answering() is None
    with pytest.raises(Gone, match="refused"):
        hosts.primary()
    for word in ({"reading": said(1, not_primary="the server is read-only")}, {"failure": Answered(1040, "too many")}):
        hosts.note(C, **cast(Any, word))
        assert "10.0.0.1:3" in str(hosts.answering())
        with pytest.raises(Answered, match="no host is the writable primary"):
            hosts.primary()


def test_who_says_that_it_is_demoted_loses_what_is_held_there(hosts: Hosts, shard: Shard) -> None:
    hosts.use(B)
    hosts.note(A, said(5, identity="old", not_primary="the server is read-only"))
    assert shard.lost == [b"old"]
    assert shard.pokes == 0


def test_a_candidate_is_looked_at_at_once(hosts: Hosts, shard: Shard) -> None:
    for _ in range(3):
        shard.breaker.fault()
    assert not shard.breaker.take_probe()
    hosts.note(B, said(5))
    assert shard.pokes == 1
    assert shard.breaker.take_probe()


def test_leaving_asks_everybody_once(hosts: Hosts, shard: Shard) -> None:
    hosts.note(A, said(5))
    hosts.note(B, said(5, not_primary="read-only"))
    hosts.note(C, said(5, not_primary="read-only"))
    hosts.use(A)
    shard.pokes = 0
    assert not hosts.asked  # what the one in use said before is old
    hosts.leave("why")
    hosts.leave("why")
    assert shard.searched == ["why"]
    assert shard.pokes == 100


def test_the_checker_of_switchovers_sees_overlaps_and_falling_tokens() -> None:
    good = [("k", 0.0, 1.0, 1), ("k", 1.0, 2.0, 2), ("other", 0.5, 1.5, 1)]
    assert overlaps(good) == unordered(good) == []
    assert overlaps([("k", 0.0, 1.0, 1), ("k", 0.9, 2.0, 2)])
    assert overlaps([("k", 0.0, 9.0, 1), ("k", 1.0, 2.0, 2), ("k", 3.0, 4.0, 3)])
    assert unordered([("k", 0.0, 1.0, 2), ("k", 1.0, 2.0, 2)])
