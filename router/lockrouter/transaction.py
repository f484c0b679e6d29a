"""The caller's SQL and its row locks in one transaction of one session.

The steps of a `Transaction`:

1. The rows are taken like those of `lock_all`, all on one session of the pool's lane for transactions.
2. The session is lent: SQLAlchemy wraps its connection, whose guard notices every end of the transaction (`lent`).
3. Leaving the block proves that the transaction is still the one that holds the rows, then commits, and waits for the
   reply. Anything else is rolled back.
4. The session goes back if nothing but rows can have changed in it; the gates open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from msgspec import structs
from pymysql import err
from sqlalchemy import Connection, event
from sqlalchemy.engine import Engine, ExceptionContext, create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from lockrouter.acquire import Ask, refuse_frozen
from lockrouter.deadline import Deadline, checked_timeout, now
from lockrouter.errors import (
    ConfigError,
    CrossShard,
    LockLost,
    LockTimeout,
    LossReason,
    OutcomeUnknown,
    Overloaded,
    ShardError,
)
from lockrouter.gate import Hold
from lockrouter.lent import GuardedConnection, LentSession
from lockrouter.lockset import name_keys, strictest, take_rows
from lockrouter.owners import forget, record
from lockrouter.protocol.effects import drive
from lockrouter.protocol.packets import IN_TRANSACTION
from lockrouter.routing import Address, encode
from lockrouter.session import TRANSACTIONS, Gone, State

if TYPE_CHECKING:
    from lockrouter.core import Core
    from lockrouter.shard import Shard

__all__ = ["Keys", "Transaction", "TransactionLock"]

Keys = str | bytes | Iterable[str | bytes]

_NOT_COMMITTED = frozenset({1213, 1290, 1792, 1836, 3100, 3101})
"""Errors of a COMMIT after which nothing is committed; after any other that is not certain."""


class TransactionLock:
    """The lock of a transaction block, in its connection's `info["lock"]`; the block's end is its only release."""

    degraded = False

    def __init__(self, transaction: Transaction, named: Mapping[bytes, str | bytes]) -> None:
        core, asks = transaction._core, transaction._asks
        self._transaction = transaction
        self.keys = tuple(named.values())
        self.addresses: dict[str | bytes, Address] = {key: core.routing.route(raw) for raw, key in named.items()}
        self.tokens: dict[str | bytes, int] = {
            key: core.gates.token_of(transaction._hold(asks[self.addresses[key].slot]), raw)
            for raw, key in named.items()
        }
        self.token = max(self.tokens.values())
        """Greater than that of every earlier holder of any of the keys, and lower than every later one's."""

    @property
    def key(self) -> str | bytes:
        """The key, or the first of several."""
        return self.keys[0]

    @property
    def address(self) -> Address:
        """Where the row of `key` is."""
        return self.addresses[self.keys[0]]

    @property
    def lost(self) -> bool:
        """True once the lock is known to have ended under its holder; no I/O."""
        return self._transaction.lost

    def check(self) -> None:
        """Ask the server, in one round trip: afterwards the rows were held, on a writable primary, a moment ago.

        Raises:
            LockLost: they are not.
        """
        self._transaction.check()

    def on_lost(self, callback: Callable[[LossReason], object]) -> None:
        """Have `callback(reason)` called once when the lock is lost, on a thread of its own; at once if it is lost."""
        self._transaction.on_lost(callback)


