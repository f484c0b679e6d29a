"""The processes of a load, as their starter sees them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import IO, Self

import msgspec

from lockrouter.testing.exclusion import Verdict, judge
from lockrouter.testing.load import Figures, Plan, Report, outages
from lockrouter.testing.server import ClusterError

__all__ = ["Fleet", "FleetError"]


class FleetError(ClusterError):
    """A process of the load ended before it was told to, or never began, or did not end."""


class Fleet:
    """Processes that run one plan until `stop`. Leaving the block ends what still runs, however it was left."""

    def __init__(self, plan: Plan, processes: int) -> None:
        """Start the processes; `go` has them begin."""
        self.plan = plan
        self._latest: list[Report | None] = [None] * processes
        self._news = threading.Condition()
        command = [sys.executable, "-m", "lockrouter.testing.load", msgspec.json.encode(plan).decode()]
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        for index in range(processes):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            reader = threading.Thread(target=self._read, args=(index, process), name=f"fleet-{index}", daemon=True)
            self._processes.append(process)
            self._readers.append(reader)
            reader.start()

    def _read(self, index: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            report = msgspec.json.decode(line, type=Report)
            with self._news:
                self._latest[index] = report
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def reports(self) -> list[Report]:
        """The latest report of each process that has made one."""
        with self._news:
            return [report for report in self._latest if report is not None]

    def figures(self) -> dict[str, Figures]:
        """The latest figures by shard, all processes together."""
        total: dict[str, Figures] = {}
        for report in self.reports():
            for name, shard in report.shards.items():
                total.setdefault(name, Figures()).add(shard.figures)
        return total

    def go(self, timeout: float = 60.0) -> None:
        """Wait until all processes are ready, then let all begin at once.

        Raises:
            FleetError: one is not ready within `timeout` seconds.
        """
        until = time.monotonic() + timeout
        with self._news:
            while not all(self._latest):
                if time.monotonic() >= until or any(process.poll() is not None for process in self._processes):
                    raise FleetError("a process of the load did not become ready; its error is above")
                self._news.wait(0.2)
        for process in self._processes:
            _input(process).write("go\n")
            _input(process).flush()

    def outage(self, at: int, *, down: bool) -> None:
        """Tell the processes whether the server of shard number `at` is certainly down.

        Say `down=False` before it is touched and before it is started again, `down=True` when it has ended.
        """
        words = outages(self.plan.folder, len(self.reports()[0].shards))
        words.view[at] += 1 if words.view[at] & 1 != down else 2
        words.close()

    def stop(self, timeout: float = 30.0) -> list[Report]:
        """Have every process end and return their last reports.

        Raises:
            FleetError: one did not end, or ended in an error.
        """
        for process in self._processes:
            _input(process).close()
        until = time.monotonic() + timeout
        for process, reader in zip(self._processes, self._readers, strict=True):
            try:
                code = process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise FleetError(f"a process of the load did not end within {timeout:g} s") from None
            reader.join(5.0)
            if code:
                raise FleetError(f"a process of the load ended with exit code {code}; its error is above")
        reports = self.reports()
        if not all(report.done for report in reports):
            raise FleetError("a process of the load ended without a last report")
        return reports

    def verdict(self) -> Verdict:
        """What the proof came to; after `stop`."""
        return judge(self.plan.folder, self.plan.keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for process, reader in zip(self._processes, self._readers, strict=True):
            reader.join(5.0)
            _input(process).close()
            if process.stdout is not None:
                process.stdout.close()


def _input(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdin is not None
    return process.stdin
