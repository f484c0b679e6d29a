"""I1 to I15, each checked on the history of a run: how often, and what was wrong."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

from tests.chaos.checkup import Checkup
from tests.chaos.holding import exclusion, frozen, inside, permits, silent, told
from tests.chaos.story import Story
from tests.support.judges import Verdict, judge_nesting, judge_set, judge_sum, together

__all__ = ["TEXTS", "Findings", "invariants"]

TEXTS = {
    "I1": "one holder at a time; owners nest",
    "I2": "tokens rise, and are constant while nested",
    "I3": "no write with an old token; nothing added is lost",
    "I4": "the holder is told of a loss in time",
    "I5": "nothing is left of what is over",
    "I6": "no call outlasts its deadline; sent once",
    "I7": "several locks: all or none, no deadlock",
    "I8": "one key, one row, in every process; other maps refused",
    "I9": "as many renewals as leases, none after release",
    "I10": "fork: child owns nothing, parent loses nothing; hubs turn",
    "I11": "a sick shard hurts no other",
    "I12": "contention opens no breaker; one probe",
    "I13": "series do not grow with keys; the gauge is the truth",
    "I14": "never more than the permits; they come back",
    "I15": "every waiter is served or times out",
}
_MARGIN = 0.25
"""Seconds over the deadline that are allowed: 0.1 by contract, the rest for a crowded machine."""
_CONNECT = 1.0
_SHARE = 10.0
_LAG = 1.0
"""Seconds a hub may stand still on a crowded machine."""


class Findings(NamedTuple):
    """What was seen beside the history."""

    checkups: list[Checkup]
    routes: str
    """The digest that every process should have."""
    left: Verdict
    """What servers said while all rested, and at the end."""
    probes: dict[str, Verdict]
    """What was tried directly, by invariant."""
    sets: dict[str, list[str]]
    sums: dict[str, tuple[int, int]]
    """By shard: the sum of all accounts, and the transfers counted."""
    money: int
    """What each sum should be."""
    bugs: dict[str, int]
    """Errors that no fault explains, by type."""


def invariants(story: Story, findings: Findings) -> dict[str, Verdict]:
    """Check all of them."""
    alone, tokens = exclusion(story)
    checks = {
        "I1": [alone, inside(story)],
        "I2": [tokens, judge_nesting(story.events)],
        "I3": [_sets(story, findings), _results(story), *_money(story, findings)],
        "I4": [told(story), frozen(story), silent(story)],
        "I5": [findings.left, _left(findings)],
        "I6": [_deadlines(story)],
        "I7": [_several(story, findings)],
        "I8": [_routes(findings)],
        "I9": [_renewals(findings)],
        "I10": [_forks(story), _hubs(story)],
        "I11": [_others(story)],
        "I12": [_breakers(story)],
        "I13": [_metrics(findings)],
        "I14": [permits(story)],
        "I15": [_liveness(story), _shares(story), _bugs(findings)],
    }
    for name, verdict in findings.probes.items():
        checks[name].append(verdict)
    return {name: together(verdicts) for name, verdicts in checks.items()}


def _sets(story: Story, findings: Findings) -> Verdict:
    added: dict[str, list[str]] = defaultdict(list)
    for event in story.notes["added"]:
        added[event.key].append(event.note)
    adding = [event.note for event in story.notes["adding"]]
    refused = {event.note for event in story.notes["stale"]}
    verdicts = []
    for name, members in findings.sets.items():
        verdicts.append(judge_set(members, added[name], adding))
        verdicts.append(Verdict(0, [f"{one} was refused as stale, and is there" for one in refused & set(members)]))
    return together([*verdicts, Verdict(len(refused), [])])


def _results(story: Story) -> Verdict:
    """`once`: everybody is told the same result of a message."""
    results: dict[str, set[str]] = defaultdict(set)
    for event in story.notes["result"]:
        results[event.key].add(event.note)
    wrong = [f"{message} has the results {found}" for message, found in results.items() if len(found) > 1]
    return Verdict(len(story.notes["result"]), wrong)


def _money(story: Story, findings: Findings) -> list[Verdict]:
    told = {what: Counter(event.key for event in story.notes[what]) for what in ("moving", "moved", "not moved")}
    return [
        judge_sum(found, findings.money, counted, confirmed := told["moved"][shard], begun - confirmed)
        for shard, (found, counted) in findings.sums.items()
        for begun in [told["moving"][shard] - told["not moved"][shard]]
    ]


def _left(findings: Findings) -> Verdict:
    wrong = [f"at rest {what}: {number:g}" for one in findings.checkups for what, number in one.left.items()]
    return Verdict(len(findings.checkups), wrong)


def _deadlines(story: Story) -> Verdict:
    wrong, checks = [], 0
    for attempt in story.attempts:
        for event in attempt.told:
            if event.what == "took":
                checks += 1
                verb, timeout, took = event.note.split()
                begin = event.at - float(took)
                allowed = (float(timeout) or _CONNECT) + _MARGIN
                late = float(took) - allowed - story.stalled(attempt.process, begin, event.at)
                if late > 0:
                    wrong.append(
                        f"{verb} of {event.key} with {float(timeout):g} s took {float(took):.2f} s, {late:.2f} too long"
                    )
    return Verdict(checks, wrong)


def _several(story: Story, findings: Findings) -> Verdict:
    calls = sum(event.what == "took" and event.note.startswith("lock_all") for event in story.events)
    number = findings.bugs.get("WouldDeadlock", 0)
    return Verdict(calls, [f"{number} times WouldDeadlock"] if number else [])


def _bugs(findings: Findings) -> Verdict:
    wrong = [f"{number} times {name}, which no fault explains" for name, number in findings.bugs.items()]
    return Verdict(len(findings.checkups), wrong + [text for one in findings.checkups for text in one.trouble[:3]])


def _routes(findings: Findings) -> Verdict:
    wrong = [f"a process routes otherwise: {one.routes}" for one in findings.checkups if one.routes != findings.routes]
    return Verdict(1000 * len(findings.checkups), wrong)


def _renewals(findings: Findings) -> Verdict:
    wrong = []
    for one in findings.checkups:
        if one.kept != one.leases:
            wrong.append(f"{one.kept} leases are kept alive, {one.leases} are held")
        if one.survived != one.leases:
            wrong.append(f"{one.leases - one.survived} of {one.leases} kept leases were lost at rest")
        if one.renewals < one.leases or one.late_renewals:
            wrong.append(f"{one.renewals:g} renewals of {one.leases} leases, {one.late_renewals:g} after their release")
    return Verdict(sum(one.leases for one in findings.checkups), wrong)


def _forks(story: Story) -> Verdict:
    wrong = []
    for event in story.notes["fork"]:
        code, alive = event.note.split(maxsplit=1)
        shard = event.key.split("/", 1)[0]
        if code != "0":
            wrong.append(f"a child ended with {code} at {event.at:.3f}")
        excused = story.faults(shard, event.at - 10, event.at) or story.stalled(event.process, event.at - 10, event.at)
        if alive not in ("alive", "degraded") and (alive == "forked" or not excused):
            wrong.append(f"{event.key}: a parent lost its lock: {alive}")
    return Verdict(len(story.notes["fork"]), wrong)


def _hubs(story: Story) -> Verdict:
    """Under gevent no call stops the others: a ticker keeps ticking but for the seconds its process is frozen."""
    wrong, checks = [], 0
    green = {event.process for event in story.notes["green"]}
    for event in story.notes["stall"]:
        begin = event.at - float(event.note)
        if event.process in green and not story.faults(event.process.split("-")[0], begin, event.at):
            checks += 1
            if float(event.note) > _LAG:
                wrong.append(f"the hub of {event.process} stood still for {float(event.note):.2f} s at {event.at:.3f}")
    return Verdict(checks, wrong)


def _others(story: Story) -> Verdict:
    """Where nothing happened nothing fails, whatever happens to the other shards meanwhile."""
    wrong, checks = [], 0
    for attempt in story.attempts:
        outcome = attempt.outcome
        if outcome is None or not story.calm(attempt, outcome.at):
            continue
        checks += 1
        if attempt.impatient:
            continue
        if outcome.what != "ok" and outcome.note not in ("busy", "held", "skipped", "another leads", "LockTimeout"):
            text = f"{outcome.key}: {outcome.what} {outcome.note} at {outcome.at:.3f} in calm: {attempt.why}"
            wrong.append(text)
    return Verdict(checks, wrong)


def _breakers(story: Story) -> Verdict:
    """No degraded lock where nothing but contention happened."""
    wrong, checks = [], 0
    for attempt in [*story.rows(), *story.rows(degraded=True)]:
        outcome = attempt.outcome
        if outcome is not None and story.calm(attempt, outcome.at):
            checks += outcome.what != "ok"
            if attempt.degraded:
                wrong.append(f"{outcome.key}: degraded at {outcome.at:.3f}, and nothing had happened")
    return Verdict(checks, wrong)


def _metrics(findings: Findings) -> Verdict:
    wrong = [f"{one.new_series} new series for {one.fresh} keys" for one in findings.checkups if one.new_series]
    wrong += [
        f"the gauge says {one.gauge:g}, {one.held} are held" for one in findings.checkups if one.gauge != one.held
    ]
    return Verdict(2 * len(findings.checkups), wrong)


def _liveness(story: Story) -> Verdict:
    killed = story.killed()
    wrong = [
        f"{attempt.told[0].key}: {attempt.process} never heard of it"
        for attempt in story.attempts
        if attempt.outcome is None and attempt.process.split("-")[0] not in killed
    ]
    return Verdict(len(story.attempts), wrong)


def _shares(story: Story) -> Verdict:
    """No process of those that lived through all of it is starved."""
    end = max((event.at for event in story.events), default=0.0)
    begin = min(story.born.values(), default=0.0)
    rates = {}
    for process, born in story.born.items():
        if born - begin < 2 and process.split("-")[0] not in story.killed():
            mine = [one for one in story.attempts if one.process == process]
            served = sum(one.outcome is not None and one.outcome.what == "ok" for one in mine)
            rates[process] = served / max(1.0, end - born - story.stalled(process, born, end))
    if len(rates) < 2:
        return Verdict(0, [])
    ratio = max(rates.values()) / max(1e-9, min(rates.values()))
    return Verdict(len(rates), [f"the luckiest process got {ratio:.1f} times as much"] if ratio > _SHARE else [])
