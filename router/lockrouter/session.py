"""One connection to one server, the state it is in, and what is still unread on it.

This module, `handshake` and `protocol/wire.py` are the only ones that touch PyMySQL's internals: PyMySQL connects and
authenticates, DBUtils owns the connection object, and from then on this module talks to its socket.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - loaded lazily by the first connect otherwise, which a fork may cut in two
import enum
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pymysql
from dbutils.steady_db import SteadyDBConnection
from pymysql.connections import Connection

from lockrouter.bridge import Bridge, end
from lockrouter.deadline import now
from lockrouter.errors import LossReason
from lockrouter.handshake import PLAIN_REFUSED, Handshake, is_answer, log_in, require_tls
from lockrouter.protocol.effects import CALL, RECEIVE, TALK, Operation
from lockrouter.protocol.packets import (
    IN_TRANSACTION,
    PING,
    QUIT,
    ROLLBACK,
    Err,
    Grants,
    Ok,
    Prepared,
    ProtocolViolation,
    Reply,
    ReplyReader,
    Rows,
    execution,
    is_off,
    prepare,
)
from lockrouter.protocol.wire import Wire
from lockrouter.sql.statements import Dialect, dialect_of

if TYPE_CHECKING:
    from lockrouter.config import Endpoint

__all__ = [
    "ROWS",
    "TRANSACTIONS",
    "Answered",
    "Garbled",
    "Gone",
    "Incarnation",
    "Session",
    "Silent",
    "State",
    "authenticate",
    "dial",
    "driver_error",
    "driver_is_known",
    "login",
    "open_session",
    "sensible",
    "set_up",
    "single_row",
]

ROWS, TRANSACTIONS = range(2)
"""The lanes of a pool: sessions for row locks alone, and those that are lent to callers' transactions."""

Incarnation = tuple[bytes, int]
"""A server between two starts of it: its identity and, by its own clock in microseconds, when it started."""


_OK_SIZE = 11
_OVER = 0.1
"""Seconds after which a login that should have ended by itself is given up."""
_CUT_SHORT = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
_KNOWN_DRIVERS = ((1, 1), (1, 2))


class State(enum.IntEnum):
    """What a session may be used for; only IDLE and ROLLBACK_SENT may be kept in a pool."""

    IDLE = 0
    ROLLBACK_SENT = 1
    BUSY = 2
    HOLDING = 3
    DEAD = 4


# Looking a member up in its class costs 0.1 microseconds, several times a lock.
_IDLE, _ROLLBACK_SENT, _BUSY, _HOLDING, _DEAD = State


