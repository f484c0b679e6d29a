"""Whether a server may hold locks at all: its settings, its role, its clock."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection

from lockrouter.admin.connect import fetch
from lockrouter.admin.finding import Finding
from lockrouter.sql import admin as sql

__all__ = ["check", "judge"]

_READ_ONLY = ("read_only", "super_read_only", "innodb_read_only")
_LOSSLESS = ("rpl_semi_sync_source_enabled", "rpl_semi_sync_master_enabled", "group_replication_single_primary_mode")


def check(connection: Connection, shard: str) -> list[Finding]:
    """What speaks against the connected server. Needs no privilege; replicas are seen only with PROCESS."""
    facts = {str(name): str(value) for name, value in map(tuple, fetch(connection, sql.SERVER_FACTS))}
    found = judge(facts, shard)
    if _clock_stands(connection):
        text = "SYSDATE is NOW on this server: start it without --sysdate-is-now"
        found.append(Finding(shard, "sysdate-is-now", text))
    if not any(facts.get(name) == "ON" for name in _LOSSLESS) and _has_replicas(connection):
        text = "asynchronous replication: a failover may lose leases, and the old primary must be fenced by hand"
        found.append(Finding(shard, "asynchronous", text, warning=True))
    return found


def judge(settings: Mapping[str, str], shard: str) -> list[Finding]:
    """What speaks against a server with these global variables; one that its vendor does not know is absent."""
    found = []
    if modes := [name for name in _READ_ONLY if settings.get(name, "OFF").upper() not in ("OFF", "0")]:
        text = f"the server is read-only ({', '.join(modes)}): it grants nothing"
        found.append(Finding(shard, "read-only", text))
    if settings.get("wsrep_on") == "ON":
        found.append(Finding(shard, "multi-writer", "Galera (wsrep_on): a row lock holds on one node only"))
    if settings.get("group_replication_single_primary_mode") == "OFF":
        text = "a multi-primary replication group: a row lock holds on one member only"
        found.append(Finding(shard, "multi-writer", text))
    if settings.get("binlog_format") == "STATEMENT":
        found.append(Finding(shard, "binlog-format", "binlog_format is STATEMENT: set ROW"))
    return found


def _clock_stands(connection: Connection) -> bool:
    row = fetch(connection, sql.LOOK_AT_CLOCK)[0]
    return bool(row.before_ == row.after_)


def _has_replicas(connection: Connection) -> bool:
    return any(str(row.Command).startswith("Binlog Dump") for row in fetch(connection, sql.SESSIONS))
