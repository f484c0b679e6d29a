"""Sessions that are lent to callers' transactions: a lock session whose socket PyMySQL uses while it is lent.

The row is locked through `Session.exchange`, like any row. Then the caller's own SQL goes through PyMySQL, and nothing
may end the transaction unnoticed. `GuardedConnection` watches for it, whatever the caller does:

1. Every OK says whether a transaction is open. None: it ended (COMMIT, ROLLBACK, DDL, ...).
2. After an error, before anything else is sent, a PING's OK says it: no list of error codes can be complete.
3. A statement that is not known to be harmless (CALL, BEGIN, SET, ...) is put behind a savepoint, which only the same
   transaction can release afterwards; such a session is not used again.
4. A connection that ended took the transaction along.
"""

from __future__ import annotations

import re
import secrets
import socket
import ssl
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from pymysql import err
from pymysql.connections import Connection, MysqlPacket
from pymysql.constants import CLIENT, COMMAND

from lockrouter.deadline import now
from lockrouter.errors import LossReason
from lockrouter.protocol.effects import CALL, Operation
from lockrouter.protocol.packets import IN_TRANSACTION, Reply
from lockrouter.protocol.wire import Wire
from lockrouter.session import TRANSACTIONS, Session, State, authenticate, login, set_up

if TYPE_CHECKING:
    from lockrouter.config import Endpoint, TransactionOptions

__all__ = ["Guard", "GuardedConnection", "LentSession", "open_lent"]

_COMMENTS = r"\s*(?:(?:/\*(?![!M]).*?\*/|--\s[^\n]*|\#[^\n]*)\s*)*"
_HARMLESS = re.compile(
    _COMMENTS + r"\(*\s*(?:(?:SELECT|INSERT|UPDATE|DELETE|REPLACE|WITH|VALUES|TABLE|SHOW|SAVEPOINT|RELEASE)\b"
    r"|ROLLBACK\s+(?:WORK\s+)?TO\b)",
    re.IGNORECASE | re.DOTALL,
)
_COMMENTS_SHOWN = 4096
_ENDS_TRANSACTION = frozenset({1213, 1614})
_SEND_TIMEOUT = 30
_ASK_AGAIN = 1.0


class Guard(Protocol):
    """Whoever a session is lent to."""

    def refuse(self) -> None:
        """Raise if the lock is lost: nothing may be sent any more."""

    def ended(self, cause: BaseException | None) -> None:
        """The server's transaction has ended, and the lock with it."""


class _Reader:
    """What PyMySQL reads replies from: as patient as the server answers elsewhere, since statements may take long."""

    def __init__(self, wire: Wire, answers: Callable[[], bool]) -> None:
        self._wire = wire
        self._answers = answers
        self._buffer = bytearray()

    def read(self, size: int) -> bytes:
        """Return `size` bytes, or fewer at the end of the stream; TimeoutError once the shard does not answer."""
        while len(self._buffer) < size:
            try:
                data = self._wire.receive(now() + _ASK_AGAIN)
            except TimeoutError:
                if not self._answers():
                    raise
                continue
            if not data:
                break
            self._buffer += data
        found = bytes(self._buffer[:size])
        del self._buffer[:size]
        return found

    def close(self) -> None:
        """Forget what came."""
        self._buffer.clear()


