"""The usual case of taking a row, in one go: a free gate, an idle session, one statement, and the reply it should have.

This is `acquire.take_row` without its waits, because generators, their objects and their many small calls cost more
than the server does. The gate, the pool and the packet are the same; of the judgement it knows only what a plain grant
is. Where anything else comes, it stops, says in the request what it has done so far, and `take_row` goes on from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockrouter.acquire import REFRESH_AFTER, Complete, Sent, enter, statement
from lockrouter.deadline import now
from lockrouter.gate import Hold, Place
from lockrouter.session import Gone, Silent
from lockrouter.tokens import base_token

if TYPE_CHECKING:
    from lockrouter.acquire import Ask

__all__ = ["take_row_now"]

_LEAD = Place.LEAD


def take_row_now(ask: Ask) -> Hold | None:
    """Return the caller's hold, or None: `take_row` has to go on with the request.

    Raises:
        What entering the gate raises. An interrupt leaves the request to be abandoned by the caller.
    """
    core, shard = ask.core, ask.shard
    if ask.shared or ask.rule.frozen or shard.frozen or core.closed:
        return None
    if enter(ask, core.gates) is not _LEAD:
        return None
    rights = shard.rights
    if rights is None or shard.refusal is not None or not shard.breaker.closed:
        return None
    releasing = core.affinity.get(ask.slot) if core.affinity else None
    session = shard.pool.take(releasing, ask.lane, ask)
    if session is None:
        return None
    ask.session = session
    at = now()
    packet, until = statement(ask, session, at)
    try:
        fields = session.talk_now(packet, until, at, ask.address.table)
    except (Gone, Silent) as error:
        ask.early = error
        return None
    if fields is None:
        ask.early = Sent(session, at, releasing)
        return None
    slot, epoch, seconds, decimals, read_only = fields
    clock = int(seconds + decimals)
    if (
        int(slot) != ask.slot
        or not int(epoch)
        or read_only != b"0"
        or session.incarnation != rights.incarnation
        or not rights.lowest(at) <= clock < rights.clock_high
        or shard.rights is not rights
        or session.answered_at - at > REFRESH_AFTER
    ):
        ask.early = Complete(session, at, releasing, fields)
        return None
    shard.breaker.answered()
    hold = Hold(
        ask.slot,
        ask.key,
        ask.thing,
        ask.owner,
        shard=shard,
        session=session,
        base=base_token(rights.term, clock),
    )
    try:
        session.occupy(hold)
    except Gone as error:
        ask.early = error
        return None
    core.gates.granted(ask, hold)
    return hold
