"""The table at the end of a run: invariants, faults, operations, times."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from tests.chaos.invariants import TEXTS
from tests.chaos.plan import ENDS_SESSIONS, OUTAGES
from tests.chaos.story import Story
from tests.support.judges import Verdict

__all__ = ["Report", "noticed", "recovered", "report_of"]

_SILENT = {"silence", "silence up", "silence down", "freeze server", "stall before reply"}


class Report(NamedTuple):
    """What a run came to."""

    headline: str
    verdicts: Mapping[str, Verdict]
    faults: Mapping[str, int]
    operations: Mapping[str, Mapping[str, int]]
    figures: Mapping[str, int]
    noticed: Mapping[str, list[float]]
    recovered: Mapping[str, list[float]]

    @property
    def violations(self) -> list[str]:
        """Everything that must not be."""
        return [f"{name}: {text}" for name, verdict in self.verdicts.items() for text in verdict.violations]

    def __str__(self) -> str:
        lines = [self.headline, "", f"{'invariant':<66}{'checks':>10}{'violations':>12}"]
        for name, verdict in self.verdicts.items():
            lines.append(f"{name:<4}{TEXTS[name]:<62}{verdict.checks:>10,}{len(verdict.violations):>12,}")
        lines += ["", "faults injected: " + ", ".join(f"{kind} {n}" for kind, n in sorted(self.faults.items()))]
        lines += ["", f"{'operations':<14}{'ok':>10}{'fail':>10}{'unknown':>10}   why they failed"]
        for kind, outcomes in sorted(self.operations.items()):
            why = ", ".join(f"{name} {n:,}" for name, n in sorted(outcomes.items()) if name not in _ENDS)
            lines.append(f"{kind:<14}" + "".join(f"{outcomes.get(end, 0):>10,}" for end in _ENDS) + f"   {why}")
        lines += ["", "also: " + ", ".join(f"{name} {n:,}" for name, n in sorted(self.figures.items()))]
        lines += [
            "",
            *_times("time to notice a loss, ", self.noticed),
            *_times("time to grant again after ", self.recovered),
        ]
        return "\n".join([*lines, *(f"VIOLATION {text}" for text in self.violations[:50])])


_ENDS = ("ok", "fail", "unknown")


def _times(what: str, times: Mapping[str, list[float]]) -> list[str]:
    return [
        f"{what + kind:<50}{len(found):>6} times: median {statistics.median(found):.2f} s, longest {max(found):.2f} s"
        for kind, found in sorted(times.items())
        if found
    ]


def noticed(story: Story) -> dict[str, list[float]]:
    """Seconds from the fault that ended a row's session to the moment its holder was told, by how silent it was."""
    found: dict[str, list[float]] = {"connection ended": [], "silence": []}
    for attempt in story.rows():
        outcome = attempt.outcome
        for at in attempt.at("told"):
            if outcome is None or outcome.what != "ok" or story.stalled(attempt.process, outcome.at, at) > 0.1:
                continue
            faults = [one for one in story.faults(attempt.shard, outcome.at, at) if one.kind in ENDS_SESSIONS]
            if faults and faults[-1].began > outcome.at:
                kind = "silence" if faults[-1].kind in _SILENT else "connection ended"
                found[kind].append(at - faults[-1].began)
    return found


def recovered(story: Story) -> dict[str, list[float]]:
    """Seconds from the end of an outage to the first row granted by that shard, by the kind of outage."""
    found: dict[str, list[float]] = {}
    granted: dict[str, list[tuple[float, float]]] = {}
    for attempt in story.rows():
        outcome = attempt.outcome
        if outcome is not None and outcome.what == "ok":
            granted.setdefault(attempt.shard, []).append((outcome.at, attempt.told[0].at))
    for outage in story.struck:
        if outage.kind in OUTAGES:
            later = [at for at, begun in granted.get(outage.target, []) if begun > outage.began and at > outage.ended]
            if later:
                found.setdefault(outage.kind, []).append(min(later) - outage.ended)
    return found


def report_of(headline: str, story: Story, verdicts: Mapping[str, Verdict], figures: Mapping[str, int]) -> Report:
    """Put everything together."""
    operations: dict[str, Counter[str]] = {}
    for attempt in story.attempts:
        outcome, counted = attempt.outcome, operations.setdefault(attempt.verb, Counter())
        if outcome is not None:
            counted[outcome.what] += 1
            if outcome.note and outcome.what != "ok":
                counted[outcome.note] += 1
            elif outcome.note:
                counted[f"{outcome.note} (ok)"] += 1
    faults = Counter(one.kind for one in story.struck)
    return Report(headline, verdicts, faults, operations, dict(figures), noticed(story), recovered(story))
