"""Servers of the peers, fresh and on loopback; they end with their stack, or with this process."""

from __future__ import annotations

import ctypes
import re
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from bench_machine import program_version

from lockrouter.testing.binaries import ProgramError, debian_tool

__all__ = ["Running", "etcd_server", "redis_server", "zookeeper_server"]

_READY_WITHIN = 20.0
_PR_SET_PDEATHSIG = 1
_JARS = "zookeeper zookeeper-jute slf4j-api slf4j-nop snappy-java metrics-core netty-all"


class Running(NamedTuple):
    """A server that answers."""

    port: int
    name: str
    """With its version."""


def redis_server(stack: ExitStack, folder: Path) -> Running:
    """Redis that keeps nothing on disk.

    Raises:
        ProgramError: there is none, or it does not answer; so do the others.
    """
    command, port = _redis_command(), _free_port()
    options = {"port": port, "bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": folder, "loglevel": "warning"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    _start("redis-server", [*command, *words], port, b"PING\r\n", b"+PONG", stack)
    return Running(port, f"Redis {program_version(command)}")


def _redis_command() -> tuple[str, ...]:
    """One binary is all of Redis's programs and looks at the name it is called by, so the link's name matters."""
    *loader, program = debian_tool("redis-server")
    named = Path(program).with_name("redis-server")
    return (*loader, str(named) if named.exists() else program)


def etcd_server(stack: ExitStack, folder: Path) -> Running:
    """A cluster of one etcd, which puts every change on disk, as it always does."""
    command, port, peers = debian_tool("etcd", "etcd-server"), _free_port(), f"http://127.0.0.1:{_free_port()}"
    here = f"http://127.0.0.1:{port}"
    options = {
        "data-dir": folder / "etcd",
        "listen-client-urls": here,
        "advertise-client-urls": here,
        "listen-peer-urls": peers,
        "initial-advertise-peer-urls": peers,
        "initial-cluster": f"default={peers}",
        "logger": "zap",
        "log-level": "error",
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    _start("etcd", [*command, *words], port, b"GET /health HTTP/1.0\r\n\r\n", b"true", stack)
    return Running(port, f"etcd {program_version(command)}")


def zookeeper_server(stack: ExitStack, folder: Path) -> Running:
    """One ZooKeeper, which puts every change on disk, as it always does."""
    command, port = debian_tool("java", "libzookeeper-java", extra=("default-jre-headless",)), _free_port()
    jars = next((path / "share/java" for path in Path(command[-1]).parents if (path / "share/java").is_dir()), None)
    if jars is None or not (jars / "zookeeper.jar").is_file():
        raise ProgramError("no zookeeper.jar beside java")
    data, settings = folder / "zookeeper", folder / "zookeeper.cfg"
    options = {
        "clientPort": port,
        "clientPortAddress": "127.0.0.1",
        "dataDir": data,
        "maxClientCnxns": 0,
        "admin.enableServer": "false",
    }
    settings.write_text("".join(f"{name}={value}\n" for name, value in options.items()), "utf-8")
    path = ":".join(str(jars / f"{name}.jar") for name in _JARS.split())
    java = [*command, "-Xmx512m", "-Dzookeeper.jmx.log4j.disable=true", "-cp", path]
    main = "org.apache.zookeeper.server.ZooKeeperServerMain"
    said = _start("ZooKeeper", [*java, main, str(settings)], port, b"srvr", b"Node count", stack)
    found = re.search(rb"version: ([\d.]+)", said)
    return Running(port, f"ZooKeeper {found[1].decode() if found else 'of unknown version'}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _start(name: str, command: Sequence[str], port: int, ask: bytes, answer: bytes, stack: ExitStack) -> bytes:
    """Start it, wait until it answers, and return what it said."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=_end_with_parent,
    )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    until = time.monotonic() + _READY_WITHIN
    while time.monotonic() < until and process.poll() is None:
        said = _said(port, ask, answer)
        if answer in said:
            return said
        time.sleep(0.02)
    raise ProgramError(f"{name} does not answer")


def _said(port: int, ask: bytes, answer: bytes) -> bytes:
    """Whatever comes until the answer is in it."""
    said = b""
    try:
        with socket.create_connection(("127.0.0.1", port), 1.0) as probe:
            probe.sendall(ask)
            while answer not in said and (more := probe.recv(4096)):
                said += more
    except OSError:
        pass
    return said


def _end_with_parent() -> None:
    """In the child, before its program: Linux ends it when the benchmark dies without a chance to."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
