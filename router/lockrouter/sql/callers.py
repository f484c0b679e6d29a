"""The statements that this package sends in callers' own transactions, through their SQLAlchemy connections."""

from __future__ import annotations

from sqlalchemy import text

from lockrouter.sql.statements import Dialect

__all__ = ["DROP_MARKER", "RAISE_FENCE", "WRITE_MARKER", "look_around"]

WRITE_MARKER = text(
    "INSERT INTO run_marker (id, at) VALUES (:id, CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS UNSIGNED))"
)
"""Commits together with the transaction, and so tells later whether it did."""

DROP_MARKER = text("DELETE FROM run_marker WHERE id = :id")
"""Removes the marker of a transaction whose outcome is known."""

RAISE_FENCE = text(
    "INSERT INTO fence (k, key_text, token) VALUES (:k, :key_text, :token)"
    " ON DUPLICATE KEY UPDATE token = LAST_INSERT_ID(GREATEST(token, :token))"
)
"""The insert id of its reply is the highest token seen, or 0 for the first; so it is whatever counts as affected."""


def look_around(dialect: Dialect) -> str:
    """Where a caller's session is and how it is set, without reading a table of InnoDB: no snapshot begins.

    Columns: autocommit, isolation, server identity, start of the server, current database, whether a timeout rolls
    the whole transaction back.
    """
    isolation = "@@session.tx_isolation" if dialect.name == "mariadb" else "@@session.transaction_isolation"
    # Whatever the session's time zone: in some of them an hour of each year comes twice.
    started = f"TIMESTAMPDIFF(SECOND, '1970-01-01', UTC_TIMESTAMP()) - {dialect.uptime}"
    return (
        f"SELECT @@session.autocommit, {isolation}, {dialect.identity}, {started}, DATABASE(), "
        "@@global.innodb_rollback_on_timeout"
    )
