"""The background thread: many operations, none delayed by another, none lost, nothing left at the end."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockrouter import watcher as module
from lockrouter.deadline import now
from lockrouter.protocol.effects import CALL, RECEIVE, SEND, SLEEP, TALK, WAIT, Operation, Waiter
from lockrouter.protocol.wire import Wire
from lockrouter.watcher import Task, Watcher

LONG = 1e6
PATIENCE = 20
"""Seconds after which a test gives up; nothing here takes that long."""
Run = Callable[..., Watcher]


class Said:
    """What tasks report, in order."""

    def __init__(self) -> None:
        self._words: queue.Queue[Any] = queue.Queue()

    def __call__(self, word: Any) -> None:
        self._words.put(word)

    def next(self) -> Any:
        return self._words.get(timeout=PATIENCE)

    @property
    def nothing(self) -> bool:
        return self._words.empty()


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def run() -> Iterator[Run]:
    running: list[Watcher] = []

    def start(*operations: Callable[[], Operation[None]]) -> Watcher:
        made = Watcher("watcher-under-test")
        made.start([Task(f"task-{number}", operation) for number, operation in enumerate(operations)])
        running.append(made)
        return made

    yield start
    for made in running:
        made.close(PATIENCE)


@pytest.fixture
def line() -> Iterator[tuple[Wire, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield Wire(ours), theirs
    ours.close()
    theirs.close()


def nap(said: Said) -> Callable[[], Operation[None]]:
    def operation() -> Operation[None]:
        said("began")
        while True:
            yield (SLEEP, now() + LONG, None)
            said("awake")

    return operation


def test_a_poke_ends_the_present_sleep(run: Run, said: Said) -> None:
    watcher = run(nap(said))
    assert said.next() == "began"
    for _ in range(5):
        watcher.poke(watcher._tasks[0])
        assert said.next() == "awake"
    assert said.nothing


def test_a_poke_before_a_sleep_ends_the_next_one(run: Run, said: Said) -> None:
    entered, go = threading.Event(), threading.Event()

    def operation() -> Operation[None]:
        entered.set()
        go.wait(PATIENCE)
        yield (SLEEP, now() + LONG, None)
        said("awake")
        yield (SLEEP, now() + LONG, None)
        said("awake again")

    watcher = run(operation)
    assert entered.wait(PATIENCE)
    watcher.poke(watcher._tasks[0])
    go.set()
    assert said.next() == "awake"


def test_many_pokes_of_a_busy_task_end_one_sleep(run: Run, said: Said) -> None:
    """A thousand callers that meet a sick shard poke its task; it reads once more, not a thousand times."""
    entered, go = threading.Event(), threading.Event()

    def operation() -> Operation[None]:
        entered.set()
        go.wait(PATIENCE)
        while True:
            yield (SLEEP, now() + LONG, None)
            said("awake")

    def other() -> Operation[None]:
        while True:
            yield (SLEEP, now() + LONG, None)
            said("other")

    watcher = run(operation, other)
    assert entered.wait(PATIENCE)
    for _ in range(50):
        watcher.poke(watcher._tasks[0])
    watcher.poke(watcher._tasks[1])
    go.set()
    words = [said.next()]
    while words[-1] != "other":
        words.append(said.next())
    watcher.poke(watcher._tasks[1])
    while said.next() != "other":
        words.append("awake")
    assert words.count("awake") <= 2


def test_a_poke_while_a_reply_is_awaited_does_not_lose_the_reply(
    run: Run, said: Said, line: tuple[Wire, socket.socket]
) -> None:
    wire, server = line

    def operation() -> Operation[None]:
        said("waiting")
        said((yield (RECEIVE, wire, now() + LONG)))
        yield (SLEEP, now() + LONG, None)
        said("poked")
        yield (SLEEP, now() + LONG, None)

    watcher = run(operation)
    assert said.next() == "waiting"
    watcher.poke(watcher._tasks[0])
    server.send(b"reply")
    assert said.next() == b"reply"
    assert said.next() == "poked"


def test_sleeps_end_in_the_order_of_their_ends(run: Run, said: Said) -> None:
    start = now() + 0.05

    def sleeper(number: int) -> Callable[[], Operation[None]]:
        def operation() -> Operation[None]:
            yield (SLEEP, start + number / 1000, None)
            said(number)
            yield (SLEEP, now() + LONG, None)

        return operation

    run(*(sleeper(number) for number in (3, 1, 2, 0)))
    assert [said.next() for _ in range(4)] == [0, 1, 2, 3]


def test_sent_and_received_bytes_are_the_wires(run: Run, said: Said, line: tuple[Wire, socket.socket]) -> None:
    wire, server = line

    def operation() -> Operation[None]:
        yield (SEND, wire, b"one")
        said((yield (RECEIVE, wire, now() + LONG)))
        said((yield (TALK, wire, (b"two", now() + LONG, 1))))
        said((yield (RECEIVE, wire, now() + LONG)))
        yield (SLEEP, now() + LONG, None)

    run(operation)
    server.settimeout(PATIENCE)
    assert server.recv(10) == b"one"
    server.send(b"1")
    assert said.next() == b"1"
    assert server.recv(10) == b"two"
    server.send(b"2")
    assert said.next() == b"2"
    server.shutdown(socket.SHUT_WR)
    assert said.next() == b""


def test_a_reply_that_does_not_come_is_a_timeout_where_it_is_awaited(
    run: Run, said: Said, line: tuple[Wire, socket.socket]
) -> None:
    wire, server = line

    def operation() -> Operation[None]:
        for effect in ((RECEIVE, wire, now() + 0.02), (TALK, wire, (b"x", now() + 0.02, 1))):
            try:
                yield effect
            except TimeoutError:
                said("silent")
        said((yield (RECEIVE, wire, now() + LONG)))
        yield (SLEEP, now() + LONG, None)

    run(operation)
    assert said.next() == said.next() == "silent"
    server.send(b"late")
    assert said.next() == b"late"


def test_a_broken_wire_is_an_error_where_it_is_used(run: Run, said: Said, line: tuple[Wire, socket.socket]) -> None:
    wire, server = line
    server.close()

    def operation() -> Operation[None]:
        for effect in ((SEND, wire, b"x"), (TALK, wire, (b"x", now() + LONG, 1))):
            try:
                yield effect
            except OSError:
                said("broken")
        wire.close()
        try:
            yield (RECEIVE, wire, now() + LONG)
        except OSError:
            said("closed")
        yield (SLEEP, now() + LONG, None)

    run(operation)
    assert [said.next() for _ in range(3)] == ["broken", "broken", "closed"]


def test_a_blocking_call_has_a_thread_of_its_own_and_delays_nobody(run: Run, said: Said) -> None:
    go = threading.Event()

    def blocked() -> Operation[None]:
        name = yield (CALL, lambda: (go.wait(PATIENCE), threading.current_thread().name)[1], None)
        said(name)
        yield (SLEEP, now() + LONG, None)

    watcher = run(blocked, nap(said))
    assert said.next() == "began"
    watcher.poke(watcher._tasks[1])
    assert said.next() == "awake", "the other task goes on while the call blocks"
    go.set()
    assert said.next() == "task-0-connect"


def test_a_call_that_fails_fails_where_it_was_made(run: Run, said: Said) -> None:
    def fail() -> None:
        raise ConnectionRefusedError("no")

    def operation() -> Operation[None]:
        try:
            yield (CALL, fail, None)
        except ConnectionRefusedError as error:
            said(str(error))
        yield (SLEEP, now() + LONG, None)

    run(operation)
    assert said.next() == "no"


def test_a_call_that_finds_no_thread_fails_and_the_next_one_is_made(
    run: Run, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.endswith("-connect"):
            raise RuntimeError("can't start new thread")
        start(thread)

    def operation() -> Operation[None]:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            try:
                yield (CALL, lambda: None, now() + LONG)
            except OSError as error:
                said(str(error))
        said((yield (CALL, lambda: "made", now() + LONG)))
        yield (SLEEP, now() + LONG, None)

    run(operation)
    assert said.next() == "no thread to connect: can't start new thread"
    assert said.next() == "made"


def test_a_poke_during_a_call_does_not_lose_its_result(run: Run, said: Said) -> None:
    go = threading.Event()

    def operation() -> Operation[None]:
        said("calling")
        said((yield (CALL, lambda: go.wait(PATIENCE), None)))
        yield (SLEEP, now() + LONG, None)
        said("poked")
        yield (SLEEP, now() + LONG, None)

    watcher = run(operation)
    assert said.next() == "calling"
    watcher.poke(watcher._tasks[0])
    go.set()
    assert said.next() is True
    assert said.next() == "poked"


def test_a_task_that_fails_unforeseen_starts_again_and_is_heard_of(
    run: Run, said: Said, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_RESTART_AFTER", 0.01)
    lives = iter(range(100))

    def operation() -> Operation[None]:
        life = next(lives)
        said(life)
        yield (SLEEP, now(), None)
        if life < 3:
            raise RuntimeError("unforeseen")
        yield (SLEEP, now() + LONG, None)

    with caplog.at_level(logging.ERROR, "lockrouter"):
        watcher = run(operation, nap(said))
        words = [said.next() for _ in range(5)]
    assert [word for word in words if word != "began"] == [0, 1, 2, 3]
    assert caplog.text.count("unforeseen") >= 3 and "task-0" in caplog.text
    watcher.poke(watcher._tasks[1])
    assert said.next() == "awake"


def test_a_task_that_waits_for_what_it_may_not_starts_again(
    run: Run, said: Said, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_RESTART_AFTER", 0.01)

    def operation() -> Operation[None]:
        said("began")
        yield (WAIT, Waiter(), now() + LONG)

    with caplog.at_level(logging.CRITICAL, "lockrouter"):
        run(operation)
        assert said.next() == said.next() == "began"


def test_a_task_may_end(run: Run, said: Said) -> None:
    def short() -> Operation[None]:
        said("short")
        return
        yield

    watcher = run(short, nap(said))
    assert {said.next(), said.next()} == {"short", "began"}
    watcher.poke(watcher._tasks[0])
    watcher.poke(watcher._tasks[1])
    assert said.next() == "awake"


class Opened:
    """A connection made by a call."""

    def __init__(self, said: Said) -> None:
        self.said = said

    def die(self) -> None:
        self.said("died")


def test_closing_closes_every_task_where_it_waits(said: Said, line: tuple[Wire, socket.socket]) -> None:
    def waiting(*effect: Any) -> Callable[[], Operation[None]]:
        def operation() -> Operation[None]:
            try:
                said("began")
                yield effect[0]
            finally:
                said("closed")

        return operation

    watcher = Watcher("watcher-under-test")
    effects = ((SLEEP, now() + LONG, None), (RECEIVE, line[0], now() + LONG))
    watcher.start([Task("one", waiting(effect)) for effect in effects])
    assert said.next() == said.next() == "began"
    watcher.close(PATIENCE)
    assert said.next() == said.next() == "closed"
    assert not watcher._thread.is_alive()
    watcher.close(PATIENCE)
    watcher.poke(watcher._tasks[0])


def test_a_connection_that_is_made_too_late_is_closed(said: Said) -> None:
    go = threading.Event()

    def connect() -> Opened:
        said("calling")
        go.wait(PATIENCE)
        return Opened(said)

    def operation() -> Operation[None]:
        yield (CALL, connect, None)
        said("used")

    watcher = Watcher("watcher-under-test")
    watcher.start([Task("one", operation)])
    assert said.next() == "calling"
    closer = threading.Thread(target=watcher.close, args=(PATIENCE,))
    closer.start()
    watcher._thread.join(PATIENCE)
    go.set()
    closer.join(PATIENCE)
    assert said.next() == "died" and said.nothing


def test_a_call_that_hangs_is_given_up_in_time_and_takes_one_thread(said: Said, run: Run) -> None:
    go = threading.Event()

    def connect() -> Opened:
        said("calling")
        go.wait(PATIENCE)
        return Opened(said)

    def operation() -> Operation[None]:
        for _ in range(3):
            try:
                yield (CALL, connect, now() + 0.01)
            except TimeoutError:
                said("late")
        go.set()
        yield (SLEEP, now() + LONG, None)

    run(operation)
    assert [said.next() for _ in range(5)] == ["calling", "late", "late", "late", "died"]


def test_a_call_after_one_that_hung_is_made(said: Said, run: Run) -> None:
    go = threading.Event()

    def hang() -> None:
        go.wait(PATIENCE)

    def operation() -> Operation[None]:
        try:
            yield (CALL, hang, now() + 0.01)
        except TimeoutError:
            go.set()
        while True:  # until the thread of the first one has ended
            try:
                said((yield (CALL, lambda: "answer", now() + 0.01)))
                break
            except TimeoutError:
                pass
        yield (SLEEP, now() + LONG, None)

    run(operation)
    assert said.next() == "answer"


def descriptors() -> int:
    return len([*Path(f"/proc/{os.getpid()}/fd").iterdir()])


def test_a_closed_watcher_leaves_no_thread_and_no_descriptor(said: Said) -> None:
    def cycle() -> None:
        watcher = Watcher("watcher-under-test")
        watcher.start([Task("one", nap(said))])
        assert said.next() == "began"
        watcher.close(PATIENCE)

    cycle()
    before = descriptors()
    for _ in range(10):
        cycle()
    assert descriptors() == before
    assert not [thread for thread in threading.enumerate() if thread.name == "watcher-under-test"]


def test_a_watcher_that_never_started_leaves_no_descriptor() -> None:
    Watcher("watcher-under-test").close(PATIENCE)
    before = descriptors()
    for _ in range(10):
        Watcher("watcher-under-test").close(PATIENCE)
    assert descriptors() == before
