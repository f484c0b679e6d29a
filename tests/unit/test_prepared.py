"""Prepared statements on the wire: what is sent, and which bytes are a grant; nothing here needs a server."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockrouter.protocol.packets import (
    Err,
    Grants,
    Prepared,
    ProtocolViolation,
    ReplyReader,
    Rows,
    decode,
    decode_prepared,
    execution,
    prepare,
)
from tests.unit.test_packets import GOLDEN_OK, ROLLED_BACK, column, eof, err, lenenc, packet, quick

LONG, LONGLONG, TINY, NEWDECIMAL, NULL_TYPE = 3, 8, 1, 246, 6
CLOCK = b"1767225600.000004"


def typed(name: bytes, kind: int, unsigned: bool = True) -> bytes:
    """A column definition with a type."""
    plain = column(name)
    return plain[:-6] + bytes((kind, 0x20 * unsigned)) + plain[-4:]


def executed(
    slot: int = 17,
    epoch: int = 1,
    clock: bytes = CLOCK,
    flag: int = 0,
    *,
    status: int = 1,
    size: int = 8,
    nulls: int = 0,
    rows: int = 1,
    last: bytes | None = None,
) -> bytes:
    """The reply to a table's prepared locking statement; `size` is that of the read-only flag."""
    kinds = {8: LONGLONG, 4: LONG, 1: TINY}
    names = ((b"slot", LONG), (b"epoch", LONG), (b"clock", NEWDECIMAL), (b"flag", kinds[size]))
    made = [packet(b"\x04", 1)]
    made += [packet(typed(*name), number) for number, name in enumerate(names, 2)]
    made.append(eof(status, 6))
    row = b"\x00" + bytes((nulls,)) + slot.to_bytes(4, "little") + epoch.to_bytes(4, "little")
    row += lenenc(len(clock)) + clock + flag.to_bytes(size, "little")
    made += [packet(row, 7 + number) for number in range(rows)]
    made.append(eof(status, 7 + rows) if last is None else packet(last, 7 + rows))
    return b"".join(made)


def test_what_is_sent() -> None:
    assert prepare(b"SELECT 1") == b"\x09\x00\x00\x00\x16SELECT 1"
    whole = execution(0x01020304) + (17).to_bytes(4, "little")
    assert whole == bytes.fromhex("12000000 17 04030201 00 01000000 00 01 0380 11000000")
    assert whole[0] == len(whole) - 4


def test_the_number_of_a_prepared_statement() -> None:
    definitions = b"".join(packet(column(b"?"), 2 + number) for number in range(1)) + eof(0, 3)
    columns = b"".join(packet(column(b"c"), 4 + number) for number in range(4)) + eof(0, 8)
    first = packet(b"\x00" + (77).to_bytes(4, "little") + b"\x04\x00\x01\x00\x00\x00\x00", 1)
    whole = first + definitions + columns
    assert decode_prepared(whole + b"rest") == (Prepared(77), len(whole))
    for end in range(len(whole)):
        assert decode_prepared(whole[:end]) is None
    assert decode_prepared(err(1461, "too many")) == (Err(1461, "too many", False), len(err(1461, "too many")))
    bare = packet(b"\x00" + (7).to_bytes(4, "little") + b"\x00\x00\x00\x00\x00\x00\x00", 1)
    assert decode_prepared(bare) == (Prepared(7), len(bare))
    for wrong in (GOLDEN_OK, executed(), packet(first[4:], 2), first + eof(0, 2)):
        with pytest.raises(ProtocolViolation):
            decode_prepared(wrong)


@quick
@given(st.binary(max_size=80))
def test_hostile_bytes_are_no_prepared_statement(data: bytes) -> None:
    reader = ReplyReader()
    reader.feed(data)
    try:
        reader.next_prepared()
    except ProtocolViolation:
        pass


@pytest.mark.parametrize("size", [8, 4, 1])
def test_a_row_is_read_as_its_text_would_be(size: int) -> None:
    whole = executed(4294967295, 12, CLOCK, 1, size=size, status=3)
    assert decode(whole, 0, True) == (Rows([(b"4294967295", b"12", CLOCK, b"1")], 3), len(whole))
    nothing = decode(executed(nulls=0b100, epoch=1)[: -9 - 44] + b"", 0, True)
    assert nothing is None
    late = executed(last=b"\xff\xd0\x0b#HY000late")
    assert decode(late, 0, True) == (Err(3024, "late", True), len(late))


def test_nulls_and_signed_numbers() -> None:
    made = packet(b"\x02", 1) + packet(typed(b"a", LONG, unsigned=False), 2) + packet(typed(b"b", LONGLONG), 3)
    made += eof(1, 4) + packet(b"\x00\x08" + (-5).to_bytes(4, "little", signed=True), 5) + eof(1, 6)
    assert decode(made, 0, True) == (Rows([(b"-5", None)], 1), len(made))


