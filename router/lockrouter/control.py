"""What one shard's server says of itself, twice a second, and the right to grant that follows from it.

The steps of `Keeper.watch`, the only judge of a shard's right to grant:

1. Read, in one statement of a session of its own: identity, start, clock, read-only flags, group role, and `lock_meta`.
2. A server that is not the writable primary with a majority demotes this router's holders and grants nothing.
3. Another identity than `lock_meta` names, a clock that fell, or one further behind `clock_high` than the window:
   a new term, written before anything is granted.
4. The same server, restarted: nothing is granted until its clock has passed `clock_high`; then it is adopted.
5. Else `Rights`: grants count while the grant's clock is below the `clock_high` that was read from that very server.

`Keeper.write` does the durable writes on a second session, so that a server that can read but no longer commit
stops granting when the window it reserved has passed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from lockrouter import tokens
from lockrouter.backoff import jittered
from lockrouter.deadline import now
from lockrouter.hosts import Hosts
from lockrouter.protocol.effects import SLEEP, Operation
from lockrouter.protocol.packets import Err, Ok, Rows
from lockrouter.reading import Reading, look_over, read
from lockrouter.session import Answered, Garbled, Gone, Incarnation, Session, Silent, State
from lockrouter.sql import statements

if TYPE_CHECKING:
    from lockrouter.config import Endpoint
    from lockrouter.lent import LentSession
    from lockrouter.shard import Shard

__all__ = ["ANOTHER_TOPOLOGY", "SHARED_CONNECTION", "Keeper", "Rights"]

_log = logging.getLogger("lockrouter")

ANOTHER_TOPOLOGY = "the database was seeded for another topology than the file's: `lockrouter verify` says what differs"
SHARED_CONNECTION = "a proxy shares server connections between clients; row locks need their own"

_CLOCK_TOLERANCE_US = 50_000
_SLOWEST_US = 999_000
"""Microseconds that a clock which is slewed backwards still shows for each second."""
_LONGER_WINDOWS = 10
"""How many times as long as this router's own another router's grant window may be."""


class Rights(NamedTuple):
    """The right to grant on one server, until its clock reaches `clock_high` (microseconds)."""

    incarnation: Incarnation
    term: int
    clock_high: int
    clock: int
    received_at: float
    wall: float

    def lowest(self, sent_at: float) -> float:
        """The lowest clock, in microseconds, that an answer to a statement sent at `sent_at` may show."""
        return self.clock + (sent_at - self.received_at) * _SLOWEST_US - _CLOCK_TOLERANCE_US

    @property
    def offset(self) -> float:
        """Seconds the server's clock is ahead of this machine's wall clock, as read."""
        return self.clock / 1e6 - self.wall

    def fell(self, clock: int, sent_at: float) -> bool:
        """True when the server's clock shows less than has passed since the reading these rights come from."""
        return clock < self.lowest(sent_at)


