"""The tables of a shard, defined once; `shards/schema.sql` is generated from here.

Every text is bytes (VARBINARY: no collation can fold two keys into one); every time is BIGINT UNSIGNED microseconds of
the server's own clock, UTC. Nothing here has a secondary index: each statement reaches its rows by primary key.

    python -m lockrouter.sql.schema > shards/schema.sql
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import Column, MetaData, Table, text
from sqlalchemy.dialects.mysql import BIGINT, INTEGER, MEDIUMBLOB, SMALLINT, TINYINT, dialect
from sqlalchemy.schema import CreateTable
from sqlalchemy.types import BINARY, VARBINARY, TypeEngine

__all__ = ["FENCE", "Schema", "ddl", "fence_ddl", "lease_name", "lock_name", "schema"]

_EXAMPLE_TABLES = 8
_HEADER = """\
-- The tables of one shard. Generated from router/lockrouter/sql/schema.py: do not edit.
--     python -m lockrouter.sql.schema > shards/schema.sql
-- `lockrouter init FILE` creates exactly these; how many lock_NN and lease_NN there are is `tables` of the shard file.
"""
_FENCE_HEADER = """\
-- In a database protected by `router.fence`, not on a lock shard: `lockrouter init --fence URL` creates it there.
"""


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of one shard of a topology with `len(lock)` lock tables; number NN of a table is its index here."""

    metadata: MetaData
    lock: tuple[Table, ...]
    lease: tuple[Table, ...]
    bucket: Table
    meta: Table
    once: Table
    run_marker: Table
    frozen: Table
    audit: Table


def lock_name(table: int) -> str:
    """The name of lock table number `table`: `lock_00`, `lock_01`, ..."""
    return f"lock_{table:02d}"


def lease_name(table: int) -> str:
    """The name of lease table number `table`: `lease_00`, `lease_01`, ..."""
    return f"lease_{table:02d}"


@lru_cache(maxsize=16)
def schema(tables: int) -> Schema:
    """The tables of a shard whose topology has `tables` lock tables (1 to 100). The same object every time.

    Raises:
        ValueError: `tables` is out of bounds.
    """
    if not 1 <= tables <= 100:
        raise ValueError(f"tables: 1 to 100, not {tables}")
    metadata = MetaData()
    return Schema(
        metadata=metadata,
        bucket=_bucket(metadata),
        meta=_meta(metadata),
        lock=tuple(_lock(metadata, table) for table in range(tables)),
        lease=tuple(_lease(metadata, table) for table in range(tables)),
        once=_once(metadata),
        run_marker=_run_marker(metadata),
        frozen=_frozen(metadata),
        audit=_audit(metadata),
    )


def ddl(tables: int) -> str:
    """The CREATE TABLE statements of one shard with `tables` lock tables, each ended by a semicolon."""
    return _script(schema(tables).metadata)


def fence_ddl() -> str:
    """The CREATE TABLE statement of the one table that a protected database needs."""
    return _script(FENCE.metadata)


def _script(metadata: MetaData) -> str:
    return "".join(f"{_create(table)};\n\n" for table in metadata.tables.values())


def _create(table: Table) -> str:
    statement = str(CreateTable(table).compile(dialect=dialect())).strip()
    return statement.replace(", \n", ",\n").replace("\t", "    ").replace("\n)ENGINE", "\n) ENGINE")


def _table(name: str, metadata: MetaData, *columns: Column[Any]) -> Table:
    return Table(
        name,
        metadata,
        *columns,
        mysql_engine="InnoDB",
        mysql_default_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
    )


def _key(name: str, kind: TypeEngine[Any]) -> Column[Any]:
    return Column(name, kind, primary_key=True, autoincrement=False)


def _plain(name: str, kind: TypeEngine[Any], default: str | None = None) -> Column[Any]:
    return Column(name, kind, nullable=False, server_default=None if default is None else text(default))


def _int() -> INTEGER:
    return INTEGER(unsigned=True)


def _big() -> BIGINT:
    return BIGINT(unsigned=True)


