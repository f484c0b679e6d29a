"""The pool: as many sessions as allowed, counted exactly, given in the order of asking, never to who has left."""

from __future__ import annotations

import functools
import random
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from pymysql.connections import Connection

from lockrouter.deadline import now
from lockrouter.pool import Borrower, Exhausted, Pool, PoolClosed
from lockrouter.protocol.effects import WAIT, Effect, Operation, Waiter, drive
from lockrouter.session import ROWS, Gone, Session, State
from tests.support.interrupts import interrupted

LONG = 1e6


class _Connection:
    server_version = "8.4.0"

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def thread_id(self) -> int:
        return 7


class Server:
    """Opens sessions; may refuse, or take its time."""

    def __init__(self) -> None:
        self.ends: dict[Session, socket.socket] = {}
        self.refuse: BaseException | None = None
        self.door: Waiter | None = None

    def open_one(self, until: float) -> Operation[Session]:
        if self.door is not None:
            yield (WAIT, self.door, until)
        if self.refuse is not None:
            raise self.refuse
        ours, theirs = socket.socketpair()
        session = Session(object(), cast("Connection[Any]", _Connection(ours)))
        self.ends[session] = theirs
        return session
        yield

    def close(self) -> None:
        for session, end in self.ends.items():
            session.die()
            end.close()


class Claim:
    """A check-out driven by hand."""

    def __init__(self, pool: Pool, seconds: float = LONG, **options: Any) -> None:
        self.operation = pool.check_out(now() + seconds, **options)
        self.session: Session | None = None
        self.over = False
        self.effect: Effect | None = None
        self.go()

    def go(self, result: Any = None) -> Claim:
        try:
            self.effect = self.operation.send(result)
        except StopIteration as stop:
            self.session, self.over = stop.value, True
        return self

    @property
    def woken(self) -> bool:
        assert self.effect is not None and self.effect[0] == WAIT
        return bool(self.effect[1].wait(now()))

    def served(self) -> Session:
        assert not self.over and self.woken
        assert self.go(True).session is not None
        return self.session  # type: ignore[return-value]


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def pool(server: Server) -> Pool:
    return Pool(2, server.open_one)


def out(pool: Pool, **options: Any) -> Session:
    """Check out without waiting."""
    claim = Claim(pool, **options)
    assert claim.over and claim.session is not None
    return claim.session


def take(pool: Pool, prefer: Session | None = None) -> Session | None:
    return pool.take(prefer, ROWS, None, now())


def counts(pool: Pool) -> tuple[int, int, int]:
    found = pool.counts()
    return found["idle"], found["busy"], found["waiting"]


def test_sessions_are_opened_up_to_the_size(pool: Pool) -> None:
    one, two = out(pool), out(pool)
    assert one is not two and pool.sessions == {one, two}
    assert counts(pool) == (0, 2, 0)
    with pytest.raises(Exhausted):
        Claim(pool, wait=False)
    assert counts(pool) == (0, 2, 0)


def test_the_session_returned_last_is_given_out_first(pool: Pool) -> None:
    one, two = out(pool), out(pool)
    pool.give_back(one)
    pool.give_back(two)
    assert out(pool) is two and out(pool) is one


def test_the_preferred_session_is_given_if_it_is_idle(pool: Pool) -> None:
    one, two = out(pool), out(pool)
    pool.give_back(one)
    pool.give_back(two)
    assert out(pool, prefer=one) is one
    assert out(pool, prefer=one) is two
    pool.give_back(one)
    assert take(pool, one) is one and take(pool) is None


def test_a_fresh_session_is_never_an_idle_one(pool: Pool) -> None:
    one = out(pool)
    pool.give_back(one)
    assert out(pool, fresh=True) is not one
    assert counts(pool) == (1, 1, 0)


def test_who_needs_a_fresh_session_does_not_wait_beside_idle_ones(pool: Pool) -> None:
    one, two = out(pool), out(pool)
    pool.give_back(one)
    pool.give_back(two)
    claim = Claim(pool, fresh=True)
    assert claim.over, "nobody holds a session: nobody would ever return one"
    assert claim.session not in (one, two)
    assert sum(counts(pool)) == 2


@pytest.mark.parametrize("state", [State.IDLE, State.ROLLBACK_SENT], ids=["idle", "rollback sent"])
def test_a_session_without_a_transaction_is_kept(pool: Pool, state: State) -> None:
    session = out(pool)
    session.state = state
    pool.give_back(session)
    assert counts(pool) == (1, 0, 0) and session.state is state and not session.fresh