class Gone(Exception):
    """The connection ended; `answered` says whether any byte of the awaited reply had come."""

    def __init__(self, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered


class Garbled(Gone):
    """The connection was ended because what came cannot be a reply: whoever says such things does answer."""


class Silent(Exception):
    """No complete reply came in time; the connection is closed."""


class Answered(Exception):
    """The server answered with an error where none can be worked around."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"({code}) {message}" if code else message)
        self.code = code


def _handshake(**arguments: Any) -> Handshake:
    """What DBUtils calls; it would call the method `connect` of a class."""
    return Handshake(**arguments)


def driver_is_known() -> bool:
    """True where this package knows PyMySQL's insides: then it talks to the socket itself."""
    return pymysql.VERSION[:2] in _KNOWN_DRIVERS


def driver_error(error: BaseException) -> BaseException:
    """The error PyMySQL raised, or would have raised for what the server answered, or the operating system's."""
    if error.__cause__ is not None:
        return error.__cause__
    if isinstance(error, Answered) and error.code:
        kind = pymysql.err.error_map.get(error.code, pymysql.err.OperationalError)
        made: BaseException = kind(error.code, error.args[0])
        return made
    return error


class _NeverRaised(Exception):
    """The one kind of failure DBUtils may repair by itself: none."""


class Session:
    """A connection with its state; its owner is whoever checked it out, or, while HOLDING, the hold.

    `mutex` guards the socket while HOLDING, when the holder, the releaser and the background thread may meet.
    """

    __slots__ = (
        "_on_settled",
        "_read",
        "_reader",
        "_steady",
        "answered_at",
        "borrower",
        "bound",
        "connection_id",
        "dialect",
        "end",
        "fresh",
        "grants",
        "hold",
        "incarnation",
        "interrupted",
        "last_slots",
        "lease",
        "may_prepare",
        "mutex",
        "ping_sent_at",
        "prepared",
        "safe_from",
        "sent_at",
        "state",
        "unread",
        "until",
        "waiting",
        "wire",
    )

    lane = ROWS
    # A shorter bound on one locking statement than usual, where the session's own settings demand it; 0: none.
    longest_wait = 0.0

    def __init__(
        self, steady: Any, connection: Connection[Any], grants: Grants | None = None, wire: Wire | None = None
    ) -> None:
        self._steady = steady
        self._reader = ReplyReader()
        self.grants = grants or Grants()
        self._on_settled: Callable[[Session], None] | None = None
        self.wire = wire or Wire(connection._sock)  # type: ignore[attr-defined]
        self.dialect: Dialect = dialect_of(connection.server_version)  # type: ignore[attr-defined]
        self.connection_id: int = connection.thread_id()  # type: ignore[no-untyped-call]
        self.incarnation: Incarnation = (b"", 0)
        self.mutex = threading.Lock()
        self.state = _IDLE
        self.hold: Any = None
        # Why a dead session ended, as far as it knows.
        self.end = LossReason.CLOSED
        self.last_slots: tuple[int, ...] = ()
        # Raised by the pool at each return, so that nobody returns what is another's by now.
        self.lease = 0
        # Whose call took it out of the pool, until it is returned: an interrupted call finds it by this.
        self.borrower: object = None
        self.interrupted = False
        # True while a session that holds rows waits for one more.
        self.waiting = False
        self.unread = 0
        # By table: the packet that executes its prepared locking statement, up to the slot; None: it was refused.
        # They are bounded by a setting of the session, which has this value, in milliseconds; 0: none yet.
        self.prepared: dict[int, bytes | None] = {}
        self.bound = 0
        # False where the server has prepared much already, for whomever, or cannot be asked to.
        self.may_prepare = False
        # Takes the next reply that is not one of the unread ones from what was received.
        self._read: Callable[[], Any] = self._reader.next
        self.fresh = True
        self.answered_at = self.safe_from = self.sent_at = now()
        self.ping_sent_at: float | None = None
        # When the wait for the reply to the last command is over; the background sees to it, see `core`.
        self.until = 0.0

    def exchange(
        self, packet: bytes, until: float, *, more: bool = False, since: float | None = None
    ) -> Operation[Reply]:
        """Send one command and return its complete reply; whatever else happens, the session is dead.

        With `more` the packet was a train, and the next reply is fetched by an exchange of nothing. `since` is when
        the command was sent, where that was before.

        Afterwards the state is BUSY: the caller says what it is now.

        Raises:
            Silent: no complete reply by `until`.
            Gone: the connection ended or sent what cannot be a reply.
        """
        self.until = until
        self.state = _BUSY
        answered = False
        try:
            sent_at = self.sent_at = since if since is not None else now()
            if packet:
                # One unread OK is 11 bytes long; whatever comes behind it makes it more.
                least = _OK_SIZE + 1 if self.unread == 1 else 1
                self._feed((yield (TALK, self.wire, (packet, until, least))))
            while True:
                reply: Reply | None = self._reader.next_ok() if self.unread else None
                if reply is None:
                    reply = self._reader.next() if self.unread else self._read()
                if reply is None:
                    self._feed((yield (RECEIVE, self.wire, until)))
                elif self.unread:
                    self._settle(reply)
                else:
                    break
            answered = True
            self._read = self._reader.next
            if type(reply) is Err and reply.unsolicited:
                raise Gone(f"({reply.code}) {reply.message}")
            if not more and not self._reader.empty:
                raise Gone("bytes after the reply", answered=True)
        except TimeoutError as error:
            self.die()
            raise Silent(str(error)) from None
        except ProtocolViolation as error:
            self.die()
            raise Garbled(str(error), answered=answered) from error
        except OSError as error:
            self.die()
            if now() > until:
                raise Silent(str(error)) from error
            raise Gone(str(error), answered=answered) from error
        except BaseException:
            self.die()
            raise
        self.answered_at = now()
        self.safe_from = sent_at
        return reply

    def talk_now(self, packet: bytes, until: float, at: float) -> bytes:
        """The quick form of `exchange`, blocking: what came first, of replies that were left unread, too.

        It is for `grant`, when it is all of them, or else for `keep`; nothing, where a part had come before.
        Afterwards the state is BUSY, or, after an error, DEAD.

        Raises:
            Silent, Gone: as `exchange`.
        """
        self.until = until
        self.state = _BUSY
        self.sent_at = at
        try:
            data = self.wire.talk(packet, until, self.unread * _OK_SIZE + 1, at)
            if not data:
                raise self._ended()
            if self._reader.data:
                self._reader.feed(data)
                return b""
            return data
        except TimeoutError as error:
            self.die()
            raise Silent(str(error)) from None
        except OSError as error:
            self.die()
            if now() > until:
                raise Silent(str(error)) from error
            raise Gone(str(error)) from error
        except BaseException:
            self.die()
            raise

    def grant(self, hold: Any, sent_at: float, answered_at: float) -> None:
        """`occupy` for `hold`, of what `talk_now` returned: the whole reply to a command sent at `sent_at`, behind all
        unread ones.

        Raises:
            Gone: as `occupy`.
        """
        if self.unread:
            self.unread = 0
            settled, self._on_settled = self._on_settled, None
            if settled is not None:
                settled(self)
        self.safe_from = sent_at
        self.answered_at = answered_at
        self.occupy(hold)

    def keep(self, data: bytes, executed: bool) -> None:
        """Leave what `talk_now` returned to an `exchange` of nothing."""
        self._reader.feed(data)
        if executed:
            self._read = self._reader.next_executed

    @property
    def proven(self) -> bool:
        """True when the server had answered here within the second before the last command was sent."""
        return self.sent_at - self.answered_at < 1.0

    def _feed(self, data: bytes) -> None:
        if not data:
            raise self._ended()
        self._reader.feed(data)

    def _ended(self) -> Exception:
        """What the end of the stream says: past the time for the reply it was the background that ended the wait."""
        if now() > self.until:
            return TimeoutError("no reply")
        return Gone("the server closed the connection", answered=not self.unread and not self._reader.empty)

    def _settle(self, reply: Reply) -> None:
        """Account for one reply that was left unread on purpose: that of a ROLLBACK or a PING."""
        if not isinstance(reply, Ok):
            raise Gone(f"({reply.code}) {reply.message}" if isinstance(reply, Err) else "rows for a ROLLBACK")
        self.unread -= 1
        open_transaction = bool(reply.status & IN_TRANSACTION)
        if self.ping_sent_at is not None:
            # A PING is only ever sent before the ROLLBACK, so its answer is the first.
            sent_at, self.ping_sent_at = self.ping_sent_at, None
            if open_transaction:
                self.safe_from = max(self.safe_from, sent_at)
            elif self.state is not _ROLLBACK_SENT:
                self.end = LossReason.TRANSACTION_ENDED
                raise Gone("the server ended the transaction")
        elif open_transaction:
            raise Gone("the ROLLBACK left a transaction open")
        else:
            self._settled()

    def _settled(self) -> None:
        settled, self._on_settled = self._on_settled, None
        if settled is not None:
            settled(self)

    def send_rollback(self, on_settled: Callable[[Session], None] | None = None, at: float | None = None) -> bool:
        """Put a ROLLBACK on its way, its reply to be read later; False: the session is dead.

        `on_settled` is called when the server is known to have executed it, or the session to be closed. `at` is now.
        """
        self.hold = None
        self._on_settled = on_settled
        try:
            self.wire.send(ROLLBACK)
        except OSError:
            self.die()
            return False
        except BaseException:
            self.die()
            raise
        self.unread += 1
        self.state = _ROLLBACK_SENT
        self.safe_from = now() if at is None else at
        return True

    def prepare(self, table: int, until: float) -> Operation[None]:
        """Have the server prepare a table's locking statement for this connection; afterwards `prepared` says so.

        For a session that has locked a row of the table just now: no metadata lock can be in the way then.

        Raises:
            Silent, Gone: as `exchange`.
        """
        self._read = self._reader.next_prepared
        answer: object = yield from self.exchange(prepare(self.dialect.prepared_lock(table)), until)
        self.prepared[table] = execution(answer.statement) if isinstance(answer, Prepared) else None

    def rollback(self, until: float) -> Operation[None]:
        """End the transaction and wait for the server's word; afterwards the session is idle or dead."""
        reply = yield from self.exchange(ROLLBACK, until)
        if not isinstance(reply, Ok) or reply.status & IN_TRANSACTION:
            self.die()
            return
        self.state = _IDLE

    def ping(self, until: float) -> Operation[None]:
        """Have the server say that it lives and that the transaction is still open.

        Raises:
            Gone: it is not.
            Silent: it did not say.
        """
        reply = yield from self.exchange(PING, until)
        if not isinstance(reply, Ok) or not reply.status & IN_TRANSACTION:
            self.die()
            raise Gone("the server ended the transaction", answered=True)

    def confirm(self, until: float) -> Operation[bool]:
        """Release with proof, in one trip: True when the transaction was alive, on a server that is not read-only,
        when the ROLLBACK behind the question came.
        """
        self.hold = None
        reply = yield from self.exchange(self.dialect.check() + ROLLBACK, until, more=True)
        alive = isinstance(reply, Rows) and bool(reply.status & IN_TRANSACTION) and is_off(reply.rows[0][1])
        reply = yield from self.exchange(b"", until)
        self.state = _IDLE
        if not isinstance(reply, Ok) or reply.status & IN_TRANSACTION:
            self.die()
            raise Gone("the ROLLBACK failed", answered=True)
        return alive

    def drain(self) -> bool:
        """Read, without waiting, what was left unread; False: the session is dead, or says what nobody asked for."""
        try:
            while (data := self.wire.receive_now()) is not None:
                if not data:
                    raise Gone("the server closed the connection")
                self._reader.feed(data)
                while (reply := self._reader.next()) is not None:
                    if not self.unread:
                        raise Gone("an unasked reply")
                    self._settle(reply)
                    self.answered_at = now()
            if not self.unread and not self._reader.empty:
                raise Gone("an unasked reply has begun")
        except (OSError, ProtocolViolation, Gone):
            self.die()
            return False
        if not self.unread and self.state is _ROLLBACK_SENT:
            self.state = _IDLE
        return True

    def attend(self) -> None:
        """Called for a held session, often, by the background: nothing, where pings and the clock tell all."""

    def send_ping(self) -> bool:
        """Ask a held session for a sign of life, to be read by `drain`; under `mutex`. False: dead."""
        sent_at = now()
        try:
            self.wire.expect(1)
            self.wire.send(PING)
        except OSError:
            self.die()
            return False
        self.unread += 1
        self.ping_sent_at = sent_at
        return True

    def die(self) -> None:
        """Close at once: the server ends the transaction when it sees the end of the stream. Idempotent."""
        if self.state is _DEAD:
            return
        self.state = _DEAD
        self.wire.close()
        self._steady = None
        self._settled()

    def occupy(self, anchor: Any) -> None:
        """From now on the session holds rows for `anchor`.

        Raises:
            Gone: it was interrupted before.
        """
        with self.mutex:
            if self.interrupted:
                self.die()
                raise Gone("the wait for the row was ended", answered=True)
            # In this order: the background takes a hold through a session that is not HOLDING for a lost one.
            self.state = _HOLDING
            self.hold = anchor

    def interrupt(self) -> bool:
        """End the stream under a caller that waits for its row; that one closes the session. False: nobody waits."""
        if self.waiting:
            self.wire.interrupt()  # its mutex is held as long as it waits
            return True
        if not self.mutex.acquire(blocking=False):
            return False
        try:
            if self.state is not _BUSY or self.hold is not None:
                return False
            self.interrupted = True
            self.wire.interrupt()
            return True
        finally:
            self.mutex.release()

    def close(self) -> None:
        """Say good-bye where nothing is in flight, then close. Idempotent."""
        if self.state is _IDLE:
            try:
                self.wire.send(QUIT)
            except OSError:
                pass
        self.die()

    def forget(self) -> None:
        """In a child process: let go of the parent's connection without ending it."""
        self.state = _DEAD
        self.wire.forget()

    def lost_reason(self, ghost_timeout: float) -> LossReason | None:
        """Why what this session holds is lost by its own state or the clock, or None; no I/O."""
        if self.state is _DEAD:
            return self.end
        if now() > self.safe_from + ghost_timeout - 0.5:
            return LossReason.SILENT
        return None


def _plain_socket(endpoint: Endpoint, seconds: float) -> socket.socket | None:
    """A connected TCP socket; each address of a name has its share of the time. None: PyMySQL connects."""
    if endpoint.unix_socket is not None:
        return None
    until = now() + seconds
    addresses = _addresses(endpoint)
    for left in range(len(addresses), 0, -1):
        family, address = addresses[-left]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.001, (until - now()) / left))
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return sock
        except BaseException as error:
            sock.close()
            if left == 1 or not isinstance(error, OSError):
                raise
    raise OSError(f"{endpoint.host} has no address")


