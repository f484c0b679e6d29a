"""The statements of the recipes: results that are stored once, permits, and the sweeper's.

As in `statements`, every value is an integer or a hexadecimal literal made by this package: no quoted user input.
Times are microseconds of the server's clock at the start of the statement.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import text

from lockrouter.protocol.packets import query
from lockrouter.tokens import EPOCH_US

__all__ = [
    "CLAIM_RESULT",
    "COMMIT",
    "DONE",
    "FILL_RESULT",
    "FIRST_OPEN_BUCKET",
    "LOOK_AT_RESULT",
    "STALE_MARKERS",
    "STALE_RESULTS",
    "SWEEP_MARKER",
    "SWEEP_RESULT",
    "SWEEP_SESSION",
    "drop_stale_result",
    "end_lease",
    "leases_of_kind",
    "open_leases",
    "probe_result",
    "read_result",
    "stale_leases",
    "store_result",
    "sweep_lease",
]

COMMIT = query(b"COMMIT")

DONE = 2
"""`once.state` of a stored result; 1 is a claim inside a transaction that has not committed."""

_NOW = "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS UNSIGNED)"
_GRANTED = f"((token >> 6 & {(1 << 48) - 1}) * 4 + {EPOCH_US})"
"""When a token was made: its ticks turned back into microseconds (see `lockrouter.tokens`)."""


def _hex(data: bytes) -> str:
    # An empty hexadecimal literal (0x) is no literal; X'' is one on both servers.
    return f"X'{data.hex()}'"


def read_result(bucket: int, digest: bytes) -> bytes:
    """The packet that reads a result: the bucket's epoch and moved_to, key_text, state, alive, owner, token, result."""
    return query(
        f"SELECT b.epoch, b.moved_to, o.key_text, o.state, o.keep_until > {_NOW}, o.owner, o.token, o.result"
        f" FROM lock_bucket b LEFT JOIN once o ON o.k = {_hex(digest)} WHERE b.bucket = {bucket}".encode()
    )


def probe_result(digest: bytes) -> bytes:
    """The packet that fails at once where another transaction is claiming the result (3572 or 1205)."""
    return query(f"SELECT state FROM once WHERE k = {_hex(digest)} FOR UPDATE NOWAIT".encode())


def drop_stale_result(digest: bytes) -> bytes:
    """The packet that removes a result whose time is over."""
    return query(f"DELETE FROM once WHERE k = {_hex(digest)} AND keep_until <= {_NOW}".encode())


def store_result(
    table: int,
    place: tuple[int, bytes],
    holder: tuple[bytes, int],
    record: tuple[bytes, bytes],
    keep_us: int,
    result: bytes,
) -> bytes:
    """The packet that stores a result if its lease is still held: affects one row, or none where it is not.

    1062: a result is there. The share lock makes whoever takes the lease over wait, and then see the result.

    Args:
        place: bucket and digest of the lease.
        holder: its owner and token.
        record: digest and text of the result's key.
    """
    bucket, lease = place
    owner, token = holder
    digest, key = record
    return query(
        f"INSERT INTO once (k, key_text, state, owner, token, expires, keep_until, result)"
        f" SELECT {_hex(digest)}, {_hex(key)}, {DONE}, l.owner, l.token, l.expires, {_NOW} + {keep_us}, {_hex(result)}"
        f" FROM lease_{table:02d} l JOIN lock_bucket b ON b.bucket = l.bucket AND b.epoch > 0"
        f" WHERE l.bucket = {bucket} AND l.k = {_hex(lease)} AND l.owner = {_hex(owner)} AND l.token = {token}"
        f" AND l.expires > {_NOW} LOCK IN SHARE MODE".encode()
    )


CLAIM_RESULT = text(
    "INSERT INTO once (k, key_text, state, owner, token, expires, keep_until) VALUES (:k, :key_text, 1, '', 0, 0, 0)"
    " ON DUPLICATE KEY UPDATE state = state"
)
"""Inside the caller's transaction: the result's row is there, and locked until the transaction ends."""

LOOK_AT_RESULT = text(f"SELECT key_text, state, keep_until > {_NOW} AS alive, result FROM once WHERE k = :k FOR UPDATE")
"""Inside the caller's transaction: the row as it is now, not as a snapshot has it."""

