"""A proof of exclusion that trusts no database: counters in shared memory, incremented without protection inside locks.

1. `Proof.increment` reads a counter, pauses, and writes back one more. Two callers inside at once lose an increment.
2. Beside each counter lies the last fencing token: one that does not rise is counted as a fall.
3. Each process keeps a ledger of what it added in a file of its own: a process that is killed is accounted for.
4. `judge` compares: what all ledgers expect must be what the counters show.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

__all__ = ["Counters", "Histogram", "Proof", "Step", "Verdict", "Words", "judge", "wait_closed"]

_WORD = 8
_PER_COUNTER = 8  # one cache line each: its value, its last token, who is inside
_COUNTERS = "counters.bin"
_LEDGER = "ledger-*.bin"
_CLOSED, _FALLS, _OVERLAPS, _FIRST = range(4)
_POLL = 0.05


class Words:
    """64-bit words in a file, seen by every process that names it; new ones are zero."""

    def __init__(self, path: str | os.PathLike[str], size: int) -> None:
        """Map the first `size` words of the file, which is made or extended as needed."""
        with Path(path).open("a+b") as file:
            if file.seek(0, os.SEEK_END) < size * _WORD:
                file.truncate(size * _WORD)
            self._map = mmap.mmap(file.fileno(), size * _WORD)
        self.view = memoryview(self._map).cast("Q")

    def close(self) -> None:
        """Let go of the mapping; the file stays. Idempotent."""
        self.view.release()
        self._map.close()


class Step(NamedTuple):
    """What one increment saw: whether its token rose, and whether nobody else came in meanwhile."""

    rising: bool
    alone: bool
    before: int = 0
    """The highest token before."""


class Counters:
    """Counters that are deliberately not safe: only the caller's lock keeps two increments apart."""

    def __init__(self, path: str | os.PathLike[str], n: int) -> None:
        """Map `n` counters; all processes must name the same number."""
        self._words = Words(path, n * _PER_COUNTER)
        self._names = itertools.count(1)
        self.size = n

    def increment(self, i: int, *, token: int | None = None, pause: float = 0.0) -> Step:
        """Read, pause (seconds; 0 still lets others run), write one more."""
        words, at = self._words.view, i * _PER_COUNTER
        me = os.getpid() << 40 | next(self._names)
        value = words[at]
        words[at + 2] = me
        time.sleep(pause)
        alone = words[at + 2] == me
        words[at] = value + 1
        if token is None:
            return Step(True, alone)
        before = words[at + 1]
        if token > before:
            words[at + 1] = token
        return Step(token > before, alone, before)

    def value(self, i: int) -> int:
        """What counter `i` shows."""
        return self._words.view[i * _PER_COUNTER]

    def close(self) -> None:
        """Let go of the mapping. Idempotent."""
        self._words.close()


class Proof:
    """One process's side of a proof: the shared counters in a folder, and its own ledger. Thread-safe.

    All processes of one proof run on one machine, name one folder, and `close` before anybody judges.
    """

    _files = itertools.count()

    def __init__(self, folder: str | os.PathLike[str], n: int) -> None:
        """Join the proof of `n` counters in the folder; the first to come makes the files."""
        self.counters = Counters(Path(folder, _COUNTERS), n)
        self._ledger = Words(Path(folder, f"ledger-{os.getpid()}-{next(self._files)}.bin"), n + _FIRST)
        self._lock = threading.Lock()
        self._closed = False

    def increment(self, i: int, *, token: int | None = None, pause: float = 0.0) -> Step:
        """Increment counter `i` unprotected and note it. Call it inside a lock that is to be proven, never degraded."""
        step = self.counters.increment(i, token=token, pause=pause)
        ledger = self._ledger.view
        with self._lock:
            ledger[_FIRST + i] += 1
            ledger[_FALLS] += not step.rising
            ledger[_OVERLAPS] += not step.alone
        return step

    def close(self) -> None:
        """This process adds no more; without it the proof stays unfinished. Idempotent."""
        if not self._closed:
            self._closed = True
            self._ledger.view[_CLOSED] = 1
            self._ledger.close()
            self.counters.close()


