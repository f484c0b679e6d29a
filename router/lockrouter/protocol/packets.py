"""Requests as ready bytes, and a strict decoder for exactly the replies they can have.

Nothing here does I/O. The decoder refuses what it does not expect: a wrong sequence number, a truncated or oversized
packet, trailing bytes, a request for a local file. Text protocol without CLIENT_DEPRECATE_EOF, as PyMySQL negotiates.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = [
    "IN_TRANSACTION",
    "PING",
    "QUIT",
    "ROLLBACK",
    "Err",
    "Grants",
    "Ok",
    "ProtocolViolation",
    "Reply",
    "ReplyReader",
    "Rows",
    "decode",
    "is_off",
    "query",
]

IN_TRANSACTION = 0x0001
"""SERVER_STATUS_IN_TRANS: set in the last packet of a reply while a transaction is open."""

_MORE_RESULTS = 0x0008
_MAX_REPLY = 1 << 20
_MAX_COLUMNS = 64


class ProtocolViolation(Exception):
    """The bytes are not a reply this client can have been sent; the connection cannot be trusted any more."""


class Ok(NamedTuple):
    """The statement succeeded without rows."""

    affected: int
    status: int


class Err(NamedTuple):
    """The statement failed; `after_rows` says that rows came before the error (the lock may have been granted)."""

    code: int
    message: str
    after_rows: bool
    unsolicited: bool = False


class Rows(NamedTuple):
    """A complete result set, values as the text protocol's bytes."""

    rows: list[tuple[bytes | None, ...]]
    status: int


Reply = Ok | Err | Rows


def is_off(value: bytes | None) -> bool:
    """True for a variable that is off, as a number or, as later MariaDB versions answer, as a word."""
    return value in (b"0", b"OFF")


def query(sql: bytes) -> bytes:
    """Return the whole COM_QUERY packet for one statement."""
    return (len(sql) + 1).to_bytes(3, "little") + b"\x00\x03" + sql


PING = b"\x01\x00\x00\x00\x0e"
QUIT = b"\x01\x00\x00\x00\x01"
ROLLBACK = query(b"ROLLBACK")


def _lenenc(data: bytes, at: int) -> tuple[int, int]:
    """Return a length-encoded integer and the position after it."""
    first = data[at]
    if first < 0xFB:
        return first, at + 1
    size = {0xFC: 2, 0xFD: 3, 0xFE: 8}.get(first)
    if size is None or at + 1 + size > len(data):
        raise ProtocolViolation("bad length-encoded integer")
    return int.from_bytes(data[at + 1 : at + 1 + size], "little"), at + 1 + size


def _decode_ok(payload: bytes) -> Ok:
    affected, at = _lenenc(payload, 1)
    _, at = _lenenc(payload, at)
    status = payload[at] | payload[at + 1] << 8
    if status & _MORE_RESULTS:
        raise ProtocolViolation("unexpected second result")
    return Ok(affected, status)


def _decode_err(payload: bytes, after_rows: bool, sequence: int) -> Err:
    code = payload[1] | payload[2] << 8
    text = payload[9:] if payload[3:4] == b"#" else payload[3:]
    return Err(code, text.decode("utf-8", "replace"), after_rows, sequence == 0)


def _decode_row(payload: bytes, columns: int) -> tuple[bytes | None, ...]:
    values: list[bytes | None] = []
    at, end = 0, len(payload)
    for _ in range(columns):
        if payload[at] == 0xFB:
            values.append(None)
            at += 1
            continue
        size, at = _lenenc(payload, at)
        if at + size > end:
            raise ProtocolViolation("value longer than its row")
        values.append(payload[at : at + size])
        at += size
    if at != end:
        raise ProtocolViolation("row longer than its values")
    return tuple(values)


_PLAIN_OK = b"\x07\x00\x00\x01\x00\x00\x00"
_IDLE_OK = Ok(0, 0)
# The OK of a ROLLBACK: no transaction is open, nothing was warned of.
_ROLLED_BACK = _PLAIN_OK + b"\x00\x00\x00\x00"


class _Incomplete(Exception):
    """More bytes are needed."""


def _packet(data: bytes, at: int, sequence: int) -> tuple[bytes, int]:
    """Return one packet's payload and the position after it; the sequence number must be the given one."""
    if len(data) < at + 4:
        raise _Incomplete
    size = data[at] | data[at + 1] << 8 | data[at + 2] << 16
    if size > _MAX_REPLY or not size:
        raise ProtocolViolation(f"packet of {size} bytes")
    if data[at + 3] != sequence & 0xFF and not (sequence == 1 and data[at + 3] == 0):
        raise ProtocolViolation(f"packet number {data[at + 3]}, expected {sequence & 0xFF}")
    end = at + 4 + size
    if len(data) < end:
        raise _Incomplete
    return data[at + 4 : end], end


def decode(data: bytes, at: int = 0) -> tuple[Reply, int] | None:
    """Return the first complete reply in `data` from `at` on, and the position after it; None: more bytes are needed.

    Raises:
        ProtocolViolation: no continuation of `data` can be a reply of this protocol.
    """
    if len(data) - at > _MAX_REPLY:
        raise ProtocolViolation("reply too large")
    try:
        return _decode(data, at)
    except _Incomplete:
        return None
    except IndexError:
        raise ProtocolViolation("packet shorter than its content") from None