def _addresses(endpoint: Endpoint) -> list[tuple[int, Any]]:
    """Family and address of all that a host is; the resolver, which has locks, is not asked for a numeric one."""
    try:
        socket.inet_pton(socket.AF_INET, endpoint.host)
    except OSError:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        return [(family, address) for family, _, _, _, address in found]
    return [(socket.AF_INET, (endpoint.host, endpoint.port))]


def login(endpoint: Endpoint, seconds: float, tls: ssl.SSLContext | None) -> dict[str, Any]:
    """PyMySQL's arguments for a connection that `authenticate` will open."""
    bound = max(0.001, seconds)
    return {
        "host": endpoint.host,
        "port": endpoint.port,
        "unix_socket": endpoint.unix_socket,
        "user": endpoint.user,
        "password": endpoint.password,
        "database": endpoint.database,
        "charset": "utf8mb4",
        "autocommit": None,
        "connect_timeout": bound,
        "read_timeout": bound,
        "write_timeout": bound,
        "ssl": tls,
        "ssl_disabled": tls is None,
        "auth_plugin_map": PLAIN_REFUSED if tls is None and endpoint.unix_socket is None else {},
        "program_name": "lockrouter",
        "defer_connect": True,
    }


def patient_login(endpoint: Endpoint, seconds: float, tls: ssl.SSLContext | None) -> dict[str, Any]:
    """As `login`, for a connection that PyMySQL itself goes on to use: values stay text, reads have no bound of its.

    Whether it speaks TLS is known only afterwards, so the password is not sent as it is even where TLS is asked for.
    """
    plain = PLAIN_REFUSED if endpoint.unix_socket is None else {}
    unbounded: dict[str, Any] = {"conv": {}, "read_timeout": None, "write_timeout": None}
    return {**login(endpoint, seconds, tls), **unbounded, "auth_plugin_map": plain}


