"""`lockrouter verify`: everything that is wrong with the shards, read from the shards, one line each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from sqlalchemy import Connection

from lockrouter.admin import grants, rowchecks, servers
from lockrouter.admin.connect import administrator, connected, each_shard, fetch, roles
from lockrouter.admin.finding import Finding, listed
from lockrouter.admin.meta import Bucket, Meta, buckets_of, differences, read_buckets, read_meta
from lockrouter.config import RouterConfig, ShardConfig
from lockrouter.errors import NotSeeded, ShardError
from lockrouter.sql import admin as sql
from lockrouter.sql.schema import schema

__all__ = ["Finding", "verify"]

_TERM_WARNING = 400


def verify(config: RouterConfig, admin: RouterConfig | None = None) -> list[Finding]:
    """All that is wrong, shard by shard in the file's order; empty if nothing is. Changes nothing and locks nothing.

    Every lock row is read once. The grants are always those of the file's own user; the rest is read with the
    administrator's credentials if given. A shard that does not answer is a finding, not an error.

    Raises:
        ConfigError: the administrator's file does not fit.
    """
    checks = {shard.id: _Shard(config, admin, shard) for shard in config.shards}
    outcomes = each_shard(config, lambda shard: checks[shard.id].run())
    found = []
    for shard, outcome in outcomes.items():
        found += checks[shard].findings
        if isinstance(outcome, ShardError):
            problem = "not-initialised" if isinstance(outcome, NotSeeded) else "unavailable"
            found.append(Finding(shard, problem, str(outcome).removeprefix(f"shard {shard}: ")))
    return found + _open_twice({shard: check.buckets for shard, check in checks.items()})


def _open_twice(known: Mapping[str, Mapping[int, Bucket]]) -> list[Finding]:
    owners: dict[int, list[str]] = defaultdict(list)
    for shard, buckets in known.items():
        for bucket, row in buckets.items():
            if row.epoch > 0:
                owners[bucket].append(shard)
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for bucket, shards in owners.items():
        if len(shards) > 1:
            groups[tuple(shards)].append(bucket)
    return [
        Finding(
            shards[0], "open-twice", f"buckets {listed(buckets)} are open on {', '.join(shards)}: two holders per row"
        )
        for shards, buckets in groups.items()
    ]


class _Shard:
    """One shard's checks; `findings` and `buckets` are filled as far as it answers."""

    def __init__(self, config: RouterConfig, admin: RouterConfig | None, shard: ShardConfig) -> None:
        self._config = config
        self._shard = shard
        self._connect = administrator(config, admin, shard)
        self.findings: list[Finding] = []
        self.buckets: dict[int, Bucket] = {}

    def run(self) -> None:
        """Server, tables, meta, buckets, rows; and at last the grants, over a connection of the application's user."""
        self._writable_servers()
        with connected(*self._connect, writable=False) as connection:
            self.findings += servers.check(connection, self._shard.id)
            absent = self._tables(connection)
            if "lock_meta" not in absent:
                self._meta(read_meta(connection))
            if "lock_bucket" not in absent:
                self.buckets = read_buckets(connection)
                self._map()
                self.findings += rowchecks.check(
                    connection, self._config.topology, self._shard.id, buckets_of(self._shard), self.buckets, absent
                )
        self._grants()

    def _add(self, problem: str, text: str, *, warning: bool = False) -> None:
        self.findings.append(Finding(self._shard.id, problem, text, warning))

    def _writable_servers(self) -> None:
        writable = [name for name, is_writable in roles(*self._connect).items() if is_writable]
        if len(writable) > 1:
            self._add("two-primaries", f"{' and '.join(writable)} are both writable: stop or fence the wrong one")

    def _tables(self, connection: Connection) -> set[str]:
        engines = {row.name: row.engine for row in fetch(connection, sql.TABLES)}
        wanted = schema(self._config.topology.tables).metadata.tables
        absent = {name for name in wanted if name not in engines}
        if absent:
            self._add("missing-table", f"{', '.join(sorted(absent))}: run `lockrouter init`")
        for name in wanted:
            if name in engines and engines[name] != "InnoDB":
                self._add("engine", f"{name} is {engines[name]}, which has no row locks: make it InnoDB")
        return absent

    def _meta(self, meta: Meta | None) -> None:
        topology = self._config.topology
        if meta is None:
            self._add("not-initialised", "lock_meta has no row: run `lockrouter init`")
            return
        for problem, text in differences(meta, topology):
            self._add(problem, text)
        if meta.epoch > topology.epoch:
            self._add(
                "epoch", f"the file is of epoch {topology.epoch}, the database of {meta.epoch}: use the newer file"
            )
        if meta.epoch < topology.epoch:
            text = f"the file is of epoch {topology.epoch}, the database of {meta.epoch}: run `lockrouter reshard`"
            self._add("epoch", text)
        if meta.term >= _TERM_WARNING:
            self._add(
                "term", f"the term is {meta.term} of at most 511: server identities change too often", warning=True
            )
        if meta.drained and meta.drained == meta.term_identity:
            self._add("drained", "the server is drained and grants nothing: switch over, or `lockrouter drain --undo`")
        elif meta.drained:
            text = (
                "names a server that was drained before: it would grant nothing as primary; `lockrouter drain --undo`"
            )
            self._add("drained-before", text, warning=True)
        if meta.migration:
            text = f"a change of map is under way, or was left unfinished: {meta.migration.decode('utf-8', 'replace')}"
            self._add("migration", text, warning=True)

    def _map(self) -> None:
        own = buckets_of(self._shard)
        unknown = [bucket for bucket in own if bucket not in self.buckets]
        if unknown:
            self._add("unseeded", f"buckets {listed(unknown)} are not known: run `lockrouter seed`")
        closed: dict[bytes, list[int]] = defaultdict(list)
        for bucket in own:
            row = self.buckets.get(bucket)
            if row is not None and row.epoch == 0:
                closed[row.moved_to].append(bucket)
        for moved_to, buckets in closed.items():
            where = (
                f"went to shard {moved_to.decode('utf-8', 'replace')}"
                if moved_to
                else "are closed: `reshard` opens them"
            )
            self._add("closed-bucket", f"buckets {listed(buckets)} {where}, but the file has them here")
        mine = set(own)
        strange = [bucket for bucket, row in self.buckets.items() if row.epoch > 0 and bucket not in mine]
        if strange:
            self._add("foreign-bucket", f"buckets {listed(strange)} are open here, but the file has them elsewhere")
        newer = [bucket for bucket, row in self.buckets.items() if row.epoch > self._config.topology.epoch]
        if newer:
            self._add("epoch", f"buckets {listed(newer)} are of a newer epoch than the file's: use the newer file")

    def _grants(self) -> None:
        endpoint = self._config.endpoints(self._shard)[0]
        with connected(self._config, self._shard, writable=False) as connection:
            held = grants.parse(row[0] for row in fetch(connection, sql.SHOW_GRANTS))
            mysql = not connection.dialect.is_mariadb  # type: ignore[attr-defined]
        wanted = sql.application_grants(self._config.topology.tables, mysql=mysql)
        if lacking := grants.missing(wanted, held, endpoint.database):
            self._add("missing-grant", f"{endpoint.user} lacks {grants.summary(lacking, endpoint.database)}")
        if surplus := grants.excess(wanted, held, endpoint.database):
            self._add(
                "excess-grant", f"{endpoint.user} has, and should not, {grants.summary(surplus, endpoint.database)}"
            )
