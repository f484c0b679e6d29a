"""The inserting of missing lock rows into one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from sqlalchemy import Connection

from lockrouter.admin.connect import fetch, run
from lockrouter.config import Topology
from lockrouter.sql import admin as sql

__all__ = ["fill_table"]

_BATCH = 32_768
"""Rows of one transaction at most: a second of work on a slow server, so that a kill undoes little."""


def fill_table(
    connection: Connection,
    topology: Topology,
    table: int,
    buckets: Sequence[int],
    present: Mapping[int, int],
    advance: Callable[[int], None],
) -> int:
    """The buckets have all their rows, each with its bucket's epoch in lock_bucket; answers how many were inserted.

    Args:
        buckets: of this table, known to lock_bucket.
        present: how many rows a bucket has; absent means none.
        advance: told the number of rows after each transaction.
    """
    rows = topology.rows_per_bucket
    inserted = 0
    for low, count, batch in _batches([bucket for bucket in buckets if not present.get(bucket)], rows):
        values = {"rows": rows, "low": low, "count": count, "buckets": batch}
        inserted += _told(advance, run(connection, sql.add_generated_rows(table), values))
    for bucket in buckets:
        if present.get(bucket):
            for low in range(0, rows, sql.GENERATED):
                count = min(sql.GENERATED, rows - low)
                inserted += _told(advance, _mend(connection, table, bucket, bucket * rows + low, count))
    return inserted


def _batches(buckets: Sequence[int], rows: int) -> Iterator[tuple[int, int, Sequence[int]]]:
    """First row, number of rows, and the buckets whose rows these are; each batch is one statement."""
    wide = max(1, _BATCH // rows)
    for start in range(0, len(buckets), wide):
        for low in range(0, rows, sql.GENERATED):
            yield low, min(sql.GENERATED, rows - low), buckets[start : start + wide]


def _mend(connection: Connection, table: int, bucket: int, low: int, count: int) -> int:
    """Inserts those of `count` slots from `low` on that are missing, under the share lock of their bucket."""
    there = {row.slot for row in fetch(connection, sql.list_slots(table), {"low": low, "high": low + count})}
    lacking = [slot for slot in range(low, low + count) if slot not in there]
    if not lacking:
        return 0
    with connection.begin():
        epoch = connection.execute(sql.SHARE_BUCKET, {"bucket": bucket}).scalar_one()
        connection.execute(sql.add_listed_rows(table), [{"slot": slot, "epoch": epoch} for slot in lacking])
    return len(lacking)


def _told(advance: Callable[[int], None], rows: int) -> int:
    if rows:
        advance(rows)
    return rows
