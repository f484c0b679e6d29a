"""`lockrouter init`: databases, tables, the row of lock_meta, and the application's least-privilege user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from sqlalchemy import Connection, Executable
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateTable

from lockrouter.admin import grants
from lockrouter.admin.connect import DENIED, administrator, connected, each_shard, error_code, fetch, run
from lockrouter.admin.meta import check, read_meta
from lockrouter.config import Endpoint, RouterConfig, ShardConfig
from lockrouter.errors import ConfigError, ShardError
from lockrouter.routing import PROTOCOL, fingerprint
from lockrouter.sql import admin as sql
from lockrouter.sql.schema import schema

__all__ = ["InitReport", "init"]


@dataclass(slots=True)
class InitReport:
    """What `init` did on one shard."""

    shard: str
    done: list[str] = field(default_factory=list)
    """One line for each thing that did not exist before; what existed already is not listed."""
    prevented: list[str] = field(default_factory=list)
    """One line for each thing that a missing privilege prevented, with the privilege."""


def init(config: RouterConfig, admin: RouterConfig | None = None) -> list[InitReport]:
    """Every shard has its database, tables, lock_meta row and application's user; what exists is kept. Repeatable.

    The user is that of the file's URL, with its password, for 127.0.0.1 and localhost where the shard is on loopback
    and for any host otherwise; its grants are those of `lockrouter.sql.admin.application_grants`. A changed password
    takes effect by another `init`. What missing privileges prevent is in the reports, and nothing is raised for it.

    Args:
        admin: the same shards with an administrator's credentials; None uses the file's own.

    Raises:
        ConfigError: the administrator's file does not fit, or the application's user has no password off loopback.
        ShardUnavailable: a shard does not answer or is read-only; the other shards are done nevertheless.
        TopologyMismatch: a database belongs to another topology, or to a newer epoch.
    """
    outcomes = each_shard(config, lambda shard: _Init(config, admin, shard).run())
    failures = [outcome for outcome in outcomes.values() if isinstance(outcome, ShardError)]
    if failures:
        for other in failures[1:]:
            failures[0].add_note(str(other))
        raise failures[0]
    return [outcome for outcome in outcomes.values() if isinstance(outcome, InitReport)]


class _Init:
    """The steps on one shard, in order."""

    def __init__(self, config: RouterConfig, admin: RouterConfig | None, shard: ShardConfig) -> None:
        self._config = config
        self._topology = config.topology
        self._shard = shard
        self._connect = administrator(config, admin, shard)
        self._application = config.endpoints(shard)
        self._report = InitReport(shard.id)

    def run(self) -> InitReport:
        """1. database 2. tables 3. lock_meta 4. user and grants."""
        admin_config, admin_shard = self._connect
        with connected(admin_config, admin_shard, database=False) as connection:
            if self._database(connection):
                self._tables(connection)
                self._user(connection, admin_config.endpoints(admin_shard)[0])
        return self._report

    def _database(self, connection: Connection) -> bool:
        name = self._application[0].database
        if not fetch(connection, sql.DATABASES, {"name": name})[0][0]:
            if not self._may(connection, sql.create_database(name), "CREATE", f"database {name} does not exist"):
                return False
            self._report.done.append(f"created database {name}")
        return self._may(connection, sql.use_database(name), "any privilege", f"database {name} cannot be used")

    def _tables(self, connection: Connection) -> None:
        there = {row.name for row in fetch(connection, sql.TABLES)}
        absent = [table for table in schema(self._topology.tables).metadata.tables.values() if table.name not in there]
        created = []
        for table in absent:
            statement = CreateTable(table, if_not_exists=True)
            if self._may(connection, statement, "CREATE", f"table {table.name} is missing"):
                created.append(table.name)
        if created:
            self._report.done.append(f"created {len(created)} tables")
        if "lock_meta" in there or "lock_meta" in created:
            self._meta(connection)

    def _meta(self, connection: Connection) -> None:
        topology = self._topology
        meta = read_meta(connection)
        if meta is not None:
            check(meta, topology, self._shard.id)
            return
        values = {
            "topology": topology.name.encode(),
            "protocol": PROTOCOL,
            "fingerprint": fingerprint(topology),
            "epoch": topology.epoch,
        }
        if self._may(connection, sql.WRITE_META, "INSERT", "lock_meta has no row", values):
            self._report.done.append(f"made it a shard of topology {topology.name!r}, epoch {topology.epoch}")

    def _user(self, connection: Connection, administrator_: Endpoint) -> None:
        application = self._application[0]
        mysql = not connection.dialect.is_mariadb  # type: ignore[attr-defined]
        wanted = sql.application_grants(self._topology.tables, mysql=mysql)
        if administrator_.user == application.user:
            held = grants.parse(row[0] for row in fetch(connection, sql.SHOW_GRANTS))
            if lacking := grants.missing(wanted, held, application.database):
                self._prevented("--admin FILE", f"grants are missing: {grants.summary(lacking, application.database)}")
            return
        accounts = [host for host in grants.user_hosts(self._application) if self._account(connection, host)]
        if accounts:
            self._grant(connection, accounts, wanted)

    def _account(self, connection: Connection, host: str) -> bool:
        """Whether the application's user exists for that host, with the file's password."""
        application = self._application[0]
        if not application.password and host == "%":
            raise ConfigError("the application's user needs a password", file=self._config.path, field="password_env")
        values = {"user": application.user, "host": host, "password": application.password}
        name = f"user {application.user}@{host}"
        return self._may(connection, sql.CREATE_USER, "CREATE USER", f"{name} may not exist", values) and self._may(
            connection, sql.ALTER_USER, "CREATE USER", f"{name} may have another password", values
        )

    def _grant(self, connection: Connection, hosts: Sequence[str], wanted: Sequence[sql.Grant]) -> None:
        application = self._application[0]
        values = {"user": application.user} | {f"host{number}": host for number, host in enumerate(hosts)}

        def place(each: sql.Grant) -> tuple[str, str]:
            return (each.database or application.database, each.table)

        for (database, table), group in groupby(sorted(wanted, key=place), key=place):
            statement = sql.grant(database, table, list(group), len(hosts))
            consequence = f"user {application.user} cannot use {database}.{table}"
            self._may(connection, statement, "GRANT OPTION", consequence, values)

    def _may(
        self,
        connection: Connection,
        statement: Executable,
        privilege: str,
        consequence: str,
        values: Mapping[str, object] | None = None,
    ) -> bool:
        """Executes a statement; False, and a line in the report, if the server says that this user may not."""
        try:
            run(connection, statement, values)
        except DBAPIError as error:
            if error_code(error) not in DENIED:
                raise
            self._prevented(privilege, consequence)
            return False
        return True

    def _prevented(self, privilege: str, consequence: str) -> None:
        self._report.prevented.append(f"{consequence} (missing: {privilege})")
