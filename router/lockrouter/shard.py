"""One database as this process sees it: its pool, its breaker, and whether it may grant."""

from __future__ import annotations

import logging
import ssl
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from lockrouter.breaker import Breaker
from lockrouter.control import ANOTHER_TOPOLOGY, SHARED_CONNECTION, Keeper, Rights
from lockrouter.deadline import now
from lockrouter.errors import LossReason, ShardError, ShardUnavailable, TopologyMismatch
from lockrouter.lent import LentSession, open_lent
from lockrouter.metrics import ShardStats
from lockrouter.pool import Pool, PoolClosed
from lockrouter.protocol.effects import CALL, SLEEP, WAIT, Operation, Waiter
from lockrouter.protocol.packets import PING, Grants
from lockrouter.reading import started_us
from lockrouter.routing import PROTOCOL, fingerprint
from lockrouter.session import (
    Answered,
    Gone,
    Session,
    Silent,
    State,
    driver_error,
    open_session,
    sensible,
    set_up,
    single_row,
)
from lockrouter.sql.statements import LEASE_SESSION
from lockrouter.watcher import Task, Watcher

if TYPE_CHECKING:
    from lockrouter.config import Endpoint, RouterConfig, ShardConfig

__all__ = ["Refusal", "Shard", "tls_context"]

_log = logging.getLogger("lockrouter")

_QUICK = 0.1
"""Seconds that a statement takes which waits for nobody; it is let end by itself."""
_LEAST = 0.05
"""Seconds a question at connect has for its answer, however late the connection came."""
_SETTLES = 5.0
"""Seconds after a change of the primary in which holders on other servers are looked for."""


class Refusal(NamedTuple):
    """Why a server that answers must not grant now."""

    why: str
    mismatch: bool = False
    # The server is its shard's primary all the same: leases that are held there may be renewed.
    renews: bool = False


