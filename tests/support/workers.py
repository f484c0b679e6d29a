"""Several processes of one module (`crew`), and what can happen to a process: killed, or frozen for a while."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["Workers"]

ROOT = Path(__file__).parents[2]


class Workers:
    """Processes of `python -m MODULE ARGUMENTS SEED`.

    They say "ready", begin at a line of input, may be told to rest, and end by themselves at the end of their input.
    """

    def __init__(self, module: str, arguments: list[str], count: int) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._seeds = 0
        self.killed = 0
        self.frozen = 0
        self.running: list[subprocess.Popen[str]] = []
        for _ in range(count):
            self.running.append(self._start())
        for process in self.running:
            self._await_ready(process)

    def _start(self) -> subprocess.Popen[str]:
        self._seeds += 1
        command = [*self._command, str(self._seeds)]
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _await_ready(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "a worker did not begin"

    def go(self) -> None:
        """All begin, at once."""
        for process in self.running:
            self._tell(process)

    def rest(self) -> list[str]:
        """All rest; answers what each says of itself then."""
        for process in self.running:
            self._tell(process, "rest")
        said = []
        for process in self.running:
            assert process.stdout is not None
            said.append(process.stdout.readline())
        return said

    def _tell(self, process: subprocess.Popen[str], word: str = "go") -> None:
        assert process.stdin is not None
        process.stdin.write(f"{word}\n")
        process.stdin.flush()

    def kill(self, index: int) -> None:
        """`kill -9`, and another process in its place."""
        process = self.running[index]
        process.kill()
        process.wait()
        self._forget(process)
        self.killed += 1
        self.running[index] = self._start()
        self._await_ready(self.running[index])
        self._tell(self.running[index])

    def freeze(self, index: int, seconds: float) -> None:
        """SIGSTOP, and so many seconds later SIGCONT."""
        process = self.running[index]
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        process.send_signal(signal.SIGCONT)
        self.frozen += 1

    def trouble(self, seconds: float, dice: random.Random, *more: Callable[[], object], longest: float = 2.5) -> None:
        """For so long, every now and then: one is killed, or frozen for up to `longest`, or one of `more` happens."""
        until = time.monotonic() + seconds
        ways: list[Callable[[], object]] = [
            lambda: self.kill(dice.randrange(len(self.running))),
            lambda: self.freeze(dice.randrange(len(self.running)), dice.uniform(0.1, longest)),
            *more,
        ]
        while time.monotonic() < until:
            time.sleep(dice.uniform(0.1, 0.6))
            dice.choice(ways)()

    def finish(self, seconds: float = 60.0) -> list[str]:
        """Tell all to end, and return what each said last; one that did not end well is a failure."""
        said = self.end(seconds)
        for process in self.running:
            assert process.returncode == 0, f"a worker ended with {process.returncode}"
        return said

    def end(self, seconds: float = 60.0) -> list[str]:
        """Tell all to end, and return what each said last, however it ended."""
        for process in self.running:  # all at once: whoever goes on may keep others waiting
            assert process.stdin is not None
            process.stdin.close()
            process.stdin = None
        said = [process.communicate(timeout=seconds)[0] for process in self.running]
        return [out.splitlines()[-1] if out else "" for out in said]

    def _forget(self, process: subprocess.Popen[str]) -> None:
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.running:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
            self._forget(process)
