"""Sweepers: any number of them may run; for each shard one of them is elected for each pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from prometheus_client import REGISTRY, CollectorRegistry
from sqlalchemy import text

from lockrouter.admin.connect import connected, fetch
from lockrouter.admin.sweep import Swept, sweep_shard
from lockrouter.config import RouterConfig, ShardConfig
from lockrouter.errors import LockRouterError, ShardError
from lockrouter.metrics import Metrics
from lockrouter.recipes.own import Kind, OwnLease, Place, take
from lockrouter.router import LockRouter
from lockrouter.routing import Address
from lockrouter.sql.recipes import FIRST_OPEN_BUCKET

__all__ = ["Sweeper"]

_log = logging.getLogger("lockrouter")

_TTL = 30.0
_NAME = "sweeper"


class Sweeper:
    """Sweeps the shards of a file, each under a lease of its own that lives on that very shard."""

    def __init__(self, config: RouterConfig, *, registry: CollectorRegistry = REGISTRY) -> None:
        self._config = config
        self._router = LockRouter(config, registry=registry)
        self._metrics = Metrics.of(registry)

    def sweep(self, *, every: float = 0.0, go_on: Callable[[], bool] = lambda: True) -> list[Swept]:
        """One pass over all shards that no other sweeper is sweeping, or has swept in this interval.

        A shard that cannot be swept is named in its `Swept`, and the others are swept all the same.

        Args:
            every: seconds from one pass to the next, of all sweepers together; 0: nobody is kept from the next one.
            go_on: False ends the pass soon.
        """
        return [self._sweep(shard, every, go_on) for shard in self._config.shards if go_on()]

    def _sweep(self, shard: ShardConfig, every: float, go_on: Callable[[], bool]) -> Swept:
        try:
            place = self._place(shard)
            if place is None:
                return Swept(shard.id, skipped="it has no buckets")
            lease = take(place, ttl=_TTL)
            if lease is None:
                return Swept(shard.id, skipped="another sweeper is at it, or was a moment ago")
            return self._elected(shard, lease, every, go_on)
        except ShardError as error:
            _log.warning("shard %s could not be swept: %s", shard.id, error)
            return Swept(shard.id, skipped=str(error), failed=True)

    def _elected(self, shard: ShardConfig, lease: OwnLease, every: float, go_on: Callable[[], bool]) -> Swept:
        try:
            swept = sweep_shard(self._config, shard, go_on=lambda: go_on() and not lease.lost)
        finally:
            self._leave(lease, every)
        for what, number in swept.deleted.items():
            self._metrics.swept.labels(shard.id, what).inc(number)
        self._metrics.swept_at.labels(shard.id).set(time.time())
        return swept

    def _leave(self, lease: OwnLease, every: float) -> None:
        try:
            if every:
                lease.leave(every * 0.9)
            else:
                lease.release()
        except LockRouterError as error:
            # Two sweepers at once do no harm, but for the load: every row is looked at again when it is deleted.
            _log.info("a sweeper's lease ended before its pass: %s", error)

    def _place(self, shard: ShardConfig) -> Place | None:
        """In the first bucket that the shard itself says it has: they move, and not every sweeper's map knows."""
        with connected(self._config, shard) as connection:
            (row,) = fetch(connection, text(FIRST_OPEN_BUCKET))
        if row.bucket is None:
            return None
        address = Address(row.bucket, shard.id, row.bucket % self._config.topology.tables, 0)
        return Place(self._router._core, Kind.SWEEPER, _NAME, address=address)

    def close(self) -> None:
        """Nothing of the sweeper is left. Idempotent."""
        self._router.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
