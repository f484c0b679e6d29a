"""A PyMySQL connection that notices every end of the transaction it was lent for, whatever its user does:

1. A statement that would commit (COMMIT, BEGIN, DDL, ...) is not sent: what the caller did so far is rolled back
   instead. Only the lender commits.
2. Every OK says whether a transaction is open. None: it ended.
3. After an error, before anything else is sent, a PING's OK says it: no list of error codes can be complete.
4. A statement that is not known to be harmless (CALL, SET, ...) is put behind a savepoint, which only the same
   transaction can release afterwards; such a session is not used again.
5. A connection that ended took the transaction along.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any, Protocol

from pymysql import err
from pymysql.constants import CLIENT, COMMAND
from pymysql.protocol import MysqlPacket

from lockrouter.deadline import now
from lockrouter.handshake import Handshake
from lockrouter.protocol.packets import IN_TRANSACTION
from lockrouter.session import State

if TYPE_CHECKING:
    from lockrouter.lent import LentSession

__all__ = ["Guard", "GuardedConnection"]

_COMMENTS = r"\s*(?:(?:/\*(?![!M]).*?\*/|--\s[^\n]*|\#[^\n]*)\s*)*"
_HARMLESS = re.compile(
    # A named lock or a variable would outlive the transaction on its session.
    r"(?!.*(?:\bGET_LOCK\b|(?<!@)@(?!@)))"
    + _COMMENTS
    + r"\(*\s*(?:(?:SELECT|INSERT|UPDATE|DELETE|REPLACE|WITH|VALUES|TABLE|SHOW|SAVEPOINT|RELEASE)\b"
    r"|ROLLBACK\s+(?:WORK\s+)?TO\b)",
    re.IGNORECASE | re.DOTALL,
)
_COMMITS = re.compile(
    _COMMENTS + r"(?:(?:COMMIT|ALTER|TRUNCATE|RENAME|GRANT|REVOKE|ANALYZE|OPTIMIZE|REPAIR|FLUSH|RESET|INSTALL|UNINSTALL"
    r"|XA|EXECUTE|CACHE\s+INDEX|LOAD\s+INDEX|IMPORT|CHANGE|STOP|SHUTDOWN|UNLOCK)\b|BEGIN\b(?!\s+NOT\s+ATOMIC)"
    r"|START\b|CREATE\b(?!\s+TEMPORARY)|DROP\b(?!\s+(?:TEMPORARY|PREPARE))"
    r"|LOCK\s+(?:TABLES?|INSTANCE)\b|SET\b.*\bautocommit\b|SET\s+PASSWORD\b)",
    re.IGNORECASE | re.DOTALL,
)
_LOOKED_AT = 4096
_ENDS_TRANSACTION = frozenset({1213, 1614})
_LONG = 4
"""A statement is long from this part of the idle bound on."""


class Guard(Protocol):
    """Whoever a session is lent to."""

    @property
    def lost(self) -> bool:
        """True once the lock is known to be lost; no I/O."""

    @property
    def lost_already(self) -> bool:
        """As `lost`, but without looking at the clock."""

    def refuse(self) -> None:
        """Raise if the lock is lost: nothing may be sent any more."""

    def ended(self, cause: BaseException | None) -> None:
        """The server's transaction has ended, and the lock with it."""


