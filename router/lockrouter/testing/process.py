"""Server processes that outlive who started them, known by more than a number that the system gives out again."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["find", "identity", "is_paused", "send", "spawn", "wait_gone"]

_POLL = 0.01
_PROC = Path("/proc")
_KEPT = ("HOME", "LANG", "LC_ALL", "PATH", "TMPDIR", "TZ")


def spawn(argv: list[str], log: Path) -> int:
    """The id of a new process in a session of its own: no Ctrl-C of this terminal reaches it. Output goes to `log`."""
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawn(
        argv[0], argv, environment, file_actions=actions, setsid=True, setsigmask=(), setsigdef=(signal.SIGINT,)
    )


def identity(pid: int) -> str | None:
    """What tells this process from every other that has had or will have the same id; None when it has ended.

    A zombie has ended. If it is a child of this process it is reaped on the way.
    """
    _reap(pid)
    if _PROC.joinpath("self/stat").is_file():
        fields = _stat(pid)
        # A zombie with threads is still dying: it holds its files and ports until the last of them is gone.
        ended = not fields or fields[0] == "X" or (fields[0] == "Z" and int(fields[17]) <= 1)
        return None if ended else f"{_boot()}:{fields[19]}"
    state, _, started = _ps("-p", str(pid), "-o", "stat=,lstart=").strip().partition(" ")
    return None if not state or state.startswith("Z") else started.strip()


def is_paused(pid: int) -> bool:
    """Whether every thread of the process is stopped by a signal."""
    if _PROC.joinpath("self/stat").is_file():
        threads = list(_PROC.joinpath(str(pid), "task").glob("*"))
        return bool(threads) and all(_stat(f"{pid}/task/{thread.name}")[:1] == ["T"] for thread in threads)
    return _ps("-p", str(pid), "-o", "stat=").startswith("T")


def find(argv: Sequence[str], option: str) -> list[int]:
    """The ids of the living processes whose command line begins with `argv` and holds `option`, in whole words."""
    found = []
    if not _PROC.joinpath("self/stat").is_file():
        for line in _ps("-axww", "-o", "pid=,command=").splitlines():
            pid, _, command = line.strip().partition(" ")
            if command.startswith(" ".join(argv) + " ") and f" {option} " in f"{command} ":
                found.append(int(pid))
        return found
    for entry in _PROC.iterdir():
        if entry.name.isdecimal():
            try:
                words = entry.joinpath("cmdline").read_bytes().split(b"\0")
            except OSError:  # it ended while we looked
                continue
            if words[: len(argv)] == [os.fsencode(word) for word in argv] and os.fsencode(option) in words:
                found.append(int(entry.name))
    return found


def send(pid: int, known: str, number: signal.Signals) -> bool:
    """Send a signal to exactly the process `known`; False when it has ended."""
    if sys.platform != "linux":
        if identity(pid) != known:
            return False
        os.kill(pid, number)
        return True
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:  # the handle stays on one process: what is checked now is what gets the signal
        if identity(pid) != known:
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def wait_gone(pid: int, known: str, timeout: float) -> bool:
    """Whether the process ended within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while identity(pid) == known:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL)
    return True


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass


def _stat(pid: int | str) -> list[str]:
    """The fields of /proc's `stat` from the state on; empty when there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


@functools.cache
def _boot() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text("ascii").strip()


def _ps(*arguments: str) -> str:
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(["ps", *arguments], env=environment, capture_output=True, text=True, check=False).stdout
