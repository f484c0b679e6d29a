"""How a lease is taken. The steps of `take`:

1. The queue of its key in this process: the first caller leads, others wait behind it, or behind the holder.
2. The lead asks the shard through its lane of acquisitions: one statement takes the row if it is free (new, released,
   expired for `clock_skew`) and one reads back whose it is. The owner id is random, and new for each acquisition.
3. The row is the caller's: the deadline is the time before the *first* request that carried this owner id, plus ttl. An
   answer that comes after it is given back, as is one from a server that is the primary no more.
4. A lost reply: the same owner id asks again. That settles it: what the first request got is found, what it did not get
   is asked for. What cannot be settled in time leaves a tombstone, and `OutcomeUnknown` is raised.
5. Held by another: look again, with jitter, no later than the moment when the row is to be had; then 2.
6. A bucket that is closed: follow where it went.

Source: the lease of Gray and Cheriton (1989), with fencing tokens; ShedLock's four storage verbs. The rules were found
by exploring small models exhaustively; tests/faults/test_lease_faults.py walks through the wrong variants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockrouter.backoff import jittered
from lockrouter.deadline import now
from lockrouter.errors import (
    Frozen,
    KeyCollision,
    LockRouterError,
    MaintenanceStall,
    OutcomeUnknown,
    PoolTimeout,
    RouterClosed,
    ShardUnavailable,
    TopologyMismatch,
)
from lockrouter.leases.entry import Entry
from lockrouter.leases.queues import Place
from lockrouter.leases.rows import Answer, Item, Said, Seen, Verb
from lockrouter.leases.trouble import error_of, refuse_in_outage
from lockrouter.protocol.effects import SLEEP, WAIT, Operation
from lockrouter.session import Answered, driver_error

if TYPE_CHECKING:
    from lockrouter.leases.request import Take

__all__ = ["take"]

_FIRST_POLL = 0.05
_LONGEST_POLL = 0.5
_AFTER_FREE = 0.002
_LOCKED_PAUSE = 0.02
_STILL_LOCKED = 5 * _LOCKED_PAUSE
_FREED_PAUSE = 0.002


def take(ask: Take) -> Operation[Entry | None]:
    """Return the caller's lease, or None where it is held and the caller would not wait.

    Raises:
        LockTimeout: held for the whole timeout.
        KeyCollision, Frozen, Overloaded, RouterClosed, or a ShardError: as the contract says.
    """
    queues = ask.leases.queues
    max_waiters = ask.rule.max_waiters if ask.rule is not None else None
    refuse_frozen(ask)
    try:
        place = queues.enter(ask, wait=ask.wait, max_waiters=max_waiters)
        if place is Place.BUSY:
            return None
        if place is Place.QUEUED:
            yield from _queue(ask)
        found = yield from _attempt(ask)
        while isinstance(found, Seen) and ask.wait:
            yield from _look_again(ask, found)
            found = yield from _attempt(ask)
        return found if isinstance(found, Entry) else None
    except LockRouterError:
        raise
    except BaseException:
        # An interrupt may have come between an answer and its being taken note of.
        ask.doubtful = True
        raise
    finally:
        if ask.doubtful and ask.entry is None:
            ask.leases.bury(ask.shard, ask.address.table, ask.row, ask.ttl)
        queues.leave(ask)


def refuse_frozen(ask: Take) -> None:
    """Refuse a user's key that the shard file or an operator has frozen.

    Raises:
        Frozen: it is.
    """
    frozen = ask.rule is not None and (ask.rule.frozen or ask.key.startswith(ask.shard.frozen))
    if frozen:
        raise Frozen(f"key {ask.leases.shown(ask.key)} is frozen: the operators' emergency stop")


def _queue(ask: Take) -> Operation[None]:
    """Step 1: wait until this caller is the lead."""
    while not ask.leases.queues.leads(ask):
        if ask.leases.closed:
            raise RouterClosed("the router was closed while waiting")
        if ask.deadline.left() <= 0:
            raise ask.timed_out()
        yield (WAIT, ask.waiter, ask.deadline.at)


def _look_again(ask: Take, seen: Seen) -> Operation[None]:
    """Step 5: return when the row looks free, or the holder here has let it go.

    Raises:
        LockTimeout: at the deadline.
    """
    skew, pause = ask.leases.config.router.clock_skew, _FIRST_POLL
    ask.polls = True
    while (free_in := seen.free_in(skew)) > 0:
        until = min(now() + min(jittered(pause), free_in + _AFTER_FREE), ask.deadline.at)
        woken = yield (WAIT, ask.waiter, until)
        if ask.leases.closed:
            raise RouterClosed("the router was closed while waiting")
        if ask.deadline.left() <= 0:
            raise ask.timed_out()
        if woken:
            return
        pause = min(pause * 2, _LONGEST_POLL)
        item = Item(Verb.READ, ask.address.table, ask.row)
        item = yield from _ask(ask, item)
        if not isinstance(item.answer, Seen):
            return  # gone, or in trouble: the next attempt says
        seen = item.answer


def _attempt(ask: Take) -> Operation[Entry | Seen]:
    """Steps 2 to 4 and 6: repeat until the row is the caller's or somebody else's."""
    missing = 0
    while True:
        refuse_frozen(ask)
        item = Item(Verb.ACQUIRE, ask.address.table, ask.row)
        item.sent_at = ask.since
        item = yield from _ask(ask, item)
        answer = item.answer
        if isinstance(answer, Seen):
            if (answer.kind, answer.key) != (ask.kind, ask.key):
                raise KeyCollision(f"key {ask.leases.shown(ask.key)} has the digest of another key's lease")
            if answer.owner == ask.owner:
                entry = ask.leases.admit(ask, item, answer)
                if entry is not None:
                    return entry
                continue
        # Whatever else was said, this request granted nothing: the next one counts from its own time.
        ask.settled()
        if isinstance(answer, Seen) and answer.open and answer.free_in(ask.leases.config.router.clock_skew) > 0:
            return answer
        if isinstance(answer, Answered):
            raise error_of(ask.shard, answer)
        missing += answer is None
        if missing > 1 or (isinstance(answer, Seen) and not answer.open):
            yield from _follow(ask)
        elif answer is None:
            # Freed, and purged, just after it was asked for; or its bucket is closed, and it will be missing again.
            yield (SLEEP, now() + jittered(_FREED_PAUSE), None)
        elif isinstance(answer, Seen):
            # Freed just after it was asked for.
            if now() >= ask.until:
                return answer
            yield (SLEEP, now() + jittered(_FREED_PAUSE), None)
        elif ask.until - now() <= _LOCKED_PAUSE:
            raise _stalled(ask)
        else:
            yield (SLEEP, now() + jittered(_LOCKED_PAUSE), None)


def _stalled(ask: Take) -> MaintenanceStall:
    return MaintenanceStall("the lease's row is locked by somebody's transaction", shard=ask.shard.id)


def _ask(ask: Take, item: Item) -> Operation[Item]:
    """Have an item carried out, as often as its replies are lost, within the deadline; returns the answered one."""
    faults = 0
    while True:
        yield from _ready(ask)
        try:
            ask.leases.asking.add(ask)
            done = yield from ask.leases.lanes(ask.shard).taking.submit(item, ask.until)
        except BaseException:
            ask.doubtful = ask.doubtful or item.verb is Verb.ACQUIRE
            raise
        finally:
            ask.leases.asking.discard(ask)
        if item.verb is Verb.ACQUIRE:
            ask.since = item.sent_at
            # Until an answer says otherwise, the server may still do it.
            ask.doubtful = ask.doubtful or (item.sent_at is not None and not (done and item.error is None))
        if done and item.error is None:
            _note(ask, item.answer)
            return item
        error = item.error
        faults += 1
        retries = ask.shard.config.breaker.retries
        if isinstance(error, Answered) and ask.since is None:
            raise error_of(ask.shard, error)
        if not done or faults > retries or now() >= ask.until:
            _give_up(ask, error)
        yield (SLEEP, min(now() + jittered(ask.shard.config.breaker.retry_delay), ask.until), None)
        again = Item(item.verb, item.table, item.row)
        again.sent_at = ask.since
        item = again


def _note(ask: Take, answer: Answer) -> None:
    """Remember what is in the way: the end of the caller's time may come while it is looked at again."""
    ask.held_until = ask.locked_until = 0.0
    if isinstance(answer, Seen) and answer.owner != ask.owner:
        ask.held_until = now() + answer.free_in(ask.leases.config.router.clock_skew)
    elif answer is Said.LOCKED:
        ask.locked_until = now() + _STILL_LOCKED


