"""The router: the verbs that callers use, blocking."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry

from lockrouter.acquire import as_shard_error
from lockrouter.config import RouterConfig, load
from lockrouter.core import Core, Overdue
from lockrouter.deadline import checked_timeout, now
from lockrouter.errors import RouterClosed
from lockrouter.fencing import Target, fence
from lockrouter.leases.handle import Lease, checked_payload, checked_ttl, require_lease_mode
from lockrouter.leases.request import Take
from lockrouter.leases.rows import Kind
from lockrouter.lockin import LockIn, lock_in
from lockrouter.lockset import LockSet, lock_all, name_keys
from lockrouter.pool import Borrower, Exhausted, PoolClosed
from lockrouter.protocol.effects import WAIT, Operation, drive
from lockrouter.recipes.verbs import RecipeVerbs
from lockrouter.rerun import run
from lockrouter.routing import Address, encode
from lockrouter.rowlock import RowLock
from lockrouter.session import Answered, Gone, Silent, driver_error
from lockrouter.shard import Shard
from lockrouter.take import take
from lockrouter.transaction import Keys, Transaction

if TYPE_CHECKING:
    from sqlalchemy import Connection

Result = TypeVar("Result")

__all__ = ["LockRouter"]


class LockRouter(RecipeVerbs):
    """Locks keys on the rows of many MySQL databases, as one shard file maps them.

    Thread-safe; one per process. Built lazily: it may be made while a shard is down. After a fork the child owns
    nothing and works with fresh connections.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        registry: CollectorRegistry = REGISTRY,
        on_overdue: Callable[[Overdue], object] | None = None,
    ) -> None:
        """Make a router of a decoded shard file; nothing is connected yet.

        Args:
            config: what `load` or `parse` returned.
            registry: where the Prometheus metrics are registered.
            on_overdue: called once for each lock that is held for longer than its class's `max_hold`, on a thread of
                its own.
        """
        self._core = Core(config, registry, on_overdue)

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        registry: CollectorRegistry = REGISTRY,
        on_overdue: Callable[[Overdue], object] | None = None,
    ) -> Self:
        """Make a router of a shard file; the other arguments are the constructor's.

        Raises:
            ConfigError: the file is wrong; names file, field and value.
        """
        return cls(load(path), registry=registry, on_overdue=on_overdue)

    def lock(
        self,
        key: str | bytes,
        timeout: float | None = None,
        *,
        owner: Hashable = None,
        reentrant: bool = True,
        shared: bool = False,
        confirm: bool = False,
    ) -> RowLock:
        """Take the row lock of `key`, waiting for other holders, and return its handle.

        Args:
            key: 1 to 255 bytes, as `bytes` or UTF-8 `str`.
            timeout: seconds for the whole call, which returns within `timeout` + 0.1; None: the configured default;
                0: never waits for another holder or for the pool.
            owner: who nests with whom; by default the running task, greenlet or thread in its own context.
            reentrant: False: `WouldDeadlock` when the owner holds the row already.
            shared: readers share the row, writers exclude; no reader passes a waiting writer.
            confirm: leaving the block awaits the release and proves that the lock was held to the end.

        Raises:
            LockTimeout: the row stayed busy.
            ShardError: one of its kinds; the row says nothing then.
            InvalidKey, WouldDeadlock, Overloaded, Frozen, RouterClosed, ConfigError: as their docstrings say.
        """
        handle = take(self._core, key, timeout, owner, reentrant, shared, confirm, True)
        assert handle is not None
        return handle

    def try_lock(
        self,
        key: str | bytes,
        *,
        owner: Hashable = None,
        reentrant: bool = True,
        shared: bool = False,
        confirm: bool = False,
    ) -> RowLock | None:
        """Take the row lock of `key` if the row is free now; None: the row is busy, never an outage. That raises, or
        degrades where the key's class says so.

        Raises:
            As `lock`, but for LockTimeout.
        """
        return take(self._core, key, 0.0, owner, reentrant, shared, confirm, False)

    def lock_all(self, keys: Iterable[str | bytes], timeout: float | None = None, *, confirm: bool = False) -> LockSet:
        """Take the row locks of all `keys` or of none, whatever their order, and return one handle for them.

        Callers who hold no other row lock never deadlock here. A caller who holds one gets everything already held,
        or `WouldDeadlock` at once. The strictest class of all keys applies.

        Args:
            keys: at most 1,000 different ones; none is fine.
            timeout: seconds for the whole call; None: the shortest default of the keys' classes.
            confirm: as in `lock`.

        Raises:
            ValueError: too many keys.
            Everything that `lock` raises.
        """
        named = name_keys(keys)
        self._core.ready()
        return lock_all(self._core, named, timeout, confirm=confirm)

    def lease(
        self,
        key: str | bytes,
        *,
        ttl: float,
        timeout: float | None = None,
        payload: bytes = b"",
        keep_alive: bool = True,
    ) -> Lease:
        """Take the lease of `key`, waiting for another holder, and return its handle.

        A lease is a row of its own, committed: it needs no connection while it is held, survives restarts, and ends at
        its ttl unless it is renewed. It is never re-entrant, and never degrades. It and the row lock of the same key
        do not exclude each other.

        Args:
            key: 1 to 255 bytes, as `bytes` or UTF-8 `str`.
            ttl: seconds, 1 to 7 days, after which others can have it when its holder is gone.
            timeout: seconds for the whole call, which returns within `timeout` + 0.1; None: the configured default;
                0: never waits for another holder.
            payload: at most 1,024 bytes that are stored with it and shown to operators.
            keep_alive: renew it in the background, at a third of its ttl, until it is released.

        Raises:
            LockTimeout: another holds it; says so if that is this process.
            KeyCollision: another key has the same digest.
            OutcomeUnknown: the reply was lost and could not be settled; what may have been granted is given up.
            ShardError: another of its kinds.
            InvalidKey, Overloaded, Frozen, RouterClosed, ConfigError: as their docstrings say.
        """
        handle, ask = self._lease(key, ttl, timeout, payload, keep_alive)
        if handle is None:
            raise ask.timed_out()
        return handle

    def try_lease(self, key: str | bytes, *, ttl: float, payload: bytes = b"", keep_alive: bool = True) -> Lease | None:
        """Take the lease of `key` if it is free now; None: another holds it. An outage raises.

        Raises:
            As `lease`, but for LockTimeout.
        """
        return self._lease(key, ttl, 0.0, payload, keep_alive)[0]

    def _lease(
        self, key: str | bytes, ttl: float, timeout: float | None, payload: bytes, keep_alive: bool
    ) -> tuple[Lease | None, Take]:
        raw = encode(key)
        rule = self._core.config.class_of(raw)
        seconds, patience = checked_ttl(ttl), checked_timeout(timeout, rule.timeout)
        require_lease_mode(rule)
        return self._core.leases.acquire(
            Kind.LEASE,
            raw,
            ttl=seconds,
            timeout=patience,
            payload=checked_payload(payload),
            keep_alive=keep_alive,
            rule=rule,
            name=key,
        )

    def transaction(self, keys: Keys, timeout: float | None = None) -> Transaction:
        """A context manager: a SQLAlchemy `Connection` in the very transaction that holds the row locks of `keys`.

        The handle is in the connection's `info["lock"]`; `Session(bind=connection)` works. Leaving the block commits,
        and waits for the reply; an error rolls back. Whatever would end the server's transaction before (a deadlock,
        a lost connection, DDL, a COMMIT of the body's own) poisons the block: it is rolled back, every further
        statement raises `LockLost`, and so does leaving it, even if the body swallowed the error. Nothing but leaving
        commits; only a procedure that commits inside cannot be kept from it, and is noticed afterwards. It never
        degrades. Between statements the body may be idle for `[transaction]`'s `idle` seconds.

        Args:
            keys: one key, or several that share a shard.
            timeout: seconds for taking the locks; None: the shortest default of the keys' classes.

        Raises:
            CrossShard: the keys live on different shards.
            WouldDeadlock: the caller holds one of the rows already.
            LockLost: on leaving: the transaction had ended before, and was not committed.
            OutcomeUnknown: on leaving: the reply to COMMIT was lost. See `run`.
            Everything that `lock` raises.
        """
        return Transaction(self._core, keys, timeout)

    def run(
        self, keys: Keys, work: Callable[[Connection], Result], attempts: int = 3, timeout: float | None = None
    ) -> Result:
        """Return `work(connection)`, done inside `transaction`, and repeated as a whole where that is safe.

        It is repeated after a deadlock, after a loss, and after an unknown COMMIT that turned out not to have happened
        (a marker row that the same transaction wrote tells), at most `attempts` times in all. So `work` must have no
        effect outside its transaction that may not happen twice.

        Args:
            keys, timeout: as in `transaction`; the timeout is that of each attempt.

        Raises:
            LockLost: the last attempt was lost.
            OutcomeUnknown: the shard did not answer the question whether the COMMIT happened.
            Whatever `work` or `transaction` raises.
        """
        return run(self._core, keys, work, attempts=attempts, timeout=timeout)

    def fence(self, connection: Target, key: str | bytes, token: int) -> None:
        """Refuse a token that is older than one seen before, in the caller's own transaction on a protected database.

        One statement on the table `fence` (`lockrouter init --fence URL` creates it), whose row stays locked until the
        transaction ends; what follows in it is then ordered by the tokens. The same token passes again. Changes
        `LAST_INSERT_ID()` of the session.

        Args:
            connection: a SQLAlchemy Connection or Session of the protected database, in a transaction.
            token: of the lock or lease of `key`.

        Raises:
            Stale: a higher token was seen; roll back.
            ConfigError: the connection is in autocommit.
        """
        fence(self._core.config.topology.name, connection, encode(key), token)

    def lock_in(self, connection: Target, key: str | bytes, timeout: float | None = None) -> LockIn:
        """Take the row lock of `key` inside the caller's own open transaction on that shard's database.

        The caller's COMMIT or ROLLBACK frees it. It must be the transaction's first statement, or the transaction READ
        COMMITTED, and not inside a savepoint. After an error, `LockTimeout` included, the row may be held until the
        caller rolls back.

        Args:
            connection: a SQLAlchemy Connection or Session.
            timeout: as in `lock`; looking at the session comes on top.

        Raises:
            ConfigError: autocommit, a savepoint, an older snapshot, another server or database than the shard's.
            WouldDeadlock: the caller holds the row already, through another session.
            LockLost: the server ended the caller's transaction meanwhile (a deadlock).
            Everything that `lock` raises.
        """
        return lock_in(self._core, connection, key, timeout)

    def route(self, key: str | bytes) -> Address:
        """Where `key` lives: pure, no I/O, the same everywhere for the same key and map.

        Raises:
            InvalidKey: the key is none.
        """
        return self._core.routing.route(encode(key))

    def warm(self) -> None:
        """Open `min_idle` connections to every shard and wait until each may grant; for readiness probes.

        Raises:
            ShardError: of the first shard that is not ready within `connect_timeout`.
        """
        self._core.start()
        for shard in self._core.shards.values():
            drive(_warm(shard))

    def health(self) -> dict[str, dict[str, Any]]:
        """What is known of each shard, by its id; no I/O."""
        return {shard.id: _health(shard) for shard in self._core.shards.values()}

    def close(self) -> None:
        """Refuse new callers, wake the waiting ones, wait `close_timeout` for holders, close all. Idempotent.

        Holders that are still there lose their locks (reason `router_closed`).
        """
        self._core.close()

    def __enter__(self) -> Self:
        if self._core.closed:
            raise RouterClosed("the router is closed")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _warm(shard: Shard) -> Operation[None]:
    until = now() + shard.config.pool.connect_timeout
    sessions, borrower = [], Borrower()
    try:
        for _ in range(shard.config.pool.min_idle):
            sessions.append((yield from shard.pool.check_out(until, wait=False, borrower=weakref.ref(borrower))))
    except Exhausted:
        pass  # in use to the last one: warm enough
    except (Gone, Silent, Answered) as error:
        raise as_shard_error(shard, error) from driver_error(error)
    except PoolClosed:
        raise RouterClosed("the router is closed") from None
    finally:
        for session in sessions:
            shard.pool.give_back(session)
    while shard.rights is None and now() < until:
        waiter = shard.watch_for_change()
        if shard.rights is None:
            yield (WAIT, waiter, until)
        shard.unwatch(waiter)
    if shard.rights is None:
        raise shard.refusal_error() or shard.unready_error()


def _health(shard: Shard) -> dict[str, Any]:
    rights, refusal = shard.rights, shard.refusal
    state = "refused" if refusal else "open" if not shard.breaker.closed else "ok" if rights else "starting"
    return {
        "state": state,
        "why": refusal.why if refusal else None if rights else shard.waiting_for,
        "role": "primary" if rights else "unknown",
        "term": rights.term if rights else None,
        "breaker": shard.breaker.state.name.lower(),
        "pool": shard.pool.counts(),
    }
