"""Callbacks take what they ask for: `fn(value)` where it has a parameter that must be given, else `fn()`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["arguments_of", "refuse_coroutines"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def arguments_of(fn: Callable[..., Any], value: Any) -> tuple[Any, ...]:
    """The arguments to call `fn` with: `value`, if it cannot be called without one."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a built-in that does not tell
        return ()
    wanted = any(one.kind in _POSITIONAL and one.default is inspect.Parameter.empty for one in parameters)
    return (value,) if wanted else ()


def refuse_coroutines(what: str, fn: Callable[..., Any]) -> None:
    """Raise TypeError for a function whose work would be done after its call has returned."""
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError(f"{what} takes plain functions: the work of a coroutine or generator would come after it")