def _authenticate_unknown(
    connection: Connection[Any], endpoint: Endpoint, seconds: float, tls: ssl.SSLContext | None
) -> socket.socket | None:
    """As `authenticate`, for a PyMySQL whose insides are not known; the bound ends the stream from outside.

    Returns:
        A socket of one's own for the same connection, where one can be had.
    """
    line: socket.socket | None = None
    late = threading.Event()
    try:
        sock = _plain_socket(endpoint, seconds)
        line = sock.dup() if sock is not None else None

        def give_up() -> None:
            late.set()
            end(line)

        timer = threading.Timer(max(0.001, seconds), give_up)
        timer.daemon = True
        timer.start()
        try:
            authenticate(connection, endpoint, seconds, sock)
        finally:
            timer.cancel()
        inside = getattr(connection, "_sock", None)
        if line is None and isinstance(inside, socket.socket):
            line = inside.dup()
        if line is not None:
            line.settimeout(None)
        if tls is not None and endpoint.unix_socket is None:
            try:
                require_tls(connection)
            except pymysql.MySQLError as error:
                raise _login_failed(error) from error
        return line
    except BaseException as error:
        if line is not None:
            line.close()
        if late.is_set() and not isinstance(error, Silent):
            raise Silent(f"no connection within {seconds:.3f} s") from error
        if isinstance(error, TimeoutError):
            raise Silent(f"no connection within {seconds:.3f} s") from error
        if isinstance(error, OSError):
            raise Gone(str(error)) from error
        raise