def test_a_row_of_another_kind_or_size_is_refused() -> None:
    for row, kind in (
        (b"\x00\x00" + bytes(3), LONG),
        (b"\x00\x00" + bytes(5), LONG),
        (b"\x01\x00" + bytes(4), LONG),
        (b"\x00\x00", NULL_TYPE),
        (b"\x00", LONG),
        (b"\x00\x00\x09abc", NEWDECIMAL),
    ):
        made = packet(b"\x01", 1) + packet(typed(b"a", kind), 2) + eof(1, 3) + packet(row, 4) + eof(1, 5)
        with pytest.raises(ProtocolViolation):
            decode(made, 0, True)


@pytest.mark.parametrize("size", [8, 4, 1])
def test_a_grant_is_found_by_how_its_table_s_replies_begin(size: int) -> None:
    grants = Grants()
    make: Callable[..., bytes] = lambda *of: executed(*of, size=size)  # noqa: E731 - short for the table below
    assert not grants.clock_executed(make(), 3, 17, 0), "the first one teaches"
    assert grants.clock_executed(make(), 3, 17, 0) == 1767225600_000004
    second = make(4294967295, 12, b"1967225600.999999")
    assert grants.clock_executed(second, 3, 4294967295, 0) == 1967225600_999999
    assert not grants.clock_executed(second, 3, 17, 0), "another slot"
    assert not grants.clock_executed(second, 4, 4294967295, 0), "another table"
    assert not grants.clock(second, 3, 4294967295, 0), "no text"
    for unread in (1, 2):
        before = ROLLED_BACK * unread
        assert not grants.clock_executed(before + second, 3, 4294967295, unread - 1), "one reply too many"
        assert not grants.clock_executed(before + second, 3, 4294967295, unread)
        assert grants.clock_executed(before + second, 3, 4294967295, unread) == 1967225600_999999


@pytest.mark.parametrize(
    "reply",
    [
        executed(status=0),
        executed(status=9),
        executed(clock=b"1767225600.00004"),
        executed(clock=b"17672256000.00004"),
        executed(flag=1),
        executed(flag=1 << 63),
        executed(epoch=0),
        executed(slot=18),
        executed(nulls=4),
        executed(rows=0),
        executed(rows=2),
        executed(size=1),
        executed()[:-1],
        executed() + GOLDEN_OK,
        executed(last=b"\xff\xd0\x0b#HY000late"),
        err(1205, "Lock wait"),
        GOLDEN_OK,
        b"",
    ],
)
def test_anything_but_one_row_in_a_transaction_is_no_grant(reply: bytes) -> None:
    for unread in range(3):
        grants, before = Grants(), ROLLED_BACK * unread
        assert not grants.clock_executed(before + executed(), 0, 17, unread)
        assert not grants.clock_executed(before + reply, 0, 17, unread)
        again = before + executed()
        found = grants.clock_executed(again, 0, 17, unread) or grants.clock_executed(again, 0, 17, unread)
        assert found == 1767225600_000004, "at the latest learned anew"


def test_a_grant_is_never_read_otherwise_than_the_decoder_reads_it() -> None:
    draw = random.Random(7)
    seeds = [executed(), executed(2097151, 345, b"1767225601.123456", status=3), executed(17, 11, flag=1, status=8)]
    grants = Grants()
    grants.clock_executed(seeds[0], 0, 17, 0)
    agreed = 0
    for _ in range(40_000):
        data = bytearray(draw.choice(seeds))
        for _ in range(draw.randrange(0, 3)):
            at = len(data) - 1 - draw.randrange(draw.choice((9, 20, 60)))
            change = draw.randrange(6)
            if change == 0:
                del data[at]
            elif change == 1:
                data.insert(at, draw.choice(b"0123456789\x01\x02\x11"))
            else:
                data[at] = draw.choice((0, 1, 2, 3, 5, 7, 8, 0x11, 0x24, 0x30, 0x39, 0xFB, 0xFE, draw.randrange(256)))
        asked = draw.choice((17, 2097151))
        clock = grants.clock_executed(bytes(data), 0, asked, 0)
        if not clock:
            continue
        agreed += 1
        found = decode(bytes(data), 0, True)
        assert found is not None and found[1] == len(data) and isinstance(found[0], Rows), bytes(data).hex()
        ((slot, epoch, seconds, flag),) = found[0].rows
        assert slot == str(asked).encode() and int(epoch or b"") > 0 and flag == b"0"
        assert seconds == b"%d.%06d" % divmod(clock, 1_000_000)
        assert found[0].status & 9 == 1
    assert agreed > 1_000
