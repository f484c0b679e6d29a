"""A row lock inside the caller's own SQLAlchemy transaction on that shard's database.

The steps of `lock_in`:

1. The caller's session is looked at: no autocommit, no savepoint, the right server and database, and no snapshot that
   could be older than the lock.
2. The gate of the row, as for every lock, so that cycles of waiting inside the process are found.
3. The locking statement, in the caller's transaction; its reply is judged like any grant.
4. The end of the transaction opens the gate (`inside`): a hint only, the row itself is the server's to free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import structs
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from lockrouter.acquire import (
    Ask,
    Unlocked,
    await_rights,
    closed_error,
    judge,
    queue_at,
    refuse_frozen,
    require_row_mode,
)
from lockrouter.deadline import Deadline, checked_timeout, now
from lockrouter.errors import ConfigError, LockLost, LossReason, ShardError, ShardUnavailable
from lockrouter.fencing import Target, autocommits, connection_of
from lockrouter.gate import Hold, Place
from lockrouter.inside import Inside, has_transaction, inside_of, watch
from lockrouter.owners import record
from lockrouter.protocol.effects import drive
from lockrouter.protocol.packets import IN_TRANSACTION, Err, Rows
from lockrouter.reading import started_us
from lockrouter.routing import Routing, encode
from lockrouter.session import Gone, Incarnation
from lockrouter.sql.callers import look_around
from lockrouter.sql.statements import MARIADB, MAX_STATEMENT_WAIT, MYSQL, Dialect

if TYPE_CHECKING:
    from lockrouter.core import Core
    from lockrouter.routing import Address
    from lockrouter.shard import Shard

__all__ = ["LockIn", "lock_in"]

_READ_COMMITTED = ("READ-COMMITTED", "READ-UNCOMMITTED")
_ENDED_CODES = frozenset({1020, 1213})
_TIMEOUT = 1205
_MARGIN = 0.005
_HEADER = 5
"""Bytes of a packet before its statement."""


class LockIn:
    """A row lock that ends with the caller's transaction; it has no release of its own."""

    degraded = False

    def __init__(self, core: Core, key: str | bytes, raw: bytes, address: Address, hold: Hold, inside: Inside) -> None:
        self._core = core
        self._generation = core.generation
        self._hold = hold
        self._inside = inside
        self.key = key
        self.address = address
        self.token = core.gates.token_of(hold, raw)

    @property
    def lost(self) -> bool:
        """True once the lock is known to have ended, by the caller's COMMIT or ROLLBACK too; no I/O.

        How long the server keeps the row of a silent holder, the caller's own session settings decide.
        """
        if self._generation is not self._core.generation or self._hold.lost is not None:
            return True
        return self._inside.over


class _Seen:
    """The caller's session, as judging a grant sees one."""

    lease = 0
    # True where a timeout would roll back what the transaction has done so far.
    endangered = False

    def __init__(self, dialect: Dialect, incarnation: Incarnation) -> None:
        self.dialect = dialect
        self.incarnation = incarnation


def lock_in(core: Core, target: Target, key: str | bytes, timeout: float | None) -> LockIn:
    """As `LockRouter.lock_in`."""
    raw = encode(key)
    rule = structs.replace(core.config.class_of(raw), on_outage="refuse")
    require_row_mode(rule)
    deadline = Deadline(checked_timeout(timeout, rule.timeout))
    core.ready()
    ask = Ask(core, raw, rule, deadline, wait=deadline.timeout > 0, alone=False)
    refuse_frozen(ask, raw)
    connection = connection_of(target)
    inside = inside_of(connection, core)
    if inside.held and not has_transaction(connection):
        inside.end()  # by a COMMIT, or a statement that commits, which SQLAlchemy does not know for what it is
        inside = inside_of(connection, core)
    hold = inside.enter(ask)
    if hold is None:
        _await_primary(ask)
        seen = _look(connection, ask.shard)
        watch(connection)
        try:
            hold = _take(ask, connection, seen)
            inside = inside_of(connection, core)  # another one, if an error on the way ended an empty transaction
            inside.hold(hold, raw)
        except BaseException:
            core.gates.forsake(ask)
            raise
    if hold not in ask.owns:
        record(hold)
    core.limit(hold, rule)
    return LockIn(core, key, raw, ask.address, hold, inside)


def _await_primary(ask: Ask) -> None:
    shard = ask.shard
    while shard.rights is None:
        error = shard.refusal_error()
        if error is not None:
            raise error
        if now() >= ask.io_until:
            raise shard.unready_error() from shard.cause
        drive(await_rights(ask))


