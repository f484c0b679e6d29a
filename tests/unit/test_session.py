"""A session is usable, or dead: nothing between, whatever interrupts it, and no reply is taken for another's."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import pytest
from pymysql.connections import Connection

from lockrouter.deadline import now
from lockrouter.errors import LossReason
from lockrouter.protocol.effects import RECEIVE, TALK, Operation, drive
from lockrouter.protocol.packets import PING, QUIT, ROLLBACK, Err, Ok, Rows, query
from lockrouter.protocol.wire import Wire
from lockrouter.session import Answered, Gone, Session, Silent, State, single_row
from lockrouter.sql.statements import MYSQL

from .test_packets import err, ok, result

T = TypeVar("T")
STATEMENT = query(b"SELECT 1")
IN_TRANS, OVER = 1, 0


class Line:
    """A session on one end of a pair of sockets, and the test, as its server, on the other."""

    def __init__(self) -> None:
        ours, self.server = socket.socketpair()
        self.server.setblocking(False)
        self.session = Session(object(), cast("Connection[Any]", _Connection(ours)))
        self.session.state = State.IDLE
        self.settled = 0

    def count(self, session: Session) -> None:
        assert session is self.session
        self.settled += 1

    def sent(self) -> bytes:
        """What the server has received since the last look."""
        try:
            return self.server.recv(65_536)
        except BlockingIOError:
            return b""

    def ended(self) -> bool:
        """Whether the server sees the end of the stream."""
        try:
            while self.server.recv(65_536):
                pass
        except BlockingIOError:
            return False
        except ConnectionResetError:
            pass
        return True

    def close(self) -> None:
        self.session.die()
        self.server.close()


class _Connection:
    """As much of PyMySQL's connection as a session looks at."""

    server_version = "8.4.0"

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def thread_id(self) -> int:
        return 7


@contextmanager
def new_line() -> Iterator[Line]:
    line = Line()
    try:
        yield line
    finally:
        line.close()


@pytest.fixture
def line() -> Iterator[Line]:
    with new_line() as made:
        yield made


def soon() -> float:
    return now() + 5


def hand_driven(operation: Operation[T], reply: bytes, *, piece: int = 1) -> tuple[T, int]:
    """Run an operation whose sends succeed and whose bytes come in pieces; returns its result and its yields."""
    at = yields = 0
    give: Any = None
    try:
        while True:
            kind, wire, detail = operation.send(give)
            yields += 1
            if kind == TALK:
                wire.send(detail[0])
            else:
                assert kind == RECEIVE
            assert at < len(reply), "the operation waits for more than the reply"
            give = reply[at : at + piece]
            at += piece
    except StopIteration as stop:
        assert at >= len(reply), "the operation ended before its reply"
        return stop.value, yields


class Interrupt(BaseException):
    """What greenlet's kill or a signal handler may raise."""


def interrupt_at(operation: Operation[T], reply: bytes, turn: int, error: BaseException) -> None:
    """Run an operation byte by byte and throw `error` where it waits for the `turn`th time."""
    give: Any = None
    for at in range(turn):
        kind, wire, detail = operation.send(give)
        if kind == TALK:
            wire.send(detail[0])
        give = reply[at : at + 1]
    operation.send(give)
    operation.throw(error)


GRANT = result(2, [(b"17", None)], IN_TRANS)
Begin = Callable[[Session], Operation[Any]]
OPERATIONS: list[tuple[str, Begin, bytes]] = [
    ("exchange", lambda session: session.exchange(STATEMENT, soon()), GRANT),
    ("rollback", lambda session: session.rollback(soon()), ok(0, OVER)),
    ("ping", lambda session: session.ping(soon()), ok(0, IN_TRANS)),
    ("confirm", lambda session: session.confirm(soon()), ok(0, IN_TRANS) + ok(0, OVER)),
]
each_operation = pytest.mark.parametrize(
    ("begin", "reply"), [case[1:] for case in OPERATIONS], ids=[case[0] for case in OPERATIONS]
)
each_error = pytest.mark.parametrize(
    "error",
    [Interrupt(), GeneratorExit(), KeyboardInterrupt(), OSError("reset"), TimeoutError(), ValueError()],
    ids=repr,
)


