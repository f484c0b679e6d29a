"""Accounts as rows on a shard: what a lock protects, and how one sees that it did."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Engine, text
from sqlalchemy.engine import URL, create_engine

from lockrouter.config import RouterConfig
from lockrouter.testing.shardfiles import APPLICATION
from tests.support.observe import Observer

__all__ = ["Accounts", "balance", "engine_of", "pay"]

_RIGHTS = "SELECT, INSERT, UPDATE, DELETE, CREATE, DROP, EXECUTE"


class Accounts:
    """A table of accounts in a shard's database, with procedures that commit; the application may do all with it."""

    def __init__(self, server: Observer, count: int = 4, each: int = 100) -> None:
        self.server = server
        self.total = count * each
        server.ask("DROP TABLE IF EXISTS account, account_ddl")
        for procedure in ("commits_inside", "commits_and_fails"):
            server.ask(f"DROP PROCEDURE IF EXISTS {procedure}")
        server.ask("CREATE TABLE account (id INT PRIMARY KEY, balance INT NOT NULL) ENGINE = InnoDB")
        server.ask("CREATE PROCEDURE commits_inside() BEGIN COMMIT; UPDATE account SET balance = balance; END")
        server.ask(
            "CREATE PROCEDURE commits_and_fails() BEGIN COMMIT; UPDATE account SET balance = balance; "
            "SIGNAL SQLSTATE '45000'; END"
        )
        server.ask("INSERT INTO account VALUES " + ", ".join(f"({number}, {each})" for number in range(count)))
        for host in ("localhost", "127.0.0.1"):
            server.ask(f"GRANT {_RIGHTS} ON {server.database}.* TO '{APPLICATION}'@'{host}'")

    def balances(self) -> list[int]:
        """Of every account, as committed."""
        return [int(row[0]) for row in self.server.ask("SELECT balance FROM account ORDER BY id")]

    def sum(self) -> int:
        """What must never change."""
        return sum(self.balances())

    def drop(self) -> None:
        """Remove the table and every right to it."""
        self.server.ask("DROP TABLE IF EXISTS account, account_ddl")
        for procedure in ("commits_inside", "commits_and_fails"):
            self.server.ask(f"DROP PROCEDURE IF EXISTS {procedure}")
        for host in ("localhost", "127.0.0.1"):
            self.server.ask(f"REVOKE {_RIGHTS} ON {self.server.database}.* FROM '{APPLICATION}'@'{host}'")


def pay(connection: Connection, account: int, amount: int) -> int:
    """Change a balance; answers how many rows matched."""
    return connection.execute(
        text("UPDATE account SET balance = balance + :amount WHERE id = :id"), {"amount": amount, "id": account}
    ).rowcount


def balance(connection: Connection, account: int) -> int:
    """One balance, as the transaction sees it."""
    return int(connection.execute(text("SELECT balance FROM account WHERE id = :id"), {"id": account}).scalar_one())


def engine_of(config: RouterConfig, shard: int, **options: Any) -> Engine:
    """An engine of the user's own, with the application's login, on a shard's database."""
    where = config.endpoints(config.shards[shard])[0]
    login = URL.create("mysql+pymysql", where.user, where.password, where.host, where.port, where.database)
    return create_engine(login, connect_args={"ssl_disabled": True}, **options)
