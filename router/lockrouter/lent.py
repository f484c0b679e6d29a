"""Sessions that are lent to callers' transactions: a lock session whose socket PyMySQL uses while it is lent.

The row is locked through `Session.exchange`, like any row. Then the caller's own SQL goes through PyMySQL, on the same
socket; `guarded` says what watches over the transaction meanwhile.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockrouter.deadline import now
from lockrouter.errors import LossReason
from lockrouter.guarded import GuardedConnection
from lockrouter.protocol.effects import CALL, Operation
from lockrouter.protocol.packets import Reply
from lockrouter.protocol.wire import Wire
from lockrouter.session import TRANSACTIONS, Session, State, authenticate, login, set_up
from lockrouter.sql.statements import MAX_STATEMENT_WAIT

if TYPE_CHECKING:
    from lockrouter.config import Endpoint, TransactionOptions

__all__ = ["LentSession", "open_lent"]

_SEND_TIMEOUT = 30
_ASK_AGAIN = 1.0


class _Reader:
    """What PyMySQL reads replies from: as patient as the server answers elsewhere, since statements may take long."""

    def __init__(self, wire: Wire, answers: Callable[[], bool]) -> None:
        self._wire = wire
        self._answers = answers
        self._buffer = bytearray()

    def read(self, size: int) -> bytes:
        """Return `size` bytes, or fewer at the end of the stream; TimeoutError once the shard does not answer."""
        buffer = self._buffer
        while len(buffer) < size:
            try:
                data = self._wire.receive(now() + _ASK_AGAIN)
            except TimeoutError:
                if not self._answers():
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

    __slots__ = ("connection", "idle", "longest_wait", "sent_at")

    lane = TRANSACTIONS

    def __init__(self, connection: GuardedConnection, options: TransactionOptions, answers: Callable[[], bool]) -> None:
        super().__init__(None, connection)
        self.connection = connection
        self.idle = options.idle
        # The session's own bound on lock waits is the caller's, and must not be the first to fire for the lock row.
        self.longest_wait = min(MAX_STATEMENT_WAIT, options.lock_wait - 0.5)
        self.sent_at = self.safe_from
        self.wire.send_within(_SEND_TIMEOUT)
        raw: Any = connection
        raw._rfile = _Reader(self.wire, answers)
        raw._current_timeout = raw._read_timeout = raw._write_timeout = None
        connection.session = self

    def heard(self) -> None:
        """The server answered the command that was sent last."""
        self.answered_at = now()
        self.safe_from = max(self.safe_from, self.sent_at)

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

    def send_ping(self) -> bool:
        """Sessions of transactions are not pinged: an idle one is to be rolled back by the server."""
        return True

    def lost_reason(self, ghost_timeout: float) -> LossReason | None:
        """As `Session.lost_reason`, by the bound of transactions, which does not run while a statement does."""
        if self.state is State.DEAD:
            return self.end
        if not self.connection.busy and now() > self.safe_from + self.idle - 0.5:
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

    def dial() -> LentSession:
        connection = GuardedConnection(**login(endpoint, seconds, tls))
        authenticate(connection, endpoint, seconds)
        return LentSession(connection, options, answers)

    session: LentSession = yield (CALL, dial, None)
    setup = session.dialect.transaction_setup(options.isolation, options.time_zone, options.lock_wait, options.idle)
    yield from set_up(session, setup, until)
    return session
