"""A hold is the caller's own where the running thing took it and the context records it: both, never one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, TypeVar

import greenlet
import pytest

from lockrouter.gate import Hold
from lockrouter.owners import describe, forget, own_holds, record, running

T = TypeVar("T")


def take() -> Hold:
    """A hold of the running thing, recorded in its context."""
    hold = Hold(1, b"k", running(), None, shard=None, session=None)
    record(hold)
    return hold


def mine() -> tuple[Hold, ...]:
    return own_holds(running())


def in_thread(work: Callable[[], T]) -> T:
    """The result of `work` in a new thread with a context of its own."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join(20)
    return results[0]


@pytest.fixture(autouse=True)
def clean_context() -> Any:
    """Each test in a context that records nothing."""
    holds = mine()
    yield
    for hold in mine():
        if hold not in holds:
            forget(hold)


def test_what_was_taken_and_recorded_here_is_mine() -> None:
    hold, other = take(), take()
    assert mine() == (hold, other)
    forget(hold)
    assert mine() == (other,)
    forget(hold)
    assert mine() == (other,)


def test_a_released_hold_is_nobodys() -> None:
    hold = take()
    hold.count = 0
    assert mine() == ()


def test_released_holds_do_not_pile_up_in_a_context() -> None:
    for _ in range(100):
        take().count = 0
    last = take()
    from lockrouter.owners import _holds

    assert _holds.get() == (last,)


def test_another_thread_owns_nothing_even_in_the_same_context() -> None:
    take()
    assert in_thread(mine) == ()
    context = copy_context()
    assert in_thread(lambda: context.run(mine)) == ()


def test_threads_one_after_another_are_different_owners_though_their_ids_are_equal() -> None:
    context = copy_context()
    first = in_thread(lambda: (threading.get_ident(), running(), context.run(take)))
    for _ in range(100):
        second = in_thread(lambda: (threading.get_ident(), running(), context.run(mine)))
        assert second[1] is not first[1] and second[2] == ()
        if second[0] == first[0]:
            return
    pytest.fail("no thread id was used again")


def test_foreign_threads_with_equal_ids_do_not_share_without_a_common_context() -> None:
    """Threads that Python did not start may look like one object; their contexts differ."""
    import _thread

    done = threading.Semaphore(0)
    seen: list[tuple[Hold, ...]] = []

    def run() -> None:
        seen.append(mine())
        take()
        done.release()

    for _ in range(20):
        _thread.start_new_thread(run, ())
        assert done.acquire(timeout=20)
    assert seen == [()] * 20


def test_what_was_recorded_before_a_context_was_copied_is_mine_inside_it() -> None:
    hold = take()
    assert copy_context().run(mine) == (hold,)


def test_what_was_recorded_inside_a_copied_context_is_not_mine_outside() -> None:
    inner = copy_context().run(take)
    assert inner.thing is running() and mine() == ()


def test_two_sibling_contexts_of_one_thread_do_not_share() -> None:
    one, two = copy_context(), copy_context()
    hold = one.run(take)
    assert two.run(mine) == () and one.run(mine) == (hold,)


def test_a_child_task_does_not_own_what_its_parent_holds() -> None:
    async def child() -> tuple[Hold, ...]:
        return mine()

    async def parent() -> None:
        hold = take()
        assert hold.thing is asyncio.current_task() and mine() == (hold,)
        assert await asyncio.create_task(child()) == ()
        assert [*await asyncio.gather(child(), child())] == [(), ()]
        assert await child() == (hold,), "awaited in the same task, it is the same caller"
        assert mine() == (hold,)

    asyncio.run(parent())


def test_a_worker_thread_of_a_task_does_not_own_what_the_task_holds() -> None:
    async def parent() -> None:
        hold = take()
        assert await asyncio.to_thread(mine) == ()
        inner = await asyncio.to_thread(take)
        assert mine() == (hold,) and inner.thing is not hold.thing

    asyncio.run(parent())


def test_a_task_does_not_own_what_its_thread_held_before_the_loop() -> None:
    hold = take()

    async def main() -> tuple[Hold, ...]:
        return mine()

    assert asyncio.run(main()) == ()
    assert mine() == (hold,)


def test_a_callback_of_the_loop_is_its_thread() -> None:
    async def main() -> object:
        found: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(lambda: found.set_result(running()))
        return await found

    assert asyncio.run(main()) is threading.current_thread()


def test_a_greenlet_is_an_owner_of_its_own() -> None:
    hold = take()

    def work() -> tuple[object, tuple[Hold, ...]]:
        return running(), mine()

    child = greenlet.greenlet(work)
    child.gr_context = copy_context()
    thing, owned = child.switch()
    assert thing is child and owned == ()
    assert mine() == (hold,)


def test_the_main_greenlet_of_a_thread_is_the_thread() -> None:
    assert running() is threading.current_thread()
    thing, thread = in_thread(lambda: (running(), threading.current_thread()))
    assert thing is thread


def test_owners_are_described_by_their_names() -> None:
    assert "worker-7" in describe(threading.Thread(name="worker-7"))

    async def main() -> str:
        task = asyncio.current_task()
        assert task is not None
        task.set_name("request-9")
        return describe(running())

    assert "request-9" in asyncio.run(main())
    assert describe(17) == "17"