def _give_up(ask: Take, error: Exception | None) -> None:
    what = "did not answer within the caller's timeout" if error is None else f"does not answer: {error}"
    cause = None if error is None else driver_error(error)
    if ask.doubtful:
        raise OutcomeUnknown(f"{what}; the lease may have been granted, and is given up", shard=ask.shard.id) from cause
    if error is None and now() < ask.held_until:
        raise ask.timed_out()
    if error is None and now() < ask.locked_until:
        raise _stalled(ask)
    if error is None:
        raise PoolTimeout("the connection for leases was busy for the caller's whole timeout", shard=ask.shard.id)
    raise ShardUnavailable(what, shard=ask.shard.id) from cause


def _ready(ask: Take) -> Operation[None]:
    """Wait until the shard may grant.

    Raises:
        RouterClosed, or a ShardError: it may not, or not in time.
    """
    shard = ask.shard
    while True:
        if ask.leases.closed:
            raise RouterClosed("the router was closed while waiting")
        try:
            refuse_in_outage(shard)
        except ShardUnavailable as error:
            if ask.doubtful:
                _give_up(ask, error)
            raise
        if shard.rights is not None:
            return
        if now() >= ask.until:
            raise shard.unready_error()
        waiter = shard.watch_for_change()
        try:
            shard.poke_control()
            if shard.rights is None:
                yield (WAIT, waiter, min(ask.until, now() + shard.config.router.role_check))
        finally:
            shard.unwatch(waiter)


def _follow(ask: Take) -> Operation[None]:
    """Step 6: the row was asked for, and is not there, or its bucket is closed here; go where that went.

    Raises:
        TopologyMismatch: this process's map does not know the shard it went to.
    """
    opened, target = yield from ask.leases.whereabouts(ask.shard, ask.address.bucket, ask.until)
    if opened and now() < ask.until:
        yield (SLEEP, now() + jittered(_FREED_PAUSE), None)
        return  # deleted just after it was asked for: ask again
    shard = ask.leases.shards.get(target)
    if target and shard is None:
        raise TopologyMismatch(
            f"bucket {ask.address.bucket} has moved to shard {target}, which this map does not list", shard=ask.shard.id
        )
    if opened:
        raise ask.timed_out()
    if shard is None or now() >= ask.until - _LOCKED_PAUSE:
        raise TopologyMismatch(
            f"bucket {ask.address.bucket} is closed on this shard: it has moved, or is moving", shard=ask.shard.id
        )
    ask.settled()
    ask.shard = shard
    yield (SLEEP, min(now() + jittered(_LOCKED_PAUSE), ask.until), None)
