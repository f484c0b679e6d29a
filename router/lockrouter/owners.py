"""Who is asking: the running thing (asyncio task, greenlet or thread) and the holds its context records as its own.

Both must agree for a hold to be the caller's own. A context alone is inherited by child tasks and worker threads; a
thread alone serves many requests one after the other. Things are compared by object, never by a reusable id.
"""

from __future__ import annotations

import sys
from asyncio import _get_running_loop, current_task
from contextvars import ContextVar
from threading import current_thread

from lockrouter.gate import Hold

__all__ = ["describe", "forget", "own_holds", "record", "running"]

_holds: ContextVar[tuple[Hold, ...]] = ContextVar("lockrouter_holds", default=())


def running() -> object:
    """The asyncio task, else the greenlet, else the thread that runs now."""
    if _get_running_loop() is not None and (task := current_task()) is not None:
        return task
    greenlet = sys.modules.get("greenlet")
    if greenlet is not None:
        current: object = greenlet.getcurrent()
        # The main greenlet of a thread is that thread; it lives as long.
        if getattr(current, "parent", None) is not None:
            return current
    return current_thread()


def own_holds(me: object) -> tuple[Hold, ...]:
    """The living holds that the current context records and that `me` took."""
    holds = _holds.get()
    if not holds:
        return ()
    return tuple(hold for hold in holds if hold.thing is me and hold.count)


def record(hold: Hold) -> None:
    """Note in the current context that `hold` was taken in it."""
    holds = _holds.get()
    if len(holds) == 1 and not holds[0].count:  # the usual one: the last lock of this context, released
        holds = ()
    _holds.set((*(old for old in holds if old.count), hold) if holds else (hold,))


def forget(hold: Hold) -> None:
    """Take a released hold out of the current context, where it stands there."""
    holds = _holds.get()
    if hold in holds:
        _holds.set(tuple(old for old in holds if old is not hold and old.count))


def describe(thing: object) -> str:
    """A name for error messages."""
    name = getattr(thing, "name", None) or (getattr(thing, "get_name", None) or (lambda: None))()
    return f"{type(thing).__name__} {name!r}" if name else repr(thing)
