"""Business tables in a shard's database, which the application may use like its own."""

from __future__ import annotations

from typing import Any

import pymysql
from sqlalchemy import Column, Engine, Integer, MetaData, Table, create_engine

from lockrouter.config import RouterConfig
from lockrouter.testing.shardfiles import APPLICATION
from tests.support.accounts import engine_of
from tests.support.observe import Observer

__all__ = ["Business", "engine_counting_changes", "wallet_table"]

_RIGHTS = "SELECT, INSERT, UPDATE, DELETE"


class Business:
    """Tables made from SQLAlchemy's description; `drop` removes them and every right to them."""

    def __init__(self, server: Observer, *tables: Table) -> None:
        self.server = server
        self.tables = tables
        admin = create_engine("mysql+pymysql://", creator=server.connect)
        for table in tables:
            table.drop(admin, checkfirst=True)
            table.create(admin)
            for host in ("localhost", "127.0.0.1"):
                server.ask(f"GRANT {_RIGHTS} ON {server.database}.{table.name} TO '{APPLICATION}'@'{host}'")
        admin.dispose()

    def drop(self) -> None:
        """Nothing is left of them."""
        for table in self.tables:
            for host in ("localhost", "127.0.0.1"):
                self.server.ask(
                    f"REVOKE {_RIGHTS} ON {self.server.database}.{table.name} FROM '{APPLICATION}'@'{host}'"
                )
            self.server.ask(f"DROP TABLE IF EXISTS {table.name}")


def wallet_table() -> Table:
    """A row per account: balance and version."""
    return Table(
        "wallet",
        MetaData(),
        Column("id", Integer, primary_key=True, autoincrement=False),
        Column("balance", Integer, nullable=False),
        Column("version", Integer, nullable=False),
        mysql_engine="InnoDB",
    )


def engine_counting_changes(config: RouterConfig, shard: int, **options: Any) -> Engine:
    """As `engine_of`, but without CLIENT_FOUND_ROWS: an UPDATE that changes nothing counts nothing."""
    where = config.endpoints(config.shards[shard])[0]

    def connect() -> Any:
        return pymysql.connect(
            host=where.host,
            port=where.port,
            user=where.user,
            password=where.password or "",
            database=where.database,
            ssl_disabled=True,
        )

    return create_engine(engine_of(config, shard).url, creator=connect, **options)
