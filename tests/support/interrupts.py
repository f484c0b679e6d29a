"""Interrupts at every instant at which the interpreter would throw one into a call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pymysql
import sqlalchemy

import lockrouter

from .observe import in_thread

__all__ = ["Interrupt", "interrupted"]

_WATCHED = tuple(folder for package in (lockrouter, sqlalchemy, pymysql) for folder in package.__path__)


class Interrupt(BaseException):
    """What is thrown into a thread from outside."""


class _Interrupter:
    """Raises `Interrupt` once in the profiled thread: at instant `at` of those at which the interpreter would.

    It looks for signals and asynchronous errors where a function begins and where a call of a C function has returned;
    between two lines, or between a `with` statement's last line and its exit, it does not. From Python 3.14 on it looks
    between taking the mutex of a `with` and its block, too, where nothing written in Python can help: not struck here.
    """

    def __init__(self, at: int) -> None:
        self.left = at
        self.place: str | None = None

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        looks = event == "call" or (event == "c_return" and getattr(arg, "__name__", None) != "__enter__")
        if self.place is None and looks and code.co_filename.startswith(_WATCHED):
            if self.left == 0:
                self.place = f"{Path(code.co_filename).name}:{frame.f_lineno} ({code.co_qualname}, {event} {arg})"
                raise Interrupt
            self.left -= 1


def _is_in(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, Interrupt):
        error = error.__context__
    return error is not None


def interrupted(call: Callable[[], object], at: int) -> str | None:
    """Run `call` in a thread, interrupted at instant `at`; answers where that was, or None if it was over before."""
    interrupter = _Interrupter(at)

    def run() -> None:
        sys.setprofile(interrupter)
        try:
            call()
        except BaseException as error:
            # What it strikes in may replace it: SQLAlchemy's clean-up asserts that it came to its end.
            if not _is_in(error):
                raise
        finally:
            sys.setprofile(None)

    in_thread(run).result()
    return interrupter.place
