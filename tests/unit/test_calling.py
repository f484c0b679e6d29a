"""Callbacks get what they ask for."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from lockrouter.recipes.calling import arguments_of, refuse_coroutines


class Method:
    def none(self) -> None: ...

    def one(self, value: object) -> None: ...


@pytest.mark.parametrize(
    ("fn", "given"),
    [
        (lambda: 1, ()),
        (lambda value: value, (7,)),
        (lambda value=5: value, ()),
        (lambda *, word=1: word, ()),
        (lambda *values: values, ()),
        ([].append, (7,)),
        (threading.Event().set, ()),
        (Method().none, ()),
        (Method().one, (7,)),
        (functools.partial(Method().one, 1), ()),
        (dict, ()),
    ],
)
def test_what_a_callback_is_given(fn: Callable[..., Any], given: tuple[int, ...]) -> None:
    assert arguments_of(fn, 7) == given


def test_what_would_come_later_is_refused() -> None:
    async def coroutine() -> None: ...

    def generator() -> Any:
        yield

    @functools.wraps(coroutine)
    def run_to_its_end() -> Any: ...

    for fn in (coroutine, functools.partial(coroutine), generator):
        with pytest.raises(TypeError, match="once takes plain functions"):
            refuse_coroutines("once", fn)
    refuse_coroutines("once", run_to_its_end)
    refuse_coroutines("once", print)
