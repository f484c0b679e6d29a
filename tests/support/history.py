"""Histories of locks over many processes, and a checker that needs to know nothing of how the locks work.

1. A `Recorder` appends one line per event to a file of its own process: what was written survives `kill -9`.
2. Each acquisition is invoked, and then ok (with its token), fail, or unknown; one that never ends died with its
   process.
3. A hold is *claimed* from its ok until the last moment its holder is known to have thought itself the holder: a look
   at `lost` that said no, or the start of the release. The clock is the machine's, the same for all its processes.
4. `judge`: no two claims of one key overlap (or no more than `permits`), and its tokens rise in the claims' order.
An unknown acquisition claims nothing. A frozen holder claims what it saw before and after it, if it was not lost then.
A lease's holder that says until when it has the lease claims all of that, also if it is killed.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from lockrouter.deadline import now

__all__ = [
    "Call",
    "Claim",
    "Event",
    "Recorder",
    "Report",
    "claims",
    "judge",
    "read",
]

ENDS = ("ok", "fail", "unknown")
OPERATIONS = ("invoke", "renew", "check", "release")


class Event(msgspec.Struct, frozen=True, array_like=True):
    """One line of a history; `call` is unique in its process, and 0 where the event belongs to no acquisition."""

    at: float
    process: str
    call: int
    what: str
    """invoke, ok, fail, unknown, held (not lost then), release (begins), released, lost; others are operations.

    Of a row lock also: proved (a check succeeded that was asked for then), confirmed (the release was proved, and the
    lock held when it began), left (the holder stopped, lost or not). Of a lease: until (has it until then, if it is not
    released). Of a nested acquisition: nested.
    """
    key: str = ""
    token: int = 0
    note: str = ""


class Recorder:
    """One process's side of a history; thread-safe. Every event is with the kernel when its method returns."""

    _numbers = itertools.count()

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Make the process's own file in the folder."""
        self.process = f"{os.getpid()}-{next(self._numbers)}"
        self._file = os.open(
            Path(folder, f"history-{self.process}.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
        )
        self._calls = itertools.count(1)
        self._lock = threading.Lock()

    def invoke(self, key: str, note: str = "") -> Call:
        """An acquisition of `key` begins."""
        call = Call(self, next(self._calls), key)
        call.say("invoke", note=note)
        return call

    def note(self, what: str, key: str = "", note: str = "", *, at: float | None = None) -> None:
        """Append an event that belongs to no acquisition."""
        self.write(Event(now() if at is None else at, self.process, 0, what, key, 0, note))

    def write(self, event: Event) -> None:
        """Append one event."""
        line = msgspec.json.encode(event) + b"\n"
        with self._lock:
            os.write(self._file, line)

    def close(self) -> None:
        """Write no more."""
        os.close(self._file)


class Call:
    """One acquisition and what became of it."""

    def __init__(self, recorder: Recorder, number: int, key: str) -> None:
        self._recorder = recorder
        self.number = number
        self.key = key
        self.ended = False
        """Whether its outcome is known."""

    def event(self, what: str) -> Event:
        """An event of now that says nothing of holding, such as a renewal that ended."""
        return Event(now(), self._recorder.process, self.number, what, self.key)

    def say(self, what: str, *, token: int = 0, note: str = "", at: float | None = None) -> None:
        """Append an event of this call, of now or of an earlier moment."""
        self.ended = self.ended or what in ENDS
        event = Event(now() if at is None else at, self._recorder.process, self.number, what, self.key, token, note)
        self._recorder.write(event)

    @contextmanager
    def timed(self, verb: str, timeout: float) -> Iterator[None]:
        """The block is the call itself, which has so many seconds; whatever it answers, how long it took is noted."""
        began = now()
        try:
            yield
        finally:
            ended = now()
            self.say("took", note=f"{verb} {timeout:.4f} {ended - began:.4f}", at=ended)

    def ok(self, token: int) -> None:
        """It was granted."""
        self.say("ok", token=token)

    def look(self, lost: object) -> bool:
        """Look, with `lost()` or an object's `lost`, whether the holder thinks it holds; True: it does."""
        at = now()
        gone = lost() if callable(lost) else lost.lost  # type: ignore[attr-defined]
        self.say("lost" if gone else "held", at=at)
        return not gone

    def look_ahead(self, lease: Leased) -> bool:
        """As `look`, and say until when the holder has the lease."""
        at = now()
        left = lease.remaining()
        if left and not lease.lost:
            self.say("until", at=at + left)
        return self.look(lease)


class Leased(Protocol):
    """What says how long it is held."""

    @property
    def lost(self) -> bool: ...

    def remaining(self) -> float: ...


class Claim(NamedTuple):
    """Somebody thought itself the holder from `start` to `end`."""

    key: str
    start: float
    end: float
    token: int
    who: str
    invoked: float = 0.0
    proved: float = 0.0
    """Held at the server until then, as it said itself; 0.0: nothing is proved."""
    shared: bool = False


class Report(NamedTuple):
    """What a history came to; it is in order if `violations` is empty."""

    calls: int
    operations: int
    """Acquisitions, renewals, checks and releases."""
    outcomes: Mapping[str, int]
    violations: list[str]

    def __str__(self) -> str:
        ends = ", ".join(f"{number:,} {what}" for what, number in sorted(self.outcomes.items()))
        operations = f"{self.operations:,} operations, {self.calls:,} of them acquisitions"
        return f"{operations} ({ends}): {len(self.violations)} violations"


def read(folder: str | os.PathLike[str]) -> list[Event]:
    """Every event of every process, each process's in order; a line that a crash cut short is left out."""
    found: list[Event] = []
    for path in sorted(Path(folder).glob("history-*.jsonl")):
        *lines, _rest = path.read_bytes().split(b"\n")
        found += [msgspec.json.decode(line, type=Event) for line in lines]
    return found


def claims(events: Iterable[Event]) -> tuple[list[Claim], list[str]]:
    """The claims of a history, and what cannot be a history at all."""
    wrong: list[str] = []
    calls: dict[tuple[str, int], list[Event]] = defaultdict(list)
    for event in events:
        if event.call:
            calls[event.process, event.call].append(event)
    made = []
    for (process, number), told in calls.items():
        who = f"{process}/{number}"
        ends = [event for event in told if event.what in ENDS]
        if told[0].what != "invoke" or len(ends) > 1 or [event.what for event in told].count("invoke") != 1:
            wrong.append(f"{who}: no history of one call: {[event.what for event in told]}")
            continue
        if not ends or ends[0].what != "ok":
            continue
        granted = ends[0]
        seen = [event.at for event in told if event.what in ("ok", "held", "proved", "release", "confirmed")]
        gone = [event.at for event in told if event.what == "lost"]
        if gone and max(seen) > min(gone):
            wrong.append(f"{who}: held {granted.key} again after it was lost: lost is final")
        proved = max([event.at for event in told if event.what in ("proved", "confirmed")], default=0.0)
        shared = granted.note == "shared"
        end = max([*seen, _promised(told, gone)])
        made.append(Claim(granted.key, granted.at, end, granted.token, who, told[0].at, proved, shared))
    return made, wrong


def _promised(told: list[Event], gone: list[float]) -> float:
    """Until when a lease's holder may count on it: its deadline, or when it gave it back or found it lost."""
    until = max([event.at for event in told if event.what == "until"], default=0.0)
    given_back = [event.at for event in told if event.what == "release"]
    return min([until, *given_back, *gone])


def judge(events: Iterable[Event], permits: int | Mapping[str, int] = 1, *, tokens: bool = True) -> Report:
    """Check a history.

    Args:
        permits: how many may hold one key at once: of all keys, or by key (1 for those that are not named).
        tokens: False where the holds of this history have none.
    """
    events = list(events)
    made, wrong = claims(events)
    by_key: dict[str, list[Claim]] = defaultdict(list)
    for claim in made:
        by_key[claim.key].append(claim)
    for key, held in sorted(by_key.items()):
        allowed = permits if isinstance(permits, int) else permits.get(key, 1)
        held.sort(key=lambda claim: claim.start)
        wrong += _crowded(key, held, allowed)
        if tokens:
            wrong += _falling(key, held) if allowed == 1 else _repeated(key, held)
    outcomes = Counter(event.what for event in events if event.what in ENDS or event.what == "lost")
    told = Counter(event.what for event in events)
    operations = sum(told[what] for what in OPERATIONS)
    return Report(told["invoke"], operations, outcomes, wrong)


def _crowded(key: str, held: list[Claim], allowed: int) -> list[str]:
    wrong = []
    inside: list[tuple[float, str]] = []
    for claim in held:
        while inside and inside[0][0] <= claim.start:
            heapq.heappop(inside)
        if len(inside) >= allowed:
            others = ", ".join(f"{who} until {end:.6f}" for end, who in sorted(inside))
            wrong.append(f"{key}: {claim.who} came in at {claim.start:.6f} beside {others}")
        heapq.heappush(inside, (claim.end, claim.who))
    return wrong


def _falling(key: str, held: list[Claim]) -> list[str]:
    return [
        f"{key}: {after.who} has token {after.token} after {before.who} had {before.token}"
        for before, after in itertools.pairwise(held)
        if after.token <= before.token
    ]


def _repeated(key: str, held: list[Claim]) -> list[str]:
    counted = Counter(claim.token for claim in held)
    return [f"{key}: token {token} was given {number} times" for token, number in counted.items() if number > 1]
