"""The record of one key of `once`: where it is, and how it is read and written."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from lockrouter.backoff import jittered
from lockrouter.deadline import now
from lockrouter.errors import KeyCollision, LockLost, ShardError
from lockrouter.recipes.home import Home
from lockrouter.recipes.own import OwnLease
from lockrouter.recipes.talk import Refused, patience, talk
from lockrouter.routing import encode
from lockrouter.sql import recipes as sql

if TYPE_CHECKING:
    from lockrouter.core import Core
    from lockrouter.shard import Shard

__all__ = ["MAX_RESULT", "Record"]

MAX_RESULT = 512 * 1024
"""Bytes of JSON that a stored result has at most."""

_DUPLICATE = 1062
_LOCKED = frozenset({1205, 3572})
_PAUSE = 0.05


class _Stored(NamedTuple):
    """A record that is alive."""

    result: bytes
    owner: bytes
    token: int


class Record:
    """Where the record of one key is, and how it is read and written."""

    def __init__(self, core: Core, key: str | bytes) -> None:
        self.core = core
        self.key = key
        self.raw = encode(key)
        self.shown = core.shown(self.raw)
        self.address = core.routing.route(self.raw)
        self.home = Home(core.shards, core.shards[self.address.shard], self.address.bucket)
        self.digest = blake2b(self.raw, digest_size=16, key=core.config.topology.name.encode()).digest()
        # Whether a record whose time is over lies in the way.
        self.stale = False

    @property
    def shard(self) -> Shard:
        """Where it is, as far as is known."""
        return self.home.shard

    def until(self) -> float:
        """When a statement sent now must have been answered."""
        return patience(self.shard, self.core.config.class_of(self.raw).timeout)

    def read(self) -> _Stored | None:
        """The record, if there is one that is alive.

        Raises:
            KeyCollision: it is another key's.
            ShardError: the shard does not answer, or the key's bucket is nowhere that this map lists.
        """
        (row,) = self.home.rows(sql.read_result(self.address.bucket, self.digest), self.until())
        text, state, alive, owner, token, result = row
        if text is None:
            self.stale = False
            return None
        self.refuse_collision(text)
        self.stale = alive != b"1"
        if self.stale or state != b"%d" % sql.DONE:
            return None
        return _Stored(result or b"null", owner or b"", int(token or 0))

    def refuse_collision(self, text: bytes) -> None:
        """Raise KeyCollision where the record is that of another key."""
        if text != self.raw:
            raise KeyCollision(f"the digest of key {self.shown} is also another key's: a result of either was stored")

    def encoded(self, function: Callable[..., Any], result: Any) -> bytes:
        """The result as it is stored.

        Raises:
            TypeError: it is no JSON.
            ValueError: it is too large, or JSON has no word for it (NaN, a circle).
        """
        what = f"once({self.shown}): the result of {getattr(function, '__qualname__', function)!s}"
        told = "it has run, and nothing was stored: the next caller runs it again"
        try:
            text = json.dumps(result, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{what}, a {type(result).__name__}, is not JSON ({error}); {told}") from error
        if len(text) > MAX_RESULT:
            raise ValueError(f"{what} has {len(text):,} bytes as JSON, more than {MAX_RESULT:,}; {told}")
        return text

    def store(self, lease: OwnLease, text: bytes, keep: float) -> None:
        """The result is stored, by the holder of the lease.

        Raises:
            LockLost: the lease was lost before; nothing was stored.
            ShardError: the shard did not answer, or refused, for one ttl.
        """
        until = now() + lease.ttl
        while True:
            try:
                if self._try_to_store(lease, text, keep):
                    return
            except ShardError:
                # A server that restarts keeps leases: the result is worth waiting for, as long as it may be stored.
                if lease.lost or now() + _PAUSE > until:
                    raise
                time.sleep(jittered(_PAUSE))
                continue
            raise LockLost(
                f"the lease of once({self.shown}) is lost: the result was not stored", key=self.raw, reason=lease.reason
            )

    def _try_to_store(self, lease: OwnLease, text: bytes, keep: float) -> bool:
        first = [sql.drop_stale_result(self.digest)] if self.stale else []
        place, holder = (self.address.bucket, lease.digest), lease.holder
        insert = sql.store_result(self.address.table, place, holder, (self.digest, self.raw), int(keep * 1e6), text)
        try:
            return self.home.change([*first, insert], self.until())
        except Refused as refused:
            if refused.code != _DUPLICATE:
                raise refused.as_shard_error(self.shard) from None
            # Ours, if the reply to an earlier COMMIT was lost; anybody else's stays as it is.
            there = self.read()
            return there is not None and (there.owner, there.token) == holder

    def claimed(self) -> bool:
        """True while somebody's transaction is claiming the record."""
        try:
            talk(self.shard, [sql.probe_result(self.digest)], self.until())
        except Refused as refused:
            if refused.code not in _LOCKED:
                raise refused.as_shard_error(self.shard) from None
            return True
        return False
