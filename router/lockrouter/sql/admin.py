"""Every administrative statement: creating, granting, seeding, and the reads of `verify`.

Values travel as bound parameters. Names of tables come from `lockrouter.sql.schema`; the name of a database comes from
a validated shard file and is quoted by `quoted` all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import TextClause, bindparam, text

from lockrouter.sql.schema import lease_name, lock_name
from lockrouter.sql.statements import MARIADB, MYSQL

__all__ = [
    "ADD_BUCKET",
    "ALTER_USER",
    "CREATE_USER",
    "DATABASES",
    "DRAIN",
    "GENERATED",
    "LOOK_AT_CLOCK",
    "READ_BUCKETS",
    "READ_META",
    "READ_ROLE",
    "SERVER_FACTS",
    "SESSIONS",
    "SHARE_BUCKET",
    "SHOW_GRANTS",
    "TABLES",
    "TAKE_MUTEX",
    "UNDRAIN",
    "WINDOW_LEFT",
    "WRITE_META",
    "Grant",
    "add_generated_rows",
    "add_listed_rows",
    "application_grants",
    "count_leases",
    "count_rows",
    "create_database",
    "examine_rows",
    "grant",
    "list_slots",
    "list_unlocked",
    "quoted",
    "read_identity",
    "take_row",
    "use_database",
]

DATABASES = text("SELECT COUNT(*) FROM information_schema.SCHEMATA WHERE SCHEMA_NAME = :name")
"""1 if the database exists and this user may know it."""

TABLES = text(
    "SELECT TABLE_NAME AS name, ENGINE AS engine FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE()"
)
"""The tables of the current database, with their engines."""

READ_ROLE = text("SELECT @@global.read_only")
"""0 where an ordinary user may write; MariaDB answers a word in later versions."""

READ_META = text(
    "SELECT topology, protocol, fingerprint, epoch, term, term_identity, drained, migration FROM lock_meta WHERE id = 1"
)
"""What the shard says of itself."""

WRITE_META = text(
    "INSERT INTO lock_meta (id, topology, protocol, fingerprint, epoch, term)"
    " VALUES (1, :topology, :protocol, :fingerprint, :epoch, 1)"
)
"""The first row of lock_meta: term 1 of nobody, so the first router that connects starts a term of its own."""

READ_BUCKETS = text("SELECT bucket, epoch, moved_to FROM lock_bucket")
"""The buckets this shard knows: epoch above 0 = its own and open."""

ADD_BUCKET = text("INSERT INTO lock_bucket (bucket, epoch, moved_to) VALUES (:bucket, :epoch, '')")
"""Makes a bucket known: with an epoch above 0 it is this shard's and open, with 0 it is closed."""

SHARE_BUCKET = text("SELECT epoch FROM lock_bucket WHERE bucket = :bucket LOCK IN SHARE MODE")
"""A bucket's epoch, which nobody can change until this transaction ends."""

TAKE_MUTEX = text("SELECT GET_LOCK(:name, :seconds)")
"""1 if the server-wide mutex of that name is now this session's; freed with the session."""

CREATE_USER = text("CREATE USER IF NOT EXISTS :user@:host IDENTIFIED BY :password")
"""The application's user. Says nothing if it exists."""

ALTER_USER = text("ALTER USER :user@:host IDENTIFIED BY :password")
"""Makes the password that of the shard file, so that a changed one only needs another `init`."""

SHOW_GRANTS = text("SHOW GRANTS")
"""What the connected user may do; needs no privilege."""

DRAIN = text("UPDATE lock_meta SET drained = :identity WHERE id = 1")
"""Forbids the server of that identity to grant."""

UNDRAIN = text("UPDATE lock_meta SET drained = '' WHERE id = 1 AND drained <> ''")
"""Lets whoever was drained grant again."""

WINDOW_LEFT = text(
    "SELECT CAST(clock_high AS SIGNED) / 1000000 - UNIX_TIMESTAMP(SYSDATE(6)) FROM lock_meta WHERE id = 1"
)
"""Seconds until the server's clock has passed all that was reserved for grants."""

SERVER_FACTS = text(
    "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('read_only', 'super_read_only', 'innodb_read_only', 'wsrep_on',"
    " 'binlog_format', 'log_bin', 'sync_binlog', 'innodb_flush_log_at_trx_commit',"
    " 'version', 'hostname', 'server_id', 'server_uuid', 'server_uid')"
    " OR Variable_name LIKE 'group\\_replication\\_%' OR Variable_name LIKE 'rpl\\_semi\\_sync\\_%'"
)
"""Settings that decide whether a server may hold locks at all; a vendor's missing ones are simply absent."""

LOOK_AT_CLOCK = text("SELECT SYSDATE(6) AS before_, SLEEP(0.001) AS slept, SYSDATE(6) AS after_")
"""Two equal times mean `--sysdate-is-now`: then the clock in a locking SELECT would be read before the grant."""

SESSIONS = text("SHOW PROCESSLIST")
"""The sessions this user may see; with PROCESS, the replicas that read the binary log are among them."""


@dataclass(frozen=True, slots=True)
class Grant:
    """One privilege on one table, or on some of its columns."""

    table: str
    privilege: str
    columns: frozenset[str] = frozenset()
    database: str | None = None
    """None: the shard's own database."""

    def __str__(self) -> str:
        return f"{self.privilege}({', '.join(sorted(self.columns))})" if self.columns else self.privilege


GENERATED = 16**3
"""How many rows of a bucket one statement of `add_generated_rows` can make."""