@each_operation
@each_error
@pytest.mark.parametrize("pending", [False, True], ids=["alone", "behind a ROLLBACK"])
def test_an_error_between_any_two_bytes_kills_the_session(
    begin: Begin, reply: bytes, error: BaseException, pending: bool
) -> None:
    def prepare(line: Line) -> bytes:
        if not pending:
            return reply
        assert line.session.send_rollback(line.count)
        return ok(0, OVER) + reply

    with new_line() as line:
        whole = prepare(line)
        _, yields = hand_driven(begin(line.session), whole)
        assert line.session.state != State.DEAD and line.settled == pending
    assert yields == len(whole)
    for turn in range(yields):
        with new_line() as line:
            whole = prepare(line)
            known: dict[type[BaseException], type[BaseException]] = {OSError: Gone, TimeoutError: Silent}
            expected = known.get(type(error), type(error))
            with pytest.raises(expected):
                interrupt_at(begin(line.session), whole, turn, error)
            assert line.session.state == State.DEAD
            assert line.ended()
            assert line.settled == pending, "who waits for the ROLLBACK must hear of it once"


def test_an_exchange_sends_its_packet_and_returns_the_reply(line: Line) -> None:
    before = now()
    reply, _ = hand_driven(line.session.exchange(STATEMENT, soon()), GRANT, piece=7)
    assert reply == Rows([(b"17", None)], IN_TRANS)
    assert line.sent() == STATEMENT
    assert line.session.state == State.BUSY, "the caller must say what it is now"
    assert before <= line.session.safe_from <= line.session.answered_at <= now()


def test_safety_counts_from_before_the_request(line: Line) -> None:
    operation = line.session.exchange(STATEMENT, soon())
    operation.send(None)
    sent_by = now()
    while now() <= sent_by:
        pass
    with pytest.raises(StopIteration):
        operation.send(GRANT)
    assert line.session.safe_from <= sent_by < line.session.answered_at


def test_an_exchange_drives_over_real_sockets(line: Line) -> None:
    line.server.send(ok(0, OVER) + GRANT)
    assert line.session.send_rollback(line.count)
    assert drive(line.session.exchange(STATEMENT, soon())) == Rows([(b"17", None)], IN_TRANS)
    assert line.sent() == ROLLBACK + STATEMENT and line.settled == 1


def test_no_reply_in_time_is_silence(line: Line) -> None:
    line.server.send(GRANT[:-1])
    with pytest.raises(Silent):
        drive(line.session.exchange(STATEMENT, now()))
    assert line.session.state == State.DEAD and line.ended()


def test_the_end_of_the_stream_is_told_from_silence(line: Line) -> None:
    line.server.shutdown(socket.SHUT_WR)
    with pytest.raises(Gone) as gone:
        drive(line.session.exchange(STATEMENT, soon()))
    assert not gone.value.answered
    assert line.session.state == State.DEAD


class _Sips(socket.socket):
    """No kernel socket to a `Wire`, as under gevent, and it gives a few bytes at a time."""

    def recv(self, size: int, flags: int = 0) -> bytes:
        return super().recv(min(size, 11), flags)


def test_a_cooperative_socket_is_read_until_there_is_enough() -> None:
    ours, server = socket.socketpair()
    with server, _Sips(fileno=ours.detach()) as sock:
        wire = Wire(sock)
        server.sendall(bytes(range(30)))
        assert wire.talk(STATEMENT, soon(), 12, now()) == bytes(range(22))
        server.shutdown(socket.SHUT_WR)
        assert wire.talk(STATEMENT, soon(), 12, now()) == bytes(range(22, 30)), "no more will come"
        assert server.recv(100) == STATEMENT * 2


@pytest.mark.parametrize("part", [b"", ok()[:1]], ids=["nothing", "a byte"])
def test_a_wait_that_the_background_ended_late_is_silence(line: Line, part: bytes) -> None:
    """A statement that nobody ended may go on at the server: only silence has it killed there."""
    line.server.send(part)
    line.server.shutdown(socket.SHUT_WR)
    with pytest.raises(Silent):
        drive(line.session.exchange(STATEMENT, now() - 0.01))
    assert line.session.state is State.DEAD