class Shard:
    """State and connections of one shard; it knows nothing of keys, gates or handles."""

    def __init__(
        self,
        config: RouterConfig,
        shard: ShardConfig,
        *,
        on_demoted: Callable[[Shard, LossReason, Callable[[bytes], bool]], None],
        like: Shard | None = None,
    ) -> None:
        """Make the shard's state; `like`, the same shard before a fork, lends what was read of files."""
        self.config = config
        self.id = shard.id
        self.protocol = PROTOCOL
        self.fingerprint = fingerprint(config.topology)
        self.buckets = sum(last - first + 1 for first, last in shard.ranges())
        self.endpoints: tuple[Endpoint, ...] = like.endpoints if like is not None else config.endpoints(shard)
        # Of several hosts, the one that was found to be the writable primary.
        self.endpoint = self.endpoints[0]
        self._tls: ssl.SSLContext | None = like._tls if like is not None else tls_context(self.endpoint)
        self._on_demoted = on_demoted
        self.grants = Grants()
        self._lock = threading.Lock()
        self._changed: list[Waiter] = []
        self.rights: Rights | None = None
        self.refusal: Refusal | None = None
        # True from when the server is known not to be the writable primary until one is found: what is held is lost.
        self.demoted = False
        self.waiting_for = "the shard has not been asked yet"
        self.cause: BaseException | None = None
        self.clock_fell = False
        # The identity of the last primary, and since when it is.
        self._primary, self._moved_at = b"", 0.0
        # Set when the breaker opens: the background is to call `interrupt_waiters`. The caller who found out might be
        # interrupted itself, with the mutex of another one's session in its hands.
        self.interrupting = False
        self.frozen: tuple[bytes, ...] = ()
        self.stats = ShardStats()
        self.breaker = Breaker(config.breaker.failures, config.breaker.probe_after)
        self.pool = Pool(config.pool.size, self._open_for_rows, self._open_for_transactions)
        self.keeper = Keeper(self)
        # What the callers' transactions are made with, and who makes it, of the first session opened for them.
        self.engine: Any = None
        self.prepare: Callable[[LentSession], None] | None = None
        # Markers of transactions that are known to have committed: nobody will ask for them any more.
        self.spent_markers: deque[bytes] = deque(maxlen=1000)
        self._watcher: Watcher | None = None
        self._tasks: dict[str, Task] = {}

    # -- background ---------------------------------------------------------------------------------------------

    def tasks(self, watcher: Watcher) -> list[Task]:
        """The endless operations of this shard, to be run by `watcher`."""
        self._watcher = watcher
        operations = {"control": self.keeper.watch, "writer": self.keeper.write, "idle": self._keep_idle}
        operations |= self.keeper.hosts.operations()
        self._tasks = {name: Task(f"lockrouter-{self.id}-{name}", make) for name, make in operations.items()}
        return list(self._tasks.values())

    def poke_control(self) -> None:
        """Read the server's state now, not at the next `role_check`."""
        if self._watcher is not None:
            self._watcher.poke(self._tasks["control"])

    def poke_hosts(self) -> None:
        """Ask the shard's other hosts now."""
        if self._watcher is not None:
            for name in self.keeper.hosts.operations():
                self._watcher.poke(self._tasks[name])

    def poke_writer(self) -> None:
        """Let the writer look for work now."""
        if self._watcher is not None:
            self._watcher.poke(self._tasks["writer"])

    def kill(self, session: Session) -> None:
        """Have the server end a connection of this process: what it waits for there, it waits for nobody."""
        self.keeper.kills.append((session.connection_id, session.incarnation))
        self.poke_control()

    def _keep_idle(self) -> Operation[None]:
        """Ping up to `min_idle` sessions nobody used for a third of `ghost_timeout`; close the others."""
        third = self.config.router.ghost_timeout / 3
        while True:
            yield (SLEEP, now() + third / 2, None)
            for number, session in enumerate(self.pool.idle_longer_than(third)):
                try:
                    if number < self.config.pool.min_idle and session.drain():
                        yield from session.exchange(PING, now() + self.config.pool.connect_timeout)
                        session.state = State.IDLE
                    else:
                        session.drain()
                        session.close()
                except (Gone, Silent):
                    pass  # closed; whether the server lives is the control session's to say
                finally:
                    self.pool.give_back(session)

    # -- connections --------------------------------------------------------------------------------------------

    def open_control(self, endpoint: Endpoint | None = None) -> Operation[Session]:
        """Open a session for reading, killing and the grant window; by default to the present primary."""
        return self._open(endpoint or self.endpoint, self.config.pool.connect_timeout, control=True)

    def _open(self, endpoint: Endpoint, seconds: float, *, control: bool) -> Operation[Session]:
        return open_session(
            endpoint,
            seconds,
            self._tls,
            control=control,
            ghost_timeout=self.config.router.ghost_timeout,
            grants=None if control else self.grants,
        )

    def _open_for_rows(self, until: float) -> Operation[Session]:
        """Open a session for row locks and learn which server, since when, it leads to."""
        yield from self._await_primary(until)
        seconds = min(self.config.pool.connect_timeout, until - now())
        end = now() + seconds
        session = yield from self._open(self.endpoint, seconds, control=False)
        yield from self._identify(session, end)
        session.send_rollback()
        return session

    def _open_for_transactions(self, until: float) -> Operation[Session]:
        """Open a session that can be lent to a caller's transaction."""
        yield from self._await_primary(until)
        seconds = min(self.config.pool.connect_timeout, until - now())
        end = now() + seconds
        session = yield from open_lent(
            self.endpoint, seconds, self._tls, self.config.transaction, self._answers, self._ask_about
        )
        yield from self._identify(session, end)
        session.send_rollback()
        if self.engine is None and self.prepare is not None:
            prepare = self.prepare
            yield from session.rollback(max(end, now() + _LEAST))
            try:
                yield (CALL, lambda: prepare(session), None)
            except BaseException:
                session.die()
                raise
        return session

    def _await_primary(self, until: float) -> Operation[None]:
        """Refuse to connect while probes alone may, for whoever got a place meanwhile; then, of several hosts, wait
        until the one that is the primary is known: the others are not worth a connection.

        Raises:
            ShardError: none is, or none was found in time.
            Silent: the shard does not answer.
        """
        if not self.breaker.closed:
            raise Silent(self.waiting_for) from self.cause
        while len(self.endpoints) > 1 and self.rights is None:
            if self.pool.closed:
                raise PoolClosed
            waiter = self.watch_for_change()
            try:
                if self.rights is None:
                    error = self.refusal_error()
                    if error is None and not self.breaker.closed and self.breaker.refusal is None:
                        raise Silent(self.waiting_for)
                    if error is not None or not self.breaker.closed or now() >= until:
                        raise error or self.unready_error()
                    yield (WAIT, waiter, min(until, now() + self.config.router.role_check))
            finally:
                self.unwatch(waiter)

    def _ask_about(self, session: LentSession) -> None:
        self.keeper.doubts.append(session)
        self.poke_control()

    def _answers(self) -> bool:
        return self.breaker.closed or self.breaker.refusal is not None

    def open_for_leases(self, seconds: float) -> Operation[Session]:
        """Open a session in autocommit for leases; it belongs to no pool, and may be idle for an hour."""
        end = now() + seconds
        session = yield from self._open(self.endpoint, seconds, control=True)
        yield from self._identify(session, end)
        yield from set_up(session, LEASE_SESSION, max(end, now() + _LEAST))
        return session

    def _identify(self, session: Session, until: float) -> Operation[None]:
        """Learn which server a session leads to; it is in a transaction afterwards, which has locked nothing."""
        try:
            row = single_row((yield from session.exchange(session.dialect.whoami(), max(until, now() + _LEAST))))
            with sensible():
                connection_id, identity, started, protocol, found, prepares = (field or b"" for field in row)
                numbers, started_at = (int(connection_id), int(protocol)), started_us(started)
        except BaseException:
            session.die()
            raise
        if numbers[0] != session.connection_id:
            session.die()
            raise Answered(0, SHARED_CONNECTION)
        if (numbers[1], found) != (self.protocol, self.fingerprint):
            session.die()
            raise TopologyMismatch(ANOTHER_TOPOLOGY, shard=self.id)
        session.incarnation = (identity, started_at)
        session.may_prepare = prepares == b"1" and session.wire.prepares

    # -- state --------------------------------------------------------------------------------------------------

    def permit(self, rights: Rights) -> None:
        """The server answered as its shard's writable primary: grants count up to `rights.clock_high`."""
        if self.breaker.success():
            _log.info("shard %s: answers again", self.id)
        if self.refusal is not None:
            _log.info("shard %s: grants again", self.id)
        self.refusal = None
        self.demoted = False
        self.cause = None
        self.waiting_for = "the right to grant has passed and could not be read again in time"
        self.rights = rights
        self._wake()
        here = rights.incarnation[0]
        if here != self._primary:
            self._primary, self._moved_at = here, now()
            self.pool.purge(here)
        if now() - self._moved_at < _SETTLES:
            # Another server's locks exclude nobody any more, whatever that one says of itself. Again for a while: a
            # grant of the last moment may just be on its way to its caller.
            self._on_demoted(self, LossReason.DEMOTED, lambda identity: identity != here)
            self.interrupt_waiters(elsewhere=here)

    def search(self, why: str) -> None:
        """The primary is not known for now: nothing is granted, and callers wait for it inside their deadlines."""
        self.rights = None
        self.waiting_for = why

    def suspend(self, why: str) -> None:
        """Nothing is granted until the next `permit`; callers wait for it inside their deadlines."""
        self.breaker.success()
        if self.rights is not None:
            _log.info("shard %s: %s", self.id, why)
        self.rights = None
        self.refusal = None
        self.waiting_for = why

    def refuse(
        self, why: str, *, mismatch: bool = False, renews: bool = False, error: BaseException | None = None
    ) -> None:
        """The server answers, and must not be asked for locks: callers get an error at once."""
        self.cause = None if error is None else driver_error(error)
        if self.refusal is None or self.refusal.why != why:
            _log.warning("shard %s: grants nothing: %s", self.id, why)
        self.rights = None
        self.refusal = Refusal(why, mismatch, renews)
        self.breaker.refused(why)
        self._wake()
        # What waits for a row can only get it in vain, and keeps a server from being made read-only meanwhile.
        self.interrupt_waiters(for_longer_than=_QUICK)

    def demote(self, why: str) -> None:
        """The server is not, or not usefully, the writable primary: holders lose their locks."""
        self.refuse(why)
        self.demoted = True
        self._on_demoted(self, LossReason.DEMOTED, lambda _: True)

    def lose_on(self, identity: bytes) -> None:
        """A server says that it is not the primary: what is held there is lost."""
        self._on_demoted(self, LossReason.DEMOTED, lambda other: other == identity)

    def fault(self, error: BaseException, *, probe: bool = False) -> None:
        """The server did not answer."""
        self.cause = driver_error(error)
        # A host that answers may know of another primary, which grants: then the shard is not simply dead.
        opened = self.breaker.fault(probe=probe, refusal=self.keeper.hosts.answering())
        if opened or (probe and self.refusal is not None):
            _log.warning("shard %s: does not answer, breaker open: %s", self.id, error)
            self.rights = None
            self.refusal = None
            self.waiting_for = f"the shard does not answer: {error}"
            self.interrupting = True
            self._wake()
        if self.keeper.hosts.several and self.keeper.hosts.used is not None:
            self.poke_control()  # another host may be the primary by now

    def interrupt_waiters(self, elsewhere: bytes | None = None, for_longer_than: float = 0.0) -> None:
        """Wake who waits at the server for a row; what they sent is abandoned, and to be killed.

        With `elsewhere` only those that wait at another server than the one of that identity.
        """
        for session in tuple(self.pool.sessions):
            if elsewhere is not None and session.incarnation[0] in (b"", elsewhere):
                continue
            if now() - session.sent_at < for_longer_than:
                continue
            if session.interrupt():
                self.kill(session)

    def note_clock(self, clock: int, sent_at: float) -> bool:
        """Compare a grant's clock with the last reading; True when it went back: the shard needs a new term."""
        rights = self.rights
        if rights is None or not rights.fell(clock, sent_at):
            return False
        self.clock_fell = True
        self.suspend("the server's clock went back")
        self.poke_control()
        return True

    def watch_for_change(self) -> Waiter:
        """A waiter that is woken by the next change of rights, refusal or breaker; end it with `unwatch`."""
        waiter = Waiter()
        with self._lock:
            self._changed.append(waiter)
        return waiter

    def unwatch(self, waiter: Waiter) -> None:
        """Forget a waiter."""
        with self._lock:
            if waiter in self._changed:
                self._changed.remove(waiter)

    def _wake(self) -> None:
        with self._lock:
            waiters, self._changed = self._changed, []
        for waiter in waiters:
            waiter.wake()

    def refusal_error(self) -> ShardError | None:
        """The error for callers while the server refuses, or None."""
        refusal = self.refusal
        if refusal is None:
            return None
        kind = TopologyMismatch if refusal.mismatch else ShardUnavailable
        return self._caused(kind(refusal.why, shard=self.id))

    def unready_error(self) -> ShardError:
        """The error for callers that cannot wait longer for the right to grant."""
        return self._caused(ShardUnavailable(self.waiting_for, shard=self.id))

    def _caused(self, error: ShardError) -> ShardError:
        error.__cause__ = self.cause
        return error

    def close(self) -> None:
        """Close every connection."""
        self.keeper.close()
        self.pool.end()
        self._wake()


def tls_context(endpoint: Endpoint) -> ssl.SSLContext | None:
    """One verified context per shard where a CA is named; none at all otherwise, never a silently unverified one."""
    if endpoint.tls_ca is None:
        return None
    return ssl.create_default_context(cafile=endpoint.tls_ca)
