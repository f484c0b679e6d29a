"""The decoder gives out exactly the replies that were sent, however the bytes arrive, and nothing for anything else."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockrouter.protocol.packets import (
    PING,
    QUIT,
    ROLLBACK,
    Err,
    Grants,
    Ok,
    ProtocolViolation,
    Reply,
    ReplyReader,
    Rows,
    decode,
    query,
)

MEGABYTE = 1 << 20
Row = tuple[bytes | None, ...]

# Replies composed by hand to the protocol as PyMySQL's negotiation gets them.
GOLDEN_OK = bytes.fromhex("0700000100000001000000")
GOLDEN_ERR = bytes.fromhex("28000001ff2505233730313030") + b"Query execution was interrupted"
GOLDEN_ROWS = (
    bytes.fromhex("0100000102")
    + bytes.fromhex("1a000002036465660000000473 6c6f74 00 0c3f00 0b000000 03 0000 0000 00".replace(" ", ""))
    + bytes.fromhex("1a000003036465660000000473 6c6f74 00 0c3f00 0b000000 03 0000 0000 00".replace(" ", ""))
    + bytes.fromhex("05000004fe00000100")
    + bytes.fromhex("04000005 02 3432 fb".replace(" ", ""))
    + bytes.fromhex("05000006fe00000300")
)


def packet(payload: bytes, sequence: int) -> bytes:
    return len(payload).to_bytes(3, "little") + bytes([sequence & 0xFF]) + payload


def lenenc(number: int) -> bytes:
    if number < 0xFB:
        return bytes([number])
    for first, size in ((0xFC, 2), (0xFD, 3)):
        if number < 1 << 8 * size:
            return bytes([first]) + number.to_bytes(size, "little")
    return b"\xfe" + number.to_bytes(8, "little")


def ok(affected: int = 0, status: int = 0, *, insert_id: int = 0, info: bytes = b"", sequence: int = 1) -> bytes:
    body = b"\x00" + lenenc(affected) + lenenc(insert_id) + status.to_bytes(2, "little") + b"\x00\x00" + info
    return packet(body, sequence)


def err(code: int, message: str, *, state: bytes = b"#HY000", sequence: int = 1) -> bytes:
    return packet(b"\xff" + code.to_bytes(2, "little") + state + message.encode(), sequence)


def column(name: bytes) -> bytes:
    empty = lenenc(0) * 3
    return lenenc(3) + b"def" + empty + lenenc(len(name)) + name + lenenc(0) + b"\x0c" + bytes(12)


def eof(status: int, sequence: int) -> bytes:
    return packet(b"\xfe\x00\x00" + status.to_bytes(2, "little"), sequence)


def value(data: bytes | None) -> bytes:
    return b"\xfb" if data is None else lenenc(len(data)) + data


def row_packets(columns: int, rows: list[Row], status: int, *, end: bytes | None = None) -> list[bytes]:
    """The packets of a result set; `end` is a payload that stands in the place of the last EOF."""
    made = [packet(lenenc(columns), 1)]
    made += [packet(column(b"c%d" % number), number + 2) for number in range(columns)]
    made.append(eof(status, columns + 2))
    made += [packet(b"".join(map(value, row)), columns + 3 + number) for number, row in enumerate(rows)]
    last = columns + 3 + len(rows)
    made.append(eof(status, last) if end is None else packet(end, last))
    return made


def result(columns: int, rows: list[Row], status: int = 1) -> bytes:
    return b"".join(row_packets(columns, rows, status))


def read_all(chunks: list[bytes]) -> list[Reply]:
    reader, replies = ReplyReader(), []
    for chunk in chunks:
        reader.feed(chunk)
        while (reply := reader.next()) is not None:
            replies.append(reply)
    return replies


def cut(data: bytes, points: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(point % (len(data) + 1) for point in points)})
    return [data[start:end] for start, end in pairwise(edges)]


# MORE_RESULTS (8) is refused; every other bit may be set.
statuses = st.integers(0, 0xFFFF).map(lambda status: status & ~8)
values = st.none() | st.binary(max_size=8) | st.integers(245, 300).map(lambda size: b"v" * size)
oks = st.builds(
    lambda affected, status: (ok(affected, status), Ok(affected, status)),
    st.integers(0, 300) | st.integers(65_530, 70_000) | st.integers(1 << 24, 1 << 40),
    statuses,
)
errs = st.builds(
    lambda code, text: (err(code, text), Err(code, text, False)), st.integers(0, 0xFFFF), st.text("aé#x ", max_size=9)
)


@st.composite
def results(draw: st.DrawFn) -> tuple[bytes, Reply]:
    columns = draw(st.integers(1, 5))
    rows: list[Row] = draw(st.lists(st.tuples(*[values] * columns), max_size=4))
    status = draw(statuses)
    if draw(st.booleans()):
        end = b"\xff" + (3024).to_bytes(2, "little") + b"#HY000late"
        return b"".join(row_packets(columns, rows, status, end=end)), Err(3024, "late", True)
    return result(columns, rows, status), Rows(rows, status)


replies = oks | errs | results()
streams = st.lists(replies, min_size=1, max_size=4)
quick = settings(derandomize=True, max_examples=150, deadline=None, database=None)


def test_requests_are_whole_packets_of_the_protocol() -> None:
    assert bytes.fromhex("010000000e") == PING
    assert bytes.fromhex("0100000001") == QUIT
    assert bytes.fromhex("0900000003") + b"ROLLBACK" == ROLLBACK
    long = query(b"x" * 70_000)
    assert long[:5] == (70_001).to_bytes(3, "little") + b"\x00\x03" and len(long) == 70_005


def test_golden_packets() -> None:
    assert decode(GOLDEN_OK) == (Ok(0, 1), len(GOLDEN_OK))
    assert decode(GOLDEN_ERR) == (Err(1317, "Query execution was interrupted", False), len(GOLDEN_ERR))
    assert decode(GOLDEN_ROWS) == (Rows([(b"42", None)], 3), len(GOLDEN_ROWS))


def test_a_reply_is_found_at_its_offset_only() -> None:
    data = ok(1) + ok(2)
    assert decode(data, len(ok(1))) == (Ok(2, 0), len(data))


def test_an_error_without_sql_state_is_read_whole() -> None:
    assert read_all([err(1040, "Too many connections", state=b"")]) == [Err(1040, "Too many connections", False)]


def test_text_that_is_not_utf8_does_not_hide_the_code() -> None:
    assert read_all([packet(b"\xff\xb5\x04#HY000\xff\xfe", 1)]) == [Err(1205, "\ufffd\ufffd", False)]


@pytest.mark.parametrize("size", [0, 1, 250, 251, 252, 255, 256, 65_535, 65_536, 300_000])
def test_values_of_every_length_encoding(size: int) -> None:
    data = b"\xfe" * size
    assert read_all([result(2, [(data, None)])]) == [Rows([(data, None)], 1)]


def test_a_value_with_an_eight_byte_length_is_no_end_of_rows() -> None:
    body = b"\xfe" + (3).to_bytes(8, "little") + b"abc"
    packets = row_packets(1, [(b"",)], 1)
    packets[-2] = packet(body, 4)
    assert read_all([b"".join(packets)]) == [Rows([(b"abc",)], 1)]


@pytest.mark.parametrize("affected", [0, 250, 251, 65_535, 65_536, (1 << 24) - 1, 1 << 24, (1 << 64) - 1])
def test_affected_rows_of_every_length_encoding(affected: int) -> None:
    assert read_all([ok(affected, 2, insert_id=affected, info=b"Rows matched: 1")]) == [Ok(affected, 2)]


def test_null_is_not_the_empty_string() -> None:
    rows: list[Row] = [(None, b""), (b"", None), (None, None)]
    assert read_all([result(2, rows)]) == [Rows(rows, 1)]


def test_packet_numbers_run_past_255() -> None:
    rows: list[Row] = [(b"%d" % number,) for number in range(600)]
    assert read_all([result(1, rows)]) == [Rows(rows, 1)]


def test_rows_followed_by_an_error_are_an_error() -> None:
    end = b"\xff" + (1317).to_bytes(2, "little") + b"#70100interrupted"
    for rows in ([], [(b"1",)], [(b"1",), (b"2",)]):
        data = b"".join(row_packets(1, list(rows), 1, end=end))
        assert read_all([data]) == [Err(1317, "interrupted", True)]


def test_an_error_numbered_zero_was_not_asked_for() -> None:
    assert read_all([err(4031, "inactivity", sequence=0)]) == [Err(4031, "inactivity", False, True)]


@pytest.mark.parametrize("data", [ok(sequence=0), packet(b"\x01", 0), packet(b"\xfb/etc/passwd", 0)])
def test_only_an_error_may_be_numbered_zero(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode(data)


@pytest.mark.parametrize("name", [b"/etc/passwd", b""])
def test_a_request_for_a_local_file_is_refused(name: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode(packet(b"\xfb" + name, 1))


def test_a_second_result_is_refused() -> None:
    for data in (ok(status=8), ok(status=0xFFFF), result(1, [(b"1",)], status=9)):
        with pytest.raises(ProtocolViolation):
            decode(data)


@pytest.mark.parametrize(
    "payload",
    [
        b"\xfe\x00\x00\x02\x00",  # an EOF, or a request to change the authentication, in the place of a reply
        b"\x41",  # 65 columns
        b"\x02\x00",  # a column count with something behind it
        b"\xfc\x01\x00",
        b"\x00",  # an OK without its numbers
        b"\x00\x00\x00\x02",
        b"\x00\xfb\x00\x02\x00",
        b"\x00\xfe\x01",
        b"\xff",
        b"\xff\x01",
    ],
)
def test_what_is_no_reply_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode(packet(payload, 1))


@pytest.mark.parametrize("row", [b"\x01ab", b"\x05ab", b"\x01", b"\xfc\x01", b"\xfb\xfb", b"\xfd\xff\xff\xff"])
def test_a_row_must_be_exactly_its_values(row: bytes) -> None:
    packets = row_packets(1, [(b"x",)], 1)
    packets[-2] = packet(row, 4)
    with pytest.raises(ProtocolViolation):
        decode(b"".join(packets))


def test_every_packet_must_have_its_number() -> None:
    packets = row_packets(2, [(b"1", None), (b"2", b"3")], 1)
    for at, whole in enumerate(packets):
        for number in {0, 1, 2, 7, 255, (at + 2) & 0xFF} - {at + 1}:
            wrong = [*packets]
            wrong[at] = whole[:3] + bytes([number]) + whole[4:]
            with pytest.raises(ProtocolViolation):
                decode(b"".join(wrong))


def test_an_empty_packet_is_refused_wherever_it_stands() -> None:
    packets = row_packets(1, [(b"1",)], 1)
    for at in range(len(packets)):
        with pytest.raises(ProtocolViolation):
            decode(b"".join([*packets[:at], packet(b"", at + 1)]))


def test_a_packet_too_large_is_refused_by_its_header() -> None:
    with pytest.raises(ProtocolViolation):
        decode(b"\xff\xff\xff\x01")
    with pytest.raises(ProtocolViolation):
        decode((MEGABYTE + 1).to_bytes(3, "little") + b"\x01")


def test_endless_rows_end_in_a_refusal_within_a_megabyte() -> None:
    reader, fed, sequence = ReplyReader(), 0, 4
    reader.feed(b"".join(row_packets(1, [], 1)[:-1]))
    with pytest.raises(ProtocolViolation):
        while fed < 3 * MEGABYTE:
            chunk = b""
            for _ in range(32):
                chunk += packet(value(b"x" * 2000), sequence)
                sequence += 1
            reader.feed(chunk)
            fed += len(chunk)
            assert reader.next() is None
    assert fed < MEGABYTE + 2 * 65_536


def test_a_packet_that_never_ends_is_waited_for_without_an_error() -> None:
    reader = ReplyReader()
    reader.feed((500).to_bytes(3, "little") + b"\x01\x00")
    assert reader.next() is None and not reader.empty


@quick
@given(replies)
def test_a_truncated_reply_is_no_reply(reply: tuple[bytes, Reply]) -> None:
    data, expected = reply
    assert decode(data) == (expected, len(data))
    step = max(1, len(data) // 150)
    assert all(decode(data[:size]) is None for size in range(0, len(data), step))


@quick
@given(streams, st.lists(st.integers(0, 1 << 20), max_size=12))
def test_any_split_of_a_stream_gives_the_same_replies(stream: list[tuple[bytes, Reply]], points: list[int]) -> None:
    data = b"".join(part for part, _ in stream)
    expected = [reply for _, reply in stream]
    assert read_all(cut(data, points)) == expected
    assert read_all([data]) == expected


def test_byte_by_byte_gives_the_same_replies() -> None:
    parts = [ok(3, 1), result(3, [(b"a", None, b"")] * 5), err(1205, "Lock wait"), ok(0, 0)]
    data = b"".join(parts)
    assert read_all([bytes([byte]) for byte in data]) == read_all(parts)
    assert len(read_all(parts)) == 4


def feed_hostile(chunks: list[bytes]) -> None:
    """Read what a hostile peer sent: replies or a violation come out, and each reply uses up bytes."""
    reader, left = ReplyReader(), 0
    try:
        for chunk in chunks:
            reader.feed(chunk)
            left += len(chunk)
            while (reply := reader.next()) is not None:
                assert isinstance(reply, (Ok, Err, Rows))
                left -= 5
                assert left >= 0
    except ProtocolViolation:
        pass


@quick
@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=3))
def test_arbitrary_bytes_raise_nothing_but_a_violation(data: bytes, points: list[int]) -> None:
    feed_hostile(cut(data, points))


@quick
@given(st.lists(st.tuples(st.integers(0, 255), st.binary(min_size=1, max_size=12)), max_size=9))
def test_arbitrary_packets_raise_nothing_but_a_violation(packets: list[tuple[int, bytes]]) -> None:
    feed_hostile([packet(body, number) for number, body in packets])
    feed_hostile([packet(body, at + 1) for at, (_, body) in enumerate(packets)])


def test_mutated_replies_raise_nothing_but_a_violation() -> None:
    draw = random.Random(3)
    seeds = [ok(300, 1), err(1205, "Lock wait"), result(2, [(b"17", None), (b"x" * 260, b"")]), ok() + result(1, [])]
    for _ in range(20_000):
        data = bytearray(draw.choice(seeds))
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(data))
            change = draw.randrange(3)
            if change == 0:
                data[at] = draw.choice((0, 1, 0xFB, 0xFC, 0xFD, 0xFE, 0xFF, draw.randrange(256)))
            elif change == 1:
                del data[at : at + draw.randrange(1, 4)]
            else:
                data[at:at] = draw.randbytes(draw.randrange(1, 4))
            data = data or bytearray(1)
        feed_hostile([bytes(data)])


ROLLED_BACK = ok()


def grant(slot: bytes, epoch: bytes, clock: bytes, read_only: bytes, status: int = 1) -> bytes:
    return result(4, [(slot, epoch, clock, read_only)], status)


def test_a_grant_is_found_by_how_its_table_s_replies_begin() -> None:
    grants = Grants()
    first = grant(b"17", b"1", b"1767225600.000004", b"0")
    assert not grants.clock(first, 3, 17, 0), "the first one teaches"
    assert grants.clock(first, 3, 17, 0) == 1767225600_000004
    second = grant(b"4294967295", b"12", b"1967225600.999999", b"0")
    assert grants.clock(second, 3, 4294967295, 0) == 1967225600_999999
    assert not grants.clock(second, 3, 17, 0), "another slot"
    assert not grants.clock(second, 4, 4294967295, 0), "another table"
    assert not grants.clock(ROLLED_BACK + second, 3, 4294967295, 0), "one reply too many"
    assert not grants.clock(ROLLED_BACK + second, 3, 4294967295, 1)
    assert grants.clock(ROLLED_BACK + second, 3, 4294967295, 1) == 1967225600_999999


@pytest.mark.parametrize(
    "reply",
    [
        grant(b"17", b"1", b"1767225600.000004", b"0", 0),
        grant(b"17", b"1", b"1767225600.000004", b"0", 9),
        grant(b"17", b"1", b"1767225600.0004", b"0"),
        grant(b"17", b"1", b"1767225600.000004", b"1"),
        grant(b"17", b"1", b"1767225600.000004", b"2"),
        grant(b"17", b"0", b"1767225600.000004", b"0"),
        grant(b"18", b"1", b"1767225600.000004", b"0"),
        grant(b"", b"1", b"1767225600.000004", b"0"),
        grant(b"-7", b"1", b"1767225600.000004", b"0"),
        result(4, []),
        result(4, [(b"17", b"1", b"1767225600.000004", None)]),
        result(4, [(b"17", b"1", b"1767225600.000004", b"0")] * 2),
        grant(b"17", b"1", b"1767225600.000004", b"0")[:-1],
        grant(b"17", b"1", b"1767225600.000004", b"0") + GOLDEN_OK,
        b"".join(row_packets(4, [(b"17", b"1", b"1767225600.000004", b"0")], 1, end=b"\xff\xd0\x0b#HY000late")),
        err(1205, "Lock wait"),
        GOLDEN_OK,
        b"",
    ],
)
def test_anything_but_one_row_in_a_transaction_is_no_grant(reply: bytes) -> None:
    grants = Grants()
    for unread, before in ((0, b""), (1, ROLLED_BACK)):
        grants.clock(before + grant(b"17", b"1", b"1767225600.000004", b"0"), 0, 17, unread)
        assert not grants.clock(before + reply, 0, 17, unread)
        again = before + grant(b"17", b"1", b"1767225600.000004", b"0")
        assert grants.clock(again, 0, 17, unread) or grants.clock(again, 0, 17, unread), "at the latest learned anew"


def test_a_grant_is_never_read_otherwise_than_the_decoder_reads_it() -> None:
    draw = random.Random(5)
    seeds = [
        grant(b"17", b"1", b"1767225600.000004", b"0"),
        grant(b"2097151", b"345", b"1767225601.123456", b"0", 3),
        grant(b"17", b"11", b"1767225601.123456", b"1", 8),
    ]
    grants = Grants()
    grants.clock(seeds[0], 0, 17, 0)
    agreed = 0
    for _ in range(40_000):
        data = bytearray(draw.choice(seeds))
        for _ in range(draw.randrange(0, 3)):
            at = len(data) - 1 - draw.randrange(draw.choice((9, 14, 45)))
            change = draw.randrange(6)
            if change == 0:
                del data[at]
            elif change == 1:
                data.insert(at, draw.choice(b"0123456789\x01\x02\x11"))
            else:
                data[at] = draw.choice((0, 1, 2, 3, 5, 8, 0x10, 0x11, 0x30, 0x39, 0xFB, 0xFE, draw.randrange(256)))
        asked = draw.choice((17, 2097151))
        clock = grants.clock(bytes(data), 0, asked, 0)
        if not clock:
            continue
        agreed += 1
        found = decode(bytes(data))
        assert found is not None and found[1] == len(data) and isinstance(found[0], Rows), bytes(data).hex()
        ((slot, epoch, seconds, read_only),) = found[0].rows
        assert slot == str(asked).encode() and int(epoch or b"") > 0 and read_only == b"0"
        assert seconds == b"%d.%06d" % divmod(clock, 1_000_000)
        assert found[0].status & 9 == 1
    assert agreed > 1_000


@quick
@given(st.binary(max_size=60), st.integers(0, 2))
def test_hostile_bytes_are_no_grant(data: bytes, unread: int) -> None:
    grants = Grants()
    lesson = grant(b"17", b"1", b"1767225600.000004", b"0")
    grants.clock(lesson, 0, 17, 0)
    grants.clock(ROLLED_BACK + lesson, 0, 17, 1)
    assert not grants.clock(data, 0, 17, unread)
    assert not grants.clock(lesson[: len(lesson) - 40] + data, 0, 17, unread) or lesson.endswith(data[-20:])
