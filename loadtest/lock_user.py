"""Locust users that lock keys: one router per process, Locust's own events, figures of their own beside Locust's.

A scenario subclasses `LockUser` and locks through `self.client`. Each lock is one of Locust's requests: type LOCK or
TRY, name the scenario's (never the key: names must stay few), response time the milliseconds until the grant.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from locust import User, events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import RescheduleTask, StopUser
from locust.runners import MasterRunner
from slo import Slo

from lockrouter import LockRouter, RowLock
from lockrouter.errors import LockLost, LockRouterError, RouterClosed, ShardError

__all__ = ["LockClient", "LockUser"]


class _Kit:
    """What all users of one process share."""

    def __init__(self, router: LockRouter) -> None:
        self.router = router
        self.slo = Slo()


_kits: WeakKeyDictionary[Environment, _Kit] = WeakKeyDictionary()


class LockClient:
    """Takes locks for one user and reports each of them."""

    def __init__(self, user: LockUser) -> None:
        self._user = user
        kit = _kits[user.environment]
        self._router, self._slo = kit.router, kit.slo

    @contextmanager
    def lock(self, key: str | bytes, timeout: float | None = None) -> Iterator[RowLock]:
        """Hold the lock of `key` inside the block. A failure is reported and ends the task."""
        with self._taken("LOCK", lambda: self._router.lock(key, timeout)) as handle:
            assert handle is not None
            yield handle

    @contextmanager
    def try_lock(self, key: str | bytes) -> Iterator[RowLock | None]:
        """Hold the lock of `key` inside the block, or have None there where the row is busy: an answer, no failure."""
        with self._taken("TRY", lambda: self._router.try_lock(key)) as handle:
            yield handle

    @contextmanager
    def _taken(self, kind: str, take: Callable[[], RowLock | None]) -> Iterator[RowLock | None]:
        began = time.monotonic()
        due = self._user.take_due() or began
        try:
            handle = take()
        except RouterClosed as error:
            raise StopUser from error
        except LockRouterError as error:
            self._slo.failed(began, error)
            self._fire(kind, time.monotonic() - began, None, error)
            raise RescheduleTask from error
        waited = time.monotonic() - began
        if handle is None:
            self._slo.failed(began, None)
            self._fire(kind, waited, None, None)
            yield None
            return
        self._slo.granted(due, began, degraded=handle.degraded)
        lost: LockLost | None = None
        try:
            with handle:
                yield handle
        except LockLost as error:
            lost = error
            self._slo.lost += 1
            raise RescheduleTask from error
        finally:
            self._fire(kind, waited, handle, lost)

    def _fire(self, kind: str, waited: float, handle: RowLock | None, error: LockRouterError | None) -> None:
        self._user.environment.events.request.fire(
            request_type=kind,
            name=self._user.scenario or type(self._user).__name__,
            response_time=waited * 1e3,
            response_length=0,
            response=handle,
            context={},
            exception=error,
        )


class LockUser(User):
    """A user whose `client` takes locks. With `--rate` it is due that often a second, however long its locks take."""

    abstract = True
    scenario = ""
    """The name its locks have in the report; by default the class's."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.client = LockClient(self)
        self._rate: float = _options(environment).rate
        self._next = time.monotonic() + (random.random() / self._rate if self._rate else 0.0)
        self._due: float | None = None
        _kits[environment].slo.paced = self._rate > 0

    def wait_time(self) -> float:
        """Seconds until the next task is due. Dues are fixed beforehand: a late one is made up for, not skipped."""
        if not self._rate:
            return 0.0
        self._next += 1 / self._rate
        self._due = self._next
        return max(0.0, self._next - time.monotonic())

    def take_due(self) -> float | None:
        """When the present task's first call was due; None for further calls, and without a rate."""
        due, self._due = self._due, None
        return due


def _options(environment: Environment) -> Any:
    return environment.parsed_options


def _add_arguments(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("lockrouter")
    group.add_argument("--shards", env_var="LOCKROUTER_SHARDS", metavar="FILE", help="The shard file.")
    group.add_argument(
        "--proof", env_var="LOCKROUTER_PROOF", metavar="DIR", help="An empty folder for the proof of exclusion."
    )
    group.add_argument(
        "--rate", env_var="LOCKROUTER_RATE", type=float, default=0.0, help="Tasks a second and user; 0: closed loop."
    )


def _make_router(environment: Environment, **_: object) -> None:
    options = _options(environment)
    if not options.shards:
        raise SystemExit("name the shard file: --shards FILE")
    if not isinstance(environment.runner, MasterRunner):
        kit = _kits[environment] = _Kit(LockRouter.from_file(options.shards))
        try:
            kit.router.warm()
        except ShardError as error:
            logging.getLogger(__name__).warning("not warm: %s", error)


def _save(environment: Environment, **_: object) -> None:
    kit, folder = _kits.get(environment), _options(environment).proof
    if kit is not None and folder:
        kit.slo.save(folder)


def _close(environment: Environment, **_: object) -> None:
    kit = _kits.get(environment)
    if kit is not None:
        kit.router.close()


# Locust leaves its hooks untyped.
_listen: Any = events
_listen.init_command_line_parser.add_listener(_add_arguments)
_listen.init.add_listener(_make_router)
_listen.test_stop.add_listener(_save)
_listen.quitting.add_listener(_close)
