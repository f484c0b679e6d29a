"""What a shard's trouble is called where leases meet it: they never degrade, so an outage is always an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockrouter.errors import MaintenanceStall, NotSeeded, ShardError, ShardUnavailable
from lockrouter.leases.store import CONTENDED
from lockrouter.session import Answered, driver_error

if TYPE_CHECKING:
    from lockrouter.shard import Shard

__all__ = ["error_of", "refuse_change", "refuse_in_outage"]

_MISSING = frozenset({1049, 1146})
_READ_ONLY = frozenset({1290, 1792, 1836, 1874, 3100})


def error_of(shard: Shard, answer: Answered) -> ShardError:
    """The contract's error for an answer of the server that is an error."""
    made: ShardError
    if answer.code in _MISSING:
        made = NotSeeded(str(answer), shard=shard.id)
    elif answer.code in CONTENDED:
        made = MaintenanceStall(f"a lock that is none of ours holds the table: {answer}", shard=shard.id)
    else:
        if answer.code in _READ_ONLY:
            shard.poke_control()
        made = ShardUnavailable(str(answer), shard=shard.id)
    made.__cause__ = driver_error(answer)
    return made


def refuse_change(shard: Shard) -> None:
    """As `refuse_in_outage`, for what is held already: a shard that is being drained still has its leases.

    Raises:
        ShardError: it does not answer, or is not the one to ask.
    """
    if shard.refusal is None or not shard.refusal.renews:
        refuse_in_outage(shard)


def refuse_in_outage(shard: Shard) -> None:
    """Refuse while the shard does not answer, or answers that it must not grant.

    Raises:
        ShardError: it does.
    """
    error = shard.refusal_error()
    if error is not None:
        raise error
    if not shard.breaker.closed:
        raise ShardUnavailable(f"does not answer, its breaker is open: {shard.cause}", shard=shard.id) from shard.cause
