"""The history of a run, arranged for the questions the invariants ask."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from tests.chaos.plan import ENDS_SESSIONS
from tests.chaos.site import SHARDS
from tests.chaos.storm import Struck
from tests.support.history import Event
from tests.support.judges import Overlap

__all__ = ["AFTERMATH", "Attempt", "Story"]

AFTERMATH = 5.0
"""Seconds after a fault in which its consequences may still be felt: open breakers, restarted terms, dead sessions."""
_PATIENCE = 1.0
"""Seconds within which a server that is well has always answered."""
ROW_KINDS = ("row", "fork", "keep")


class Attempt(NamedTuple):
    """One acquisition: all its events."""

    process: str
    shard: str
    kind: str
    told: list[Event]

    @property
    def outcome(self) -> Event | None:
        """Its ok, fail or unknown."""
        return next((event for event in self.told if event.what in ("ok", "fail", "unknown")), None)

    @property
    def verb(self) -> str:
        """What was called."""
        return self.told[0].note

    @property
    def why(self) -> str:
        """The text of its error, where it ended in one that is no answer."""
        return next((event.note for event in self.told if event.what == "why"), "")

    @property
    def impatient(self) -> bool:
        """It ended by its own timeout, which was too short for a crowded machine to say more."""
        timeouts = [float(event.note.split()[1]) for event in self.told if event.what == "took"]
        return "caller's" in self.why and all(timeout < _PATIENCE for timeout in timeouts)

    def at(self, *what: str) -> list[float]:
        """When such events were."""
        return [event.at for event in self.told if event.what in what]

    @property
    def degraded(self) -> bool:
        """Whether it excluded its own process only."""
        outcome = self.outcome
        return outcome is not None and outcome.note.startswith("degraded")


class Story:
    """Events by acquisition, process and shard, beside the faults that struck."""

    def __init__(self, events: Iterable[Event], struck: list[Struck]) -> None:
        self.events = list(events)
        self.struck = sorted(struck, key=lambda one: one.began)
        calls: dict[tuple[str, int], list[Event]] = defaultdict(list)
        self.notes: dict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            if event.call:
                calls[event.process, event.call].append(event)
            else:
                self.notes[event.what].append(event)
        self.attempts = []
        for (process, _), told in calls.items():
            shard, kind, _ = told[0].key.split("/", 2)
            self.attempts.append(Attempt(process, shard, kind, told))
        self.born = {process: min(a.told[0].at for a in group) for process, group in self._by_process().items()}
        self._stalls: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for event in self.notes["stall"]:
            self._stalls[event.process].append((event.at - float(event.note), event.at))

    def _by_process(self) -> dict[str, list[Attempt]]:
        found: dict[str, list[Attempt]] = defaultdict(list)
        for attempt in self.attempts:
            found[attempt.process].append(attempt)
        return found

    # -- what an acquisition is of -------------------------------------------------------------------------------

    @staticmethod
    def is_row(attempt: Attempt) -> bool:
        """Of a row lock; the other kinds are leases."""
        return attempt.kind in ROW_KINDS or (attempt.kind == "set" and attempt.told[0].key.endswith("/0"))

    def rows(self, *, degraded: bool = False) -> list[Attempt]:
        """The acquisitions of rows: the real ones, or the degraded ones."""
        return [one for one in self.attempts if self.is_row(one) and one.degraded is degraded]

    def leases(self, *kinds: str) -> list[Attempt]:
        """The acquisitions of leases, of some kinds or of all that are exclusive."""
        found = [one for one in self.attempts if not self.is_row(one)]
        return [one for one in found if (one.kind in kinds if kinds else one.kind != "gate")]

    # -- what happened around it ------------------------------------------------------------------------------------

    def stalled(self, process: str, begin: float, end: float) -> float:
        """Seconds between two moments in which a process did not run."""
        stalls = self._stalls[process]
        position, total = bisect_left(stalls, (begin, begin)), 0.0
        for start, stop in stalls[max(0, position - 1) :]:
            if start > end:
                break
            total += max(0.0, min(stop, end) - max(start, begin))
        return total

    def faults(self, target: str, begin: float, end: float) -> list[Struck]:
        """What struck a shard or a process id between two moments."""
        return [one for one in self.struck if one.target == target and one.began <= end and one.ended >= begin]

    def calm(self, attempt: Attempt, at: float) -> bool:
        """No fault, and no consequence of one, explains what this acquisition met, on any shard its error names."""
        begin = attempt.told[0].at - AFTERMATH
        shards = {attempt.shard, *(shard for shard in SHARDS if shard in attempt.why)}
        return (
            not any(self.faults(shard, begin, at) for shard in shards)
            and self.stalled(attempt.process, begin, at) < 0.5
            and self.born[attempt.process] < begin
        )

    def ended_session(self, overlap: Overlap, bound: float) -> bool:
        """A fault may have ended the earlier holder's session, and the overlap is not longer than `bound`."""
        shard = overlap.key.split("/", 1)[0]
        faults = self.faults(shard, overlap.since, overlap.at)
        return overlap.seconds <= bound and any(one.kind in ENDS_SESSIONS for one in faults)

    def killed(self) -> set[str]:
        """The ids of the processes that were killed."""
        return {one.target for one in self.struck if one.kind == "kill worker"}
