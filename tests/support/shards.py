"""Topologies in databases of their own, on the servers of a cluster with two shards."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pymysql

from lockrouter.admin.init import init
from lockrouter.admin.seed import seed
from lockrouter.admin.verify import verify
from lockrouter.config import RouterConfig, load
from lockrouter.testing.cluster import Cluster

__all__ = ["BUCKETS", "ROWS", "TABLES", "Shards", "arguments", "drop", "make"]

TABLES, BUCKETS, ROWS = 2, 8, 16
"""Of the small topology that most tests use."""


@dataclass
class Shards:
    """A topology in databases of its own on the two servers of a cluster."""

    cluster: Cluster
    file: Path
    admin_file: Path
    databases: tuple[str, str]

    @property
    def config(self) -> RouterConfig:
        return load(self.file)

    @property
    def admin(self) -> RouterConfig:
        return load(self.admin_file)

    def create(self) -> Shards:
        init(self.config, self.admin)
        seed(self.config, self.admin)
        return self

    def sql(self, index: int, *statements: str) -> list[tuple[Any, ...]]:
        """Executes as administrator in the shard's database; answers the last one's rows."""
        with self.cluster.connect(index) as connection, connection.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE IF NOT EXISTS {self.databases[index]}")
            cursor.execute(f"USE {self.databases[index]}")
            for statement in statements:
                cursor.execute(statement)
            rows = list(cursor.fetchall())
            connection.commit()
        return [tuple(row.values()) if isinstance(row, dict) else tuple(row) for row in rows]

    def problems(self) -> list[tuple[str, str]]:
        return [(finding.shard, finding.problem) for finding in verify(self.config, self.admin)]

    def application(self, index: int) -> pymysql.connections.Connection[Any]:
        """A connection of the application's user."""
        config = self.config
        where = config.endpoints(config.shards[index])[0]
        return pymysql.connect(
            host=where.host,
            port=where.port,
            user=where.user,
            password=where.password,
            database=where.database,
            ssl_disabled=True,
        )

    def epoch(self, epoch: int) -> RouterConfig:
        """The file as it would be at another epoch."""
        config = self.config
        return msgspec.structs.replace(config, topology=msgspec.structs.replace(config.topology, epoch=epoch))


def make(
    cluster: Cluster, folder: Path, prefix: str, tables: int, buckets: int, rows: int, *, turns: bool = False
) -> Shards:
    """The files of a topology; its databases do not exist yet. With `turns` the shards own every second bucket each."""
    shape = f'name = "t"\nepoch = 3\ntables = {tables}\nbuckets = {buckets}\nrows_per_bucket = {rows}\n'
    paths = []
    for original in (cluster.shards_file, cluster.admin_file):
        config = load(original)
        text = f'[topology]\n{shape}[router]\non_outage = "refuse"\n'
        for index, shard in enumerate(config.shards):
            database = config.endpoints(shard)[0].database
            url = shard.url.removesuffix(database) + f"{prefix}_{index}"
            share = f"{buckets // 2 * index}-{buckets // 2 * (index + 1) - 1}"
            owned = [str(bucket) for bucket in range(index, buckets, 2)] if turns else [share]
            text += f'[[shard]]\nid = "s{index}"\nurl = "{url}"\nbuckets = {json.dumps(owned)}\n'
        paths.append(folder / f"{prefix}-{Path(original).name}")
        paths[-1].write_text(text, "utf-8")
    shards = Shards(cluster, paths[0], paths[1], (f"{prefix}_0", f"{prefix}_1"))
    drop(shards)
    return shards


def drop(shards: Shards) -> None:
    for index, database in enumerate(shards.databases):
        shards.sql(index, f"DROP DATABASE {database}")


def arguments(command: str, shards: Shards) -> list[str]:
    """Of the command line, with the administrator's file."""
    return [command, str(shards.file), "--admin", str(shards.admin_file)]
