"""`lockrouter seed`: every bucket of the map has all its lock rows, and a row is open on one shard at most."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b

from sqlalchemy import Connection

from lockrouter.admin.connect import administrator, connected, each_shard, fetch, run
from lockrouter.admin.meta import Bucket, buckets_of, check, read_buckets, read_meta
from lockrouter.admin.rows import fill_table
from lockrouter.config import RouterConfig, ShardConfig
from lockrouter.errors import ShardError, ShardUnavailable
from lockrouter.sql import admin as sql

__all__ = ["Progress", "SeedReport", "seed"]

Progress = Callable[[str, int, int], None]
"""Called with shard id, rows that are there, rows wanted; from several threads, never twice at once for one shard."""

_LANES = 2
"""Connections per shard that fill tables at the same time."""
_MUTEX_WAIT = 3600
"""Seconds to wait for another seeder of the same database."""


@dataclass(frozen=True, slots=True)
class SeedReport:
    """What `seed` did on one shard."""

    shard: str
    rows: int
    """Rows of the shard's own buckets; all of them are there."""
    inserted: int
    closed: int
    """Buckets of the file that are closed here: `reshard` opens them, or they have moved on."""
    seconds: float


@dataclass(frozen=True, slots=True)
class _Known:
    """What a shard knew before the first insert."""

    epoch: int
    buckets: Mapping[int, Bucket]


def seed(config: RouterConfig, admin: RouterConfig | None = None, progress: Progress | None = None) -> list[SeedReport]:
    """All shards have their own rows: missing ones are inserted, nothing else is touched. Repeatable, resumable.

    A row gets the epoch that lock_bucket has for its bucket, in the inserting transaction. A bucket that a shard does
    not know yet is opened (the topology's epoch) only if the whole topology is being seeded for the first time: all
    shards answer, were made at the file's very epoch, and no other one knows the bucket. Otherwise somebody may hold
    its rows elsewhere, and it becomes known as closed (epoch 0), to be opened by `reshard`.

    Args:
        admin: the same shards with an administrator's credentials (INSERT on the lock tables); None: the file's own.

    Raises:
        ConfigError: the administrator's file does not fit.
        NotSeeded: `init` was not run.
        ShardUnavailable: a shard does not answer, is read-only, or denies access; the others are seeded nevertheless if
            they know all their buckets already.
        TopologyMismatch: a database belongs to another topology, or is newer than the file.
    """

    known, failures = _survey(config, admin)
    reachable = [shard for shard in config.shards if shard.id in known]
    if failures and any(bucket not in known[shard.id].buckets for shard in reachable for bucket in buckets_of(shard)):
        raise _first(failures)
    new = not failures and all(answer.epoch == config.topology.epoch for answer in known.values())
    stop = threading.Event()

    def work(shard: ShardConfig) -> SeedReport | None:
        if shard.id not in known:
            return None
        elsewhere = {bucket for name, answer in known.items() if name != shard.id for bucket in answer.buckets}
        openable = set(buckets_of(shard)) - elsewhere if new else set()
        return _Seeder(config, admin, shard, openable=openable, progress=progress, stop=stop).run()

    outcomes = each_shard(config, work, stop.set)
    failures += [outcome for outcome in outcomes.values() if isinstance(outcome, ShardError)]
    if failures:
        raise _first(failures)
    return [outcome for outcome in outcomes.values() if isinstance(outcome, SeedReport)]


