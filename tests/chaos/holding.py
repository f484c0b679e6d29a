"""Who holds when: exclusion, permits, and whether a holder knows in time that it has lost what it held."""

from __future__ import annotations

from collections import defaultdict

from tests.chaos.jobs import PERMITS
from tests.chaos.site import GHOST
from tests.chaos.story import Attempt, Story
from tests.support.history import Event, judge
from tests.support.judges import Overlap, Verdict, judge_rows

__all__ = ["exclusion", "frozen", "inside", "permits", "silent", "told"]

TOLD = 0.3
"""Seconds after its own deadline within which a lease's holder has been told, on a crowded machine."""


def events(attempts: list[Attempt]) -> list[Event]:
    return [event for attempt in attempts for event in attempt.told]


def exclusion(story: Story) -> tuple[Verdict, Verdict]:
    """Exclusion and tokens over all processes."""
    rows = story.rows()

    def excused(overlap: Overlap) -> bool:
        return story.ended_session(overlap, GHOST)

    by_rows = judge_rows(events(rows), excused)
    by_leases = judge(events(story.leases()))
    wrong = by_rows.violations + by_leases.violations
    checks = by_rows.checks + by_leases.outcomes.get("ok", 0)
    falls = [text for text in wrong if " token " in text]
    return Verdict(checks, [text for text in wrong if text not in falls]), Verdict(checks, falls)


def inside(story: Story) -> Verdict:
    """Inside one process nothing ends a hold but its holder: also degraded locks, and lost ones, exclude there."""
    holds: dict[tuple[str, str], list[tuple[float, float, bool]]] = defaultdict(list)
    for attempt in [*story.rows(), *story.rows(degraded=True)]:
        outcome, left = attempt.outcome, attempt.at("left")
        if outcome is not None and outcome.what == "ok" and left:
            holds[attempt.process, outcome.key].append((outcome.at, left[0], outcome.note.endswith("shared")))
    wrong, checks = [], 0
    for (process, key), spans in holds.items():
        ends = {False: 0.0, True: 0.0}
        for start, end, shared in sorted(spans):
            checks += 1
            if start < (ends[False] if shared else max(ends.values())):
                wrong.append(f"{key}: two holders in process {process} at {start:.6f}")
            ends[shared] = max(ends[shared], end)
    return Verdict(checks, wrong)


def told(story: Story) -> Verdict:
    """Who loses a lease is told no later than its own deadline."""
    wrong, checks = [], 0
    for attempt in story.leases():
        for event in attempt.told:
            if event.what == "told" and " " in event.note:
                checks += 1
                late = float(event.note.split()[1]) - story.stalled(attempt.process, event.at - 10, event.at)
                if late > TOLD:
                    wrong.append(f"{event.key}: {attempt.process} was told {late:.3f} s after its deadline")
    return Verdict(checks, wrong)


def frozen(story: Story) -> Verdict:
    """Who was frozen for longer than the server waits knows, the moment it wakes, that its row is lost."""
    wrong, checks = [], 0
    freezes = [one for one in story.struck if one.kind == "freeze worker" and one.ended - one.began > GHOST]
    for freeze in freezes:
        for attempt in story.rows():
            outcome = attempt.outcome
            if attempt.process.split("-")[0] != freeze.target or outcome is None or outcome.what != "ok":
                continue
            if outcome.at < freeze.began and any(at > freeze.began for at in attempt.at("held", "lost", "left")):
                checks += 1
                if any(at > freeze.ended for at in attempt.at("held", "proved", "confirmed", "release")):
                    wrong.append(
                        f"{outcome.key}: {attempt.process} held after {freeze.ended - freeze.began:.1f} s frozen"
                    )
    return Verdict(checks, wrong)


def silent(story: Story) -> Verdict:
    """Who hears nothing counts its row lost before the server may free it."""
    wrong, checks = [], 0
    kinds = ("silence", "silence up", "silence down", "freeze server")
    for silence in [one for one in story.struck if one.kind in kinds and one.ended - one.began > GHOST]:
        for attempt in story.rows():
            outcome = attempt.outcome
            if attempt.shard != silence.target or outcome is None or outcome.what != "ok":
                continue
            looks = [at for at in attempt.at("held", "lost", "left") if silence.began < at < silence.ended]
            if outcome.at < silence.began and looks:
                checks += 1
                late = [at for at in attempt.at("held") if silence.began + GHOST < at < silence.ended]
                if late:
                    wrong.append(f"{outcome.key}: {attempt.process} held {late[-1] - silence.began:.2f} s into silence")
    return Verdict(checks, wrong)


def permits(story: Story) -> Verdict:
    report = judge(events(story.leases("gate")), PERMITS, tokens=False)
    return Verdict(report.outcomes.get("ok", 0), report.violations)
