"""What an operation may wait for, and the blocking driver.

An operation is a generator that yields effects and is sent their results, so one algorithm serves blocking callers,
the background thread that multiplexes many operations, and asyncio (the way psycopg 3 does it). An effect is a plain
tuple, because several are made for every lock:

- `(SEND, wire, data)`: all bytes are on their way; result None.
- `(TALK, wire, (data, until, least))`: SEND, then RECEIVE of `least` bytes or more, in one step: what every lock does.
- `(RECEIVE, wire, until)`: result: some bytes, `b""` at the end of the stream; raises TimeoutError at `until`.
- `(WAIT, waiter, until)`: result True when the waiter was woken, False at `until`.
- `(SLEEP, until, None)`: result None.
- `(CALL, function, until)`: result of a function that may block for as long as its own bounds say (connecting). The
  background gives it up at `until`, if that is not None, and raises TimeoutError; a blocking caller has to wait.

An error of an effect is thrown into the operation where it waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from typing import Any, TypeVar

from lockrouter.deadline import now

__all__ = ["CALL", "RECEIVE", "SEND", "SLEEP", "TALK", "WAIT", "Effect", "Operation", "Waiter", "drive"]

SEND, RECEIVE, WAIT, SLEEP, CALL, TALK = range(6)

Effect = tuple[int, Any, Any]
T = TypeVar("T")
Operation = Generator[Effect, Any, T]


class Waiter:
    """One caller's bed: `wake` may come before, during or after the wait, and is a hint only."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        """Make the present or next `wait` return at once; waking twice is waking once."""
        if self._lock.locked():
            try:
                self._lock.release()
            except RuntimeError:  # two wakers at once: the other one did it
                pass

    def wait(self, until: float) -> bool:
        """Return True once woken, False at `until`."""
        return self._lock.acquire(timeout=min(max(0.0, until - now()), threading.TIMEOUT_MAX))


def perform(effect: Effect) -> Any:
    """Carry out one effect, but TALK, by blocking the calling thread or greenlet."""
    kind, subject, detail = effect
    if kind == RECEIVE:
        return subject.receive(detail)
    if kind == SEND:
        return subject.send(detail)
    if kind == WAIT:
        return subject.wait(detail)
    if kind == SLEEP:
        return time.sleep(max(0.0, subject - now()))
    return subject()


def drive(operation: Operation[T]) -> T:
    """Run an operation to its end in the calling thread or greenlet and return its result."""
    step = operation.send
    result: Any = None
    try:
        while True:
            effect = step(result)
            while True:
                try:
                    if effect[0] == TALK:
                        data, until, least = effect[2]
                        effect[1].send(data)
                        result = effect[1].receive(until, least)
                    else:
                        result = perform(effect)
                    break
                except BaseException as error:  # noqa: BLE001 - the operation decides; what it does not catch comes out
                    effect = operation.throw(error)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    finally:
        operation.close()  # an interrupt that hit this driver itself still ends the operation now, not at collection
