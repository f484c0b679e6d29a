"""The tables of a shard file as frozen structs. What a value may be is checked in `configcheck`; times are seconds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from .errors import ConfigError
from .urls import Endpoint, endpoints_of, resolve_password, resolve_tls_ca

__all__ = [
    "BreakerOptions",
    "Isolation",
    "KeyClass",
    "Mode",
    "OnOutage",
    "PoolOptions",
    "ResolvedClass",
    "RouterOptions",
    "ShardConfig",
    "Topology",
    "TransactionOptions",
]

OnOutage = Literal["local", "refuse"]
Mode = Literal["row", "lease"]
Isolation = Literal["READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]

_RANGE = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10}))?\Z")


class Topology(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of the whole: every field but `epoch` is fixed for the life of the data."""

    name: str
    """1 to 64 of A-Z a-z 0-9 . _ -"""
    epoch: int
    """Raised by one with every change of the map; from 1."""
    tables: int
    """Lock tables per shard, 1 to 100."""
    buckets: int
    """What is mapped to shards and moves as one; `tables` to 65,536."""
    rows_per_bucket: int
    """Lock rows of a bucket; buckets times rows stay below 2**32."""
    seed: int = 0
    """Of mmh3, 32 bits."""


class RouterOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What holds for all keys; a `KeyClass` narrows `on_outage` and `timeout`."""

    on_outage: OnOutage
    timeout: float = 3.0
    ghost_timeout: int = 10
    """Whole seconds after which the server frees the row of a silent holder; at least 2."""
    role_check: float = 0.5
    """Interval of the control session's reading of each server's role and clock."""
    grant_window: float = 3.0
    """How far the reservation of the server's clock runs ahead; at least two `role_check`."""
    clock_skew: float = 0.5
    """How much longer the server waits than a lease's holder before giving the lease away."""
    storm_ratio: float = 0.8
    """Share of the buckets (0 to 1) whose loss is taken for this process's own fault."""
    handover_limit: int = 60
    """Passes inside the process on one grant of the server, 0 to 63."""
    handover_time: float = 0.02
    close_timeout: float = 5.0
    reload: bool = False
    log_keys: bool = False


class PoolOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Connections per shard and process."""

    size: int = 16
    min_idle: int = 2
    connect_timeout: float = 1.0


class BreakerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a shard that does not answer is left alone, and when it is asked again."""

    failures: int = 5
    retries: int = 2
    retry_delay: float = 0.1
    probe_after: float = 1.0


class TransactionOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sessions of `transaction`, in which the user's SQL runs."""

    isolation: Isolation = "READ COMMITTED"
    time_zone: str = "+00:00"
    lock_wait: int = 10
    """Whole seconds."""
    idle: int = 10
    """Whole seconds between statements after which the server rolls back."""


class ShardConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One database and the buckets it owns; neither its repr nor its errors show the URL, which may hold a password."""

    id: str
    """1 to 64 of A-Z a-z 0-9 _ $ -"""
    url: str
    password_env: str | None = None
    password_file: str | None = None
    tls_ca: str | None = None
    buckets: tuple[str, ...]
    """Like ("0-1023", "2048"); may be empty: a shard that buckets are about to move to."""
    weight: int = 1

    def __repr__(self) -> str:
        return f"ShardConfig(id={self.id!r}, buckets={self.buckets!r}, weight={self.weight!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("id", self.id), ("buckets", self.buckets), ("weight", self.weight)]

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """First and last bucket (both included) of each entry of `buckets`, in the file's order.

        Raises:
            ConfigError: field "buckets": an entry that is neither "7" nor "0-1023", or reversed.
        """
        found = []
        for text in self.buckets:
            match = _RANGE.match(text)
            if match is None:
                raise ConfigError(f'expected a range like "0-1023" or "7", got {text!r}', field="buckets")
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise ConfigError(f"the range {text!r} is reversed", field="buckets")
            found.append((first, last))
        return tuple(found)

    def endpoints(self, config_dir: str | Path) -> tuple[Endpoint, ...]:
        """The shard's addresses with the password as it is now; files named relatively are sought in `config_dir`.

        Raises:
            ConfigError: naming the field: a bad URL, more than one password source or none that can be read, an
                unusable tls_ca, a literal password off loopback.
        """
        folder = Path(config_dir)
        password = resolve_password(self.password_env, self.password_file, folder)
        tls_ca = resolve_tls_ca(self.tls_ca, folder)
        return endpoints_of(self.url, password=password, tls_ca=tls_ca)


class KeyClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rules for the keys that start with `prefix`; None inherits from [router], or means no limit."""

    prefix: str
    """1 to 255 bytes of UTF-8, compared byte by byte."""
    mode: Mode = "row"
    on_outage: OnOutage | None = None
    timeout: float | None = None
    max_waiters: int | None = None
    """Per row and process."""
    max_hold: float | None = None
    kill: bool = False
    """End the holder's session at `max_hold`."""
    frozen: bool = False
    pinned: bool = False


class ResolvedClass(KeyClass, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A `KeyClass` with everything inherited filled in; the default one has the prefix ""."""

    on_outage: OnOutage
    timeout: float
