"""What the values of a shard file may be; the first mistake ends in a `ConfigError` with file, field and value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from .errors import ConfigError
from .options import (
    BreakerOptions,
    KeyClass,
    PoolOptions,
    RouterOptions,
    ShardConfig,
    Topology,
    TransactionOptions,
)
from .urls import SAFE_NAME

__all__ = ["MAX_BUCKETS", "MAX_SLOTS", "Checker"]

MAX_SLOTS = 2**32 - 1
"""A slot is an INT UNSIGNED."""
MAX_BUCKETS = 65_536
MAX_TABLES = 100
"""Their names end in two digits."""
_TOPOLOGY_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
_TIME_ZONE = re.compile(r"[+-](0\d|1[0-4]):[0-5]\d\Z")
_HOUR, _YEAR, _LONG = 3600.0, 31_536_000, 1e9


class Checker:
    """The checks of each table, raising for one file (None: made in Python)."""

    def __init__(self, file: str | None) -> None:
        self._file = file

    def topology(self, topology: Topology) -> None:
        """The sizes fit the layout: two-digit tables, INT UNSIGNED slots and epochs, a 32-bit seed."""
        if not _TOPOLOGY_NAME.match(topology.name):
            raise self._error("topology.name", f"must be 1 to 64 of A-Z a-z 0-9 . _ - ; got {topology.name!r}")
        self._number("topology.epoch", topology.epoch, 1, MAX_SLOTS)
        self._number("topology.tables", topology.tables, 1, MAX_TABLES)
        self._number("topology.buckets", topology.buckets, 1, MAX_BUCKETS)
        self._number("topology.rows_per_bucket", topology.rows_per_bucket, 1, MAX_SLOTS)
        self._number("topology.seed", topology.seed, 0, 2**32 - 1)
        if topology.tables > topology.buckets:
            message = f"{topology.tables} tables for {topology.buckets} buckets: some would stay empty"
            raise self._error("topology.tables", message)
        rows = topology.buckets * topology.rows_per_bucket
        if rows > MAX_SLOTS:
            text = (
                f"{topology.buckets} buckets of {topology.rows_per_bucket} rows are {rows} slots; at most {MAX_SLOTS}"
            )
            raise self._error("topology.rows_per_bucket", text)

    def router(self, router: RouterOptions) -> None:
        """Times are finite and in order: the grant window outlives a missed reading of the clock."""
        self._number("router.timeout", router.timeout, 0, _LONG)
        self._number("router.ghost_timeout", router.ghost_timeout, 2, int(_HOUR))
        self._number("router.role_check", router.role_check, 0.01, 60)
        self._number("router.grant_window", router.grant_window, 2 * router.role_check, _HOUR, "two role_check to 3600")
        self._number("router.clock_skew", router.clock_skew, 0, _HOUR)
        self._number("router.storm_ratio", router.storm_ratio, 0, 1)
        self._number("router.handover_limit", router.handover_limit, 0, 63)
        self._number("router.handover_time", router.handover_time, 0, 60)
        self._number("router.close_timeout", router.close_timeout, 0, _HOUR)
        if router.reload:
            raise self._error("router.reload", "must be false: this version reads the file once; got True")

    def pool(self, pool: PoolOptions, breaker: BreakerOptions) -> None:
        """At least one connection, no more idle ones than there may be, and a bound on connecting."""
        self._number("pool.size", pool.size, 1, 10_000)
        self._number("pool.min_idle", pool.min_idle, 0, pool.size, "0 to pool.size")
        self._number("pool.connect_timeout", pool.connect_timeout, 0.001, _HOUR)
        self._number("breaker.failures", breaker.failures, 1, 10_000)
        self._number("breaker.retries", breaker.retries, 0, 100)
        self._number("breaker.retry_delay", breaker.retry_delay, 0, _HOUR)
        self._number("breaker.probe_after", breaker.probe_after, 0.001, _HOUR)

    def transaction(self, options: TransactionOptions) -> None:
        """What goes into SET statements is of a safe alphabet and within the servers' bounds."""
        if not _TIME_ZONE.match(options.time_zone):
            # In a zone with summer time an hour of each year comes twice, and the clock of a grant would go back.
            message = f'expected an offset like "+00:00", got {options.time_zone!r}'
            raise self._error("transaction.time_zone", message)
        self._number("transaction.lock_wait", options.lock_wait, 1, _YEAR)
        self._number("transaction.idle", options.idle, 1, _YEAR)

    def shards(self, topology: Topology, shards: Sequence[ShardConfig], folder: Path) -> None:
        """Ids and databases are distinct, every login can be made, and each bucket has exactly one owner."""
        owners: dict[str, int] = {}
        databases: dict[tuple[object, ...], str] = {}
        claims: list[tuple[int, int, str]] = []
        for at, shard in enumerate(shards):
            place = f"shard[{at}]"
            if not SAFE_NAME.match(shard.id):
                raise self._error(f"{place}.id", f"must be 1 to 64 of A-Z a-z 0-9 _ $ - ; got {shard.id!r}")
            if shard.id in owners:
                raise self._error(f"{place}.id", f"{shard.id!r} is the id of shard[{owners[shard.id]}] already")
            owners[shard.id] = at
            self._number(f"{place}.weight", shard.weight, 0, 1_000_000)
            with self._at(place, shard.id):
                for end in shard.endpoints(folder):
                    where = (end.unix_socket or (end.host.lower(), end.port), end.database)
                    other = databases.setdefault(where, shard.id)
                    if other != shard.id:
                        raise ConfigError(f"the database {end.database!r} there belongs to {other!r}", field="url")
                claims += [(first, last, shard.id) for first, last in shard.ranges()]
        self._map(topology.buckets, claims)

    def classes(self, classes: Sequence[KeyClass]) -> None:
        """Prefixes are distinct and can start a key; limits are positive and mean something."""
        seen: dict[str, int] = {}
        for at, rule in enumerate(classes):
            place = f"class[{at}]"
            size = _utf8_size(rule.prefix)
            if size is None or not 1 <= size <= 255:
                raise self._error(f"{place}.prefix", f"must be 1 to 255 bytes of UTF-8; got {rule.prefix!r}")
            if rule.prefix in seen:
                raise self._error(
                    f"{place}.prefix", f"{rule.prefix!r} is the prefix of class[{seen[rule.prefix]}] already"
                )
            seen[rule.prefix] = at
            if rule.timeout is not None:
                self._number(f"{place}.timeout", rule.timeout, 0, _LONG)
            if rule.max_waiters is not None:
                self._number(f"{place}.max_waiters", rule.max_waiters, 1, 1_000_000)
            if rule.max_hold is not None:
                self._number(f"{place}.max_hold", rule.max_hold, 0.001, _LONG)
            if rule.kill and rule.max_hold is None:
                raise self._error(f"{place}.kill", f"True without max_hold would never end anything ({rule.prefix!r})")
            if rule.mode == "lease" and rule.on_outage == "local":
                raise self._error(f"{place}.on_outage", f"'local', but a lease never degrades ({rule.prefix!r})")

    def _map(self, buckets: int, claims: list[tuple[int, int, str]]) -> None:
        owner: list[str | None] = [None] * buckets
        clashes: list[tuple[int, str]] = []
        for first, last, shard in claims:
            if last >= buckets:
                message = f"out of range 0 to {buckets - 1}: {first}-{last} of {shard!r}"
                raise self._error("shard.buckets", message)
            for bucket in range(first, last + 1):
                if (other := owner[bucket]) is not None:
                    clashes.append((bucket, f"{other!r} and {shard!r}" if other != shard else f"{shard!r} twice"))
                owner[bucket] = shard
        if clashes:
            bucket, who = clashes[0]
            spans = _spans([number for number, pair in clashes if pair == who])
            raise self._error("shard.buckets", f"overlapping: {spans} belong to {who}")
        if missing := _spans([bucket for bucket, shard in enumerate(owner) if shard is None]):
            raise self._error("shard.buckets", f"missing: {missing} belong to no shard")

    def _number(self, field: str, value: float, low: float, high: float, bounds: str | None = None) -> None:
        if not low <= value <= high:  # also caught here: NaN
            raise self._error(field, f"must be {bounds or f'{_text(low)} to {_text(high)}'}, got {value!r}")

    def _error(self, field: str, message: str) -> ConfigError:
        return ConfigError(message, file=self._file, field=field)

    @contextmanager
    def _at(self, place: str, shard: str) -> Iterator[None]:
        problem: ConfigError | None = None
        try:
            yield
        except ConfigError as error:
            problem = error
        if problem is not None:
            message = str(problem).removeprefix(f"{problem.field}: ")
            raise self._error(f"{place}.{problem.field}", f"{message} (shard {shard!r})")


def _utf8_size(text: str) -> int | None:
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError:
        return None


def _text(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def _spans(numbers: list[int]) -> str:
    """Sorted numbers as "buckets 3-5, 9", the first five spans of them."""
    consecutive = groupby(enumerate(sorted(set(numbers))), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in consecutive]
    shown = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:5])
    more = f" and {len(runs) - 5} more ranges" if len(runs) > 5 else ""
    return f"buckets {shown}{more}" if runs else ""
