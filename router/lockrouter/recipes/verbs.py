"""The verbs of the recipes, as `LockRouter` has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockrouter.recipes.election import Election
from lockrouter.recipes.guard import Guard
from lockrouter.recipes.once import once
from lockrouter.recipes.semaphore import Semaphore

if TYPE_CHECKING:
    from lockrouter.core import Core

__all__ = ["RecipeVerbs"]


class RecipeVerbs:
    """What a router offers on top of its locks. Everything here raises `ShardUnavailable` in an outage."""

    _core: Core

    def once(
        self,
        key: str | bytes,
        fn: Callable[..., Any],
        ttl: float = 60.0,
        keep: float = 86400.0,
        transaction: bool = False,
    ) -> Any:
        """The result of `fn()`, which is stored and returned to every later caller of `key`, as JSON has it.

        While one caller runs `fn`, kept alive in the background, the others get `InProgress`. An error of `fn` stores
        nothing and frees the key at once. After a crash, or a pause longer than `ttl`, the next caller runs it again:
        so its side effects carry the token (`fn` is given the lease if it has a parameter for it) or may happen twice.

        With `transaction=True`, `fn(conn)` runs in a transaction under the row lock of `key`, and the record commits
        with what it writes: exactly once. It may be called again after a loss that rolled everything back. All callers
        of one key use the same `transaction`.

            >>> router.once("message:8812", lambda: {"order": 8812, "sent": True})
            {'order': 8812, 'sent': True}
            >>> router.once("message:8812", lambda: "never called")
            {'order': 8812, 'sent': True}

        Args:
            key: 1 to 255 bytes, as `bytes` or UTF-8 `str`.
            ttl: seconds, 1 to 7 days, after which a dead caller's key is free; `transaction=True` needs none.
            keep: seconds, 1 to 10 years, for which the result is returned instead of a new run.

        Raises:
            InProgress: another caller runs it now.
            TypeError, ValueError: the result is no JSON, or has more than 512 KiB. It has run, nothing was stored.
            LockLost: the lease, or the transaction, was lost; the result was not stored, nobody's was overwritten.
            ShardError: the shard does not answer. If `fn` has run by then, its result was not stored.
            Whatever `fn` raises; with `transaction=True`, whatever `run` raises.
        """
        return once(self._core, key, fn, ttl=ttl, keep=keep, transaction=transaction)

    def guard(self, name: str | bytes, ttl: float = 30.0, at_least: float = 0.0) -> Guard:
        """A decorator, and a context manager: of all nodes that come one runs, the others get `SKIPPED` (falsy).

        It is kept alive while it runs. If its node crashes, or is frozen for longer than `ttl`, the next node that asks
        runs the job again. The guarded function's `reason` says why it was skipped. Leaving raises `LockLost` where the
        guard was lost meanwhile: another node may have run.

            >>> @router.guard("nightly-report", ttl=30, at_least=60)
            ... def nightly_report():
            ...     return "written"
            >>> nightly_report()
            'written'
            >>> nightly_report()
            SKIPPED
            >>> with router.guard("clean-up", ttl=30) as held:
            ...     if held:
            ...         print("cleaning up")
            cleaning up

        Args:
            name: 1 to 255 bytes, as `bytes` or UTF-8 `str`.
            ttl: seconds, 1 to 7 days.
            at_least: seconds for which it counts as running, by the server's clock, even if the work was quicker, or
                failed: longer than the nodes' timers differ.

        Raises:
            ShardError: on entering: the shard does not answer.
        """
        return Guard(self._core, name, ttl=ttl, at_least=at_least)

    def election(self, name: str | bytes, ttl: float = 15.0) -> Election:
        """A context manager: in its block this process stands for election; one of all candidates is the leader.

        Never two before their own deadlines, while the servers' clocks agree within `clock_skew`; the token orders the
        rest. The leader is kept alive, and deposed by its own clock at the latest when its ttl has passed.

            >>> with router.election("settlement", ttl=15) as candidate:
            ...     if candidate.wait(timeout=10):
            ...         print(candidate.is_leader, candidate.token > 0)
            True True

        Args:
            name: 1 to 255 bytes, as `bytes` or UTF-8 `str`.
            ttl: seconds, 1 to 7 days, after which a dead leader is replaced.
        """
        return Election(self._core, name, ttl=ttl)

    def semaphore(self, name: str | bytes, permits: int, ttl: float = 30.0) -> Semaphore:
        """A semaphore of the whole fleet: at most `permits` are held at once; who waits is served in order.

            >>> gateway = router.semaphore("gateway-x", permits=2)
            >>> with gateway.acquire(timeout=2.0), gateway.acquire(timeout=2.0):
            ...     print(gateway.try_acquire())
            None

        Args:
            name: 1 to 247 bytes, as `bytes` or UTF-8 `str`.
            permits: 1 to 1,000; lowered, it takes effect as permits are given back.
            ttl: seconds, 1 to 7 days, after which a dead holder's permit is free again.
        """
        return Semaphore(self._core, name, permits=permits, ttl=ttl)