_DIGIT = "SELECT 0 AS d UNION ALL " + " UNION ALL ".join(f"SELECT {n}" for n in range(1, 16))
_NUMBERS = (
    f"SELECT a.d * 256 + b.d * 16 + c.d AS n FROM ({_DIGIT}) AS a CROSS JOIN ({_DIGIT}) AS b CROSS JOIN ({_DIGIT}) AS c"
)

_META_COLUMNS = frozenset({"term", "term_identity", "term_started", "server_started", "clock_high"})
_READ_WRITE = ("SELECT", "INSERT", "UPDATE", "DELETE")


def application_grants(tables: int, *, mysql: bool) -> list[Grant]:
    """All that the application's user may do on a shard, and needs to: nothing global, nothing on whole databases."""
    names = range(tables)
    grants = [Grant(lock_name(n), "SELECT") for n in names]
    grants += [Grant(lock_name(n), "UPDATE", frozenset({"pad"})) for n in names]
    grants += [Grant(table, "SELECT") for table in ("lock_bucket", "lock_meta", "frozen", "audit")]
    grants += [Grant("lock_meta", "UPDATE", _META_COLUMNS)]
    grants += [Grant(table, verb) for table in (*map(lease_name, names), "once") for verb in _READ_WRITE]
    grants += [Grant("run_marker", verb) for verb in ("SELECT", "INSERT", "DELETE")]
    if mysql:
        grants.append(Grant("replication_group_members", "SELECT", database="performance_schema"))
    return grants


def quoted(identifier: str) -> str:
    """The identifier in backquotes, its own backquotes doubled."""
    return "`" + identifier.replace("`", "``") + "`"


def create_database(name: str) -> TextClause:
    """Creates the shard's database with a character set in which bytes compare as bytes."""
    return _literal(f"CREATE DATABASE IF NOT EXISTS {quoted(name)} CHARACTER SET utf8mb4 COLLATE utf8mb4_bin")


def grant(database: str, table: str, grants: Sequence[Grant], accounts: int) -> TextClause:
    """Gives all the grants of one table to `:user` at each of `:host0`, `:host1`, ... Repeating it changes nothing."""
    verbs = ", ".join(
        f"{each.privilege} ({', '.join(map(quoted, sorted(each.columns)))})" if each.columns else each.privilege
        for each in grants
    )
    to = ", ".join(f":user@:host{number}" for number in range(accounts))
    return _literal(f"GRANT {verbs} ON {quoted(database)}.{quoted(table)} TO ", to)


def use_database(name: str) -> TextClause:
    """Makes the shard's database the current one."""
    return _literal(f"USE {quoted(name)}")


def count_rows(table: int) -> TextClause:
    """Rows per bucket of one lock table. Reads the whole table, locks nothing."""
    return text(f"SELECT slot DIV :rows AS bucket, COUNT(*) AS present FROM {lock_name(table)} GROUP BY bucket")


def examine_rows(table: int) -> TextClause:
    """Per bucket of one lock table: rows, closed rows, lowest and highest epoch of the open ones. Locks nothing."""
    return text(
        "SELECT slot DIV :rows AS bucket, COUNT(*) AS present, SUM(epoch = 0) AS closed,"
        f" MIN(NULLIF(epoch, 0)) AS lowest, MAX(NULLIF(epoch, 0)) AS highest FROM {lock_name(table)} GROUP BY bucket"
    )


def list_slots(table: int) -> TextClause:
    """The slots that exist from `:low` to before `:high`. Locks nothing."""
    return text(f"SELECT slot FROM {lock_name(table)} WHERE slot >= :low AND slot < :high")


def list_unlocked(table: int) -> TextClause:
    """The same, of those that nobody has locked; they are locked themselves until this transaction ends."""
    return text(
        f"SELECT slot FROM {lock_name(table)} WHERE slot >= :low AND slot < :high ORDER BY slot FOR UPDATE SKIP LOCKED"
    )


def take_row(table: int) -> TextClause:
    """Locks one row at once, or ends in an error that says busy."""
    return text(f"SELECT slot FROM {lock_name(table)} WHERE slot = :slot FOR UPDATE NOWAIT")


def count_leases(table: int) -> TextClause:
    """How many leases of one table are held. Locks nothing."""
    return text(
        f"SELECT COUNT(*) FROM {lease_name(table)}"
        " WHERE owner <> '' AND expires > CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS UNSIGNED)"
    )


def read_identity(*, mariadb: bool) -> TextClause:
    """What `lock_meta` calls the server that one is connected to."""
    return text(f"SELECT {(MARIADB if mariadb else MYSQL).identity}")


def add_generated_rows(table: int) -> TextClause:
    """Inserts `:count` (at most `GENERATED`) rows from row `:low` on, of each of `:buckets`; the server counts.

    The epoch is that of lock_bucket, read under a share lock in this very statement: a bucket that is not this shard's
    own can never get an open row, whatever the seeder believed before.
    """
    return text(
        f"INSERT INTO {lock_name(table)} (slot, epoch, pad)"
        f" SELECT b.bucket * :rows + :low + n.n AS slot, b.epoch, 0 FROM lock_bucket AS b JOIN ({_NUMBERS}) AS n"
        " ON n.n < :count WHERE b.bucket IN :buckets ORDER BY slot LOCK IN SHARE MODE"
    ).bindparams(bindparam("buckets", expanding=True))


def add_listed_rows(table: int) -> TextClause:
    """Inserts one row; executed with many parameter sets it becomes one multi-row INSERT. See `SHARE_BUCKET`."""
    return text(f"INSERT INTO {lock_name(table)} (slot, epoch, pad) VALUES (:slot, :epoch, 0)")


def _literal(statement: str, rest: str = "") -> TextClause:
    """`text` of a statement that holds quoted names: their colons are no parameters."""
    return text(statement.replace(":", r"\:") + rest)
