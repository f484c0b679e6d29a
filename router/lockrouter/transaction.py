"""The caller's SQL and its row locks in one transaction of one session.

The steps of a `Transaction`:

1. The rows are taken like those of `lock_all`, all on one session of the pool's lane for transactions.
2. The session is lent: SQLAlchemy wraps its connection, whose guard notices every end of the transaction (`lent`).
3. Leaving the block proves that the transaction is still the one that holds the rows, then commits, and waits for the
   reply. Anything else is rolled back.
4. The session goes back if nothing but rows can have changed in it; the gates open.

Whatever an interrupt cuts short, the session is closed, so that the server rolls back, and `Claim.forsake` opens the
gates: on the way out, or, where that was what it hit, in the background, when the context manager is collected.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from msgspec import structs
from pymysql import err
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from lockrouter.claim import Claim, TransactionLock
from lockrouter.deadline import Deadline, checked_timeout
from lockrouter.engines import prepare, wrap
from lockrouter.errors import (
    CrossShard,
    LockLost,
    LossReason,
    OutcomeUnknown,
)
from lockrouter.gate import Told
from lockrouter.guarded import GuardedConnection
from lockrouter.lent import LentSession
from lockrouter.lockset import name_keys, strictest
from lockrouter.protocol.packets import IN_TRANSACTION
from lockrouter.routing import encode
from lockrouter.session import State

if TYPE_CHECKING:
    from lockrouter.core import Core
    from lockrouter.shard import Shard

__all__ = ["Keys", "Transaction"]

Keys = str | bytes | Iterable[str | bytes]

_NOT_COMMITTED = frozenset({1213, 1290, 1792, 1836, 3100, 3101})
"""Errors of a COMMIT after which nothing is committed; after any other that is not certain."""


class Transaction:
    """The context manager, for one use. Collected inside its block, it is rolled back, with a `ResourceWarning`."""

    def __init__(self, core: Core, keys: Keys, timeout: float | None) -> None:
        self._core = core
        self._entered = False
        self.block = Block(core, keys, timeout)

    def __enter__(self) -> Connection:
        if self._entered:
            raise RuntimeError("a transaction is entered once")
        self._entered = True
        return self.block.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.block.leave(error)

    def __del__(self) -> None:
        # Nothing of the block refers to its context manager, so nobody can leave it any more.
        block = getattr(self, "block", None)
        if block is not None and block.claim.open and block.generation is self._core.generation:
            self._core.forsaken.append(block.claim.forsake)
            what = "a transaction was dropped without leaving its block"
            warnings.warn(what, ResourceWarning, stacklevel=2, source=self)


class Block:
    """The transaction itself; also the guard of the session it lends to its block."""

    def __init__(self, core: Core, keys: Keys, timeout: float | None) -> None:
        self._core = core
        self.generation = core.generation
        self._named = {encode(keys): keys} if isinstance(keys, str | bytes) else name_keys(keys)
        if not self._named:
            raise ValueError("a transaction needs at least one key")
        rule = strictest([core.config.class_of(raw) for raw in self._named])
        self._timeout = checked_timeout(timeout, rule.timeout)
        shards = {core.routing.route(raw).shard for raw in self._named}
        if len(shards) > 1:
            raise CrossShard(f"the keys of one transaction live on different shards: {', '.join(sorted(shards))}")
        self.shard: Shard = core.shards[shards.pop()]
        # An outage never degrades a transaction: there is no database to run it on.
        self.claim = Claim(core, self.shard, self._named, structs.replace(rule, on_outage="refuse"))
        self._connection: Connection | None = None
        # True once the transaction has ended as it should, and every reply was read.
        self._ended_well = False
        self._cause: BaseException | None = None
        self._reason: LossReason | None = None
        self._told: tuple[Told, ...] = ()

    # -- entering -----------------------------------------------------------------------------------------------

    def enter(self) -> Connection:
        """Take the rows, and lend their session."""
        deadline, shard = Deadline(self._timeout), self.shard
        self._core.ready()
        if shard.prepare is None:
            shard.prepare = lambda session: prepare(shard, session)
        self.claim.take(deadline)
        try:
            self._connection = self._lend()
        except BaseException:
            self.claim.forsake()
            raise
        return self._connection

    @property
    def _session(self) -> LentSession:
        return self.claim.session

    @property
    def _raw(self) -> GuardedConnection:
        return self._session.connection

    def _lend(self) -> Connection:
        session, engine = self._session, self.shard.engine
        session.end = LossReason.TRANSACTION_ENDED
        session.connection.lend(self)
        connection = wrap(engine, session)
        connection.info["lock"] = TransactionLock(self, self._named)
        return connection

    # -- guarding -----------------------------------------------------------------------------------------------

    def reason(self) -> LossReason | None:
        """Why the lock is lost, or None; no I/O."""
        if self.generation is not self._core.generation:
            return LossReason.FORKED
        if self._reason is None:
            self._reason = self.claim.loss()
        return self._reason

    @property
    def lost(self) -> bool:
        """True once the lock is known to be lost; no I/O."""
        return self.reason() is not None

    @property
    def lost_already(self) -> bool:
        """As `lost`, but without looking at the clock."""
        return self.generation is not self._core.generation or any(hold.lost for hold in self.claim.holds)

    def refuse(self) -> None:
        """Raise LockLost if the lock is lost: nothing may be sent any more."""
        reason = self.reason()
        if reason is not None:
            raise self._lost_error(reason) from self._cause

    def ended(self, cause: BaseException | None) -> None:
        """The server's transaction has ended, and the lock with it."""
        if self._cause is None:
            self._cause = cause
        if self.generation is self._core.generation:
            self.claim.lose(LossReason.TRANSACTION_ENDED)

    def _lost_error(self, reason: LossReason) -> LockLost:
        key = next(iter(self._named))
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
        reason, _ = self._core.ask_server(self.claim.first)
        if reason is not None:
            self.claim.lose(reason)
        self.refuse()

    def on_lost(self, callback: Callable[[LossReason], object]) -> None:
        """As `TransactionLock.on_lost`."""
        told = Told(callback)
        reason = self.reason() or self._core.gates.subscribe(self.claim.first, told)
        if reason is not None:
            callback(reason)
        else:
            self._told += (told,)

    # -- leaving ------------------------------------------------------------------------------------------------

    def leave(self, error: BaseException | None) -> None:
        """Commit, or roll back because of the body's error; whatever happens, everything is given back."""
        if self.generation is not self._core.generation:
            return  # a child process: the transaction is its parent's
        try:
            if error is None:
                self._commit()
            else:
                self._roll_back(error)
        finally:
            try:
                self._free()
            finally:
                self.claim.forsake()  # nothing is left to do for it, unless an interrupt came

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
            self._undo()
            raise self._lost_error(self.reason() or LossReason.TRANSACTION_ENDED) from failed
        except BaseException:
            self._undo()
            raise
        self._ended_well = True

    def _undo(self) -> None:
        self._raw.undo()
        self._ended_well = True

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
        self._raw.tainted = True
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
        self._undo()
        reason = self.reason()
        if reason is None or isinstance(error, LockLost):
            return
        if isinstance(error, DBAPIError | err.MySQLError):
            raise self._lost_error(reason) from error
        error.add_note(f"and meanwhile {self._lost_error(reason)}")

    def _free(self) -> None:
        """Give the session back, or close it, and open the gates, whatever happened."""
        session, raw = self._session, self._raw
        lost = self.lost
        raw.ending = True
        # The server may not learn that the connection has ended: it is told through another one.
        abandoned = (session.state is State.DEAD and raw.busy) or self.reason() is LossReason.SILENT
        raw.take_back()
        try:
            if self._connection is not None:
                self._connection.close()
        finally:
            self._release(lost=lost, abandoned=abandoned)

    def _release(self, *, lost: bool, abandoned: bool) -> None:
        session, raw = self._session, self._raw
        with session.mutex:
            clean = raw.open and not raw.tainted and not lost and not raw.server_status & IN_TRANSACTION
            if clean and self._ended_well and session.state is State.HOLDING:
                session.hold = None  # in this order: a hold through a session that holds nothing is a lost one
                session.state = State.IDLE
                session.end = LossReason.CLOSED
        if session.state is not State.IDLE:
            session.die()
        if abandoned:
            self.shard.kill(session)
        self.claim.give_back()
