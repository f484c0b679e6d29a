"""Requests as ready bytes, and a strict decoder for exactly the replies they can have.

Nothing here does I/O. The decoder refuses what it does not expect: a wrong sequence number, a truncated or oversized
packet, trailing bytes, a request for a local file. No CLIENT_DEPRECATE_EOF, as PyMySQL negotiates. Rows of prepared
statements come in the binary form; they are given out as the text form would have them.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "IN_TRANSACTION",
    "PING",
    "QUIT",
    "ROLLBACK",
    "Err",
    "Grants",
    "Ok",
    "Prepared",
    "ProtocolViolation",
    "Reply",
    "ReplyReader",
    "Rows",
    "decode",
    "decode_prepared",
    "execution",
    "is_off",
    "prepare",
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


class Prepared(NamedTuple):
    """The server's number for a statement that it has prepared on this connection."""

    statement: int


Reply = Ok | Err | Rows


def is_off(value: bytes | None) -> bool:
    """True for a variable that is off, as a number or, as later MariaDB versions answer, as a word."""
    return value in (b"0", b"OFF")


def query(sql: bytes) -> bytes:
    """Return the whole COM_QUERY packet for one statement."""
    return (len(sql) + 1).to_bytes(3, "little") + b"\x00\x03" + sql


def prepare(sql: bytes) -> bytes:
    """Return the whole COM_STMT_PREPARE packet for one statement."""
    return (len(sql) + 1).to_bytes(3, "little") + b"\x00\x16" + sql


def execution(statement: int) -> bytes:
    """Return a COM_STMT_EXECUTE packet for one unsigned number up to the number, which follows in four bytes."""
    # No cursor, once, no NULL, and the type of what follows: an unsigned INT.
    return b"\x12\x00\x00\x00\x17" + statement.to_bytes(4, "little") + b"\x00\x01\x00\x00\x00\x00\x01\x03\x80"


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