class Keeper:
    """The control and the writer session of one shard, as operations of the background thread."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.hosts = Hosts(shard)
        self._window_us = int(shard.config.router.grant_window * 1_000_000)
        self._control: Session | None = None
        self._reused = False
        self._writer: Session | None = None
        self._last: Reading | None = None
        # The server whose clock has been followed from a reading that granted; and the first doubtful one of another.
        self._known: Incarnation | None = None
        self._doubted: Reading | None = None
        self._order: bytes | None = None
        self._order_what = ""
        self._write_failed = False
        # Where the writer session leads: what one server is told must never be written on another.
        self._writer_at: Endpoint | None = shard.endpoint
        # Connections to be killed. An id means something only between two starts of the server that gave it.
        self.kills: deque[tuple[int, Incarnation]] = deque(maxlen=1000)
        # Sessions whose statement takes so long that the server is asked what it does for them.
        self.doubts: deque[LentSession] = deque(maxlen=1000)

    # -- reading ------------------------------------------------------------------------------------------------

    def watch(self) -> Operation[None]:
        """Read for ever, every `role_check` seconds, or when poked."""
        shard = self._shard
        while True:
            probing = False
            if not shard.breaker.closed:
                probing = shard.breaker.take_probe()
                if not probing:
                    yield (SLEEP, now() + max(0.01, shard.breaker.probe_in()), None)
                    continue
            pause = jittered(shard.config.router.role_check, spread=0.1)
            try:
                yield from self._read()
            except (Answered, Garbled) as error:
                shard.refuse(str(error), error=error)
            except Gone as error:
                if self._reused:
                    # The server closed a connection that had been idle: it says nothing of the server. Ask again.
                    continue
                shard.fault(error, probe=probing)
                pause = jittered(shard.config.breaker.retry_delay)
            except Silent as error:
                shard.fault(error, probe=probing)
                pause = jittered(shard.config.breaker.retry_delay)
            finally:
                if probing:
                    shard.breaker.abandon_probe()
            yield (SLEEP, now() + pause, None)

    def _read(self) -> Operation[None]:
        shard = self._shard
        session, self._control = self._control, None
        self._reused = session is not None
        if session is None:
            session = yield from self._find_primary()
        try:
            until = now() + shard.config.pool.connect_timeout
            if not self._reused:
                yield from look_over(session, until)
            reading = yield from read(session, until)
            yield from self._kill_all(session, reading.incarnation, until)
            while self.doubts:
                yield from self._ask_about(session, self.doubts.popleft(), reading.incarnation, until)
            frozen = yield from session.exchange(statements.FROZEN_PREFIXES, until)
            if not isinstance(frozen, Rows):
                raise Answered(getattr(frozen, "code", 0), "the frozen prefixes cannot be read")
            shard.frozen = tuple(row[0] for row in frozen.rows if row[0])
        except BaseException as error:
            session.die()
            if self.hosts.several and isinstance(error, Silent | Answered | Garbled):
                self.hosts.note(shard.endpoint, failure=error)
            raise
        session.state = State.IDLE
        self._control = session
        self._judge(reading, session)
        if reading.not_primary is not None or reading.term < self.hosts.highest_term:
            # Also of a single host: its name may lead to another server by now.
            self._control = None
            if self.hosts.several:
                self.hosts.note(shard.endpoint, reading)
                shard.poke_control()
            yield from self._leave(session, reading.incarnation, until)

    def _leave(self, session: Session, incarnation: Incarnation, until: float) -> Operation[None]:
        """Close the session to a server that is not the primary; nothing of ours goes on waiting there."""
        try:
            yield from self._kill_all(session, incarnation, until)
            session.state = State.IDLE
        except (Gone, Silent):
            pass
        finally:
            session.close()

    def _kill_all(self, session: Session, here: Incarnation, until: float) -> Operation[None]:
        while self.kills:
            killing = connection_id, incarnation = self.kills.popleft()
            try:
                if incarnation == here:
                    yield from session.exchange(statements.kill(connection_id), until)
            except BaseException:
                self.kills.appendleft(killing)  # the next control session will
                raise

    def _ask_about(
        self, session: Session, doubted: LentSession, incarnation: Incarnation, until: float
    ) -> Operation[None]:
        asked_at = now()
        reply = yield from session.exchange(statements.doing(doubted.connection_id), until)
        if isinstance(reply, Rows):
            busy = any(row[0] != b"Sleep" for row in reply.rows)
            doubted.judged(asked_at, working=busy and doubted.incarnation == incarnation)

    def _find_primary(self) -> Operation[Session]:
        """A control session to the shard's writable primary; where there is but one host, to that.

        Of several hosts all are asked, side by side, each for `connect_timeout` at most, and those that were silent
        last time are not waited for.

        Raises:
            Gone, Silent: none can be reached.
            Answered: not exactly one is writable.
        """
        shard, hosts = self._shard, self.hosts
        if not hosts.several:
            return (yield from shard.open_control())
        hosts.leave("the primary is being looked for among the shard's hosts")
        until = now() + shard.config.pool.connect_timeout
        while not hosts.asked and now() < until:
            yield (SLEEP, until, None)
        endpoint = hosts.primary()
        try:
            session = yield from shard.open_control(endpoint)
        except (Gone, Silent, Answered) as error:
            hosts.note(endpoint, failure=error)
            raise
        shard.endpoint = endpoint
        hosts.use(endpoint)
        return session

    # -- judging ------------------------------------------------------------------------------------------------

    def _judge(self, reading: Reading, session: Session) -> None:
        shard, hosts = self._shard, self.hosts
        last, self._last = self._last, reading
        if last is not None and last.incarnation[0] != reading.incarnation[0]:
            self._writer_at = None  # a name may lead elsewhere by now: both sessions go to the same server
        hosts.see_term(reading)
        rival = hosts.rival()
        if reading.connection_id != session.connection_id:
            shard.refuse(SHARED_CONNECTION)
        elif (reading.protocol, reading.fingerprint) != (shard.protocol, shard.fingerprint):
            shard.refuse(ANOTHER_TOPOLOGY, mismatch=True)
        elif reading.not_primary is not None:
            shard.demote(reading.not_primary)
        elif reading.term < hosts.highest_term:
            shard.demote(f"an older server: its term is {reading.term}, {hosts.highest_term} was seen before")
        elif rival is not None:
            # Whose lock_meta names itself has begun to grant: what is held here excludes nobody there.
            (shard.demote if rival[1].term_identity == rival[1].incarnation[0] else shard.refuse)(rival[0])
        elif reading.drained and reading.drained == reading.incarnation[0]:
            shard.refuse("the shard is drained for a switchover", renews=True)
        elif reading.term_identity != reading.incarnation[0]:
            self._new_term(reading, "another server than the one the last term was started on")
        elif reading.term == hosts.highest_term and reading.term_identity != hosts.highest_identity:
            self._new_term(reading, "another server has started the same term")
        elif self._clock_fell(last, reading) or reading.ahead_us > _LONGER_WINDOWS * self._window_us:
            self._new_term(reading, "the server's clock went back")
        elif reading.ahead_us > self._window_us and self._known != reading.incarnation:
            self._doubt(reading)
        elif reading.server_started != reading.incarnation[1]:
            self._restarted(reading)
        else:
            self._permit(reading)
        if last is not None and last.epoch != reading.epoch:
            _log.info("shard %s: topology epoch is now %d", shard.id, reading.epoch)

    def _clock_fell(self, last: Reading | None, reading: Reading) -> bool:
        if self._shard.clock_fell:
            return True
        if last is None or last.incarnation != reading.incarnation:
            return False
        passed_us = (reading.sent_at - last.received_at) * _SLOWEST_US
        return reading.clock < last.clock + passed_us - _CLOCK_TOLERANCE_US

    def _doubt(self, reading: Reading) -> None:
        """On a server not known yet, more is reserved than this router ever does: the clock went back, unless somebody
        with a longer window goes on renewing it, which happens before half of what is reserved has passed.
        """
        if self._doubted is None or self._doubted.incarnation != reading.incarnation:
            self._doubted = reading
        first = self._doubted
        patience = first.ahead_us / 2e6 + self._shard.config.pool.connect_timeout
        restarted = reading.server_started != reading.incarnation[1]
        if restarted or reading.sent_at - first.sent_at > patience:
            self._new_term(reading, "the server's clock went back")
        elif first.clock_high < reading.clock_high:
            self._permit(reading)
        else:
            self._shard.suspend("more is reserved than this router's grant_window: has the server's clock gone back?")

    def _permit(self, reading: Reading) -> None:
        shard = self._shard
        self._known, self._doubted = reading.incarnation, None
        if self._write_failed and reading.clock >= reading.clock_high:
            shard.demote("the server cannot commit: the grant window could not be renewed")
            self._renew(reading)
            return
        # Without a writer session even where the window is long: when it is not, a connection may not be had any more.
        if self._writer is None or reading.clock_high < reading.clock + self._window_us * 2 // 3:
            self._renew(reading)
        wall = time.time() - (now() - reading.received_at)
        rights = Rights(reading.incarnation, reading.term, reading.clock_high, reading.clock, reading.received_at, wall)
        shard.permit(rights)

    def _renew(self, reading: Reading) -> None:
        self._write(
            statements.renew_window(self._window_us, reading.term, reading.incarnation[0]), "renew the grant window"
        )

    def _restarted(self, reading: Reading) -> None:
        self._shard.suspend("the server has restarted; its clock has yet to pass what was granted before")
        if reading.clock > reading.clock_high:
            packet = statements.adopt_restart(reading.term, reading.server_started, reading.incarnation[1])
            self._write(packet, "adopt the restarted server")

    def _new_term(self, reading: Reading, why: str) -> None:
        self._shard.suspend(f"a new term is needed: {why}")
        if reading.term >= tokens.MAX_TERM:
            self._shard.refuse(f"the last term ({tokens.MAX_TERM}) is used up")
            return
        identity, started = reading.incarnation
        self._write(statements.raise_term(reading.term, identity, started, self._window_us), "start a new term")

    # -- writing ------------------------------------------------------------------------------------------------

    def _write(self, packet: bytes, what: str) -> None:
        self._order, self._order_what = packet, what
        self._shard.poke_writer()

    def write(self) -> Operation[None]:
        """Carry out the writes that the readings ask for, for ever."""
        shard = self._shard
        while True:
            packet, what = self._order, self._order_what
            if packet is None:
                yield (SLEEP, now() + 60.0, None)
                continue
            try:
                reply = yield from self._commit(packet)
            except (Answered, Gone, Silent) as error:
                _log.warning("shard %s: could not %s: %s", shard.id, what, error)
                self._write_failed = True
                if self._order is packet:
                    self._order = None
                continue
            self._write_failed = False
            if self._order is packet:
                self._order = None
            shard.clock_fell = shard.clock_fell and what != "start a new term"
            if reply.affected and what != "renew the grant window":
                _log.info("shard %s: %s: done", shard.id, what)
            shard.poke_control()

    def _commit(self, packet: bytes) -> Operation[Ok]:
        session, self._writer = self._writer, None
        if session is not None and self._writer_at != self._shard.endpoint:
            session.close()
            session = None
        if session is not None:
            try:
                return (yield from self._send_write(session, packet))
            except Gone:
                pass  # closed while idle; every write here changes something at most once, so it may be sent again
        self._writer_at = self._shard.endpoint
        session = yield from self._shard.open_control()
        return (yield from self._send_write(session, packet))

    def _send_write(self, session: Session, packet: bytes) -> Operation[Ok]:
        # A silent one is not killed: a commit that waits for a replica would be made without it (MariaDB does that).
        reply = yield from session.exchange(packet, now() + self._shard.config.pool.connect_timeout)
        if not isinstance(reply, Ok):
            session.die()
            code, message = (reply.code, reply.message) if isinstance(reply, Err) else (0, "rows for a write")
            raise Answered(code, message)
        session.state = State.IDLE
        self._writer = session
        return reply

    def close(self) -> None:
        """Close both sessions."""
        for session in (self._control, self._writer):
            if session is not None:
                session.close()
        self.hosts.close()

    def sessions(self) -> list[Session]:
        """The sessions kept at present."""
        kept = [session for session in (self._control, self._writer) if session is not None]
        return kept + self.hosts.sessions()
