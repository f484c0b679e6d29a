"""Whether a server may hold locks at all: its settings, its role, its clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sqlalchemy import Connection

from lockrouter.admin.connect import fetch
from lockrouter.admin.finding import Finding
from lockrouter.sql import admin as sql

__all__ = ["check", "judge"]

_READ_ONLY = ("read_only", "super_read_only", "innodb_read_only")
_SEMI_SYNC = ("rpl_semi_sync_source", "rpl_semi_sync_master")
_PATIENT_MS = 3_600_000
"""From this timeout on semi-synchronous replication is taken for one that never gives up."""
_LONGEST_EXPULSION = 10


def _weak_group(settings: Mapping[str, str]) -> Iterator[str]:
    """What of a group's settings costs safety margins or time when it loses its primary."""

    def value(name: str) -> str:
        return settings.get(f"group_replication_{name}", "").upper()

    if value("unreachable_majority_timeout") == "0":
        yield "unreachable_majority_timeout is 0: a primary in the minority stays one in its own eyes; set some seconds"
    if value("exit_state_action") == "READ_ONLY":
        yield "exit_state_action is READ_ONLY: an expelled primary keeps its clients' sessions; set OFFLINE_MODE"
    if value("member_expel_timeout").isdecimal() and int(value("member_expel_timeout")) > _LONGEST_EXPULSION:
        yield (
            f"member_expel_timeout is {value('member_expel_timeout')}: for so many seconds, and 5, a dead primary is"
            " not replaced, and nothing is granted"
        )
    if value("consistency") == "EVENTUAL":
        yield (
            "consistency is EVENTUAL: a new primary answers before it has what the old one committed; set"
            " BEFORE_ON_PRIMARY_FAILOVER"
        )


def _weak_semi_sync(settings: Mapping[str, str], prefix: str) -> Iterator[str]:
    """What makes semi-synchronous replication lose what was committed."""
    timeout = settings.get(f"{prefix}_timeout", "")
    if timeout.isdecimal() and int(timeout) < _PATIENT_MS:
        yield f"{prefix}_timeout is {timeout} ms: after that it is asynchronous, and a failover may lose leases"
    if settings.get(f"{prefix}_wait_point", "").upper() == "AFTER_COMMIT":
        yield f"{prefix}_wait_point is AFTER_COMMIT: others see what a failover may lose; set AFTER_SYNC"


def check(connection: Connection, shard: str) -> list[Finding]:
    """What speaks against the connected server. Needs no privilege; replicas are seen only with PROCESS."""
    facts = {str(name): str(value) for name, value in map(tuple, fetch(connection, sql.SERVER_FACTS))}
    found = judge(facts, shard)
    if _clock_stands(connection):
        text = "SYSDATE is NOW on this server: start it without --sysdate-is-now"
        found.append(Finding(shard, "sysdate-is-now", text))
    lossless = _in_group(facts) or any(facts.get(f"{prefix}_enabled") == "ON" for prefix in _SEMI_SYNC)
    if not lossless and _has_replicas(connection):
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
    if settings.get("innodb_flush_log_at_trx_commit", "1") != "1":
        text = "innodb_flush_log_at_trx_commit is not 1: leases that were granted may be lost when the machine stops"
        found.append(Finding(shard, "durability", text))
    if settings.get("log_bin") == "ON" and settings.get("sync_binlog", "1") != "1":
        text = "sync_binlog is not 1: what replicas never get may be lost when the machine stops"
        found.append(Finding(shard, "durability", text, warning=True))
    if _in_group(settings):
        texts = [f"group_replication_{text}" for text in _weak_group(settings)]
        found += [Finding(shard, "group-setting", text, warning=True) for text in texts]
    for prefix in _SEMI_SYNC:
        if settings.get(f"{prefix}_enabled") == "ON":
            found += [Finding(shard, "semi-sync", text, warning=True) for text in _weak_semi_sync(settings, prefix)]
    return found


def _in_group(settings: Mapping[str, str]) -> bool:
    return bool(settings.get("group_replication_group_name"))


def _clock_stands(connection: Connection) -> bool:
    row = fetch(connection, sql.LOOK_AT_CLOCK)[0]
    return bool(row.before_ == row.after_)


def _has_replicas(connection: Connection) -> bool:
    return any(str(row.Command).startswith("Binlog Dump") for row in fetch(connection, sql.SESSIONS))
