"""The one background thread of a router: it runs many operations side by side, and nobody's callbacks.

An operation here is an endless generator (see `protocol.effects`). Sockets are multiplexed, sleeping is a heap of
timers, and connecting, which blocks, is done by a short-lived thread each, so that a dead shard delays no other. What
hangs for ever (a resolver) is given up in time, and then takes one thread of its task, not one for each try.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from lockrouter.deadline import now
from lockrouter.protocol.effects import CALL, RECEIVE, SEND, SLEEP, TALK, Operation

__all__ = ["Task", "Watcher"]

_log = logging.getLogger("lockrouter")

_RESTART_AFTER = 1.0
_POKE = -1


class Task:
    """One endless operation; `make` makes it anew after a failure nobody foresaw."""

    __slots__ = ("calling", "effect", "make", "name", "operation", "poked", "turn", "watched")

    def __init__(self, name: str, make: Callable[[], Operation[None]]) -> None:
        self.name = name
        self.make = make
        self.operation = make()
        self.effect: tuple[int, Any, Any] | None = None
        # Raised each time the task goes on: timers and wake-ups of an earlier wait are then stale.
        self.turn = 0
        self.poked = False
        # True while a thread carries out a CALL, of this turn or of one that was given up.
        self.calling = False
        self.watched: int | None = None


class Watcher:
    """Runs tasks in one daemon thread (a greenlet under gevent) from `start` until `close`."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._mail: deque[tuple[Task, Any, BaseException | None, int | None]] = deque()
        self._timers: list[tuple[float, int, Task, int]] = []
        self._order = itertools.count()
        self._selector = selectors.DefaultSelector()
        self._inbox, self._bell = socket.socketpair()
        self._inbox.setblocking(False)
        self._bell.setblocking(False)
        self._selector.register(self._inbox, selectors.EVENT_READ)
        self._tasks: list[Task] = []
        self._callers: list[threading.Thread] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, tasks: list[Task]) -> None:
        """Begin to run `tasks`."""
        self._tasks = tasks
        self._mail.extend((task, None, None, None) for task in tasks)
        self._thread.start()

    def poke(self, task: Task) -> None:
        """End the task's present or next sleep at once."""
        task.poked = True
        self._post(task, None, None, _POKE)

    def _post(self, task: Task, value: Any, error: BaseException | None, turn: int | None) -> None:
        self._mail.append((task, value, error, turn))
        try:
            self._bell.send(b"!")
        except OSError:  # full: it rings already; closed: nobody listens any more
            pass

    def close(self, timeout: float) -> None:
        """End all tasks, closing what they hold, and the thread. Idempotent."""
        self._closing = True
        try:
            self._bell.send(b"!")
        except OSError:
            pass
        until = now() + timeout
        for thread in (self._thread, *self._callers):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, until - now()))
        while self._mail:
            # A connection that was opened too late to be used.
            value = self._mail.popleft()[1]
            if value is not None:
                value.die()
        if self._thread.ident is None:
            self._selector.close()
        self._inbox.close()
        self._bell.close()

    def forget(self) -> None:
        """In a child process: let go of what the parent's thread used."""
        self._selector.close()
        self._inbox.close()
        self._bell.close()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            for task in self._tasks:
                task.operation.close()
            self._selector.close()

    def _turn(self) -> None:
        while self._mail and not self._closing:
            task, value, error, turn = self._mail.popleft()
            if turn == _POKE:
                # Many pokes of a busy task are one.
                if task.poked and task.effect is not None and task.effect[0] == SLEEP:
                    task.poked = False
                    self._advance(task, None, None)
            elif turn is None or turn == task.turn:
                self._advance(task, value, error)
            elif value is not None:
                value.die()  # a connection that was opened too late to be used
        while self._timers and self._timers[0][0] <= now():
            _, _, task, turn = heapq.heappop(self._timers)
            if turn == task.turn and task.effect is not None:
                error = TimeoutError("no reply") if task.effect[0] in (RECEIVE, CALL) else None
                self._advance(task, None, error)
        if self._mail or self._closing:
            return
        wait = max(0.0, self._timers[0][0] - now()) if self._timers else 1.0
        for key, _ in self._selector.select(min(wait, 1.0)):
            if key.data is None:
                self._hush()
            else:
                self._arrived(key.data)

    def _hush(self) -> None:
        try:
            self._inbox.recv(4096)
        except OSError:
            pass

    def _arrived(self, task: Task) -> None:
        assert task.effect is not None
        try:
            data = task.effect[1].receive_now()
        except OSError as error:
            self._advance(task, None, error)
            return
        if data is not None:
            self._advance(task, data, None)

    def _advance(self, task: Task, value: Any, error: BaseException | None) -> None:
        """Let a task go on until it has to wait again."""
        if task.watched is not None:
            self._selector.unregister(task.watched)
            task.watched = None
        task.turn += 1
        task.effect = None
        try:
            while True:
                effect = task.operation.throw(error) if error is not None else task.operation.send(value)
                value = error = None
                try:
                    over, value = self._begin(task, effect)
                    if not over:
                        return
                except OSError as failed:
                    error = failed
        except StopIteration:
            return
        except Exception:  # noqa: BLE001 - a background task must not die quietly, whatever it met
            _log.exception("background task %s failed; it starts again", task.name)
            task.operation = task.make()
            task.effect = (SLEEP, 0.0, None)
            heapq.heappush(self._timers, (now() + _RESTART_AFTER, next(self._order), task, task.turn))

    def _begin(self, task: Task, effect: tuple[int, Any, Any]) -> tuple[bool, Any]:
        """Start waiting for an effect; returns whether it was over at once, and its result."""
        kind, subject, detail = effect
        if kind == SEND:
            subject.send(detail)
            return True, None
        if kind == TALK:
            data, until, _ = detail
            subject.expect(1)  # whatever a lock waited for last: one byte wakes this thread
            subject.send(data)
            kind, detail = RECEIVE, until
            effect = (kind, subject, detail)
        if kind == RECEIVE:
            data = subject.receive_now()
            if data is not None:
                return True, data
            task.watched = subject.sock.fileno()
            self._selector.register(task.watched, selectors.EVENT_READ, task)
            self._at(detail, task)
        elif kind == SLEEP:
            if task.poked:
                task.poked = False
                return True, None
            self._at(subject, task)
        elif kind == CALL:
            if detail is not None:
                self._at(detail, task)
            if not task.calling:
                self._call(task, subject)
        else:
            raise AssertionError(f"a background task may not wait for effect {kind}")
        task.effect = effect
        return False, None

    def _at(self, when: float, task: Task) -> None:
        heapq.heappush(self._timers, (when, next(self._order), task, task.turn))

    def _call(self, task: Task, function: Callable[[], Any]) -> None:
        turn = task.turn
        task.calling = True

        def run() -> None:
            value, failure = None, None
            try:
                value = function()
            except Exception as error:  # noqa: BLE001 - delivered to the task that asked, which decides
                failure = error
            task.calling = False
            self._post(task, value, failure, turn)

        thread = threading.Thread(target=run, name=f"{task.name}-connect", daemon=True)
        self._callers = [*(t for t in self._callers if t.is_alive()), thread]
        try:
            thread.start()
        except RuntimeError as error:
            self._callers.remove(thread)
            task.calling = False
            self._post(task, None, OSError(f"no thread to connect: {error}"), turn)