def test_a_quick_wait_that_the_background_ended_late_is_silence(line: Line) -> None:
    line.server.shutdown(socket.SHUT_WR)
    with pytest.raises(Silent):
        line.session.talk_now(STATEMENT, now() - 0.01, now())
    assert line.session.state is State.DEAD


def test_a_stream_that_ends_inside_the_reply_had_answered(line: Line) -> None:
    line.server.send(GRANT[:20])
    line.server.shutdown(socket.SHUT_WR)
    with pytest.raises(Gone) as gone:
        drive(line.session.exchange(STATEMENT, soon()))
    assert gone.value.answered, "some bytes of the awaited reply had come"


def test_an_error_reply_is_a_reply(line: Line) -> None:
    reply, _ = hand_driven(line.session.exchange(STATEMENT, soon()), err(1205, "Lock wait"))
    assert reply == Err(1205, "Lock wait", False)
    assert line.session.state == State.BUSY


def test_an_unasked_error_is_the_end_of_the_session_not_the_reply(line: Line) -> None:
    with pytest.raises(Gone, match="4031") as gone:
        hand_driven(line.session.exchange(STATEMENT, soon()), err(4031, "inactivity", sequence=0))
    assert not gone.value.answered
    assert line.session.state == State.DEAD


@pytest.mark.parametrize("extra", [b"\x00", ok(), err(1053, "shutdown", sequence=0)], ids=["byte", "ok", "error"])
def test_bytes_after_the_reply_kill_the_session(line: Line, extra: bytes) -> None:
    data = GRANT + extra
    with pytest.raises(Gone):
        hand_driven(line.session.exchange(STATEMENT, soon()), data, piece=len(data))
    assert line.session.state == State.DEAD


def test_a_violation_of_the_protocol_kills_the_session(line: Line) -> None:
    with pytest.raises(Gone):
        hand_driven(line.session.exchange(STATEMENT, soon()), b"\x01\x00\x00\x05\x00", piece=5)
    assert line.session.state == State.DEAD


@pytest.mark.parametrize("piece", [1, 3, 11, 12, 50, 1000])
def test_the_unread_reply_of_a_rollback_is_never_the_next_reply(line: Line, piece: int) -> None:
    assert line.session.send_rollback(line.count)
    assert line.session.state == State.ROLLBACK_SENT and line.settled == 0
    data = ok(0, OVER) + ok(5, IN_TRANS)
    reply, _ = hand_driven(line.session.exchange(STATEMENT, soon()), data, piece=piece)
    assert reply == Ok(5, IN_TRANS)
    assert line.settled == 1 and line.session.unread == 0


def test_two_unread_replies_are_both_skipped(line: Line) -> None:
    session = line.session
    session.state = State.HOLDING
    assert session.send_ping()
    assert session.send_rollback(line.count)
    assert session.unread == 2
    reply, _ = hand_driven(session.exchange(STATEMENT, soon()), ok(0, IN_TRANS) + ok(0, OVER) + ok(9))
    assert reply == Ok(9, 0)
    assert line.settled == 1 and line.sent() == PING + ROLLBACK + STATEMENT


def test_a_rollback_settles_only_when_its_own_reply_has_come(line: Line) -> None:
    session = line.session
    session.state = State.HOLDING
    session.send_ping()
    session.send_rollback(line.count)
    line.server.send(ok(0, IN_TRANS))
    assert session.drain() and session.unread == 1
    assert (line.settled, session.state) == (0, State.ROLLBACK_SENT)
    line.server.send(ok(0, OVER))
    assert session.drain() and session.unread == 0
    assert (line.settled, session.state) == (1, State.IDLE)


@pytest.mark.parametrize(
    "reply", [err(1053, "shutdown"), GRANT, err(1, "x", sequence=0)], ids=["error", "rows", "unasked error"]
)
def test_a_rollback_that_failed_kills_the_session(line: Line, reply: bytes) -> None:
    assert line.session.send_rollback(line.count)
    with pytest.raises(Gone):
        hand_driven(line.session.exchange(STATEMENT, soon()), reply + GRANT, piece=1000)
    assert line.session.state == State.DEAD and line.settled == 1


