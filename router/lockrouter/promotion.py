"""Making a degraded lock a real one: its shard is back, and the row is taken for what follows.

The steps of `promote`:

1. The key is routed again: the hold may be older than what this process knows of the map.
2. The shard is asked like for any row, but not its gate: the caller is inside already.
3. The hold gets the session, the token and a party of its own, in one step; where it was released or promoted
   meanwhile, the row goes back at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from lockrouter.acquire import Ask, abandon, ask_shard, refuse_frozen
from lockrouter.deadline import Deadline, checked_timeout, now
from lockrouter.errors import LockLost, LockTimeout, NotHeld
from lockrouter.gate import Party
from lockrouter.protocol.effects import drive
from lockrouter.session import State

if TYPE_CHECKING:
    from lockrouter.core import Core
    from lockrouter.gate import Hold

__all__ = ["promote"]


def promote(core: Core, hold: Hold, key: bytes, timeout: float | None) -> bool:
    """As `RowLock.promote`, for a degraded hold."""
    rule = structs.replace(core.config.class_of(key), on_outage="refuse")
    deadline = Deadline(checked_timeout(timeout, rule.timeout))
    core.ready()
    ask = Ask(core, key, rule, deadline, wait=deadline.timeout > 0, shared=hold.shared)
    refuse_frozen(ask, key)
    outcome = "error"
    try:
        while (real := drive(ask_shard(ask))) is not None and not _graft(core, ask, hold, real):
            if hold.lost is not None:
                raise LockLost(f"the lock is lost: {hold.lost.value}", key=key, reason=hold.lost)
            if not hold.count:
                raise NotHeld(f"the lock of key {core.shown(key)} was released meanwhile")
            if hold.session is not None:
                break  # promoted by another thread
        outcome = "busy" if real is None else "acquired"
    except LockTimeout:
        outcome = "timeout"
        abandon(ask)
    except BaseException:
        if hold.session is None or hold.session is not ask.session:
            abandon(ask)
        raise
    finally:
        ask.shard.stats.row.ended(outcome, deadline.waited(), core.segments[ask.address.bucket])
    return outcome == "acquired"


def _graft(core: Core, ask: Ask, hold: Hold, real: Hold) -> bool:
    session, local = real.session, hold.shard.stats.local
    assert session is not None
    party = Party(session)
    with session.mutex:
        if core.gates.promote(hold, real, party):
            local.released(now() - hold.granted_at)
            return True
        if session.state is State.HOLDING:
            core.send_rollback(session, (real,))
    ask.session = None
    ask.shard.pool.give_back(session)
    return False