class Transaction:
    """A context manager, for one use; also the guard of the session it lends to its block."""

    def __init__(self, core: Core, keys: Keys, timeout: float | None) -> None:
        self._core = core
        self._generation = core.generation
        self._named = {encode(keys): keys} if isinstance(keys, str | bytes) else name_keys(keys)
        if not self._named:
            raise ValueError("a transaction needs at least one key")
        rule = strictest([core.config.class_of(raw) for raw in self._named])
        self._deadline = Deadline(checked_timeout(timeout, rule.timeout))
        shards = {core.routing.route(raw).shard for raw in self._named}
        if len(shards) > 1:
            raise CrossShard(f"the keys of one transaction live on different shards: {', '.join(sorted(shards))}")
        self.shard: Shard = core.shards[shards.pop()]
        # An outage never degrades a transaction: there is no database to run it on.
        self._rule = structs.replace(rule, on_outage="refuse")
        self._asks: dict[int, Ask] = {}
        self._holds: list[tuple[Hold, bytes]] = []
        self._connection: Connection | None = None
        self._cause: BaseException | None = None
        self._reason: LossReason | None = None

    # -- entering -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Connection:
        core = self._core
        if self._asks:
            raise RuntimeError("a transaction is entered once")
        core.ready()
        for raw in self._named:
            slot = core.routing.route(raw).slot
            if slot not in self._asks:
                self._asks[slot] = self._ask(raw)
            refuse_frozen(self._asks[slot], raw)
        if self.shard.prepare is None:
            self.shard.prepare = lambda session: _prepare(self.shard, session)
        self._take()
        try:
            self._connection = self._lend()
        except BaseException:
            self._session.die()
            self._free()
            raise
        return self._connection

    def _ask(self, raw: bytes) -> Ask:
        return Ask(
            self._core,
            raw,
            self._rule,
            self._deadline,
            wait=self._deadline.timeout > 0,
            reentrant=False,
            alone=False,
            lane=TRANSACTIONS,
        )

    def _take(self) -> None:
        asks = [self._asks[slot] for slot in sorted(self._asks)]
        outcome = "error"
        try:
            drive(take_rows(asks))
            outcome = "acquired"
        except LockTimeout:
            outcome = "timeout"
            raise
        except (Overloaded, ShardError) as error:
            outcome = "refused" if isinstance(error, Overloaded) or not self.shard.breaker.closed else "error"
            raise
        finally:
            waited = self._deadline.waited()
            for ask in asks:
                self.shard.stats.transaction.ended(outcome, waited, self._core.segment(ask.address.bucket))
        for ask in asks:
            hold = self._hold(ask)
            hold.mode = "transaction"
            self._holds.append((hold, ask.key))
            record(hold)
        for raw in self._named:
            hold = self._hold(self._asks[self._core.routing.route(raw).slot])
            if raw not in hold.keys:
                self._core.gates.add_key(hold, raw)
                self._holds.append((hold, raw))

    @staticmethod
    def _hold(ask: Ask) -> Hold:
        assert ask.hold is not None
        return ask.hold

    @property
    def _session(self) -> LentSession:
        session: LentSession = self._holds[0][0].session  # type: ignore[assignment]
        return session

    @property
    def _raw(self) -> GuardedConnection:
        return self._session.connection

    def _lend(self) -> Connection:
        session, engine = self._session, self.shard.engine
        session.end = LossReason.TRANSACTION_ENDED
        raw: Any = session.connection
        pool = NullPool(lambda: raw, dialect=engine.dialect, reset_on_return=None)
        session.connection.lend(self)
        connection = Connection(engine, pool.connect())
        connection.info["lock"] = TransactionLock(self, self._named)
        connection.begin()
        return connection

    # -- guarding -----------------------------------------------------------------------------------------------

    def reason(self) -> LossReason | None:
        """Why the lock is lost, or None; no I/O."""
        if self._generation is not self._core.generation:
            return LossReason.FORKED
        if self._reason is None:
            reasons = [reason for hold, _ in self._holds if (reason := self._core.loss_of(hold)) is not None]
            self._reason = reasons[0] if reasons else None
        return self._reason

    @property
    def lost(self) -> bool:
        """True once the lock is known to be lost; no I/O."""
        return self.reason() is not None

    @property
    def lost_already(self) -> bool:
        """As `lost`, but without looking at the clock."""
        return self._generation is not self._core.generation or any(hold.lost is not None for hold, _ in self._holds)

    def refuse(self) -> None:
        """Raise LockLost if the lock is lost: nothing may be sent any more."""
        reason = self.reason()
        if reason is not None:
            raise self._lost_error(reason) from self._cause

    def ended(self, cause: BaseException | None) -> None:
        """The server's transaction has ended, and the lock with it."""
        if self._cause is None:
            self._cause = cause
        if self._generation is self._core.generation:
            for hold, _ in self._holds:
                self._core.lose_hold(hold, LossReason.TRANSACTION_ENDED)

    def _lost_error(self, reason: LossReason) -> LockLost:
        key = self._holds[0][1]
        shown = self._core.shown(key)
        return LockLost(f"the transaction that held key {shown} is lost: {reason.value}", key=key, reason=reason)

    def never_committed(self) -> LockLost:
        """The error of a transaction whose COMMIT turned out not to have happened; it is lost afterwards."""
        self._reason = LossReason.TRANSACTION_ENDED
        return self._lost_error(self._reason)

    def check(self) -> None:
        """As `TransactionLock.check`."""
        self.refuse()
        self._raw.prove()
        self.refuse()
        hold = self._holds[0][0]
        reason, _ = self._core.ask_server(hold)
        if reason is not None:
            for each, _ in self._holds:
                self._core.lose_hold(each, reason)
        self.refuse()

    def on_lost(self, callback: Callable[[LossReason], object]) -> None:
        """As `TransactionLock.on_lost`."""
        reason = self.reason() or self._core.gates.subscribe(self._holds[0][0], callback)
        if reason is not None:
            callback(reason)

    # -- leaving ------------------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._generation is not self._core.generation:
            return  # a child process: the transaction is its parent's
        try:
            if error is None:
                self._commit()
            else:
                self._roll_back(error)
        finally:
            self._free()

    def _commit(self) -> None:
        raw = self._raw
        try:
            self.refuse()
            raw.prove()
            if raw.open and self._session.wire.readable():
                raw._force_close()  # the server has ended it, and nothing was committed
            self.refuse()
            self._send_commit()
        except err.MySQLError as failed:
            self.ended(failed)
            raw.undo()
            raise self._lost_error(self.reason() or LossReason.TRANSACTION_ENDED) from failed
        except BaseException:
            if raw.open:
                raw.undo()
            raise

    def _send_commit(self) -> None:
        raw, connection = self._raw, self._connection
        root = connection.get_transaction() if connection is not None else None
        if root is None or not root.is_active:
            self.ended(None)
            self.refuse()
            return
        raw.ending = True
        try:
            root.commit()
        except DBAPIError as failed:
            self._judge_commit(failed)
        except BaseException as interrupt:
            if raw.commit_sent and not raw.open:
                interrupt.add_note("COMMIT was sent, and its reply was not awaited: what became of it is unknown")
            raise

    def _judge_commit(self, failed: DBAPIError) -> None:
        original = failed.orig
        code = original.args[0] if original is not None and original.args else 0
        if self._raw.commit_sent and code not in _NOT_COMMITTED:
            raise OutcomeUnknown(
                "the reply to COMMIT was lost or says nothing certain", shard=self.shard.id
            ) from original
        self._raw.ending = False
        self.ended(original)
        self._raw.ending = True
        raise self._lost_error(self.reason() or LossReason.TRANSACTION_ENDED) from original

    def _roll_back(self, error: BaseException) -> None:
        """Roll back; where the transaction was lost, that is the error of the block, unless the body had its own."""
        raw = self._raw
        try:
            if not self.lost and raw.open:
                raw.prove()
        except err.MySQLError as failed:
            self.ended(failed)  # the connection is gone, and the transaction with it
        raw.undo()
        reason = self.reason()
        if reason is None or isinstance(error, LockLost):
            return
        if isinstance(error, DBAPIError | err.MySQLError):
            raise self._lost_error(reason) from error
        error.add_note(f"and meanwhile {self._lost_error(reason)}")

    def _free(self) -> None:
        """Give the session back, or close it, and open the gates, whatever happened."""
        core, session, raw = self._core, self._session, self._raw
        lost = self.lost
        raw.ending = True
        abandoned = session.state is State.DEAD and raw.busy
        raw.take_back()
        if self._connection is not None:
            self._connection.close()
        with session.mutex:
            clean = raw.open and not raw.tainted and not lost and not raw.server_status & IN_TRANSACTION
            if clean and session.state is State.HOLDING:
                session.state = State.IDLE
                session.end = LossReason.CLOSED
        if session.state is not State.IDLE:
            session.die()
        if abandoned:
            self.shard.kill(session)
        held = now() - self._holds[0][0].granted_at
        last = False
        for hold, key in self._holds:
            forget(hold)
            self.shard.stats.transaction.released(held)
            last = core.gates.uncount(hold, key)
        if last:
            session.hold = None
            self.shard.pool.give_back(session)
            for hold in reversed([hold for hold, key in self._holds if key == hold.key]):
                core.gates.leave(hold)
            return
        # Handles that were nested inside outlive the transaction: the last of them frees the rows.
        session.die()
        for hold, _ in self._holds:
            core.lose_hold(hold, LossReason.TRANSACTION_ENDED)


