"""Sessions that are lent to callers' transactions: a lock session whose socket PyMySQL uses while it is lent.

The row is locked through `Session.exchange`, like any row. Then the caller's own SQL goes through PyMySQL, on the same
socket; `guarded` says what watches over the transaction meanwhile.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pymysql import VERSION_STRING

from lockrouter.deadline import now
from lockrouter.errors import ConfigError, LossReason
from lockrouter.guarded import GuardedConnection
from lockrouter.protocol.effects import CALL, Operation
from lockrouter.protocol.packets import Reply
from lockrouter.protocol.wire import Wire
from lockrouter.session import TRANSACTIONS, Session, State, authenticate, driver_is_known, login, set_up
from lockrouter.sql.statements import MAX_STATEMENT_WAIT

if TYPE_CHECKING:
    from lockrouter.config import Endpoint, TransactionOptions

__all__ = ["LentSession", "open_lent"]

_SEND_TIMEOUT = 30
_ASK_AGAIN = 1.0
_ENOUGH = 2
"""So many times in a row the server must say that it does nothing, before a reply is given up."""


class _Reader:
    """What PyMySQL reads replies from: as patient as the server works on the statement, which may take long."""

    def __init__(self, wire: Wire, patient: Callable[[], bool]) -> None:
        self._wire = wire
        self._patient = patient
        self._buffer = bytearray()

    @property
    def behind(self) -> bool:
        """True while something has come that nobody has read yet."""
        return bool(self._buffer) or self._wire.readable()

    def read(self, size: int) -> bytes:
        """Return `size` bytes, or fewer at the end of the stream; TimeoutError once there is no hope of them."""
        buffer = self._buffer
        while len(buffer) < size:
            try:
                data = self._wire.receive(now() + _ASK_AGAIN)
            except TimeoutError:
                if not self._patient():
                    raise
                continue
            if not data:
                break
            buffer += data
        found = bytes(buffer[:size])
        del buffer[:size]
        return found

    def close(self) -> None:
        """Forget what came."""
        self._buffer.clear()


class LentSession(Session):
    """A session of a pool's other lane; between transactions it is like any other."""

    __slots__ = (
        "_ask_about",
        "_asked_at",
        "_reader_of_driver",
        "_unheard",
        "connection",
        "idle",
        "longest_wait",
        "sent_at",
        "working_at",
    )

    lane = TRANSACTIONS

    def __init__(
        self,
        connection: GuardedConnection,
        options: TransactionOptions,
        answers: Callable[[], bool],
        ask_about: Callable[[LentSession], None],
    ) -> None:
        super().__init__(None, connection)
        self._ask_about = ask_about
        self._asked_at = self.working_at = 0.0
        self._unheard = 0
        self.connection = connection
        self.idle = options.idle
        # The session's own bound on lock waits is the caller's, and must not be the first to fire for the lock row.
        self.longest_wait = min(MAX_STATEMENT_WAIT, options.lock_wait - 0.5)
        self.sent_at = self.safe_from
        self.wire.send_within(_SEND_TIMEOUT)
        raw: Any = connection
        self._reader_of_driver = _Reader(self.wire, lambda: answers() and self._unheard < _ENOUGH)
        raw._rfile = self._reader_of_driver
        raw._current_timeout = raw._read_timeout = raw._write_timeout = None
        connection.session = self

    def heard(self) -> None:
        """The server answered the command that was sent last."""
        self.answered_at = now()
        self.safe_from = max(self.safe_from, self.sent_at)
        self._unheard = 0

    def exchange(
        self, packet: bytes, until: float, *, more: bool = False, since: float | None = None
    ) -> Operation[Reply]:
        """As `Session.exchange`; never between the caller's own statement and its reply."""
        if self.connection.busy:
            raise RuntimeError("a statement of the transaction is still in flight on its connection")
        return (yield from super().exchange(packet, until, more=more, since=since))

    def drain(self) -> bool:
        """While lent, look without reading: anything to read, and no command in flight, is the end."""
        if self.connection.guard is None:
            return super().drain()
        if self.connection.busy or not self.wire.readable():
            return True
        self.die()
        return False

    def attend(self) -> None:
        """Of a statement that takes long, ask through another session whether the server works on it at all.

        Where only this connection's packets are dropped, the server either never got it, or its reply never comes:
        then the server counts the connection as idle, and frees its rows when that has lasted for long enough.
        """
        if not self.connection.busy:
            return
        at, pause = now(), min(_ASK_AGAIN, self.idle / 8)
        soon_lost = at > max(self.safe_from, self.working_at) + self.idle - 1.0
        if at - max(self.sent_at, self._asked_at) > pause or (soon_lost and at - self._asked_at > pause / 8):
            self._asked_at = at
            self._ask_about(self)

    def judged(self, asked_at: float, *, working: bool) -> None:
        """What the server said, when asked at `asked_at` about this connection."""
        if self.state is State.DEAD or not self.connection.busy or asked_at < self.sent_at:
            return
        if working:
            self.working_at = asked_at
            self._unheard = 0
        elif not self._reader_of_driver.behind:
            self._unheard += 1

    def send_ping(self) -> bool:
        """Sessions of transactions are not pinged: an idle one is to be rolled back by the server."""
        return True

    def lost_reason(self, ghost_timeout: float) -> LossReason | None:
        """As `Session.lost_reason`, by the bound of transactions, which does not run while the server works."""
        if self.state is State.DEAD:
            return self.end
        until = self.safe_from + self.idle - 0.5
        if self.connection.busy:
            if self._unheard >= _ENOUGH:
                return LossReason.SILENT
            until = max(self.safe_from, self.working_at) + self.idle - 0.25
        return LossReason.SILENT if now() > until else None


def open_lent(
    endpoint: Endpoint,
    seconds: float,
    tls: ssl.SSLContext | None,
    options: TransactionOptions,
    answers: Callable[[], bool],
    ask_about: Callable[[LentSession], None],
) -> Operation[LentSession]:
    """Return a session set up for callers' transactions.

    Args:
        answers: says whether the shard answers elsewhere.
        ask_about: has another session ask what the server does for this one, to be told by `judged`.

    Raises:
        Answered, Gone, Silent: as `session.dial`, and for what the set-up says.
    """
    if not driver_is_known():
        raise ConfigError(f"transaction knows the insides of PyMySQL 1.1 and 1.2 only, and this is {VERSION_STRING}")
    until = now() + seconds

    def dial() -> LentSession:
        connection = GuardedConnection(**login(endpoint, seconds, tls))
        authenticate(connection, endpoint, seconds)
        return LentSession(connection, options, answers, ask_about)

    session: LentSession = yield (CALL, dial, None)
    setup = session.dialect.transaction_setup(options.isolation, options.time_zone, options.lock_wait, options.idle)
    yield from set_up(session, setup, until)
    return session
