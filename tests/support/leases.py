"""Leases as the server stores them, and what a router still does about them."""

from __future__ import annotations

from typing import Any, NamedTuple

from lockrouter import LockRouter
from lockrouter.leases.rows import Kind, digest
from tests.support.observe import Observer, Routers, eventually

__all__ = ["LeaseRow", "lease_row", "place", "settled", "tombs"]


class LeaseRow(NamedTuple):
    """One row of a lease table; times are microseconds of the server's clock."""

    kind: int
    key: bytes
    owner: bytes
    token: int
    ttl: int
    acquired: int
    expires: int
    payload: bytes


def place(router: LockRouter, key: str, kind: int = Kind.LEASE) -> tuple[str, int, bytes]:
    """Table, bucket and digest of a key's lease."""
    address = router.route(key)
    return f"lease_{address.table:02d}", address.bucket, digest(router._core.config.topology.name, kind, key.encode())


def lease_row(server: Observer, router: LockRouter, key: str, kind: int = Kind.LEASE) -> LeaseRow | None:
    """What the server has stored for a key."""
    table, bucket, k = place(router, key, kind)
    columns = ", ".join(LeaseRow._fields).replace("key,", "key_text,")
    rows: list[tuple[Any, ...]] = server.ask(f"SELECT {columns} FROM {table} WHERE bucket = %s AND k = %s", bucket, k)
    return LeaseRow(*rows[0]) if rows else None


def tombs(router: LockRouter) -> int:
    """How many owner ids the router still releases in the background."""
    return router._core.leases.keeper.tombs()


def settled(routers: Routers, router: LockRouter) -> None:
    """The router keeps nothing alive, and no row of its shards is owned."""
    leases = router._core.leases
    eventually(lambda: not leases.entries, 5.0, lambda: leases.entries)
    for server in routers.observers:
        eventually(lambda: not owned(server, router), 5.0, lambda: owned(server, router))  # noqa: B023 - called now


def owned(server: Observer, router: LockRouter) -> list[tuple[Any, ...]]:
    """The rows of a shard that are not free."""
    tables = range(router._core.config.topology.tables)
    union = " UNION ALL ".join(
        f"SELECT key_text, owner FROM lease_{table:02d} WHERE owner <> '' "
        "AND expires > CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS UNSIGNED)"
        for table in tables
    )
    return server.ask(union)
