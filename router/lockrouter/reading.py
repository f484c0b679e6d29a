"""What one server says of itself, and whether that makes it a server that may hold locks."""

from __future__ import annotations

from typing import NamedTuple

from lockrouter import tokens
from lockrouter.deadline import now
from lockrouter.protocol.effects import Operation
from lockrouter.protocol.packets import Rows, is_off
from lockrouter.session import Answered, Incarnation, Session, sensible, single_row
from lockrouter.sql import statements

__all__ = ["Reading", "look_over", "read", "started_us", "unfit"]


class Reading(NamedTuple):
    """One answer of a server about itself; clocks in microseconds since 1970, UTC, of the server."""

    connection_id: int
    incarnation: Incarnation
    protocol: int
    fingerprint: bytes
    epoch: int
    term: int
    term_identity: bytes
    server_started: int
    clock_high: int
    drained: bytes
    clock: int
    not_primary: str | None
    sent_at: float
    received_at: float

    @property
    def ahead_us(self) -> int:
        """Microseconds of the server's clock that are reserved for grants."""
        return self.clock_high - self.clock

    @classmethod
    def of(cls, row: tuple[bytes | None, ...], sent_at: float, received_at: float) -> Reading:
        """Decode the row of `Dialect.control_read`.

        Raises:
            Answered: it is none.
        """
        value = [field if field is not None else b"" for field in row]
        with sensible():
            return cls._of(value, sent_at, received_at)

    @classmethod
    def _of(cls, value: list[bytes], sent_at: float, received_at: float) -> Reading:
        return cls(
            connection_id=int(value[0]),
            incarnation=(value[1], started_us(value[2])),
            protocol=int(value[4]),
            fingerprint=value[5],
            epoch=int(value[6]),
            term=int(value[7]),
            term_identity=value[8],
            server_started=int(value[9]),
            clock_high=int(value[10]),
            drained=value[11],
            clock=tokens.micros(value[12]),
            not_primary=_why_not_primary(value[13], value[14:]),
            sent_at=sent_at,
            received_at=received_at,
        )


def started_us(text: bytes) -> int:
    """When the server started by its own clock, from whole seconds as text, in microseconds."""
    return round(float(text)) * 1_000_000


def _why_not_primary(read_only: bytes, roles: list[bytes]) -> str | None:
    """Why this server must not grant, or None: it is the writable primary, as far as it knows."""
    if not is_off(read_only):
        return "the server is read-only"
    if not roles:
        return None
    if any(value and not is_off(value) for value in roles[:2]):
        return "the server is read-only"
    if not roles[2]:
        return None
    online, members, primaries, *me = roles[2].decode("utf-8", "replace").split()
    if me == ["SECONDARY", "OFFLINE"] or (members == "1" and me[-1:] == ["OFFLINE"]):
        return None
    if int(primaries) > 1:
        return _MULTI_PRIMARY
    if me != ["PRIMARY", "ONLINE"]:
        return f"the server is {' '.join(me) or 'no member'} of its replication group"
    if int(online) * 2 <= int(members):
        return f"the server's replication group has no majority ({online} of {members} online)"
    return None


_MULTI_PRIMARY = "a multi-primary replication group: a row lock holds on one member only"
_GALERA = "a Galera node (wsrep_on): a row lock holds on one node only"


def unfit(settings: dict[str, str]) -> str | None:
    """Why a server with these settings must never hold locks, whatever its role, or None."""
    if settings.get("wsrep_on", "").upper() in ("ON", "1"):
        return _GALERA
    if settings.get("group_replication_single_primary_mode", "").upper() in ("OFF", "0"):
        return _MULTI_PRIMARY
    return None


def read(session: Session, until: float) -> Operation[Reading]:
    """Ask a server what it is.

    Raises:
        Gone, Silent: the session is closed.
        Answered: an error came, or not one row.
    """
    sent_at = now()
    reply = yield from session.exchange(session.dialect.control_read(), until)
    return Reading.of(single_row(reply), sent_at, now())


def look_over(session: Session, until: float) -> Operation[None]:
    """Refuse a server that can never order or exclude grants: done once per connection.

    Raises:
        Answered: its clock stands still inside a statement, more than one of its kind takes writes, or its group, which
            it is not in, may have another primary.
        Gone, Silent: the session is closed.
    """
    row = single_row((yield from session.exchange(statements.SYSDATE_MOVES, until)))
    with sensible():
        first, _, second = row
    if first == second:
        raise Answered(0, "the server runs with --sysdate-is-now: its clock cannot order grants")
    settings = yield from session.exchange(statements.WRITERS, until)
    if not isinstance(settings, Rows):
        raise Answered(getattr(settings, "code", 0), "the server's settings cannot be read")
    with sensible():
        found = {(name or b"").decode(): (value or b"").decode() for name, value in settings.rows}
    why = unfit(found)
    if why is not None:
        raise Answered(0, why)
    if found.get("group_replication_group_name"):
        state = yield from session.exchange(statements.MEMBER_STATE, until)
        if not isinstance(state, Rows) or not state.rows or state.rows[0][0] == b"OFFLINE":
            raise Answered(0, "the server is not in its replication group: the group may have another primary")
