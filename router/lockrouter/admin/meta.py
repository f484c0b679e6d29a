"""What a shard says of itself: lock_meta and lock_bucket, read and compared with the shard file."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection

from lockrouter.admin.connect import fetch
from lockrouter.config import ShardConfig, Topology
from lockrouter.errors import NotSeeded, TopologyMismatch
from lockrouter.routing import PROTOCOL, fingerprint
from lockrouter.sql import admin as sql

__all__ = ["Bucket", "Meta", "buckets_of", "check", "differences", "read_buckets", "read_meta"]


@dataclass(frozen=True, slots=True)
class Meta:
    """The row of lock_meta."""

    topology: bytes
    protocol: int
    fingerprint: bytes
    epoch: int
    term: int
    term_identity: bytes
    drained: bytes
    """The identity of the server that must grant nothing; empty for none."""
    migration: bytes
    """The mark of a migrator at work; empty for none."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A row of lock_bucket; epoch 0 is closed, moved_to the shard it went to."""

    epoch: int
    moved_to: bytes


def read_meta(connection: Connection) -> Meta | None:
    """The shard's lock_meta, or None before `init` has written it."""
    rows = fetch(connection, sql.READ_META)
    if not rows:
        return None
    row = rows[0]
    return Meta(
        row.topology, row.protocol, row.fingerprint, row.epoch, row.term, row.term_identity, row.drained, row.migration
    )


def read_buckets(connection: Connection) -> dict[int, Bucket]:
    """The buckets the shard knows."""
    return {row.bucket: Bucket(row.epoch, row.moved_to) for row in fetch(connection, sql.READ_BUCKETS)}


def buckets_of(shard: ShardConfig) -> list[int]:
    """The buckets the shard file gives to a shard, ascending."""
    return sorted(bucket for first, last in shard.ranges() for bucket in range(first, last + 1))


def differences(meta: Meta, topology: Topology) -> list[tuple[str, str]]:
    """What makes the database another topology's than the file's: pairs of a word and a sentence; empty if nothing."""
    found = []
    if meta.topology != topology.name.encode():
        name = meta.topology.decode("utf-8", "replace")
        found.append(("topology", f"the database belongs to topology {name!r}, the file to {topology.name!r}"))
    if meta.protocol != PROTOCOL:
        found.append(("protocol", f"the database speaks protocol {meta.protocol}, this version {PROTOCOL}"))
    if meta.fingerprint != fingerprint(topology):
        sizes = "name, tables, buckets, rows_per_bucket and seed are fixed for life"
        found.append(("fingerprint", f"the database was made for another layout than the file's: {sizes}"))
    return found


def check(meta: Meta | None, topology: Topology, shard: str) -> Meta:
    """The shard's lock_meta, which is the file's own topology, and not a newer one.

    Raises:
        NotSeeded: there is no row.
        TopologyMismatch: another topology's database, or the file is older than the database.
    """
    if meta is None:
        raise NotSeeded("lock_meta is empty: run `lockrouter init`", shard=shard)
    if found := differences(meta, topology):
        raise TopologyMismatch("; ".join(text for _, text in found), shard=shard)
    if meta.epoch > topology.epoch:
        text = f"the file is of epoch {topology.epoch}, the database of {meta.epoch}: use the newer file"
        raise TopologyMismatch(text, shard=shard)
    return meta