def _look(connection: Connection, shard: Shard) -> _Seen:
    """Refuse a session in which the lock would mean little.

    Raises:
        ConfigError: autocommit, a savepoint, another server or database, or a snapshot older than the lock.
    """
    if connection.dialect.name not in ("mysql", "mariadb"):
        raise ConfigError(f"lock_in needs a connection to shard {shard.id}, not to {connection.dialect.name}")
    if autocommits(connection):
        raise ConfigError("lock_in needs a transaction: with autocommit the row is free again at once")
    if connection.in_nested_transaction():
        raise ConfigError("lock_in inside a savepoint: rolling back to it may or may not free the row")
    dialect = MARIADB if getattr(connection.dialect, "is_mariadb", False) else MYSQL
    autocommit, isolation, identity, started, database, rolls_back = connection.exec_driver_sql(
        look_around(dialect)
    ).one()
    if int(autocommit):
        raise ConfigError("lock_in needs a transaction: with autocommit the row is free again at once")
    incarnation = (_bytes(identity), started_us(_bytes(started)))
    rights, wanted = shard.rights, shard.endpoint.database
    if rights is not None and incarnation[0] != rights.incarnation[0]:
        raise ConfigError(f"the connection leads to another server than the primary of shard {shard.id}")
    if database != wanted:
        raise ConfigError(f"the connection's database is {database!r}; that of shard {shard.id} is {wanted!r}")
    if isolation not in _READ_COMMITTED and has_transaction(connection):
        raise ConfigError(
            f"lock_in at {isolation} must be the first statement of its transaction: a snapshot taken before the lock"
            " shows what was true before it"
        )
    seen = _Seen(dialect, incarnation)
    seen.endangered = bool(int(rolls_back)) and has_transaction(connection)
    return seen


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _take(ask: Ask, connection: Connection, seen: _Seen) -> Hold:
    gates = ask.core.gates
    try:
        place = gates.enter(ask, wait=ask.wait, reentrant=False, max_waiters=ask.rule.max_waiters)
        if place is Place.QUEUED:
            place = drive(queue_at(ask, gates, ask))
        if place is not Place.LEAD:
            raise ask.timed_out(gates)
        hold = _ask(ask, connection, seen)
        hold.session, hold.degraded, hold.mode = None, False, "transaction"
        hold.server = seen.incarnation[0]
        gates.granted(ask, hold)
    except BaseException as error:
        _count(ask, "timeout" if isinstance(error, TimeoutError) else "error")
        raise
    _count(ask, "acquired")
    return hold


def _count(ask: Ask, outcome: str) -> None:
    segment = ask.core.segments[ask.address.bucket]
    ask.shard.stats.transaction.ended(outcome, ask.deadline.waited(), segment)


def _ask(ask: Ask, connection: Connection, seen: _Seen) -> Hold:
    """Send the locking statement in the caller's transaction until its reply is a grant, or the deadline."""
    while True:
        sent_at = now()
        reply, error = _send(ask, connection, seen.dialect)
        session: Any = seen
        try:
            outcome = judge(ask, session, reply, sent_at)
        except Gone as gone:
            raise ShardUnavailable(str(gone), shard=ask.shard.id) from error
        if isinstance(outcome, Hold):
            return outcome
        if isinstance(outcome, ShardError):
            raise outcome from error
        if outcome is Unlocked.CLOSED:
            raise closed_error(ask)
        if isinstance(reply, Err) and (
            reply.code in _ENDED_CODES
            or (reply.code == _TIMEOUT and seen.endangered and not has_transaction(connection))
        ):
            message = f"the caller's transaction ended while it asked for the row: {reply.message}"
            raise LockLost(message, key=ask.key, reason=LossReason.TRANSACTION_ENDED) from error
        over = ask.deadline.left() <= _MARGIN or not ask.wait
        if outcome is Unlocked.SUSPENDED:
            if over:
                raise ask.shard.unready_error()
            drive(await_rights(ask))
        elif over:
            raise ask.timed_out(ask.core.gates) from error


def _send(ask: Ask, connection: Connection, dialect: Dialect) -> tuple[Rows | Err, DBAPIError | None]:
    address, tag = ask.address, Routing.tag(ask.key)
    if ask.wait:
        bound = max(0.001, min(MAX_STATEMENT_WAIT, ask.deadline.left() - _MARGIN))
        statement = dialect.lock(address.table, address.slot, bound, tag)
    else:
        statement = dialect.try_lock(address.table, address.slot, tag)
    try:
        rows = connection.exec_driver_sql(dialect.in_utc(statement[_HEADER:]).decode()).all()
    except DBAPIError as error:
        arguments = error.orig.args if error.orig is not None else ()
        if len(arguments) < 2 or not isinstance(arguments[0], int):
            raise
        return Err(arguments[0], str(arguments[1]), False), error
    return Rows([tuple(_bytes(value) for value in row) for row in rows], IN_TRANSACTION), None