class _Seeder:
    """One shard. 1. make unknown buckets known 2. in lanes, a table at a time: count its rows, insert what is missing.

    Each step is under a mutex of its own, held by the session that does it: a killed seeder's last statement may still
    be running, and its successor must count after it.
    """

    def __init__(
        self,
        config: RouterConfig,
        admin: RouterConfig | None,
        shard: ShardConfig,
        *,
        openable: set[int],
        progress: Progress | None,
        stop: threading.Event,
    ) -> None:
        self._config = config
        self._shard = shard
        self._connect = administrator(config, admin, shard)
        self._openable = openable
        self._own = buckets_of(shard)
        self._wanted = len(self._own) * config.topology.rows_per_bucket
        self._progress = progress
        self._stop = stop
        self._there = 0
        self._lock = threading.Lock()

    def run(self) -> SeedReport:
        """All rows are there when it returns."""
        started = time.monotonic()
        with connected(*self._connect) as connection:
            self._take_mutex(connection, "map")
            self._make_known(connection)
            known = read_buckets(connection)
        lanes = min(_LANES, self._config.topology.tables)
        with ThreadPoolExecutor(lanes, thread_name_prefix=f"lockrouter-seed-{self._shard.id}") as threads:
            inserted = sum(threads.map(self._lane, range(lanes)))
        closed = sum(known[bucket].epoch == 0 for bucket in self._own)
        return SeedReport(self._shard.id, self._wanted, inserted, closed, time.monotonic() - started)

    def _take_mutex(self, connection: Connection, part: str) -> None:
        """Two seeders would meet in duplicate keys. The name is server-wide, so it is made of the database's."""
        database = self._config.endpoints(self._shard)[0].database
        name = "lockrouter.seed." + blake2b(f"{database} {part}".encode(), digest_size=16).hexdigest()
        if fetch(connection, sql.TAKE_MUTEX, {"name": name, "seconds": _MUTEX_WAIT})[0][0] != 1:
            raise ShardUnavailable("another seeder is at work", shard=self._shard.id)

    def _make_known(self, connection: Connection) -> None:
        known = _look(connection, self._config, self._shard).buckets
        epoch = self._config.topology.epoch
        new = [
            {"bucket": bucket, "epoch": epoch if bucket in self._openable else 0}
            for bucket in self._own
            if bucket not in known
        ]
        if new:
            run(connection, sql.ADD_BUCKET, new)

    def _lane(self, lane: int) -> int:
        topology = self._config.topology
        inserted = 0
        with connected(*self._connect) as connection:
            self._take_mutex(connection, f"lane {lane}")
            for table in range(lane, topology.tables, _LANES):
                counted = fetch(connection, sql.count_rows(table), {"rows": topology.rows_per_bucket})
                present = {row.bucket: row.present for row in counted}
                own = [bucket for bucket in self._own if bucket % topology.tables == table]
                self._advance(sum(present.get(bucket, 0) for bucket in own))
                lacking = [bucket for bucket in own if present.get(bucket, 0) < topology.rows_per_bucket]
                inserted += fill_table(connection, topology, table, lacking, present, self._advance)
        return inserted

    def _advance(self, rows: int) -> None:
        if self._stop.is_set():
            raise ShardError("seeding was interrupted; another `seed` goes on from here", shard=self._shard.id)
        with self._lock:
            self._there += rows
            if self._progress is not None:
                self._progress(self._shard.id, self._there, self._wanted)


def _survey(config: RouterConfig, admin: RouterConfig | None) -> tuple[dict[str, _Known], list[ShardError]]:
    """What each shard knows, by id, and the errors of those that could not say."""

    def look(shard: ShardConfig) -> _Known:
        with connected(*administrator(config, admin, shard)) as connection:
            return _look(connection, config, shard)

    answers = each_shard(config, look)
    known = {shard: answer for shard, answer in answers.items() if isinstance(answer, _Known)}
    return known, [answer for answer in answers.values() if isinstance(answer, ShardError)]


def _look(connection: Connection, config: RouterConfig, shard: ShardConfig) -> _Known:
    meta = check(read_meta(connection), config.topology, shard.id)
    return _Known(meta.epoch, read_buckets(connection))


def _first(failures: Sequence[ShardError]) -> ShardError:
    for other in failures[1:]:
        failures[0].add_note(str(other))
    return failures[0]