class GuardedConnection(Connection[Any]):
    """PyMySQL's connection of a lent session; see the module's rules."""

    def __init__(self, **arguments: Any) -> None:
        self.session: LentSession | None = None
        self.guard: Guard | None = None
        # Set while the lender itself ends the transaction: that it ends then is no loss.
        self.ending = False
        self.tainted = False
        self.in_flight = False
        self.commit_sent = False
        self._doubtful: err.MySQLError | None = None
        self._savepoint: str | None = None
        super().__init__(client_flag=CLIENT.FOUND_ROWS, **arguments)

    # -- lending ------------------------------------------------------------------------------------------------

    def lend(self, guard: Guard) -> None:
        """Let the caller's SQL through, for a transaction that is open already."""
        self.guard = guard
        self.ending = self.commit_sent = self.in_flight = False
        self._doubtful = self._savepoint = None

    def take_back(self) -> None:
        """Refuse whatever comes from references the caller kept."""
        self.guard = None

    def prove(self) -> None:
        """Return when the transaction is known to be the one that was lent; else `refuse` of the guard raises."""
        if self._result is not None:
            self._drain_results()
        savepoint, self._savepoint = self._savepoint, None
        if savepoint is not None and self._doubtful is None:
            try:
                super()._execute_command(COMMAND.COM_QUERY, f"RELEASE SAVEPOINT {savepoint}")  # type: ignore[misc]
                super()._read_ok_packet()  # type: ignore[misc]
            except err.MySQLError as error:
                self._end(error)
        doubtful, self._doubtful = self._doubtful, None
        if doubtful is not None and self.guard is not None and self.open:
            super()._execute_command(COMMAND.COM_PING, "")  # type: ignore[misc]
            self._read_ok_packet()
        self.in_flight = False

    def _drain_results(self) -> None:
        result = self._result
        if result.unbuffered_active:
            result._finish_unbuffered_query()
        while self._result is not None and self._result.has_next:
            self.next_result()

    def _end(self, cause: BaseException | None) -> None:
        if self.guard is not None and not self.ending:
            self.tainted = True
            self.guard.ended(cause)

    # -- PyMySQL's choke points ---------------------------------------------------------------------------------

    def _execute_command(self, command: int, sql: str | bytes) -> None:
        session, guard = self.session, self.guard
        if session is None:
            super()._execute_command(command, sql)  # type: ignore[misc]
            return
        if guard is None:
            raise err.InterfaceError(0, "the transaction that this connection was lent to is over")
        if not self.ending:
            guard.refuse()
            self.prove()
            guard.refuse()
            if command not in (COMMAND.COM_QUERY, COMMAND.COM_PING):
                self.tainted = True
            elif command == COMMAND.COM_QUERY:
                self._look_at(sql)
        with session.mutex:
            self.in_flight = True
        try:
            sent_at = now()
            super()._execute_command(command, sql)  # type: ignore[misc]
            self.commit_sent = self.ending
            session.sent_at = sent_at
        except err.MySQLError as error:
            self._end(error)
            raise

    def _look_at(self, sql: str | bytes) -> None:
        text = sql[:_COMMENTS_SHOWN].decode("latin-1") if isinstance(sql, bytes) else sql[:_COMMENTS_SHOWN]
        if _HARMLESS.match(text):
            return
        self.tainted = True
        savepoint = f"lockrouter_{secrets.token_hex(8)}"
        super()._execute_command(COMMAND.COM_QUERY, f"SAVEPOINT {savepoint}")  # type: ignore[misc]
        super()._read_ok_packet()  # type: ignore[misc]
        self._savepoint = savepoint

    def _read_packet(self, packet_type: Any = MysqlPacket) -> Any:
        try:
            packet = super()._read_packet(packet_type)  # type: ignore[misc]
        except err.MySQLError as error:
            if not self.open or (error.args and error.args[0] in _ENDS_TRANSACTION):
                self._end(error)
            else:
                self._doubtful = error
            raise
        if self.session is not None:
            self.session.heard()
        return packet

    def _read_ok_packet(self) -> Any:
        packet = super()._read_ok_packet()  # type: ignore[misc]
        self._replied()
        return packet

    def _read_query_result(self, unbuffered: bool = False) -> Any:
        rows = super()._read_query_result(unbuffered)  # type: ignore[misc]
        result = self._result
        if result.unbuffered_active or result.has_next:
            return rows
        if result.server_status is not None:
            self._replied()
        else:
            self.in_flight = False
        return rows

    def _replied(self) -> None:
        self.in_flight = False
        if not self.server_status & IN_TRANSACTION:  # type: ignore[attr-defined]
            self._end(None)

    def _force_close(self) -> None:
        super()._force_close()  # type: ignore[misc]
        session = getattr(self, "session", None)
        if session is not None:
            session.die()
            self._end(None)

    def rollback(self) -> None:
        """Roll back where there is still something to; the caller's own rollback ends the lock."""
        if self.session is None or (self.open and self.guard is not None and not self._lost()):
            super().rollback()

    def _lost(self) -> bool:
        """A lost lock's transaction is rolled back by its lender alone."""
        return self.tainted and self.session is not None and self.session.lost_to_guard

    def close(self) -> None:
        """SQLAlchemy throws its connection away: the lender's own doing, or the end of the transaction."""
        if self.session is not None and self.guard is not None and not self.ending:
            self._force_close()


