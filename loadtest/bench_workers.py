"""Contenders of several processes, and how evenly processes share one hot key."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from lockrouter.cli.timing import PERCENTS, Contender, Sample

__all__ = ["Workers", "fairness", "processes"]

_WORKER = Path(__file__).with_name("bench_worker.py")
_FAIR_PROCESSES, _FAIR_CALLERS = 4, 8


class Workers:
    """Processes of `bench_worker.py` that are ready; they end with `stack`, or when this process does."""

    def __init__(self, count: int, kind: str, where: str, callers: int, stack: ExitStack) -> None:
        self._processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(_WORKER), kind, where, str(number), str(callers)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for number in range(count)
        ]
        for process in self._processes:
            self._said(process)

    def run(self, seconds: float) -> list[Sample]:
        """What each measured in the same so many seconds."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        found = [json.loads(self._said(process)) for process in self._processes]
        return [Sample(one["rate"], dict(one["latency"])) for one in found]

    @staticmethod
    def _said(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("a worker of the benchmark ended")
        return line


def processes(name: str, count: int, kind: str, where: str, callers: int, stack: ExitStack) -> Contender:
    """All processes together: their rates added, of their latencies the worst."""
    workers = Workers(count, kind, where, callers, stack)

    def run(seconds: float) -> Sample:
        samples = workers.run(seconds)
        latency = {percent: max(one.latency[percent] for one in samples) for percent in PERCENTS}
        return Sample(sum(one.rate for one in samples), latency)

    return Contender(f"{name}, {count} processes", count * callers, run)


def fairness(file: Path, *, rounds: int, seconds: float) -> float:
    """Locks of the luckiest process over those of the unluckiest, one hot key, 1 ms hold: the median of the rounds."""
    with ExitStack() as stack:
        workers = Workers(_FAIR_PROCESSES, "hot", str(file), _FAIR_CALLERS, stack)
        found = []
        for _ in range(rounds):
            rates = [one.rate for one in workers.run(seconds)]
            found.append(max(rates) / min(rates))
    return median(found)
