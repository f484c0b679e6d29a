"""Requests as ready bytes, and a strict decoder for exactly the replies they can have.

Nothing here does I/O. The decoder refuses what it does not expect: a wrong sequence number, a truncated or oversized
packet, trailing bytes, a request for a local file. Text protocol without CLIENT_DEPRECATE_EOF, as PyMySQL negotiates.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "IN_TRANSACTION",
    "PING",
    "QUIT",
    "ROLLBACK",
    "Err",
    "Ok",
    "ProtocolViolation",
    "Reply",
    "ReplyReader",
    "Rows",
    "Shapes",
    "decode",
    "query",
]

IN_TRANSACTION = 0x0001
"""SERVER_STATUS_IN_TRANS: set in the last packet of a reply while a transaction is open."""

_AUTOCOMMIT_MORE = 0x0008
_MAX_REPLY = 1 << 20
_MAX_COLUMNS = 64
_MAX_SHAPES = 128


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
    if status & _AUTOCOMMIT_MORE:
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
# The OK of a ROLLBACK, up to its status: neither a transaction nor anything else is open.
_ROLLED_BACK = b"\x07\x00\x00\x01\x00\x00\x00\x00\x00"


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
        if payload[:3] == b"\x00\x00\x00" and len(payload) == 7 and not payload[3] & _AUTOCOMMIT_MORE:
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
            if status & _AUTOCOMMIT_MORE:
                raise ProtocolViolation("unexpected second result")
            return Rows(rows, status), at
        if payload[0] == 0xFF:
            return _decode_err(payload, True, 1), at
        rows.append(_decode_row(payload, columns))


class Shapes:
    """The column definitions seen before on one server, byte for byte, so that a reply's row is found at once.

    Only replies that `decode` accepted teach a shape, and only an equal beginning uses it: the result is the same.
    """

    __slots__ = ("_known", "_widths")

    def __init__(self) -> None:
        # The number of columns, and how the packet that ends the one row begins.
        self._known: dict[bytes, tuple[int, bytes]] = {}
        # Few: the statements of a session's life, whose table names are of one length.
        self._widths: tuple[int, ...] = ()

    def learn(self, data: bytes) -> None:
        """Remember the beginning of a reply of rows, up to the end of its column definitions."""
        columns = data[4]
        at = 5
        for _ in range(columns + 1):
            at += 4 + (data[at] | data[at + 1] << 8 | data[at + 2] << 16)
        if len(self._known) < _MAX_SHAPES:
            self._known[data[:at]] = columns, bytes((5, 0, 0, columns + 4, 0xFE))
            if at not in self._widths:
                self._widths += (at,)

    def one_row(self, data: bytes) -> Rows | None:
        """Decode a reply that is one short row of a known shape and nothing more; None: ask `decode`."""
        if data[3:4] != b"\x01" or data[4:5] == b"\x00":
            return None
        for at in self._widths:
            shape = self._known.get(data[:at])
            if shape is not None:
                try:
                    return _one_row(data, at, *shape)
                except IndexError:
                    return None
        return None


def _one_row(data: bytes, at: int, columns: int, tail: bytes) -> Rows | None:
    end = len(data) - 9
    if (
        end - at < 4
        or data[at : at + 4] != bytes((end - at - 4 & 0xFF, end - at - 4 >> 8 & 0xFF, 0, columns + 3))
        or data[end : end + 5] != tail
        or data[end + 7] & _AUTOCOMMIT_MORE
    ):
        return None
    at += 4
    values = []
    for _ in range(columns):
        size = data[at]
        if size > 0xFA:
            return None
        at += 1 + size
        values.append(data[at - size : at])
    if at != end:
        return None
    return Rows([tuple(values)], data[end + 7] | data[end + 8] << 8)


class ReplyReader:
    """Collects bytes of one connection and gives out the replies in them, in order."""

    __slots__ = ("_data", "_shapes")

    def __init__(self, shapes: Shapes | None = None) -> None:
        self._data = b""
        self._shapes = shapes or Shapes()

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
        row = self._shapes.one_row(self._data)
        if row is not None:
            self._data = b""
            return row
        found = decode(self._data)
        if found is None:
            return None
        reply, end = found
        if type(reply) is Rows:
            self._shapes.learn(self._data)
        self._data = self._data[end:] if end < len(self._data) else b""
        return reply

    def one_row_of(self, data: bytes, unread: int) -> tuple[bytes, ...] | None:
        """The values of a reply that is one row of a known shape inside a transaction, behind at most one plain OK.

        None: it is something else; nothing was taken then, and `data` is still to be fed.
        """
        if unread:
            if unread > 1 or data[:9] != _ROLLED_BACK:
                return None
            data = data[11:]
        if self._data:
            return None
        rows = self._shapes.one_row(data)
        return rows.rows[0] if rows is not None and rows.status & IN_TRANSACTION else None  # type: ignore[return-value]

    def next_ok(self) -> Ok | None:
        """As `next` where the next reply is the plain OK of a ROLLBACK or a PING; None: ask `next`."""
        data = self._data
        if data[:7] != _PLAIN_OK or len(data) < 11 or data[7] & _AUTOCOMMIT_MORE:
            return None
        self._data = data[11:]
        return _IDLE_OK if data[7:9] == b"\x00\x00" else Ok(0, data[7] | data[8] << 8)

    @property
    def empty(self) -> bool:
        """True when every byte received so far belonged to a reply that was given out."""
        return not self._data