@pytest.mark.parametrize("state", [State.BUSY, State.HOLDING, State.DEAD], ids=["busy", "holding", "dead"])
def test_any_other_session_is_closed_and_its_place_is_free(pool: Pool, state: State) -> None:
    session, other = out(pool), out(pool)
    claim = Claim(pool)
    if state is State.DEAD:
        session.die()
    session.state = state
    pool.give_back(session)
    assert session.state is State.DEAD and pool.sessions == {other}
    # The longest waiter has leave to open one on the free place.
    fresh = claim.served()
    assert fresh.fresh and pool.sessions == {other, fresh}
    assert counts(pool) == (0, 2, 0)


def test_waiters_are_served_in_the_order_they_came(pool: Pool) -> None:
    sessions = [out(pool), out(pool)]
    claims = [Claim(pool) for _ in range(5)]
    assert counts(pool) == (0, 2, 5)
    for number, claim in enumerate(claims):
        session = sessions[number % 2]
        pool.give_back(session)
        assert not any(later.woken for later in claims[number + 1 :])
        assert claim.served() is session
    assert counts(pool) == (0, 2, 0)


def test_a_newcomer_does_not_overtake_who_waits(pool: Pool) -> None:
    one, _ = out(pool), out(pool)
    claim = Claim(pool)
    pool.give_back(one)
    with pytest.raises(Exhausted):
        Claim(pool, wait=False)
    assert take(pool) is None
    assert claim.served() is one


def test_a_waiter_whose_time_is_up_is_given_nothing(pool: Pool) -> None:
    one, _ = out(pool), out(pool)
    gone, next_one = Claim(pool, 0.0), Claim(pool)
    with pytest.raises(Exhausted):
        gone.go(False)
    pool.give_back(one)
    assert not gone.woken
    assert next_one.served() is one


def test_a_waiter_served_at_its_very_deadline_has_the_session(pool: Pool) -> None:
    one, _ = out(pool), out(pool)
    claim = Claim(pool)
    pool.give_back(one)
    assert claim.go(False).session is one


def test_a_waiter_that_was_not_woken_is_woken_by_the_background(pool: Pool) -> None:
    one, _ = out(pool), out(pool)
    claim = Claim(pool)
    pool._idle[one.lane].append(one)  # as an interrupt between giving it back and serving the queue leaves it
    assert not claim.woken
    pool.mend()
    assert claim.served() is one


class Interrupt(BaseException):
    pass


@pytest.mark.parametrize("served", ["not yet", "with a session", "with leave to open"])
def test_an_interrupted_waiter_passes_on_what_it_was_given(pool: Pool, served: str) -> None:
    one, two = out(pool), out(pool)
    claim, next_one = Claim(pool), Claim(pool)
    if served == "with leave to open":
        one.die()
    if served != "not yet":
        pool.give_back(one)
    with pytest.raises(Interrupt):
        claim.operation.throw(Interrupt)
    if served == "not yet":
        assert counts(pool) == (0, 2, 1)
        pool.give_back(one)
    assert (next_one.served() is one) == (served != "with leave to open")
    pool.give_back(two)
    assert counts(pool) == (1, 1, 0)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("scene", ["idle", "to be opened", "dead", "waited for"])
def test_an_interrupt_at_any_instant_costs_no_place(server: Server, scene: str) -> None:
    """Of a call that borrows a session and gives it back, with and without another one that waits for it."""

    def call(pool: Pool) -> None:
        borrower = Borrower()
        session = drive(pool.check_out(now() + 1.0, borrower=weakref.ref(borrower)))
        try:
            if scene == "dead":
                session.die()
        finally:
            pool.give_back(session)

    at, struck = 0, True
    while struck:
        pool = Pool(1, server.open_one)
        if scene != "to be opened":
            pool.give_back(out(pool))
        held = out(pool) if scene == "waited for" else None
        waiting = Claim(pool) if held is not None else None

        if held is None or waiting is None:
            struck = interrupted(lambda: call(pool), at) is not None  # noqa: B023 - called now
            pool.mend()
        else:
            lease = held.lease
            struck = interrupted(functools.partial(pool.give_back, held, lease), at) is not None
            pool.give_back(held, lease)  # as whoever cleans up does
            served = waiting.go(True).session
            assert served is not None
            pool.give_back(served)
        pool.give_back(out(pool, wait=False))
        assert counts(pool) == (1, 0, 0)
        pool.close()
        at += 1
    assert at > 4