class LentSession(Session):
    """A session of a pool's other lane; between transactions it is like any other."""

    __slots__ = ("connection", "idle", "lost_to_guard", "sent_at")

    lane = TRANSACTIONS

    def __init__(self, connection: GuardedConnection, idle: int, answers: Callable[[], bool]) -> None:
        super().__init__(None, connection)
        self.connection = connection
        self.idle = idle
        self.sent_at = self.safe_from
        self.lost_to_guard = False
        if isinstance(self.wire.sock, socket.socket) and not isinstance(self.wire.sock, ssl.SSLSocket):
            timeval = struct.pack("ll", _SEND_TIMEOUT, 0)
            self.wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        raw: Any = connection
        raw._rfile = _Reader(self.wire, answers)
        raw._current_timeout = raw._read_timeout = raw._write_timeout = None
        connection.session = self

    def heard(self) -> None:
        """The server answered the command that was sent last."""
        self.answered_at = now()
        self.safe_from = max(self.safe_from, self.sent_at)

    def exchange(self, packet: bytes, until: float, *, more: bool = False) -> Operation[Reply]:
        """As `Session.exchange`; never between the caller's own statement and its reply."""
        if self.connection.in_flight:
            raise RuntimeError("a statement of the transaction is still in flight on its connection")
        return (yield from super().exchange(packet, until, more=more))

    def drain(self) -> bool:
        """While lent, look without reading: anything to read, and no command in flight, is the end."""
        if self.connection.guard is None:
            return super().drain()
        if self.connection.in_flight or not self.wire.readable():
            return True
        self.die()
        return False

    def send_ping(self) -> bool:
        """Sessions of transactions are not pinged: an idle one is to be rolled back by the server."""
        return True

    def lost_reason(self, ghost_timeout: float) -> LossReason | None:
        """As `Session.lost_reason`, by the bound of transactions, which does not run while a statement does."""
        if self.state is State.DEAD:
            return self.end
        if not self.connection.in_flight and now() > self.safe_from + self.idle - 0.5:
            return LossReason.SILENT
        return None


def open_lent(
    endpoint: Endpoint,
    seconds: float,
    tls: ssl.SSLContext | None,
    options: TransactionOptions,
    answers: Callable[[], bool],
) -> Operation[LentSession]:
    """Return a session set up for callers' transactions; `answers` says whether its shard answers elsewhere.

    Raises:
        Answered, Gone, Silent: as `session.dial`, and for what the set-up says.
    """
    until = now() + seconds
    session: LentSession = yield (CALL, lambda: _dial(endpoint, seconds, tls, options.idle, answers), None)
    setup = session.dialect.transaction_setup(options.isolation, options.time_zone, options.lock_wait, options.idle)
    yield from set_up(session, setup, until)
    return session


def _dial(
    endpoint: Endpoint, seconds: float, tls: ssl.SSLContext | None, idle: int, answers: Callable[[], bool]
) -> LentSession:
    connection = GuardedConnection(**login(endpoint, seconds, tls))
    authenticate(connection, endpoint, seconds)
    return LentSession(connection, idle, answers)
