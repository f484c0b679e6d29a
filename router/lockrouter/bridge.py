"""A way to the server through PyMySQL's public methods, for versions of it whose insides this package does not know.

A session talks bytes of the protocol to a socket. Here that socket is one end of a pair, and a thread at the other end
carries out each command with a cursor or `ping`, and puts what comes of it back into bytes. It is slower by a thread
and a round trip, and everything above is the same: the states, the decoder, the looks, the bounds.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from typing import Any

from pymysql import MySQLError
from pymysql.connections import Connection

from lockrouter.protocol.packets import QUIT, query
from lockrouter.protocol.wire import Wire

__all__ = ["Bridge", "end"]

_log = logging.getLogger("lockrouter")

_HEADER = 4
_QUERY = query(b"")[_HEADER]
_NULL = b"\xfb"


class _Over(Exception):
    """The connection has ended, or cannot be trusted any more."""


class Bridge(Wire):
    """The session's end of the pair; `line` is the server's socket, to look at it and to end it, where it is known."""

    __slots__ = ("_line",)

    prepares = False  # PyMySQL's public methods know only text

    def __init__(self, connection: Connection[Any], line: socket.socket | None, owner: object) -> None:
        """Serve from now on; `owner`, whose end would close the connection, is kept as long as that is in use."""
        near, far = socket.socketpair()
        super().__init__(near)
        self._line = line
        threading.Thread(
            target=_serve, args=(connection, far, line, owner), name="lockrouter-bridge", daemon=True
        ).start()

    def interrupt(self) -> None:
        """As `Wire.interrupt`; the thread's own wait for the server ends, too."""
        super().interrupt()
        end(self._line)

    def forget(self) -> None:
        """As `Wire.forget`."""
        super().forget()
        if self._line is not None:
            self._line.close()


def end(line: socket.socket | None) -> None:
    """End a stream both ways, for whoever uses it."""
    try:
        if line is not None:
            line.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def _serve(connection: Connection[Any], far: socket.socket, line: socket.socket | None, owner: object) -> None:
    try:
        while True:
            far.sendall(_carry_out(connection, _next_command(far, line)))
    except (_Over, OSError, MySQLError):
        pass
    except Exception:  # noqa: BLE001 - what a driver of unknown insides raises when its stream ends is not known, either
        _log.debug("the driver failed", exc_info=True)
    finally:
        far.close()
        end(line)
        try:
            connection.close()
        except Exception:  # noqa: BLE001 - as above; the stream has ended already
            pass
        if line is not None:
            line.close()


def _next_command(far: socket.socket, line: socket.socket | None) -> bytes:
    """Wait for a command. What comes from the server meanwhile can only be its end, or the reason for that."""
    poll = select.poll()
    for side in (far, line):
        if side is not None:
            poll.register(side.fileno(), select.POLLIN)
    if far.fileno() not in {descriptor for descriptor, _ in poll.poll()}:
        raise _Over
    size = int.from_bytes(_exactly(far, _HEADER)[:3], "little")
    return _exactly(far, size)


def _exactly(far: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = far.recv(size - len(data))
        if not more:
            raise _Over
        data += more
    return data


def _carry_out(connection: Connection[Any], command: bytes) -> bytes:
    if command == QUIT[_HEADER:]:
        raise _Over
    try:
        if command[0] != _QUERY:
            connection.ping(reconnect=False)
            return _ok(0, _status(connection))
        with connection.cursor() as cursor:
            cursor.execute(command[1:].decode("ascii"))
            if cursor.description is None:
                return _ok(max(0, cursor.rowcount), _status(connection))
            columns, rows = len(cursor.description), cursor.fetchall()
        # PyMySQL keeps no status of a reply with rows; a PING's reply says whether a transaction is open now.
        connection.ping(reconnect=False)
        return _rows(columns, rows, _status(connection))
    except MySQLError as error:
        code = error.args[0] if error.args else None
        if not isinstance(code, int) or code < 1000 or 2000 <= code < 3000:
            raise _Over from error
        return _packet(b"\xff" + code.to_bytes(2, "little") + b"#HY000" + str(error.args[1]).encode(), 1)


def _status(connection: Connection[Any]) -> int:
    status: int = connection.server_status  # type: ignore[attr-defined]
    return status & ~0x0008


def _packet(payload: bytes, number: int) -> bytes:
    return len(payload).to_bytes(3, "little") + bytes([number & 0xFF]) + payload


def _number(value: int) -> bytes:
    if value < 0xFB:
        return bytes([value])
    return b"\xfc" + value.to_bytes(2, "little") if value < 1 << 16 else b"\xfe" + value.to_bytes(8, "little")


def _ok(affected: int, status: int) -> bytes:
    return _packet(b"\x00" + _number(affected) + b"\x00" + status.to_bytes(2, "little") + b"\x00\x00", 1)


def _rows(columns: int, rows: Any, status: int) -> bytes:
    parts = [bytes([columns]), *[b"\x03def"] * columns, b"\xfe\x00\x00" + status.to_bytes(2, "little")]
    parts += [b"".join(map(_value, row)) for row in rows]
    parts.append(b"\xfe\x00\x00" + status.to_bytes(2, "little"))
    return b"".join(_packet(part, number) for number, part in enumerate(parts, 1))


def _value(value: str | bytes | None) -> bytes:
    if value is None:
        return _NULL
    raw = value.encode() if isinstance(value, str) else value
    return _number(len(raw)) + raw