class _Nobody:
    """The guard of a connection that holds nothing."""

    lost = lost_already = False

    def refuse(self) -> None:
        """Let everything pass."""

    def ended(self, cause: BaseException | None) -> None:
        """Nothing is lost."""


def _prepare(shard: Shard, session: LentSession) -> None:
    """Make the shard's engine, and have SQLAlchemy look at the server through a session that holds nothing.

    SQLAlchemy rolls back at the first use of an engine; at the second the row would still be there, at the first not.
    """
    engine = _engine(session.connection)
    session.connection.lend(_Nobody(), ending=True)
    try:
        with engine.connect():
            pass
    except DBAPIError as error:
        raise Gone(str(error.orig)) from error
    finally:
        session.connection.take_back()
    shard.engine = engine


def _engine(first: GuardedConnection) -> Engine:
    connections = [first]

    def creator() -> Any:
        if not connections:
            raise ConfigError("the engine of a transaction opens no connections of its own")
        return connections.pop()

    engine = create_engine("mysql+pymysql://", creator=creator, poolclass=NullPool, pool_reset_on_return=None)
    event.listen(engine, "handle_error", _stay)
    return engine


def _stay(context: ExceptionContext) -> None:
    """Have SQLAlchemy keep a connection that ended: its guard answers whatever is asked of it with `LockLost`."""
    context.is_disconnect = False
