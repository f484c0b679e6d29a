"""The statements of leases: take, read back, renew, release, for any number of rows of one table at a time.

Every value is an integer or a hexadecimal literal. `now` is NOW, the start of the statement: a statement that waited
judges by the earlier time, so it can find a lease still held that has just expired, never the other way round.

Each statement share-locks the rows of `lock_bucket` it needs: behind a fence it waits, and finds the bucket closed.
`lock_meta` is read in subqueries, which lock nothing: the grant window's UPDATE must not wait for leases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lockrouter.protocol.packets import query
from lockrouter.sql.statements import MYSQL, Dialect
from lockrouter.tokens import EPOCH_US

__all__ = ["BEGIN", "COMMIT", "Wanted", "find", "find_unlocked", "free", "keep", "owners", "take"]

_NOW = b"CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED)"
_TERM = b"(SELECT m.term FROM lock_meta AS m WHERE m.id = 1)"
_TERM_STARTED = b"(SELECT CAST(m.term_started AS SIGNED) FROM lock_meta AS m WHERE m.id = 1)"
_TOKEN = b"%b * 18014398509481984 + CAST((%b - %d) DIV 4 AS UNSIGNED) * 64" % (_TERM, _NOW, EPOCH_US)


class Wanted(NamedTuple):
    """One row of a statement; `token` 0 stands for any, times are microseconds."""

    bucket: int
    k: bytes
    kind: int
    key: bytes
    owner: bytes
    token: int
    ttl: int
    payload: bytes


def _hex(value: bytes) -> bytes:
    return b"0x" + value.hex().encode() if value else b"''"


def _full(row: Wanted) -> bytes:
    return b"%d,%b,%d,%b,%b,%d,%b" % (
        row.bucket, _hex(row.k), row.kind, _hex(row.key), _hex(row.owner), row.ttl, _hex(row.payload)
    )  # fmt: skip


def _short(row: Wanted) -> bytes:
    return b"%d,%b,%b,%d,%d" % (row.bucket, _hex(row.k), _hex(row.owner), row.token, row.ttl)


def _source(dialect: Dialect, names: bytes, rows: Sequence[Wanted], values: Callable[[Wanted], bytes]) -> bytes:
    """A derived table `v` of literals; few rows are cheaper as SELECTs, many as a VALUES list (measured)."""
    if len(rows) < 24:
        first = b",".join(
            b"%b AS %b" % pair for pair in zip(values(rows[0]).split(b","), names.split(b","), strict=True)
        )
        return b"(SELECT %b) AS v" % b" UNION ALL SELECT ".join((first, *map(values, rows[1:])))
    if dialect is MYSQL:
        return b"(VALUES %b) AS v(%b)" % (b",".join(b"ROW(%b)" % values(row) for row in rows), names)
    return b"(WITH w(%b) AS (VALUES %b) SELECT * FROM w) AS v" % (
        names,
        b",".join(b"(%b)" % values(row) for row in rows),
    )


def take(dialect: Dialect, table: int, rows: Sequence[Wanted], skew_us: int) -> bytes:
    """The packet that gives each row to its new owner where it is free, and changes nothing of it otherwise.

    Free: released; or expired for `skew_us`, and the present term older than the row's ttl: after a failover only the
    holder goes on. The assignments are carried out in order: those that ask whether the row is free come first, `owner`
    is the last of them; those after it ask whether the owner is the new one, whose id no other acquisition has.
    Repeated after a lost reply it finds its own owner, keeps its token and the time it was acquired, and at most
    prolongs.
    """
    t = b"lease_%02d" % table
    free_now = (
        b"(%b.owner = '' OR (CAST(%b.expires AS SIGNED) + %d <= c.now AND c.now >= c.since + CAST(%b.ttl AS SIGNED)))"
        b" AND %b.key_text = v.key_text AND %b.kind = v.kind"
    ) % (t, t, skew_us, t, t, t)
    mine = b"%b.owner = v.owner" % t
    source = _source(dialect, b"bucket,k,kind,key_text,owner,ttl,payload", rows, _full)
    parts = (
        b"INSERT INTO %b (bucket, k, kind, key_text, owner, token, ttl, acquired, expires, payload) " % t,
        b"SELECT v.bucket, v.k, v.kind, v.key_text, v.owner, c.token, v.ttl, c.now, c.now + v.ttl, v.payload FROM ",
        b"(SELECT %b AS now, %b AS token, %b AS since) AS c STRAIGHT_JOIN %b" % (_NOW, _TOKEN, _TERM_STARTED, source),
        b" STRAIGHT_JOIN lock_bucket AS b ON b.bucket = v.bucket AND b.epoch > 0 LOCK IN SHARE MODE",
        b" ON DUPLICATE KEY UPDATE token = IF(%b, GREATEST(%b.token + 1, c.token), %b.token)" % (free_now, t, t),
        b", acquired = IF(%b, c.now, %b.acquired)" % (free_now, t),
        b", owner = IF(%b, v.owner, %b.owner)" % (free_now, t),
        b", payload = IF(%b, v.payload, %b.payload)" % (mine, t),
        b", ttl = IF(%b, v.ttl, %b.ttl)" % (mine, t),
        b", expires = IF(%b, GREATEST(%b.expires, c.now + v.ttl), %b.expires)" % (mine, t, t),
    )
    return query(b"".join(parts))


def _change(dialect: Dialect, table: int, rows: Sequence[Wanted], change: bytes, also: bytes = b"") -> bytes:
    t = b"lease_%02d" % table
    source = _source(dialect, b"bucket,k,owner,token,ttl", rows, _short)
    return query(
        b"UPDATE %b STRAIGHT_JOIN lock_bucket AS b ON b.bucket = v.bucket AND b.epoch > 0"
        b" STRAIGHT_JOIN %b AS l ON l.bucket = v.bucket AND l.k = v.k SET %b"
        b" WHERE l.owner = v.owner AND (v.token = 0 OR l.token = v.token)%b" % (source, t, change, also)
    )


def keep(dialect: Dialect, table: int, rows: Sequence[Wanted]) -> bytes:
    """The packet that renews each row its owner still holds; an expired one is not revived, none is shortened."""
    change = b"l.expires = GREATEST(l.expires, %b + v.ttl), l.ttl = v.ttl" % _NOW
    return _change(dialect, table, rows, change, b" AND l.expires > %b" % _NOW)


def free(dialect: Dialect, table: int, rows: Sequence[Wanted]) -> bytes:
    """The packet that frees each row its owner still has. Never by `expires = 0`, which would look long expired."""
    return _change(dialect, table, rows, b"l.owner = '', l.expires = LEAST(l.expires, %b)" % _NOW)


def _where(rows: Sequence[Wanted]) -> bytes:
    return b" OR ".join(b"(bucket = %d AND k = %b)" % (row.bucket, _hex(row.k)) for row in rows)


def find(groups: Sequence[tuple[int, Sequence[Wanted]]]) -> bytes:
    """The packet that reads the rows of each table, locking nothing.

    Columns: k, owner, token, kind, key_text, microseconds until it expires, microseconds until its term lets others
    have it, and the epoch of its bucket.
    """
    form = (
        b"SELECT k, owner, token, kind, key_text, CAST(expires AS SIGNED) - %b, %b + CAST(ttl AS SIGNED) - %b,"
        b" (SELECT b.epoch FROM lock_bucket AS b WHERE b.bucket = l.bucket) FROM lease_%%02d AS l WHERE %%b"
    ) % (_NOW, _TERM_STARTED, _NOW)
    return query(b" UNION ALL ".join(form % (table, _where(rows)) for table, rows in groups))


def owners(groups: Sequence[tuple[int, Sequence[Wanted]]]) -> bytes:
    """The packet that reads k, owner and token alone: all that a new holder needs, for half the price of `find`."""
    form = b"SELECT k, owner, token FROM lease_%02d WHERE %b"
    return query(b" UNION ALL ".join(form % (table, _where(rows)) for table, rows in groups))


def find_unlocked(table: int, rows: Sequence[Wanted]) -> bytes:
    """The packets that read the digests of the rows that exist, then of those that nobody has locked; none waits."""
    plain = b"SELECT k FROM %b WHERE %b" % (b"lease_%02d" % table, _where(rows))
    return query(plain) + query(plain + b" FOR UPDATE SKIP LOCKED")


BEGIN, COMMIT = query(b"START TRANSACTION"), query(b"COMMIT")