def test_a_late_rollback_that_leaves_the_transaction_open_kills_the_session(line: Line) -> None:
    assert line.session.send_rollback(line.count)
    line.server.send(ok(0, IN_TRANS))
    assert not line.session.drain()
    assert line.session.state == State.DEAD


def test_a_rollback_that_cannot_be_sent_is_settled_by_closing(line: Line) -> None:
    line.session.wire.close()
    assert not line.session.send_rollback(line.count)
    assert line.session.state == State.DEAD and line.settled == 1


def test_a_released_session_belongs_to_no_hold(line: Line) -> None:
    line.session.hold = object()
    line.session.send_rollback()
    assert line.session.hold is None


def test_an_awaited_rollback_leaves_the_session_idle(line: Line) -> None:
    hand_driven(line.session.rollback(soon()), ok(0, OVER))
    assert line.session.state == State.IDLE


@pytest.mark.parametrize("reply", [ok(0, IN_TRANS), err(1105, "no"), GRANT], ids=["still open", "error", "rows"])
def test_an_awaited_rollback_without_the_servers_word_kills_the_session(line: Line, reply: bytes) -> None:
    hand_driven(line.session.rollback(soon()), reply)
    assert line.session.state == State.DEAD and line.ended()


def test_a_ping_proves_the_open_transaction(line: Line) -> None:
    hand_driven(line.session.ping(soon()), ok(0, IN_TRANS))
    assert line.sent() == PING
    for reply in (ok(0, OVER), err(1053, "shutdown")):
        with new_line() as other:
            with pytest.raises(Gone):
                hand_driven(other.session.ping(soon()), reply)
            assert other.session.state == State.DEAD


@pytest.mark.parametrize("piece", [1, 11, 22])
def test_a_confirmed_release_takes_one_trip_and_tells_whether_it_was_held(piece: int) -> None:
    answers = (
        (result(2, [(b"1796066653.743323", b"0")], IN_TRANS), True),
        (result(2, [(b"1796066653.743323", b"0")], OVER), False),
        (result(2, [(b"1796066653.743323", b"1")], IN_TRANS), False),
        (err(1105, "no"), False),
    )
    for first, alive in answers:
        with new_line() as line:
            line.session.state = State.HOLDING
            line.session.hold = object()
            proof, _ = hand_driven(line.session.confirm(soon()), first + ok(0, OVER), piece=piece)
            assert proof is alive
            assert line.sent() == MYSQL.check() + ROLLBACK
            assert line.session.state == State.IDLE and line.session.hold is None


@pytest.mark.parametrize(
    "last",
    [ok(0, IN_TRANS), err(1053, "shutdown"), ok(0, OVER) + b"\x00"],
    ids=["still open", "error", "byte too many"],
)
def test_a_confirmed_release_needs_the_end_of_the_transaction(line: Line, last: bytes) -> None:
    with pytest.raises(Gone):
        hand_driven(line.session.confirm(soon()), ok(0, IN_TRANS) + last, piece=100)
    assert line.session.state == State.DEAD


def test_draining_without_news_changes_nothing(line: Line) -> None:
    for state in (State.IDLE, State.HOLDING):
        line.session.state = state
        assert line.session.drain() and line.session.state == state
    line.session.send_rollback(line.count)
    assert line.session.drain() and line.session.state == State.ROLLBACK_SENT and not line.settled


@pytest.mark.parametrize("state", [State.IDLE, State.HOLDING], ids=["idle", "holding"])
@pytest.mark.parametrize(
    "news", [ok(), err(4031, "inactivity", sequence=0), GRANT, b"\xff" * 9], ids=["ok", "error", "rows", "garbage"]
)
def test_draining_what_nobody_asked_for_kills_the_session(line: Line, state: State, news: bytes) -> None:
    line.session.state = state
    line.server.send(news)
    assert not line.session.drain()
    assert line.session.state == State.DEAD


def test_draining_a_part_of_what_nobody_asked_for_kills_the_session(line: Line) -> None:
    line.server.send(err(4031, "inactivity", sequence=0)[:6])
    assert not line.session.drain()
    assert line.session.state == State.DEAD


