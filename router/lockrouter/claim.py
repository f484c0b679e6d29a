"""The rows of one transaction: taken together on one session of their own lane, and given back together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from lockrouter.acquire import Ask, outcome_of, refuse_frozen
from lockrouter.deadline import Deadline, now
from lockrouter.errors import LossReason
from lockrouter.gate import Hold, Share
from lockrouter.lent import LentSession
from lockrouter.lockset import take_rows
from lockrouter.owners import forget, record
from lockrouter.protocol.effects import drive
from lockrouter.session import TRANSACTIONS

if TYPE_CHECKING:
    from lockrouter.config import ResolvedClass
    from lockrouter.core import Core
    from lockrouter.routing import Address
    from lockrouter.shard import Shard
    from lockrouter.transaction import Block

__all__ = ["Claim", "TransactionLock"]


class Claim:
    """What a transaction asks for, and from `take` to `give_back` or `forsake` holds."""

    def __init__(self, core: Core, shard: Shard, named: Mapping[bytes, str | bytes], rule: ResolvedClass) -> None:
        self.core = core
        self.shard = shard
        self._named = named
        self._rule = rule
        self._asks: dict[int, Ask] = {}
        # One for each key; several may be of one hold, as they share its row.
        self._shares: list[Share] = []
        self._lease = 0
        # True while anything may have to be given back; and once the caller may have nested other locks inside.
        self.open = self._taken = False

    @property
    def session(self) -> LentSession:
        """The one session that all rows are held through."""
        session = self.first.session
        assert isinstance(session, LentSession)
        return session

    @property
    def first(self) -> Hold:
        """The hold of the lowest row."""
        return self._shares[0].hold

    @property
    def holds(self) -> list[Hold]:
        """One hold for each row, in the order they were taken."""
        return [share.hold for share in self._shares if share.key == share.hold.key]

    def take(self, deadline: Deadline) -> None:
        """Take all rows or none; entered once."""
        for raw in self._named:
            slot = self.core.routing.route(raw).slot
            if slot not in self._asks:
                self._asks[slot] = self._ask(raw, deadline)
            refuse_frozen(self._asks[slot], raw)
        asks = [self._asks[slot] for slot in sorted(self._asks)]
        outcome = "error"
        self.open = True
        try:
            drive(take_rows(asks))
            self._record(asks)
            outcome = "acquired"
        except BaseException as error:
            outcome = outcome_of(error, asks[0])
            self.forsake()
            raise
        finally:
            for ask in asks:
                segment = self.core.segments[ask.address.bucket]
                self.shard.stats.transaction.ended(outcome, deadline.waited(), segment)

    def _ask(self, raw: bytes, deadline: Deadline) -> Ask:
        wait = deadline.timeout > 0
        ask = Ask(self.core, raw, self._rule, deadline, wait=wait, reentrant=False, alone=False, lane=TRANSACTIONS)
        ask.fixed = True
        return ask

    def _record(self, asks: list[Ask]) -> None:
        for ask in asks:
            hold = ask.hold
            assert hold is not None
            hold.mode = "transaction"
            self.core.limit(hold, self._rule)
            share = Share(hold, ask.key, self.core.generation)
            share.attached = True
            self._shares.append(share)
            record(hold)
        for raw in self._named:
            hold = self.hold_of(raw)
            if not self.core.gates.has_key(hold, raw):
                share = Share(hold, raw, self.core.generation)
                self._shares.append(share)
                self.core.gates.add_key(hold, raw, share)
        self._lease = self.session.lease
        self._taken = True

    def hold_of(self, raw: bytes) -> Hold:
        """The hold of a key's row."""
        hold = self._asks[self.core.routing.route(raw).slot].hold
        assert hold is not None
        return hold

    def token_of(self, raw: bytes) -> int:
        """The fencing token of a key."""
        return self.core.gates.token_of(self.hold_of(raw), raw)

    def loss(self) -> LossReason | None:
        """Why the rows are lost, or None; no I/O."""
        return next((reason for hold in self.holds if (reason := self.core.loss_of(hold)) is not None), None)

    def lose(self, reason: LossReason) -> None:
        """Mark all rows as lost."""
        for hold in self.holds:
            self.core.lose_hold(hold, reason)

    def give_back(self) -> None:
        """Return the session, which is idle or dead, and open the gates, latest first."""
        held = now() - self.first.granted_at
        for _ in self.holds:
            self.shard.stats.transaction.released(held)
        self._leave()

    def _leave(self) -> None:
        """Idempotent, and may be interrupted anywhere."""
        core, session, holds = self.core, self.session, self.holds
        for share in self._shares:
            forget(share.hold)
            if share.attached:
                core.gates.uncount(share.hold, share.key, share)
        if any(hold.count for hold in holds):
            # Handles that were nested inside outlive the transaction: the last of them frees the rows.
            session.die()
            self.lose(LossReason.TRANSACTION_ENDED)
        else:
            if session.lease == self._lease:  # given back before, it may be another's by now
                session.hold = None
                self.shard.pool.give_back(session, self._lease)
            for hold in reversed(holds):
                core.gates.leave(hold)
        self.open = False

    def forsake(self) -> None:
        """Leave nothing of whatever an interrupt has left; the rows' session is closed. Idempotent."""
        if not self.open:
            return
        if self._taken:
            session = self.session
            if session.lease == self._lease:
                session.connection.take_back()
                session.die()
                self.shard.kill(session)  # what may still run in it would keep the rows until it ends
            self._leave()
            return
        asks = self._asks.values()
        for ask in asks:
            for borrowed in self.shard.pool.borrowed(ask):
                borrowed.die()
                self.shard.pool.give_back(borrowed)
        for ask in asks:
            self.core.gates.forsake(ask)
        self.open = False


class TransactionLock:
    """The lock of a transaction block, in its connection's `info["lock"]`; the block's end is its only release."""

    degraded = False

    def __init__(self, transaction: Block, named: Mapping[bytes, str | bytes]) -> None:
        claim = transaction.claim
        self._transaction = transaction
        self.keys = tuple(named.values())
        self.addresses: dict[str | bytes, Address] = {key: claim.core.routing.route(raw) for raw, key in named.items()}
        self.tokens: dict[str | bytes, int] = {key: claim.token_of(raw) for raw, key in named.items()}
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