class Verdict(msgspec.Struct, frozen=True):
    """What a proof came to."""

    expected: int
    """Increments that the ledgers hold."""
    found: int
    """Increments that the counters show."""
    wrong: int
    """Counters that differ from the ledgers."""
    falls: int
    """Holders whose token was not above that of the holder before."""
    overlaps: int
    """Holders that saw somebody else come in."""
    unfinished: int
    """Processes that never closed their ledger."""

    @property
    def kept(self) -> bool:
        """Whether exclusion held, provably: something was counted, nothing was lost, every token rose."""
        broken = self.wrong or self.falls or self.overlaps or self.unfinished
        return self.expected > 0 and self.expected == self.found and not broken

    def __str__(self) -> str:
        said = f"expected {self.expected:,}, found {self.found:,}"
        faults = {
            "counters are wrong": self.wrong,
            "tokens did not rise": self.falls,
            "holders were not alone": self.overlaps,
            "processes left no full account": self.unfinished,
        }
        return "; ".join([said, *(f"{number:,} {text}" for text, number in faults.items() if number)])


def judge(folder: str | os.PathLike[str], n: int) -> Verdict:
    """Compare the counters of a folder with all its ledgers."""
    expected, falls, overlaps, unfinished = [0] * n, 0, 0, 0
    for path in Path(folder).glob(_LEDGER):
        ledger = memoryview(path.read_bytes()).cast("Q")
        unfinished += not ledger[_CLOSED]
        falls += ledger[_FALLS]
        overlaps += ledger[_OVERLAPS]
        for i in range(n):
            expected[i] += ledger[_FIRST + i]
    counters = Counters(Path(folder, _COUNTERS), n)
    found = [counters.value(i) for i in range(n)]
    counters.close()
    wrong = sum(one != other for one, other in zip(expected, found, strict=True))
    return Verdict(sum(expected), sum(found), wrong, falls, overlaps, unfinished)


def wait_closed(folder: str | os.PathLike[str], timeout: float) -> bool:
    """Wait until every ledger of the folder is closed; False when one still is open after `timeout` seconds."""
    until = time.monotonic() + timeout
    while not all(memoryview(path.read_bytes()).cast("Q")[_CLOSED] for path in Path(folder).glob(_LEDGER)):
        if time.monotonic() >= until:
            return False
        time.sleep(_POLL)
    return True


class Histogram(msgspec.Struct):
    """Durations in buckets at most 0.8 % wide, after Gil Tene's HdrHistogram; one thread records, any thread reads."""

    counts: dict[int, int] = {}
    longest: float = 0.0

    def record(self, seconds: float) -> None:
        """Count one duration, to the microsecond."""
        micros = max(0, int(seconds * 1e6))
        shift = max(0, micros.bit_length() - 8)
        bucket = (shift << 8) + (micros >> shift)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        if seconds > self.longest:
            self.longest = seconds

    def add(self, other: Histogram) -> None:
        """Add what another one has counted, also while it goes on counting."""
        for bucket, count in dict(other.counts).items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.longest = max(self.longest, other.longest)

    def since(self, earlier: Histogram) -> Histogram:
        """What was counted after the copy `earlier` was taken; its longest is that of the whole time."""
        counts = {bucket: count - earlier.counts.get(bucket, 0) for bucket, count in self.counts.items()}
        return Histogram({bucket: count for bucket, count in counts.items() if count}, self.longest)

    @property
    def count(self) -> int:
        """How many durations were recorded."""
        return sum(self.counts.values())

    def percentile(self, percent: float) -> float:
        """Seconds that `percent` of the durations do not exceed, rounded up to its bucket's edge; 0.0 when empty."""
        wanted, seen = self.count * percent / 100, 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= wanted:
                return min(_upper_edge(bucket), self.longest)
        return 0.0


def _upper_edge(bucket: int) -> float:
    shift = bucket >> 8
    return (((bucket & 255) + 1) << shift) / 1e6
