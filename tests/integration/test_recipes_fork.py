"""After a fork the child has nothing of its parent's recipes, works on its own, and its parent loses nothing."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator

import pytest

from lockrouter import SKIPPED, InProgress, LockRouter
from lockrouter.testing.cluster import Cluster
from tests.support.observe import Routers, keys_on

pytestmark = [pytest.mark.server, pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")]


@pytest.fixture
def router(cluster: Cluster) -> Iterator[LockRouter]:
    routers = Routers(cluster)
    for server in routers.observers:
        for (table,) in [*server.ask("SHOW TABLES LIKE 'lease%'"), ("once",)]:
            server.ask(f"DELETE FROM {table}")
    yield routers.make()
    routers.finish()


def in_child(work: Callable[[], None]) -> bool:
    """Whether the work succeeded in a forked process."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the child must end here, whatever happened
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def test_the_child_owns_nothing(router: LockRouter) -> None:
    name = keys_on(router, 0, prefix="fork")[0]
    semaphore = router.semaphore(name, permits=1)
    with router.election(name, ttl=10.0) as leader, router.guard(name) as held, semaphore.acquire() as permit:
        assert leader.wait(10.0)
        assert held
        another = router.semaphore(f"{name}:another", permits=1)

        def child() -> None:
            assert not leader.is_leader
            assert leader.token is None
            assert not leader.wait(0.1)
            assert held.lost
            assert permit.lost
            assert router.guard(name)(lambda: 1)() is SKIPPED
            assert router.semaphore(name, permits=1).try_acquire() is None
            assert semaphore.try_acquire() is None
            with another.acquire(timeout=5.0):
                pass
            assert router.once(f"{name}:child", lambda: "child") == "child"
            leader.resign()
            leader.__exit__(None, None, None)
            router.close()

        assert in_child(child)
        assert leader.is_leader
        assert not held.lost
        assert not permit.lost
        permit.check()
        assert router.once(f"{name}:child", lambda: "parent") == "child"


def test_work_that_forks_is_stored_by_the_parent_alone(router: LockRouter) -> None:
    key = keys_on(router, 0, prefix="forks")[0]

    def work() -> str:
        def child() -> None:
            with pytest.raises(InProgress):
                router.once(key, lambda: "child")
            router.close()

        assert in_child(child)
        return "parent"

    assert router.once(key, work) == "parent"
