"""Whoever listens at a shard's address and is not its server: as much of the protocol as it takes to lie in it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

__all__ = ["FakeServer", "error", "greeting", "let_in", "ok", "packet", "receive"]

Serve = Callable[[socket.socket], None]

_PROTOCOL = 0x0200 | 0x2000 | 0x8000 | 0x0008 | 0x80000 | 0x200000
"""4.1, transactions, secure connection, connect with a database, plugins, long answers to them; no TLS."""


class FakeServer:
    """Listens on `port` of loopback; each connection is `serve(sock)` in a thread of its own, and closed behind it."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self.accepted = 0
        self.heard = b""
        """What clients said that `receive` has seen, all together."""
        self._lines: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, name="fake-server", daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                line = _Heard(self, self._listener.accept()[0])
                self.accepted += 1
                self._lines.append(line)
                thread = threading.Thread(target=self._run, args=(line,), name="fake-server-line", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _run(self, line: socket.socket) -> None:
        with line, contextlib.suppress(OSError):
            self._serve(line)

    def close(self) -> None:
        """Nothing of the server is left. Idempotent."""
        for sock in (self._listener, *self._lines):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(10.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Heard(socket.socket):
    """A client's line that remembers for its server what was received on it."""

    def __init__(self, server: FakeServer, line: socket.socket) -> None:
        super().__init__(line.family, line.type, line.proto, line.detach())
        self._server = server

    def recv(self, size: int, flags: int = 0) -> bytes:
        data = super().recv(size, flags)
        self._server.heard += data
        return data


def packet(payload: bytes, number: int) -> bytes:
    """One packet."""
    return len(payload).to_bytes(3, "little") + bytes([number & 0xFF]) + payload


def receive(line: socket.socket) -> bytes:
    """The payload of the client's next packet; raises OSError at the end of the stream."""
    return _exactly(line, int.from_bytes(_exactly(line, 4)[:3], "little"))


def _exactly(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = line.recv(size - len(data))
        if not more:
            raise OSError("the client has gone")
        data += more
    return data


def greeting(version: bytes = b"8.4.0", plugin: bytes = b"mysql_native_password", *, tls: bool = False) -> bytes:
    """A server's first packet."""
    able = _PROTOCOL | (0x0800 if tls else 0)
    return packet(
        b"\x0a" + version + b"\0" + (7).to_bytes(4, "little") + b"12345678\0" + (able & 0xFFFF).to_bytes(2, "little")
        + b"\xff\x02\x00" + (able >> 16).to_bytes(2, "little") + b"\x15" + bytes(10) + b"abcdefghijkl\0" + plugin
        + b"\0",
        0,
    )  # fmt: skip


def ok(number: int, status: int = 2) -> bytes:
    """An OK without changes."""
    return packet(b"\x00\x00\x00" + status.to_bytes(2, "little") + b"\x00\x00", number)


def error(number: int, code: int, text: bytes = b"no") -> bytes:
    """An error."""
    return packet(b"\xff" + code.to_bytes(2, "little") + b"#HY000" + text, number)


def let_in(line: socket.socket, version: bytes = b"8.4.0") -> None:
    """Log the client in, whatever its password, SET NAMES included."""
    line.sendall(greeting(version))
    receive(line)
    line.sendall(ok(2))
    receive(line)
    line.sendall(ok(1))