def test_draining_sees_few_bytes_after_a_wait_for_more(line: Line) -> None:
    assert line.session.send_rollback(line.count)
    line.server.send(ok(0, OVER) + GRANT)
    drive(line.session.exchange(STATEMENT, soon()))
    line.session.state = State.HOLDING
    line.server.send(ok())
    assert not line.session.drain()


def test_an_error_in_the_place_of_two_replies_is_not_waited_for(line: Line) -> None:
    assert line.session.send_rollback(line.count)
    line.server.send(err(4031, "", sequence=0, state=b""))
    line.server.shutdown(socket.SHUT_WR)
    with pytest.raises(Gone):
        drive(line.session.exchange(STATEMENT, soon()))


def test_draining_finds_the_end_of_the_stream(line: Line) -> None:
    line.session.send_rollback(line.count)
    line.server.close()
    assert not line.session.drain()
    assert line.session.state == State.DEAD and line.settled == 1
    assert not line.session.drain(), "a dead session stays dead"


def test_draining_settles_a_rollback_whose_reply_comes_in_pieces(line: Line) -> None:
    line.session.send_rollback(line.count)
    for byte in ok(0, OVER):
        assert line.session.state == State.ROLLBACK_SENT and not line.settled
        line.server.send(bytes([byte]))
        assert line.session.drain()
    assert line.session.state == State.IDLE and line.settled == 1


def test_a_pong_makes_the_session_safe_from_when_the_ping_was_sent(line: Line) -> None:
    session = line.session
    session.state = State.HOLDING
    session.safe_from = 1.0
    assert session.send_ping()
    sent_at = session.ping_sent_at
    assert sent_at is not None and session.safe_from == 1.0
    line.server.send(ok(0, IN_TRANS))
    assert session.drain()
    assert session.state == State.HOLDING
    assert session.safe_from == sent_at and session.ping_sent_at is None


def test_a_pong_outside_a_transaction_says_that_the_row_is_gone(line: Line) -> None:
    session = line.session
    session.state = State.HOLDING
    assert session.send_ping()
    line.server.send(ok(0, OVER))
    assert not session.drain()
    assert session.state == State.DEAD


def test_a_ping_that_died_unanswered_proves_nothing(line: Line) -> None:
    session = line.session
    session.state = State.HOLDING
    session.safe_from = 1.0
    session.send_ping()
    session.die()
    assert session.safe_from == 1.0


def test_dying_twice_settles_once(line: Line) -> None:
    line.session.send_rollback(line.count)
    line.session.die()
    line.session.die()
    assert line.settled == 1


def test_only_an_idle_session_says_good_bye() -> None:
    for state, farewell in ((State.IDLE, QUIT), (State.BUSY, b""), (State.HOLDING, b""), (State.ROLLBACK_SENT, b"")):
        with new_line() as line:
            line.session.state = state
            line.session.close()
            line.session.close()
            assert line.sent() == farewell and line.ended()
            assert line.session.state == State.DEAD


def test_a_child_process_lets_go_without_ending_the_connection(line: Line) -> None:
    shared = line.session.wire.sock.dup()
    line.session.forget()
    assert line.session.state == State.DEAD and not line.ended()
    shared.send(b"parent")
    assert line.sent() == b"parent"
    shared.close()


def test_a_dead_session_stays_dead_when_it_is_used(line: Line) -> None:
    line.session.die()
    with pytest.raises(Gone):
        drive(line.session.exchange(STATEMENT, soon()))
    assert line.session.state == State.DEAD


def test_a_session_is_lost_by_its_state_or_by_the_clock(line: Line) -> None:
    session = line.session
    session.state = State.HOLDING
    session.safe_from = now()
    assert session.lost_reason(10) is None
    session.safe_from = now() - 9.6
    assert session.lost_reason(10) == LossReason.SILENT
    session.die()
    assert session.lost_reason(10) == LossReason.CLOSED


def test_a_single_row_is_exactly_one() -> None:
    assert single_row(Rows([(b"1",)], 0)) == (b"1",)
    for reply in (Rows([], 0), Rows([(b"1",), (b"2",)], 0), Ok(1, 0), Err(1142, "denied", False)):
        with pytest.raises(Answered):
            single_row(reply)