def authenticate(
    connection: Connection[Any], endpoint: Endpoint, seconds: float, sock: socket.socket | None = None
) -> None:
    """Connect, unless a connected socket is given, and log in within about `seconds`, blocking.

    Raises:
        Answered, Gone, Silent: as `dial`.
    """
    bound = max(0.001, seconds)
    until = now() + bound
    try:
        sock = sock or _plain_socket(endpoint, bound)
        log_in(connection, sock, until)
    except pymysql.MySQLError as error:
        raise _login_failed(error) from error
    except TimeoutError as error:
        raise Silent(f"no connection within {bound:.3f} s") from error
    except OSError as error:
        raise Gone(str(error)) from error


def _login_failed(error: pymysql.MySQLError) -> Answered | Gone | Silent:
    code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
    text = str(error.args[1]) if len(error.args) > 1 else str(error)
    cause = getattr(error, "original_exception", None)
    if is_answer(error) or (isinstance(cause, ssl.SSLError) and not isinstance(cause, _CUT_SHORT)):
        return Answered(code, text)  # it is there, and may be granting to others
    if isinstance(cause, TimeoutError) or "timed out" in text:
        return Silent(text)
    return Gone(text)


def dial(endpoint: Endpoint, seconds: float, tls: ssl.SSLContext | None, grants: Grants | None = None) -> Session:
    """Connect and authenticate within about `seconds`, blocking; the session is IDLE and not yet set up.

    Raises:
        Answered: the server answered with an error (access denied, too many connections, unknown database).
        Gone: it refused, could not be reached, or ended the connection.
        Silent: it did not answer in time.
    """
    known = driver_is_known()
    steady = SteadyDBConnection(
        _handshake if known else pymysql,
        failures=(_NeverRaised,),
        ping=0,
        closeable=True,
        **(login if known else patient_login)(endpoint, seconds, tls),
    )
    connection = steady._con
    if not known:
        line = _authenticate_unknown(connection, endpoint, seconds, tls)
        return Session(None, connection, grants, Bridge(connection, line, steady))
    authenticate(connection, endpoint, seconds)
    session = Session(steady, connection, grants)
    # The socket is this module's now: PyMySQL's reader must not take bytes, its finaliser must not send any.
    connection._rfile, connection._sock, connection._closed = None, None, True
    return session