def _lock(metadata: MetaData, table: int) -> Table:
    """Pre-seeded; epoch is that of its bucket's last move, 0 = closed; pad exists for the UPDATE grant alone."""
    columns = (_key("slot", _int()), _plain("epoch", _int()), _plain("pad", TINYINT(), "0"))
    return _table(lock_name(table), metadata, *columns)


def _bucket(metadata: MetaData) -> Table:
    """What this shard knows of a bucket: epoch above 0 = its own and open; moved_to = the shard it went to."""
    columns = (_key("bucket", _int()), _plain("epoch", _int()), _plain("moved_to", VARBINARY(64), "''"))
    return _table("lock_bucket", metadata, *columns)


def _meta(metadata: MetaData) -> Table:
    """One row, id 1. clock_high is the reservation of the grant window; server_started tells of which incarnation.

    server_started is the start of the server, by its own clock, in whole seconds turned into microseconds.
    """
    columns = (
        _key("id", TINYINT(unsigned=True)),
        _plain("topology", VARBINARY(64)),
        _plain("protocol", SMALLINT(unsigned=True)),
        _plain("fingerprint", BINARY(16)),
        _plain("epoch", _int()),
        _plain("term", SMALLINT(unsigned=True)),
        _plain("term_identity", VARBINARY(255), "''"),
        _plain("term_started", _big(), "0"),
        _plain("server_started", _big(), "0"),
        _plain("clock_high", _big(), "0"),
        _plain("drained", VARBINARY(255), "''"),
        _plain("migration", VARBINARY(255), "''"),
    )
    return _table("lock_meta", metadata, *columns)


def _lease(metadata: MetaData, table: int) -> Table:
    """One row per lease; owner is 16 bytes, or empty once released; ttl, acquired and expires are microseconds."""
    columns = (
        _key("bucket", _int()),
        _key("k", BINARY(16)),
        _plain("kind", TINYINT(unsigned=True)),
        _plain("key_text", VARBINARY(255)),
        _plain("owner", VARBINARY(16)),
        _plain("token", _big()),
        _plain("ttl", _big()),
        _plain("acquired", _big()),
        _plain("expires", _big()),
        _plain("payload", VARBINARY(1024), "''"),
    )
    return _table(lease_name(table), metadata, *columns)


def _once(metadata: MetaData) -> Table:
    columns = (
        _key("k", BINARY(16)),
        _plain("key_text", VARBINARY(255)),
        _plain("state", TINYINT(unsigned=True)),
        _plain("owner", VARBINARY(16)),
        _plain("token", _big()),
        _plain("expires", _big()),
        _plain("keep_until", _big()),
        Column("result", MEDIUMBLOB(), nullable=True),
    )
    return _table("once", metadata, *columns)


def _run_marker(metadata: MetaData) -> Table:
    return _table("run_marker", metadata, _key("id", BINARY(16)), _plain("at", _big()))


def _frozen(metadata: MetaData) -> Table:
    columns = (_key("prefix", VARBINARY(255)), _plain("at", _big()), _plain("why", VARBINARY(255), "''"))
    return _table("frozen", metadata, *columns)


def _audit(metadata: MetaData) -> Table:
    """What operators did; slot and connection_id are null where the action names none."""
    columns = (
        Column("id", _big(), primary_key=True, autoincrement=True),
        _plain("at", _big()),
        _plain("who", VARBINARY(255)),
        _plain("action", VARBINARY(64)),
        _plain("key_text", VARBINARY(255), "''"),
        Column("slot", _int(), nullable=True),
        Column("connection_id", _big(), nullable=True),
        _plain("detail", VARBINARY(1024), "''"),
    )
    return _table("audit", metadata, *columns)


FENCE = _table(
    "fence",
    MetaData(),
    _key("k", BINARY(16)),
    _plain("key_text", VARBINARY(255)),
    _plain("token", _big()),
)
"""The highest token seen per key, in a database protected by `router.fence`."""


if __name__ == "__main__":
    sys.stdout.write(f"{_HEADER}\n{ddl(_EXAMPLE_TABLES)}{_FENCE_HEADER}\n{fence_ddl()}".rstrip("\n") + "\n")
