"""A login that is bounded as a whole, and shows the password to nobody it should not be shown to.

PyMySQL bounds each read alone, trusts every size it is told, and answers every question of a login, the one for the
password in plain text included. Whoever answers at a shard's address may be no server of ours:

1. All of a login ends at one moment, however slowly its bytes come, and is at most `_MOST` bytes long.
2. Where TLS was asked for, nothing is said before it is there.
3. Without it the password never leaves in plain text.
"""

from __future__ import annotations

import socket
import traceback
from typing import Any, NoReturn

from pymysql import err
from pymysql.connections import Connection
from pymysql.constants import CLIENT, CR

from lockrouter.deadline import now

__all__ = ["PLAIN_REFUSED", "Handshake", "is_answer", "log_in", "require_tls"]

_MOST = 16 * 1024
_MALFORMED = 2027
_LOST = frozenset({CR.CR_CONNECTION_ERROR, CR.CR_CONN_HOST_ERROR, CR.CR_SERVER_GONE_ERROR, CR.CR_SERVER_LOST, 2055})


class _PlainRefused:
    """PyMySQL's handler of a login that would send the password as it is."""

    def __init__(self, connection: Connection[Any]) -> None:
        pass

    def authenticate(self, packet: object) -> NoReturn:
        raise err.OperationalError(CR.CR_AUTH_PLUGIN_ERR, "the server asks for the password in plain text, without TLS")


PLAIN_REFUSED = {"mysql_clear_password": _PlainRefused, "dialog": _PlainRefused}
"""PyMySQL's `auth_plugin_map` for connections without TLS."""


class Handshake(Connection):
    """PyMySQL's connection, of a version whose insides are known; `log_in` opens it."""

    _read_timeout: float | None
    _write_timeout: float | None
    _current_timeout: float | None
    _sock: Any
    _rfile: Any
    ssl: bool
    server_capabilities: int

    def __init__(self, **arguments: Any) -> None:
        self._until: float | None = None
        self._left = _MOST
        super().__init__(**arguments)

    def connect_by(self, sock: socket.socket | None, until: float) -> None:
        """As `connect`, which opens a socket where none is given, and be logged in by `until`."""
        patience = self._read_timeout, self._write_timeout
        self._until = until
        try:
            self.connect(sock)
        finally:
            self._until = None
            self._read_timeout, self._write_timeout = patience
            self._current_timeout = None  # what PyMySQL takes the socket's to be

    def _read_bytes(self, num_bytes: int) -> bytes:
        if self._until is None:
            read: bytes = super()._read_bytes(num_bytes)  # type: ignore[misc]
            return read
        self._left -= num_bytes
        if self._left < 0:
            raise err.OperationalError(_MALFORMED, "the server says more than a login takes")
        data = b""
        while len(data) < num_bytes:
            self._sock.settimeout(self._time_left())
            more = self._rfile.read1(num_bytes - len(data))
            if not more:
                raise err.OperationalError(CR.CR_SERVER_LOST, "the server closed the connection during its login")
            data += more
        return data

    def _request_authentication(self) -> None:
        if self.ssl and not self.server_capabilities & CLIENT.SSL and self._sock.family != socket.AF_UNIX:
            raise err.OperationalError(CR.CR_SSL_CONNECTION_ERROR, "the server does not speak TLS")
        self._read_timeout = self._write_timeout = self._time_left()  # of the TLS handshake, too
        super()._request_authentication()  # type: ignore[misc]

    def _time_left(self) -> float:
        assert self._until is not None
        left = self._until - now()
        if left <= 0:
            raise TimeoutError("timed out")
        return left


def log_in(connection: Connection[Any], sock: socket.socket | None, until: float) -> None:
    """Connect, unless a connected socket is given, and log in; by `until`, if it is a `Handshake`.

    Raises:
        MySQLError, OSError: nothing is left open.
    """
    try:
        if isinstance(connection, Handshake):
            connection.connect_by(sock, until)
        else:
            connection.connect(sock)
    except (err.MySQLError, OSError):
        raise
    except Exception as error:
        # PyMySQL takes apart unchecked what it is sent: anything may come of it.
        raise err.OperationalError(_MALFORMED, f"no login of MySQL's: {type(error).__name__}: {error}") from error


def require_tls(connection: Connection[Any]) -> None:
    """Ask the server whether the connection is encrypted: a PyMySQL of unknown insides may have gone on without.

    Raises:
        OperationalError: it is not.
    """
    with connection.cursor() as cursor:
        cursor.execute("SHOW SESSION STATUS LIKE 'Ssl_cipher'")
        if not any(row[1] for row in cursor.fetchall()):
            raise err.OperationalError(CR.CR_SSL_CONNECTION_ERROR, "the server does not speak TLS")


def is_answer(error: err.MySQLError) -> bool:
    """True where a login failed by something that was said: whoever says it may be granting rows to others."""
    code = error.args[0] if error.args else None
    return code not in _LOST or _was_said(error)


def _was_said(error: err.MySQLError) -> bool:
    """True of what came as an error packet: proxies say with a client's own codes that they have lost a server."""
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1:] == [err.raise_mysql_exception.__name__]