def open_session(
    endpoint: Endpoint,
    seconds: float,
    tls: ssl.SSLContext | None,
    *,
    control: bool,
    ghost_timeout: int,
    grants: Grants | None = None,
) -> Operation[Session]:
    """Return a session that is set up for its purpose; nothing of a failed attempt remains.

    Raises:
        Answered, Gone, Silent: as `dial`, and for what the set-up says.
    """
    until = now() + seconds
    try:
        session: Session = yield (CALL, lambda: dial(endpoint, seconds, tls, grants), until + _OVER)
    except TimeoutError:
        raise Silent(f"no connection within {seconds:.3f} s") from None  # a resolver that hangs, by what it looks like
    setup = session.dialect.control_setup if control else session.dialect.session_setup
    yield from set_up(session, setup(ghost_timeout), until)
    return session


def set_up(session: Session, packet: bytes, until: float) -> Operation[None]:
    """Send a fresh connection its settings; it is closed if they are refused.

    Raises:
        Answered, Gone, Silent: as `Session.exchange`, and for a refusal.
    """
    try:
        reply = yield from session.exchange(packet, until)
        if isinstance(reply, Err):
            raise Answered(reply.code, reply.message)
        session.state = _IDLE
    except BaseException:
        session.die()
        raise


def single_row(reply: Reply) -> tuple[bytes | None, ...]:
    """Return the one row of a reply.

    Raises:
        Answered: the reply is an error, or not one row.
    """
    if isinstance(reply, Err):
        raise Answered(reply.code, reply.message)
    if not isinstance(reply, Rows) or len(reply.rows) != 1:
        raise Answered(0, "expected exactly one row")
    return reply.rows[0]


@contextmanager
def sensible() -> Iterator[None]:
    """Read a row inside: another number of columns or another kind of values is an answer that helps nobody.

    Raises:
        Answered: it is.
    """
    try:
        yield
    except (ArithmeticError, IndexError, ValueError):
        raise Answered(0, "the server says nonsense of itself") from None
