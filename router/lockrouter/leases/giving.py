"""What is done with a lease that is held: released, renewed, asked about.

Release: the entry is taken out first, so that no renewal is made of it any more; then the row is freed, owner and token
named. One that is already on its way finds no owner and changes nothing. Without an answer a tombstone goes on trying.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockrouter.backoff import jittered
from lockrouter.deadline import now
from lockrouter.errors import LossReason, OutcomeUnknown, ShardError
from lockrouter.leases.entry import Entry
from lockrouter.leases.rows import Answer, Item, Said, Seen, Verb
from lockrouter.leases.trouble import error_of, refuse_change
from lockrouter.protocol.effects import SLEEP, Operation
from lockrouter.session import Answered, driver_error

if TYPE_CHECKING:
    from lockrouter.leases.service import Leases

__all__ = ["free", "look", "loss_in", "renew"]

_PAUSE = 0.02


def free(leases: Leases, entry: Entry) -> Operation[LossReason | None]:
    """Free the row of an entry that was taken out; why it had been lost by then, or None: it was held to the end.

    Raises:
        OutcomeUnknown: no answer came; the background goes on trying.
        ShardError: the server refused; the same.
    """
    try:
        answer = yield from _ask(leases, entry, Verb.RELEASE)
    except BaseException:
        leases.bury_entry(entry)
        raise
    if entry.doubtful or answer is Said.LOCKED:
        leases.bury_entry(entry)
    if not isinstance(answer, Seen):
        return LossReason.EXPIRED if answer is None else None
    if answer.token == entry.row.token and not answer.owner:
        return None  # freed by an earlier request whose reply was lost
    return LossReason.EXPIRED if answer.owner == entry.row.owner else LossReason.STOLEN


def renew(leases: Leases, entry: Entry, ttl: float) -> Operation[LossReason | None]:
    """Prolong a lease to `ttl` from now; why it is lost, or None. An entry that is out meanwhile is not touched.

    Raises:
        ShardError: no answer, or the server refused: the lease keeps the deadline it had.
    """
    item_ttl = int(ttl * 1_000_000)
    entry.row = entry.row._replace(ttl=item_ttl)
    sent_at = now()
    answer = yield from _ask(leases, entry, Verb.RENEW)
    return leases.renewed(entry, answer, sent_at, ttl)


def look(leases: Leases, entry: Entry) -> Operation[LossReason | None]:
    """Ask the server: why the lease is lost, or None: a moment ago it was held.

    Raises:
        ShardError: no answer.
    """
    answer = yield from _ask(leases, entry, Verb.READ)
    return loss_in(entry, answer)


def loss_in(entry: Entry, answer: Answer) -> LossReason | None:
    """Why a lease is lost by what was read of its row."""
    if not isinstance(answer, Seen):
        return LossReason.EXPIRED if answer is None else None
    if answer.owner == entry.row.owner and answer.token == entry.row.token:
        return None if answer.left > 0 else LossReason.EXPIRED
    if not answer.owner and answer.token == entry.row.token:
        return LossReason.OPERATOR
    return LossReason.STOLEN


def _ask(leases: Leases, entry: Entry, verb: Verb) -> Operation[Answer]:
    """Have one thing done with the entry's row, repeated while replies are lost, for a bounded time."""
    until = now() + 2 * leases.config.pool.connect_timeout + leases.config.breaker.retry_delay
    while True:
        shard = entry.shard
        refuse_change(shard)
        item = Item(verb, entry.table, entry.row)
        done = yield from leases.lanes(shard).giving.submit(item, until)
        if done and item.error is None:
            answer = item.answer
            if isinstance(answer, Answered):
                raise error_of(shard, answer)
            elsewhere = answer is None or (isinstance(answer, Seen) and not answer.open)
            if answer is not Said.LOCKED and not (elsewhere and (yield from _moved(leases, entry, until))):
                return answer
            if now() + _PAUSE >= until:
                return answer
            yield (SLEEP, now() + jittered(_PAUSE), None)
            continue
        if item.sent_at is not None and verb is not Verb.READ:
            entry.doubtful = True
        if not done or now() >= until or not shard.breaker.closed:
            raise _unanswered(entry, verb, item.error)
        yield (SLEEP, min(now() + jittered(leases.config.breaker.retry_delay), until), None)


def _unanswered(entry: Entry, verb: Verb, error: Exception | None) -> ShardError:
    what = {
        Verb.RELEASE: "the release got no answer; it is repeated in the background until the ttl has passed",
        Verb.RENEW: "the renewal got no answer; the lease keeps the deadline it had",
        Verb.READ: "the question whether the lease is held got no answer",
    }[verb]
    made = OutcomeUnknown(what, shard=entry.shard.id)
    made.__cause__ = None if error is None else driver_error(error)
    return made


def _moved(leases: Leases, entry: Entry, until: float) -> Operation[bool]:
    """True when the row is where nothing may be changed any more: then the entry follows its bucket."""
    opened, target = yield from leases.whereabouts(entry.shard, entry.row.bucket, until)
    shard = leases.shards.get(target)
    if shard is not None and not opened:
        entry.shard = shard
    return not opened