def _decode_executed(payload: bytes, types: list[tuple[int, bool]]) -> tuple[bytes | None, ...]:
    """A row in the binary form, as text; `types` are those of the columns, and whether they are unsigned."""
    at, end = 1 + (len(types) + 9) // 8, len(payload)
    if payload[0] != 0x00 or at > end:
        raise ProtocolViolation("bad row")
    values: list[bytes | None] = []
    for number, (kind, unsigned) in enumerate(types, start=2):
        if payload[1 + number // 8] >> number % 8 & 1:
            values.append(None)
            continue
        size = _WHOLE_NUMBERS.get(kind)
        if size is None and kind not in _TEXTS:
            raise ProtocolViolation(f"a value of type {kind}")
        if size is None:
            size, at = _lenenc(payload, at)
            values.append(payload[at : at + size])
        else:
            number_read = int.from_bytes(payload[at : at + size], "little", signed=not unsigned)
            values.append(b"%d" % number_read)
        at += size
        if at > end:
            raise ProtocolViolation("value longer than its row")
    if at != end:
        raise ProtocolViolation("row longer than its values")
    return tuple(values)


# Column types of the binary form: how many bytes numbers have, and what begins with its length.
_WHOLE_NUMBERS = {1: 1, 2: 2, 3: 4, 8: 8, 9: 4}
_TEXTS = frozenset({0, 15, 246, 249, 250, 251, 252, 253, 254})
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


def decode(data: bytes, at: int = 0, executed: bool = False) -> tuple[Reply, int] | None:
    """Return the first complete reply in `data` from `at` on, and the position after it; None: more bytes are needed.

    `executed`: rows are in the binary form, as a prepared statement has them.

    Raises:
        ProtocolViolation: no continuation of `data` can be a reply of this protocol.
    """
    if len(data) - at > _MAX_REPLY:
        raise ProtocolViolation("reply too large")
    try:
        return _decode(data, at, executed)
    except _Incomplete:
        return None
    except IndexError:
        raise ProtocolViolation("packet shorter than its content") from None


def decode_prepared(data: bytes) -> tuple[Prepared | Err, int] | None:
    """As `decode`, for the reply to `prepare`."""
    try:
        payload, at = _packet(data, 0, 1)
        if payload[0] == 0xFF:
            return _decode_err(payload, False, data[3]), at
        if payload[0] != 0x00 or len(payload) != 12 or data[3] == 0:
            raise ProtocolViolation("bad reply to a prepared statement")
        sequence = 1
        for count in (payload[7] | payload[8] << 8, payload[5] | payload[6] << 8):
            if count > _MAX_COLUMNS:
                raise ProtocolViolation(f"{count} columns")
            for number in range(count + bool(count)):
                sequence += 1
                definition, at = _packet(data, at, sequence)
                if definition[0] != (0x03 if number < count else 0xFE):
                    raise ProtocolViolation("bad column definition")
        return Prepared(int.from_bytes(payload[1:5], "little")), at
    except _Incomplete:
        if len(data) > _MAX_REPLY:
            raise ProtocolViolation("reply too large") from None
        return None
    except IndexError:
        raise ProtocolViolation("packet shorter than its content") from None


def _decode(data: bytes, at: int, executed: bool) -> tuple[Reply, int]:
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
    return _decode_rows(data, end, kind, executed)


def _decode_rows(data: bytes, at: int, columns: int, executed: bool) -> tuple[Reply, int]:
    sequence = 2
    types = []
    for _ in range(columns):
        payload, at = _packet(data, at, sequence)
        if payload[0] != 0x03:
            raise ProtocolViolation("bad column definition")
        if executed:
            types.append((payload[-6], bool(payload[-5] & 0x20)))
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
        rows.append(_decode_executed(payload, types) if executed else _decode_row(payload, columns))


_CLOCK_SIZE, _POINT = 17, ord(".")
_SEVENTH = b"\x00\x00\x07"
_WRITABLE_END = b"\x010\x05\x00\x00\x08\xfe"
# Of an executed statement's row: what it has before the last value, which is a number of one of these sizes.
_EXECUTED_SIZE, _FLAG_SIZES = 28, (8, 4, 1)


class _Form(NamedTuple):
    """How the replies to a table's prepared statement begin, and what stands around slot, epoch and clock."""

    beginning: bytes
    head: bytes
    tail: bytes


class Grants:
    """Replies to locking statements on one shard, found by what they begin with.

    The column definitions of a table's reply are the same each time, byte for byte. Only a reply that `decode` accepted
    whole teaches its beginning, and only an equal beginning uses it, so the result is the same as `decode`'s.
    """

    __slots__ = ("_beginnings", "_forms")

    def __init__(self) -> None:
        self._beginnings: dict[int, bytes] = {}
        self._forms: dict[int, _Form] = {}

    def clock(self, data: bytes, table: int, slot: int, unread: int) -> int:
        """The server's clock in microseconds, of a reply that is that slot's row, open, in a writable transaction.

        `unread` (up to 2) plain OKs, of a ROLLBACK and of a setting, come before it. 0: it is anything else, or not
        complete.
        """
        beginning = self._beginnings.get(table << 2 | unread)
        if beginning is None or not data.startswith(beginning):
            self._learn(data, table, unread, executed=False)
            return 0
        # Four short values, each behind its length, and the packet that ends the rows; packets 7 and 8 of the reply.
        row = data[len(beginning) :]
        asked = str(slot).encode()
        epoch_at, end = 5 + len(asked), len(row) - 9
        clock_at = end - 20
        if clock_at < epoch_at + 2 or row[5:epoch_at] != asked:
            return 0
        epoch, clock = row[epoch_at + 1 : clock_at], row[clock_at + 1 : clock_at + 11] + row[clock_at + 12 : end - 2]
        if (
            row[0] != end - 4
            or row[1:4] != _SEVENTH
            or row[4] != len(asked)
            or row[epoch_at] != len(epoch)
            or not epoch.isdigit()
            or not int(epoch)
            or row[clock_at] != _CLOCK_SIZE
            or row[clock_at + 11] != _POINT
            or not clock.isdigit()
            or row[end - 2 : end + 5] != _WRITABLE_END
            or row[end + 7] & (IN_TRANSACTION | _MORE_RESULTS) != IN_TRANSACTION
        ):
            return 0
        return int(clock)

    def clock_executed(self, data: bytes, table: int, slot: int, unread: int) -> int:
        """As `clock`, for the table's prepared statement."""
        form = self._forms.get(table << 2 | unread)
        if form is None or not data.startswith(form.beginning):
            self._learn(data, table, unread, executed=True)
            return 0
        row = data[len(form.beginning) :]
        clock = row[15:25] + row[26:32]
        if (
            row[:10] != form.head + slot.to_bytes(4, "little")
            or row[10:14] == b"\x00\x00\x00\x00"
            or row[14:15] != b"\x11"
            or row[25:26] != b"."
            or not clock.isdigit()
            or row[32:-4] != form.tail
            or row[-2] & (IN_TRANSACTION | _MORE_RESULTS) != IN_TRANSACTION
        ):
            return 0
        return int(clock)

    def _learn(self, data: bytes, table: int, unread: int, *, executed: bool) -> None:
        """Remember how a table's replies begin, by one that is complete; the next one is found by it."""
        if unread > 2 or not data.startswith(_ROLLED_BACK * unread):
            return
        try:
            found = decode(data, 11 * unread, executed)
        except ProtocolViolation:
            return
        if found is None or found[1] != len(data) or not isinstance(found[0], Rows) or len(found[0].rows) != 1:
            return
        if not executed:
            row = sum(1 + len(value or b"") for value in found[0].rows[0])
            self._beginnings[table << 2 | unread] = data[: len(data) - 9 - 4 - row]
            return
        for flag in _FLAG_SIZES:
            head = bytes((_EXECUTED_SIZE + flag, 0, 0, 7, 0, 0))
            at = len(data) - 9 - 4 - _EXECUTED_SIZE - flag
            if data[at : at + 6] == head:
                tail = bytes(flag) + b"\x05\x00\x00\x08\xfe"
                self._forms[table << 2 | unread] = _Form(data[:at], head, tail)


class ReplyReader:
    """Collects bytes of one connection and gives out the replies in them, in order."""

    __slots__ = ("data",)

    def __init__(self) -> None:
        self.data = b""

    def feed(self, data: bytes) -> None:
        """Add what was received."""
        self.data = self.data + data if self.data else data

    def next(self, executed: bool = False) -> Reply | None:
        """Return and forget the next complete reply, or None; `executed` as `decode` has it.

        Raises:
            ProtocolViolation: as `decode`.
        """
        if not self.data:
            return None
        found = decode(self.data, 0, executed)
        if found is None:
            return None
        reply, end = found
        self.data = self.data[end:] if end < len(self.data) else b""
        return reply

    def next_executed(self) -> Reply | None:
        """As `next`, where rows are in the binary form."""
        return self.next(executed=True)

    def next_prepared(self) -> Prepared | Err | None:
        """As `next`, for the reply to `prepare`."""
        found = decode_prepared(self.data)
        if found is None:
            return None
        reply, end = found
        self.data = self.data[end:]
        return reply

    def next_ok(self) -> Ok | None:
        """As `next` where the next reply is the plain OK of a ROLLBACK or a PING; None: ask `next`."""
        data = self.data
        if data[:7] != _PLAIN_OK or len(data) < 11 or data[7] & _MORE_RESULTS:
            return None
        self.data = data[11:]
        return _IDLE_OK if data[7:9] == b"\x00\x00" else Ok(0, data[7] | data[8] << 8)

    @property
    def empty(self) -> bool:
        """True when every byte received so far belonged to a reply that was given out."""
        return not self.data
