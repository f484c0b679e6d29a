"""Contenders that are not MySQL: locks in a local Redis, and files. What is not installed is left out, and said."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import itertools
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench_mysql import THREADS
from bench_timing import Contender, Cycle, timed

from lockrouter.testing.binaries import ProgramError, debian_tool

__all__ = ["peer_contenders", "redis_command", "redis_server"]

_KEYS = 2500
_READY_WITHIN = 10.0
_PR_SET_PDEATHSIG = 1


def peer_contenders(stack: ExitStack, folder: Path) -> tuple[list[Contender], list[str]]:
    """The peers that can be run here, and a line for each that cannot; what they start ends with `stack`."""
    makers: list[Callable[[int], list[Cycle]]] = []
    names: list[str] = []
    missing: list[str] = []
    try:
        port = redis_server(stack, folder)
    except ProgramError as error:
        missing.append(f"left out: Redis: {error}")
    else:
        for module, name, maker in (
            ("redis", "redis-py Lock", _redis_cycles),
            ("redis_lock", "python-redis-lock", _redis_lock_cycles),
        ):
            if importlib.util.find_spec("redis") and importlib.util.find_spec(module):
                names.append(name)
                makers.append(partial(maker, port, stack))
            else:
                missing.append(f"left out: {name}: not installed")
    if importlib.util.find_spec("filelock"):
        names.append("filelock")
        makers.append(partial(_file_cycles, folder))
    else:
        missing.append("left out: filelock: not installed")
    contenders = [
        Contender(name, threads, partial(timed, maker(threads)))
        for threads in THREADS
        for name, maker in zip(names, makers, strict=True)
    ]
    return contenders, missing


def redis_command() -> tuple[str, ...]:
    """The command line of redis-server.

    One binary is all of Redis's programs and looks at the name it is called by, so the link's name matters.
    """
    *loader, program = debian_tool("redis-server")
    named = Path(program).with_name("redis-server")
    return (*loader, str(named) if named.exists() else program)


def redis_server(stack: ExitStack, folder: Path) -> int:
    """The port of a fresh Redis on loopback that keeps nothing; it ends with `stack`, or with this process.

    Raises:
        ProgramError: there is none, or it does not answer.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    options = {"port": port, "bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": folder, "loglevel": "warning"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    process = subprocess.Popen(
        [*redis_command(), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=_end_with_parent,
    )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    until = time.monotonic() + _READY_WITHIN
    while time.monotonic() < until and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), 1.0) as probe:
                probe.sendall(b"PING\r\n")
                if probe.recv(16).startswith(b"+PONG"):
                    return port
        except OSError:
            time.sleep(0.02)
    raise ProgramError("redis-server does not answer")


def _end_with_parent() -> None:
    """In the child, before its program: Linux ends it when the benchmark dies without a chance to."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _redis_client(port: int, stack: ExitStack) -> Any:
    redis: Any = importlib.import_module("redis")
    client = redis.Redis(host="127.0.0.1", port=port)
    stack.callback(client.close)
    return client


def _names(thread: int) -> itertools.cycle[str]:
    return itertools.cycle([f"account:{thread}:{number}" for number in range(_KEYS)])


def _redis_cycles(port: int, stack: ExitStack, threads: int) -> list[Cycle]:
    client = _redis_client(port, stack)

    def made(thread: int) -> Cycle:
        following = _names(thread)

        def cycle() -> None:
            with client.lock(next(following), timeout=10.0):
                pass

        return cycle

    return [made(thread) for thread in range(threads)]


def _redis_lock_cycles(port: int, stack: ExitStack, threads: int) -> list[Cycle]:
    redis_lock: Any = importlib.import_module("redis_lock")
    client = _redis_client(port, stack)

    def made(thread: int) -> Cycle:
        following = _names(thread)

        def cycle() -> None:
            with redis_lock.Lock(client, next(following), expire=10):
                pass

        return cycle

    return [made(thread) for thread in range(threads)]


def _file_cycles(folder: Path, threads: int) -> list[Cycle]:
    filelock: Any = importlib.import_module("filelock")

    def made(thread: int) -> Cycle:
        following = _names(thread)

        def cycle() -> None:
            with filelock.FileLock(folder / next(following)):
                pass

        return cycle

    return [made(thread) for thread in range(threads)]
