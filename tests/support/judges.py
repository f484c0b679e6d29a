"""Judges of histories beside `history.judge`: of row locks, nesting, money, and sets.

A row lock's session can be ended under its holder, who learns it a moment later: `judge_rows` holds it to what is
promised then. A hold is *proved* up to the moment a confirmed release or a successful check was asked for; nobody comes
in before that. What is not proved may overlap where the session was ended, until its holder has noticed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from tests.support.history import Claim, Event, claims

__all__ = ["Overlap", "Verdict", "judge_nesting", "judge_rows", "judge_set", "judge_sum", "together"]


class Verdict(NamedTuple):
    """How much was checked, and what was wrong."""

    checks: int
    violations: list[str]


def together(verdicts: Iterable[Verdict]) -> Verdict:
    """Several as one."""
    verdicts = list(verdicts)
    return Verdict(sum(one.checks for one in verdicts), [text for one in verdicts for text in one.violations])


class Overlap(NamedTuple):
    """Somebody came in while an earlier holder, whose session had been ended, had not noticed."""

    key: str
    since: float
    """When the earlier one was granted."""
    at: float
    seconds: float
    text: str


def judge_rows(events: Iterable[Event], excused: Callable[[Overlap], bool] = lambda _: False) -> Verdict:
    """Check a history of row locks, shared ones included; a key stands for a row.

    1. Tokens rise in real time: who asked after another one had been granted has the higher token.
    2. While a hold is proved, nobody with a later token comes in.
    3. Nobody comes in while an earlier holder thinks itself the holder, unless `excused` says that its session was
       ended, and that it had this long to notice.
    """
    made, wrong = claims(events)
    checks = 0
    by_key: dict[str, list[Claim]] = defaultdict(list)
    for claim in made:
        by_key[claim.key].append(claim)
    for key, held in sorted(by_key.items()):
        checks += len(held)
        wrong += _not_rising(key, held)
        wrong += _beside(key, held, excused)
    return Verdict(checks, wrong)


def _not_rising(key: str, held: list[Claim]) -> list[str]:
    wrong = []
    by_start, highest = sorted(held, key=lambda claim: claim.start), {False: (0, ""), True: (0, "")}
    position = 0
    for claim in sorted(held, key=lambda claim: claim.invoked):
        while position < len(by_start) and by_start[position].start < claim.invoked:
            before = by_start[position]
            highest[before.shared] = max(highest[before.shared], (before.token, before.who))
            position += 1
        token, who = highest[False] if claim.shared else max(highest.values())
        if claim.token <= token:
            wrong.append(f"{key}: {claim.who} has token {claim.token} after {who} had {token}")
    counted = Counter(claim.token for claim in held if not claim.shared)
    return wrong + [f"{key}: token {token} was given {number} times" for token, number in counted.items() if number > 1]


def _beside(key: str, held: list[Claim], excused: Callable[[Overlap], bool]) -> list[str]:
    wrong: list[str] = []
    proved: dict[bool, Claim] = {}
    trusting: dict[bool, Claim] = {}
    for claim in sorted(held, key=lambda claim: claim.token):
        for shared in (False,) if claim.shared else (False, True):
            sure, before = proved.get(shared), trusting.get(shared)
            if sure and claim.start <= sure.proved:
                wrong.append(
                    f"{key}: {claim.who} came in at {claim.start:.6f}, {sure.who} held until {sure.proved:.6f}"
                )
            elif before and claim.start < before.end:
                text = f"{key}: {claim.who} came in at {claim.start:.6f} beside {before.who} until {before.end:.6f}"
                if not excused(Overlap(key, before.start, claim.start, before.end - claim.start, text)):
                    wrong.append(text)
        if claim.proved and (claim.shared not in proved or claim.proved > proved[claim.shared].proved):
            proved[claim.shared] = claim
        if claim.shared not in trusting or claim.end > trusting[claim.shared].end:
            trusting[claim.shared] = claim
    return wrong


def judge_nesting(events: Iterable[Event]) -> Verdict:
    """A nested acquisition has the token of the hold it is nested in."""
    tokens: dict[tuple[str, int], int] = {}
    nested: list[Event] = []
    for event in events:
        if event.what == "ok":
            tokens[event.process, event.call] = event.token
        elif event.what == "nested":
            nested.append(event)
    wrong = [
        f"{event.key}: {event.process}/{event.call} has token {event.token} inside, {outer} outside"
        for event in nested
        if (outer := tokens.get((event.process, event.call))) != event.token
    ]
    return Verdict(len(nested), wrong)


def judge_sum(found: int, expected: int, counted: int, confirmed: int, unknown: int) -> Verdict:
    """Money: the sum of all accounts is what it was, and every confirmed transfer is counted once.

    Args:
        found, expected: sums.
        counted: transfers that the database counted.
        confirmed: transfers whose callers were told that they happened.
        unknown: transfers of which their callers know nothing.
    """
    wrong = [] if found == expected else [f"the sum is {found}, not {expected}"]
    if not confirmed <= counted <= confirmed + unknown:
        wrong.append(f"{counted} transfers are counted, {confirmed} were confirmed and {unknown} are unknown")
    return Verdict(confirmed, wrong)


def judge_set(members: Collection[str], added: Collection[str], maybe: Collection[str]) -> Verdict:
    """Adds to a set: what was acknowledged is there, what was not asked for is not, nothing is there twice."""
    there = Counter(members)
    wrong = [f"{one} was added and is lost" for one in sorted(set(added) - set(there))]
    wrong += [f"{one} was never added" for one in sorted(set(there) - set(added) - set(maybe))]
    wrong += [f"{one} is there {number} times" for one, number in there.items() if number > 1]
    return Verdict(len(added), wrong)
