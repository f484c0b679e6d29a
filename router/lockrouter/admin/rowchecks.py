"""Whether the lock rows are those that lock_bucket says: all there, no others, and open exactly where it says so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from sqlalchemy import Connection

from lockrouter.admin.connect import fetch
from lockrouter.admin.finding import Finding, listed
from lockrouter.admin.meta import Bucket
from lockrouter.config import Topology
from lockrouter.sql import admin as sql
from lockrouter.sql.schema import lock_name

__all__ = ["check"]


def check(
    connection: Connection,
    topology: Topology,
    shard: str,
    own: Sequence[int],
    known: Mapping[int, Bucket],
    absent: AbstractSet[str],
) -> list[Finding]:
    """What is wrong with the rows, at most one finding per table and problem. Reads every row, locks none.

    Args:
        own: the buckets the file gives to the shard.
        known: the shard's lock_bucket.
        absent: tables that do not exist, and are not looked at.
    """
    found = []
    for table in range(topology.tables):
        if lock_name(table) not in absent:
            mine = {bucket for bucket in own if bucket % topology.tables == table}
            for problem, text in _Table(topology, table, mine, known).problems(connection):
                found.append(Finding(shard, problem, f"{lock_name(table)}: {text}"))
    return found


class _Table:
    """The counts of one table, sorted by what they mean."""

    def __init__(self, topology: Topology, table: int, own: AbstractSet[int], known: Mapping[int, Bucket]) -> None:
        self._rows = topology.rows_per_bucket
        self._topology = topology
        self._table = table
        self._own = own
        self._known = known

    def problems(self, connection: Connection) -> list[tuple[str, str]]:
        """Pairs of a word and a sentence."""
        counts: dict[str, dict[int, int]] = defaultdict(dict)
        missing = {bucket: self._rows for bucket in self._own if bucket in self._known}
        for row in fetch(connection, sql.examine_rows(self._table), {"rows": self._rows}):
            bucket = self._known.get(row.bucket)
            if bucket is None or row.bucket % self._topology.tables != self._table:
                counts["extra-rows"][row.bucket] = row.present
                continue
            if row.bucket in missing:
                missing[row.bucket] -= row.present
            is_open = row.present - int(row.closed)
            if bucket.epoch == 0:
                counts["departed-open"][row.bucket] = is_open
            else:
                counts["closed-rows"][row.bucket] = int(row.closed)
                if is_open and (row.lowest != bucket.epoch or row.highest != bucket.epoch):
                    counts["row-epoch"][row.bucket] = is_open
        counts["missing-rows"] = missing
        return [
            (
                problem,
                text.format(n=sum(counts[problem].values()), b=listed(b for b, n in counts[problem].items() if n)),
            )
            for problem, text in _TEXTS.items()
            if any(counts[problem].values())
        ]


_TEXTS = {
    "missing-rows": "{n} rows of buckets {b} are missing: run `lockrouter seed`",
    "extra-rows": "{n} rows belong to no bucket of this table and shard (buckets {b}): delete them",
    "closed-rows": "{n} rows of buckets {b} are closed though their bucket is this shard's own",
    "departed-open": "{n} rows of buckets {b} are open though their bucket is closed here: two holders per row",
    "row-epoch": "buckets {b} have rows of another epoch than their bucket's",
}