class GuardedConnection(Handshake):
    """PyMySQL's connection of a lent session; see the module's rules."""

    _result: Any
    server_status: int

    def __init__(self, **arguments: Any) -> None:
        self.session: LentSession | None = None
        self.guard: Guard | None = None
        # While the lender itself ends the transaction, that it ends is no loss.
        self.ending = self.finished = False
        self.commit_sent = False
        # Set by statements that may have changed more than rows.
        self.tainted = False
        self._in_flight = False
        self._doubt: err.MySQLError | None = None
        self._savepoint: str | None = None
        super().__init__(client_flag=CLIENT.FOUND_ROWS, **arguments)

    @property
    def busy(self) -> bool:
        """True between a command and the end of its reply, streamed results included."""
        result = self._result
        return self._in_flight and (result is None or result.unbuffered_active or bool(result.has_next))

    # -- lending ------------------------------------------------------------------------------------------------

    def lend(self, guard: Guard, *, ending: bool = False) -> None:
        """Let the caller's SQL through, for a transaction that is open already."""
        self.guard = guard
        self.ending = ending
        self.finished = self.commit_sent = self._in_flight = False
        self._doubt = self._savepoint = None

    def take_back(self) -> None:
        """Refuse from now on whatever comes through references the caller kept."""
        self.guard = None

    def undo(self) -> None:
        """Roll back as the lender, or close; afterwards whatever else wants to roll back finds it done."""
        self.ending = True
        try:
            if self.open and self.session is not None and self.session.state is not State.DEAD:
                super().rollback()
        except err.MySQLError:
            self._force_close()  # the server rolls back when it sees the end of the stream
        self.finished = True

    def prove(self) -> None:
        """Find out whether the transaction is still the one that was lent; if not, the guard knows afterwards."""
        self._drain()
        savepoint, self._savepoint = self._savepoint, None
        if savepoint is not None:
            # Also behind an error: a procedure may have committed before it failed.
            try:
                self._say(f"RELEASE SAVEPOINT {savepoint}")
            except err.MySQLError as error:
                self._end(error)
        doubt, self._doubt = self._doubt, None
        if doubt is not None and self.open:
            self._ask(COMMAND.COM_PING, "")
            self._replied()
        elif savepoint is not None:
            self._replied()

    def _drain(self) -> None:
        """Read the last reply to its end; one whose reader was interrupted has none.

        Raises:
            OperationalError: that is so; the connection is closed.
        """
        result = self._result
        if result is not None and result.unbuffered_active:
            result._finish_unbuffered_query()
        while self._result is not None and self._result.has_next:
            self.next_result()
        if self.busy:
            self._force_close()
            raise err.OperationalError(2013, "the statement before was interrupted, and its reply not read")

    def _say(self, statement: str) -> None:
        self._ask(COMMAND.COM_QUERY, statement)

    def _ask(self, command: int, text: str) -> None:
        """A command of the guard's own, and its OK; in flight meanwhile like the caller's."""
        self._fly()
        self._send(command, text)
        super()._read_ok_packet()  # type: ignore[misc]
        self._in_flight = False

    def _fly(self) -> None:
        assert self.session is not None
        with self.session.mutex:
            self._in_flight = True
            self._result = None

    def _send(self, command: int, text: str | bytes) -> None:
        try:
            super()._execute_command(command, text)  # type: ignore[misc]
        except err.MySQLError:
            raise
        except BaseException:
            self._force_close()  # half a packet may be on its way
            raise

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
        self._drain()
        if not self.ending:
            self._permit(guard, command, sql)
        self._fly()
        session.sent_at = now()
        self.commit_sent = self.ending
        try:
            self._send(command, sql)
        except err.MySQLError as error:
            self.commit_sent = False
            self._end(error)
            raise

    def _permit(self, guard: Guard, command: int, sql: str | bytes) -> None:
        guard.refuse()
        self.prove()
        guard.refuse()
        if command == COMMAND.COM_PING:
            return
        head = sql[:_LOOKED_AT]
        text = head.decode("latin-1") if isinstance(head, bytes) else head
        if command == COMMAND.COM_QUERY and _HARMLESS.match(text):
            return
        self.tainted = True
        if _COMMITS.match(text):
            self._say("ROLLBACK")
            self._end(err.ProgrammingError(f"{text.split(None, 1)[0]} would have committed; rolled back instead"))
            guard.refuse()
        savepoint = f"lockrouter_{secrets.token_hex(8)}"
        self._say(f"SAVEPOINT {savepoint}")
        self._savepoint = savepoint

    def _read_packet(self, packet_type: Any = MysqlPacket) -> Any:
        try:
            packet = super()._read_packet(packet_type)  # type: ignore[no-untyped-call]
        except err.MySQLError as error:
            self._in_flight = False
            if not self.open or (error.args and error.args[0] in _ENDS_TRANSACTION):
                self._end(error)
            else:
                self._doubt = error
            raise
        except BaseException:
            self._force_close()  # half a packet may have been read
            raise
        if self.session is not None:
            self.session.heard()
        return packet

    def _read_ok_packet(self) -> Any:
        packet = super()._read_ok_packet()  # type: ignore[misc]
        self._replied()
        return packet

    def _read_query_result(self, unbuffered: bool = False) -> Any:
        affected = super()._read_query_result(unbuffered)  # type: ignore[misc]
        # A result with rows carries no status that PyMySQL keeps, and what returns rows ends no transaction alone.
        if self._result.server_status is not None and not self._result.has_next:
            self._replied()
        if self.guard is not None and not self.busy and not self.ending:
            self._refresh(self.guard)
        return affected

    def _refresh(self, guard: Guard) -> None:
        """After a long statement, one PING: the server's patience began with its end, ours when it was sent."""
        session = self.session
        if session is None or now() - session.sent_at < session.idle / _LONG or guard.lost_already:
            return
        result = self._result
        session.sent_at = now()
        self._ask(COMMAND.COM_PING, "")
        self._result = result
        self._replied()

    def _replied(self) -> None:
        self._in_flight = False
        if not self.server_status & IN_TRANSACTION:
            self._end(None)

    def _force_close(self) -> None:
        super()._force_close()  # type: ignore[misc]
        session = getattr(self, "session", None)
        if session is not None:
            self._end(None)
            session.die()

    def rollback(self) -> None:
        """The caller's own ROLLBACK, which ends the lock; of a lost one the lender rolls back what is left."""
        if self.guard is not None and not self.finished and (self.ending or not self.guard.lost):
            super().rollback()

    def close(self) -> None:
        """Nothing, if the lender is done with it; else the caller throws it away, and its transaction ends."""
        if self.guard is not None and not self.ending:
            self._force_close()