FILL_RESULT = text(
    f"UPDATE once SET state = {DONE}, owner = :owner, token = :token, expires = 0, keep_until = {_NOW} + :keep,"
    " result = :result WHERE k = :k"
)
"""Inside the caller's transaction: the result, which commits with the caller's rows."""


def end_lease(table: int, place: tuple[int, bytes], holder: tuple[bytes, int], least_us: int) -> bytes:
    """The packet that has a lease expire `least_us` after it was acquired, or now; affects no row if it is lost.

    Its ttl becomes 0: after a failover nobody need be given the time to renew it.
    """
    bucket, digest = place
    owner, token = holder
    return query(
        f"UPDATE lock_bucket b STRAIGHT_JOIN lease_{table:02d} l ON l.bucket = b.bucket AND l.k = {_hex(digest)}"
        f" SET l.ttl = 0, l.expires = GREATEST(l.acquired + {least_us}, {_NOW})"
        f" WHERE b.bucket = {bucket} AND b.epoch > 0 AND l.owner = {_hex(owner)} AND l.token = {token}"
        f" AND l.expires > {_NOW}".encode()
    )


def _leases(table: int, bucket: int, condition: str) -> bytes:
    return query(
        "SELECT b.epoch, b.moved_to,"
        f" l.k, l.owner, l.token, CAST(l.expires AS SIGNED) - CAST({_NOW} AS SIGNED), l.key_text, l.payload"
        f" FROM lock_bucket b LEFT JOIN lease_{table:02d} l ON l.bucket = {bucket} AND {condition}"
        f" WHERE b.bucket = {bucket}".encode()
    )


def open_leases(table: int, bucket: int, digests: Sequence[bytes]) -> bytes:
    """The packet that reads some leases of a bucket.

    Columns: the bucket's epoch and moved_to; then, NULL if none is there, k, owner, token, microseconds left, key_text,
    payload.
    """
    return _leases(table, bucket, f"l.k IN ({', '.join(map(_hex, digests))})")


def leases_of_kind(table: int, bucket: int, kind: int) -> bytes:
    """The packet that reads all leases of one kind in a bucket, whatever their keys; columns as in `open_leases`."""
    return _leases(table, bucket, f"l.kind = {kind}")


def stale_leases(table: int) -> str:
    """Reads `:page` leases after (`:bucket`, `:k`), and says which are stale: long expired, and granted long ago."""
    return (
        f"SELECT bucket, k, expires + :age <= {_NOW} AND {_GRANTED} + :age <= {_NOW} AS stale FROM lease_{table:02d}"
        " WHERE bucket >= :bucket AND (bucket > :bucket OR k > :k) ORDER BY bucket, k LIMIT :page"
    )


def sweep_lease(table: int) -> str:
    """Deletes one lease if it is stale still."""
    return (
        f"DELETE FROM lease_{table:02d} WHERE bucket = :bucket AND k = :k"
        f" AND expires + :age <= {_NOW} AND {_GRANTED} + :age <= {_NOW}"
    )


FIRST_OPEN_BUCKET = "SELECT MIN(bucket) AS bucket FROM lock_bucket WHERE epoch > 0"
"""Reads in which bucket the sweepers of a shard elect one of them: its first, whatever the map says; NULL: none."""

STALE_RESULTS = f"SELECT k, keep_until <= {_NOW} AS stale FROM once WHERE k > :k ORDER BY k LIMIT :page"
"""Reads `:page` results after `:k`, and says which have been kept for as long as they were to be."""

SWEEP_RESULT = f"DELETE FROM once WHERE k = :k AND keep_until <= {_NOW}"
"""Deletes one result if its time is over still."""

STALE_MARKERS = f"SELECT id AS k, at + :age <= {_NOW} AS stale FROM run_marker WHERE id > :k ORDER BY id LIMIT :page"
"""Reads `:page` markers of `run` after `:k`, and says which nobody can be asking for any more."""

SWEEP_MARKER = f"DELETE FROM run_marker WHERE id = :k AND at + :age <= {_NOW}"
"""Deletes one marker if it is old still."""

SWEEP_SESSION = "SET SESSION innodb_lock_wait_timeout = 1, lock_wait_timeout = 1"
"""A sweeper gives way to whoever holds a row for a second, or a table."""