def test_an_owner_of_a_session_may_exceed_the_size_by_as_much_and_never_waits(pool: Pool) -> None:
    sessions = [out(pool), out(pool)]
    claim = Claim(pool)
    sessions += [out(pool, beyond=True), out(pool, beyond=True)]
    with pytest.raises(Exhausted):
        Claim(pool, beyond=True)
    assert counts(pool) == (0, 4, 1)
    # What is beyond the size is closed on its return; only then are the waiting served.
    for session in sessions[:2]:
        pool.give_back(session)
        assert session.state is State.DEAD and not claim.woken
    assert counts(pool) == (0, 2, 1)
    pool.give_back(sessions[2])
    assert claim.served() is sessions[2]
    assert counts(pool) == (0, 2, 0)


def test_an_opening_that_fails_gives_its_place_up(server: Server, pool: Pool) -> None:
    held = out(pool)
    server.refuse = Gone("refused")
    for _ in range(5):
        with pytest.raises(Gone):
            Claim(pool)
        assert counts(pool) == (0, 1, 0)
    server.refuse = None
    pool.give_back(out(pool))
    pool.give_back(held)
    assert counts(pool) == (2, 0, 0)


def test_an_opening_that_fails_serves_the_next_in_line(server: Server, pool: Pool) -> None:
    out(pool)
    server.door = Waiter()
    opening = Claim(pool)
    waiting = Claim(pool)
    assert counts(pool) == (0, 2, 1)
    server.refuse = Gone("refused")
    with pytest.raises(Gone):
        opening.go(True)
    server.refuse, server.door = None, None
    assert waiting.served() in pool.sessions
    assert counts(pool) == (0, 2, 0)


def test_an_interrupted_opening_gives_its_place_up(server: Server, pool: Pool) -> None:
    server.door = Waiter()
    opening = Claim(pool)
    with pytest.raises(Interrupt):
        opening.operation.throw(Interrupt)
    abandoned = Claim(pool)
    abandoned.operation.close()
    assert counts(pool) == (0, 0, 0)


def test_an_opening_that_takes_its_time_delays_nobody_else(server: Server, pool: Pool) -> None:
    idle = out(pool)
    server.door = Waiter()
    entered = threading.Event()

    def open_one(until: float) -> Operation[Session]:
        entered.set()
        return (yield from server.open_one(until))

    pool._openers = (open_one,)
    opened: list[Session] = []
    thread = threading.Thread(target=lambda: opened.append(drive(pool.check_out(now() + 20))))
    thread.start()
    assert entered.wait(20)
    # The other thread is inside `open_one`; the pool serves others meanwhile.
    pool.give_back(idle)
    assert out(pool) is idle
    pool.give_back(idle)
    server.door.wake()
    thread.join(20)
    assert opened and opened[0] is not idle and counts(pool) == (1, 1, 0)


def test_an_idle_session_whose_server_has_gone_is_not_given_out(server: Server, pool: Pool) -> None:
    one, two = out(pool), out(pool)
    pool.give_back(one)
    pool.give_back(two)
    server.ends[two].close()
    two.answered_at -= 10
    assert out(pool) is one
    assert two.state is State.DEAD and pool.sessions == {one}
    assert counts(pool) == (0, 1, 0)


def test_a_look_at_all_idle_sessions_closes_the_dead_ones(server: Server, pool: Pool) -> None:
    one, two = out(pool), out(pool)
    pool.give_back(one)
    pool.give_back(two)
    server.ends[one].close()
    while now() <= max(one.answered_at, two.answered_at):
        pass
    pool.purge()
    assert counts(pool) == (1, 0, 0) and out(pool) is two


def test_old_idle_sessions_are_taken_out_and_given_back(pool: Pool) -> None:
    one, two = out(pool), out(pool)
    pool.give_back(one)
    pool.give_back(two)
    one.answered_at -= 100
    assert pool.idle_longer_than(50) == [one]
    assert counts(pool) == (1, 1, 0)
    pool.give_back(one)
    assert counts(pool) == (2, 0, 0)