def _decode(data: bytes, at: int) -> tuple[Reply, int]:
    payload, end = _packet(data, at, 1)
    numbered = data[at + 3]
    kind = payload[0]
    if kind == 0xFF:
        return _decode_err(payload, False, numbered), end
    if numbered == 0:
        raise ProtocolViolation("unsolicited packet")
    if kind == 0x00:
        if payload[:3] == b"\x00\x00\x00" and len(payload) == 7 and not payload[3] & _MORE_RESULTS:
            return Ok(0, payload[3] | payload[4] << 8), end
        return _decode_ok(payload), end
    if len(payload) != 1 or kind > _MAX_COLUMNS:
        raise ProtocolViolation(f"unexpected reply 0x{kind:02x}")
    return _decode_rows(data, end, kind)


def _decode_rows(data: bytes, at: int, columns: int) -> tuple[Reply, int]:
    sequence = 2
    for _ in range(columns):
        payload, at = _packet(data, at, sequence)
        if payload[0] != 0x03:
            raise ProtocolViolation("bad column definition")
        sequence += 1
    payload, at = _packet(data, at, sequence)
    if payload[0] != 0xFE or len(payload) != 5:
        raise ProtocolViolation("column definitions do not end")
    rows: list[tuple[bytes | None, ...]] = []
    while True:
        sequence += 1
        payload, at = _packet(data, at, sequence)
        if payload[0] == 0xFE and len(payload) < 9:
            status = payload[3] | payload[4] << 8
            if status & _MORE_RESULTS:
                raise ProtocolViolation("unexpected second result")
            return Rows(rows, status), at
        if payload[0] == 0xFF:
            return _decode_err(payload, True, 1), at
        rows.append(_decode_row(payload, columns))


class Grants:
    """Replies to locking statements on one shard, found by what they begin with.

    The column definitions of a table's reply are the same each time, byte for byte. Only a reply that `decode` accepted
    whole teaches its beginning, and only an equal beginning uses it, so the result is the same as `decode`'s.
    """

    __slots__ = ("_beginnings",)

    def __init__(self) -> None:
        self._beginnings: dict[int, bytes] = {}

    def fields(self, data: bytes, table: int, unread: int) -> tuple[bytes, ...] | None:
        """Slot, epoch, seconds, their six decimals and read_only of a reply that is one such row in a transaction.

        `unread` (0 or 1) plain OKs of a ROLLBACK come before it. None: it is anything else, or not complete.
        """
        beginning = self._beginnings.get(table << 1 | unread)
        if beginning is None or not data.startswith(beginning):
            self._learn(data, table, unread)
            return None
        row = _GRANT(data, len(beginning))
        if row is None:
            return None
        size, status = row.group(1, 7)
        fields = row.group(2, 3, 4, 5, 6)
        at, slot = len(beginning), len(fields[0])
        if (
            size[0] != len(data) - at - 13
            or data[at + 4] != slot
            or data[at + 5 + slot] != len(fields[1])
            or status[0] & (IN_TRANSACTION | _MORE_RESULTS) != IN_TRANSACTION
        ):
            return None
        return fields

    def _learn(self, data: bytes, table: int, unread: int) -> None:
        """Remember how a table's replies begin, by one that is complete; the next one is found by it."""
        if unread > 1 or (unread and data[:11] != _ROLLED_BACK):
            return
        try:
            found = decode(data, 11 * unread)
        except ProtocolViolation:
            return
        if found is None or found[1] != len(data) or not isinstance(found[0], Rows) or len(found[0].rows) != 1:
            return
        row = sum(1 + len(value or b"") for value in found[0].rows[0])
        self._beginnings[table << 1 | unread] = data[: len(data) - 9 - 4 - row]


# One row of four short values, each behind its length, and the packet that ends it; packets 7 and 8 of the reply.
_GRANT = re.compile(
    rb"([\x10-\x40])\x00\x00\x07[\x01-\x0a](\d{1,10})[\x01-\x0a](\d{1,10})\x11(\d{10})\.(\d{6})\x01([01])"
    rb"\x05\x00\x00\x08\xfe..(.).",
    re.DOTALL,
).fullmatch


class ReplyReader:
    """Collects bytes of one connection and gives out the replies in them, in order."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = b""

    def feed(self, data: bytes) -> None:
        """Add what was received."""
        self._data = self._data + data if self._data else data

    def next(self) -> Reply | None:
        """Return and forget the next complete reply, or None.

        Raises:
            ProtocolViolation: as `decode`.
        """
        if not self._data:
            return None
        found = decode(self._data)
        if found is None:
            return None
        reply, end = found
        self._data = self._data[end:] if end < len(self._data) else b""
        return reply

    def next_ok(self) -> Ok | None:
        """As `next` where the next reply is the plain OK of a ROLLBACK or a PING; None: ask `next`."""
        data = self._data
        if data[:7] != _PLAIN_OK or len(data) < 11 or data[7] & _MORE_RESULTS:
            return None
        self._data = data[11:]
        return _IDLE_OK if data[7:9] == b"\x00\x00" else Ok(0, data[7] | data[8] << 8)

    @property
    def empty(self) -> bool:
        """True when every byte received so far belonged to a reply that was given out."""
        return not self._data
