"""All leases of one router: what it holds, who waits, and the four things one does with a lease.

This is what recipes build on: `acquire` with a kind of their own, and the handle it returns.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING

from lockrouter.deadline import Deadline, now
from lockrouter.errors import LockTimeout, LossReason, NotHeld, Overloaded, ShardError, ShardUnavailable
from lockrouter.leases import giving
from lockrouter.leases.entry import Entry
from lockrouter.leases.handle import Lease
from lockrouter.leases.holdings import Holdings
from lockrouter.leases.keeper import Keeper
from lockrouter.leases.lane import Lane
from lockrouter.leases.request import Take
from lockrouter.leases.rows import Item, Seen, Verb
from lockrouter.leases.store import SqlStore
from lockrouter.leases.taking import take
from lockrouter.leases.trouble import error_of
from lockrouter.protocol.effects import Operation, drive
from lockrouter.session import Answered, Gone, Session, Silent, driver_error
from lockrouter.sql.leases import Wanted
from lockrouter.tokens import parts

if TYPE_CHECKING:
    from lockrouter.config import ResolvedClass
    from lockrouter.core import Core
    from lockrouter.routing import Address
    from lockrouter.shard import Shard
    from lockrouter.watcher import Task, Watcher

__all__ = ["Lanes", "Leases"]


class Lanes:
    """The lanes of one shard: acquisitions and looks in one, releases and what holders ask in the other."""

    def __init__(self, leases: Leases, shard: Shard) -> None:
        self.stores = (SqlStore(shard), SqlStore(shard))

        def orphan(item: Item) -> None:
            if item.verb is Verb.ACQUIRE:
                # Its caller may have left before it was sent, and so have no reason to bury it.
                leases.bury(shard, item.table, item.row, item.row.ttl / 1_000_000)

        def adopt() -> None:
            leases.keeper.adopt(shard)

        self.taking = Lane(self.stores[0], orphan, adopt)
        self.giving = Lane(self.stores[1], orphan, adopt)


class Leases(Holdings):
    """The leases of one router; made with it, and idle until the first is asked for."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self._core = core
        self.config = core.config
        self.topology = core.config.topology.name
        self.shards = core.shards
        self.shown = core.shown
        self._lanes = {shard.id: Lanes(self, shard) for shard in core.shards.values()}
        self.keeper = Keeper(self)

    @property
    def closed(self) -> bool:
        """True once the router takes no more calls."""
        return self._core.closed

    @property
    def generation(self) -> object:
        """What tells a forked child's leases from its parent's."""
        return self._core.generation

    def lanes(self, shard: Shard) -> Lanes:
        """The lanes of a shard."""
        return self._lanes[shard.id]

    def acquire(
        self,
        kind: int,
        key: bytes,
        *,
        ttl: float,
        timeout: float,
        payload: bytes = b"",
        keep_alive: bool = True,
        rule: ResolvedClass | None = None,
        address: Address | None = None,
        name: str | bytes | None = None,
        make: type[Lease] = Lease,
        until: float | None = None,
    ) -> tuple[Lease | None, Take]:
        """Take a lease and return its handle, or None where it stayed held; and the request, which knows who holds it.

        The arguments have been checked. With a `timeout` of 0 nobody is waited for.

        Args:
            kind: whose lease it is; see `Kind`.
            name: what the handle's `key` says; None: the key.
            make: the class of the handle, for recipes that have one of their own.
            rule: the class of the key, for users' leases.
            address: where the row is to be, for leases that belong to a shard rather than to a key.
            until: with a `timeout` of 0: when the shard must have answered; None: within `connect_timeout`.

        Raises:
            As `taking.take`, but for LockTimeout.
        """
        self._core.ready()
        self.reap()
        deadline = Deadline(timeout)
        where = address or self._core.routing.route(key)
        ask = Take(
            self,
            kind,
            key,
            where,
            ttl=ttl,
            deadline=deadline,
            payload=payload,
            keep_alive=keep_alive,
            rule=rule,
            until=until,
        )
        ask.handle = handle = make(self, key if name is None else name)
        stats, segment = self.shards[where.shard].stats.lease, self._core.segments[where.bucket]
        outcome = "error"
        try:
            operation = take(ask)
            ask.operation = weakref.ref(operation)
            entry = drive(operation)
            outcome = "busy" if entry is None else "acquired"
        except LockTimeout:
            outcome = "timeout"
            return None, ask
        except (Overloaded, ShardError) as error:
            refused = isinstance(error, Overloaded) or not ask.shard.breaker.closed
            outcome = "refused" if refused else "error"
            raise
        except BaseException:
            self.drop(ask.entry)
            raise
        finally:
            stats.ended(outcome, deadline.waited(), segment)
        return (None if entry is None else handle), ask

    def admit(self, ask: Take, item: Item, seen: Seen) -> Entry | None:
        """Step 3 of `take`: make the entry of a granted lease; None: it came too late, and is given back."""
        shard, since = ask.shard, ask.since if ask.since is not None else now()
        deadline = since + ask.ttl
        rights = shard.rights
        # Without rights the shard is between two terms: what was granted then may have been by the old one's rules.
        wrong_server = (
            shard.demoted
            or rights is None
            or rights.incarnation != item.incarnation
            or parts(seen.token)[0] < rights.term
        )
        entry = Entry(
            Wanted(ask.row.bucket, ask.k, ask.kind, ask.key, ask.owner, seen.token, ask.row.ttl, b""),
            table=ask.address.table,
            shard=shard,
            key=ask.key,
            ttl=ask.ttl,
            deadline=deadline,
            granted_at=now(),
            keep_alive=ask.keep_alive,
            thing=ask.thing,
        )
        if wrong_server or self.closed or now() >= entry.over_at:
            ask.doubtful = True
            ask.settled()
            return None
        shard.breaker.answered()
        entry.doubtful = ask.doubtful
        if ask.rule is not None and ask.rule.max_hold is not None:
            entry.overdue_at = entry.granted_at + ask.rule.max_hold / 2
            entry.kill_at = entry.granted_at + ask.rule.max_hold if ask.rule.kill else None
        handle = ask.handle
        assert handle is not None
        # From here on whoever drops the handle, an interrupt too, gives the lease up.
        entry.handle = weakref.ref(handle)
        handle.attach(entry)
        self.add(entry)
        ask.entry = entry
        self.queues.granted(ask, entry)
        self.keeper.watch(entry)
        return entry

    def release(self, entry: Entry) -> LossReason | None:
        """Free a lease; why it had been lost by then, or None. Whatever comes, it is not kept alive any more.

        Raises:
            ShardError: no answer, or a refusal; the background goes on trying.
            NotHeld: somebody else is releasing it.
        """
        if self.loss_of(entry) is not None:
            return entry.lost
        others = False
        try:
            if not self.take_out(entry):
                others = entry.lost is None
                if others:
                    raise NotHeld(f"the lease of key {self.shown(entry.key)} was released before")
                return entry.lost
            reason = drive(giving.free(self, entry))
        except (NotHeld, ShardError):
            raise
        except BaseException:
            if entry.released:
                self.bury_entry(entry)
            raise
        finally:
            if not others:
                self.left(entry)
        entry.shard.stats.lease.released(now() - entry.granted_at)
        if reason is not None:
            entry.lost = reason
            entry.shard.stats.count_lost("lease", reason.value)
        return reason

    def renew(self, entry: Entry, ttl: float) -> LossReason | None:
        """Prolong a lease to `ttl` from now; why it is lost, or None.

        Raises:
            ShardError: as `giving.renew`.
        """
        reason = self.loss_of(entry)
        if reason is None:
            reason = drive(giving.renew(self, entry, ttl))
            if reason is not None:
                self.lose(entry, reason)
        return entry.lost or reason

    def check(self, entry: Entry) -> LossReason | None:
        """Ask the server; why the lease is lost, or None.

        Raises:
            ShardError: no answer.
        """
        reason = self.loss_of(entry)
        if reason is None:
            reason = drive(giving.look(self, entry))
            if reason is not None:
                self.lose(entry, reason)
        return entry.lost or reason

    def whereabouts(self, shard: Shard, bucket: int, until: float) -> Operation[tuple[bool, str]]:
        """Whether a bucket is open on a shard, and which shard it went to, as far as that one knows.

        Raises:
            ShardError: it could not be read.
        """
        store = SqlStore(shard)
        try:
            return (yield from store.moved(bucket, until))
        except Answered as error:
            raise error_of(shard, error) from driver_error(error)
        except (Gone, Silent) as error:
            raise ShardUnavailable(f"does not answer: {error}", shard=shard.id) from driver_error(error)
        finally:
            store.close()

    def tasks(self, watcher: Watcher) -> list[Task]:
        """The endless operations of the leases, to be run by `watcher`."""
        return self.keeper.tasks(watcher)

    def held_by_shard(self) -> dict[str, int]:
        """How many leases are held, for the metrics."""
        return Counter(entry.shard.id for entry in tuple(self.entries.values()))

    def waiting_by_shard(self) -> dict[str, int]:
        """How many callers wait, for the metrics."""
        return self.queues.count()

    def end(self, until: float) -> None:
        """The router is closed and has waited long enough: whoever still holds has lost, is told, and its row freed.

        What was given up before, and was not yet released once, is released now, as far as the server answers in time.
        """
        for entry in tuple(self.entries.values()):
            self.lose(entry, LossReason.ROUTER_CLOSED)
        self.keeper.flush(max(until, now() + self.config.pool.connect_timeout))

    def sessions(self) -> list[Session]:
        """The connections kept at present."""
        stores = [store for lanes in self._lanes.values() for store in lanes.stores] + self.keeper.stores()
        return [store.session for store in stores if store.session is not None]

    def close(self) -> None:
        """Close every connection. Idempotent."""
        for lanes in self._lanes.values():
            for store in lanes.stores:
                store.shut()
        self.keeper.close()