def test_a_closed_pool_closes_what_is_idle_and_wakes_who_waits(pool: Pool) -> None:
    one, two = out(pool), out(pool)
    claims = [Claim(pool, 0.0), Claim(pool), Claim(pool)]
    with pytest.raises(Exhausted):
        claims[0].go(False)
    pool.close()
    pool.close()
    for claim in claims[1:]:
        assert claim.woken
        with pytest.raises(PoolClosed):
            claim.go(True)
    with pytest.raises(PoolClosed):
        Claim(pool)
    assert take(pool) is None
    pool.give_back(one)
    two.state = State.HOLDING
    pool.give_back(two)
    assert one.state is two.state is State.DEAD
    assert counts(pool) == (0, 0, 0) and not pool.sessions


def test_closing_closes_idle_sessions(pool: Pool) -> None:
    session = out(pool)
    pool.give_back(session)
    pool.close()
    assert session.state is State.DEAD and counts(pool) == (0, 0, 0)


def test_a_session_opened_while_the_pool_closes_is_closed(server: Server, pool: Pool) -> None:
    server.door = Waiter()
    opening = Claim(pool)
    pool.close()
    with pytest.raises(PoolClosed):
        opening.go(True)
    assert counts(pool) == (0, 0, 0) and not pool.sessions
    assert all(session.state is State.DEAD for session in server.ends)


def test_a_session_given_at_the_moment_of_closing_is_closed_on_its_return(pool: Pool) -> None:
    one, two = out(pool), out(pool)
    claim = Claim(pool)
    pool.give_back(one)
    pool.close()
    assert claim.served() is one
    pool.give_back(one)
    pool.give_back(two)
    assert counts(pool) == (0, 0, 0)


def test_threads_get_their_sessions_in_turn_and_all_places_come_back(server: Server) -> None:
    """Ten callers on two sessions: never more out than allowed, all served, whatever dies or fails."""
    pool = Pool(2, server.open_one)
    lock = threading.Lock()
    busy: set[Session] = set()
    failures: list[BaseException] = []
    served = [0] * 10

    def run(number: int) -> None:
        try:
            for turn in range(60):
                session = drive(pool.check_out(now() + 20))
                with lock:
                    assert session not in busy and len(busy) < 2
                    busy.add(session)
                    served[number] += 1
                if (turn + number) % 7 == 0:
                    session.die()
                with lock:
                    busy.discard(session)
                pool.give_back(session)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures and served == [60] * 10
    idle, used, waiting = counts(pool)
    assert used == waiting == 0 and idle == len(pool.sessions) <= 2


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_exact_after_any_history(server: Server, seed: int) -> None:
    draw = random.Random(seed)
    pool = Pool(draw.randrange(1, 4), server.open_one)
    claims: list[Claim] = []
    held: list[Session] = []

    def ask() -> None:
        options: dict[str, Any] = {"beyond": True} if held and draw.random() < 0.3 else {}
        server.refuse = Gone("refused") if draw.random() < 0.2 else None
        try:
            claim = Claim(pool, wait=draw.random() < 0.8, **options)
        except (Exhausted, Gone):
            return
        settle(claim)

    def settle(claim: Claim) -> None:
        if claim.over and claim.session is not None:
            held.append(claim.session)
        else:
            claims.append(claim)

    def go_on() -> None:
        if claims:
            claim = claims.pop(draw.randrange(len(claims)))
            try:
                settle(claim.go(False))
            except (Exhausted, Gone):
                pass

    def interrupt() -> None:
        if claims:
            with pytest.raises(Interrupt):
                claims.pop(draw.randrange(len(claims))).operation.throw(Interrupt)

    def give() -> None:
        if held:
            session = held.pop(draw.randrange(len(held)))
            session.state = draw.choice((State.IDLE, State.IDLE, State.ROLLBACK_SENT, State.BUSY))
            pool.give_back(session)

    steps: tuple[Callable[[], None], ...] = (ask, ask, go_on, interrupt, give, give)
    for _ in range(400):
        draw.choice(steps)()
        idle, busy, waiting = counts(pool)
        assert waiting <= len(claims) and busy >= len(held)
        assert idle + busy <= pool.size * 2
        assert not (idle and waiting), "nobody waits beside an idle session"
    server.refuse = None
    while claims or held:
        give()
        go_on()
    idle, busy, waiting = counts(pool)
    assert (busy, waiting) == (0, 0) and idle == len(pool.sessions) <= pool.size
