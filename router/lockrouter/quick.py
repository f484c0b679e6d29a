"""The usual case of taking a row, in one go: a free gate, an idle session, one statement, and the reply it should have.

This is `acquire.take_row` without its waits, because generators, their objects and their many small calls cost more
than the server does. It decides nothing by itself: the gate, the pool, the packet and the judgement are the same. Where
anything else comes, it stops, says in the request what it has done so far, and `take_row` goes on from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockrouter import tokens
from lockrouter.acquire import REFRESH_AFTER, Judged, Sent, enter, judge_grant, statement
from lockrouter.deadline import now
from lockrouter.gate import Hold, Place
from lockrouter.protocol.effects import drive
from lockrouter.session import Gone, Silent, State

if TYPE_CHECKING:
    from lockrouter.acquire import Ask

__all__ = ["take_row_now"]

_LEAD, _HOLDING = Place.LEAD, State.HOLDING


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
    if shard.rights is None or shard.refusal is not None or not shard.breaker.closed:
        return None
    slot = ask.slot
    releasing = core.affinity.get(slot)
    session = shard.pool.take(releasing)
    if session is None:
        return None
    ask.session = session
    at = now()
    packet, until = statement(ask, session, at)
    try:
        row = session.talk_now(packet, until, at)
    except (Gone, Silent) as error:
        ask.early = error
        return None
    if row is None:
        ask.early = Sent(session, at, releasing)
        return None
    try:
        if int(row[0]) != slot:
            raise Gone("the reply is for another row", answered=True)
        outcome = judge_grant(ask, session, int(row[1]), tokens.micros(row[2]), row[3], at)
        if session.answered_at - at > REFRESH_AFTER:
            drive(session.ping(now() + shard.config.pool.connect_timeout))
    except ValueError:
        ask.early = Gone("the reply is not what was asked for", answered=True)
        return None
    except (Gone, Silent) as error:
        ask.early = error
        return None
    if type(outcome) is not Hold:
        ask.early = Judged(session, outcome, releasing)  # type: ignore[arg-type]
        return None
    session.hold = outcome
    session.state = _HOLDING
    core.gates.granted(ask, outcome)
    return outcome
