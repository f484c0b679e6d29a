"""From key to row: pure, the same in every process, on every machine, for ever.

`low, high = mmh3_x64_128(key, seed)`; bucket = high mod buckets; row = low mod rows_per_bucket; table = bucket mod
tables; slot = bucket * rows_per_bucket + row. A row belongs to one bucket, so a bucket that moves takes whole rows
along. Which shard has a bucket is the map of the shard file, and never depends on whether that shard answers: a key
sent elsewhere for an outage would have two holders.
"""

from __future__ import annotations

from binascii import hexlify
from hashlib import blake2b
from typing import NamedTuple

from mmh3 import mmh3_x64_128_digest, mmh3_x64_128_utupledigest

from .config import RouterConfig, Topology
from .errors import InvalidKey

__all__ = ["LAYOUT", "MAX_KEY_BYTES", "PROTOCOL", "Address", "Routing", "encode", "fingerprint", "key_hash"]

PROTOCOL = 1
"""Version of what processes say to each other through the tables."""
LAYOUT = 1
"""Version of how a key becomes a slot, and of the tables."""
MAX_KEY_BYTES = 255
_PROBE = b"lockrouter seed probe"
_new = tuple.__new__


class Address(NamedTuple):
    """Where the row of a key is."""

    bucket: int
    shard: str
    table: int
    """lock_00 is 0."""
    slot: int
    """The row's primary key, unique in the topology: bucket * rows_per_bucket + row."""


def encode(key: str | bytes) -> bytes:
    """The bytes that are the key: UTF-8 of a `str`, `bytes` as they are; nothing is normalised.

    Raises:
        InvalidKey: neither `str` nor `bytes`, a lone surrogate, no byte, or more than 255.
    """
    if isinstance(key, str):
        # mmh3 itself crashes the process on a lone surrogate: it is only ever given bytes.
        try:
            raw = key.encode()
        except UnicodeEncodeError:
            raw = None
        # Raised out here: the codec's error would carry the key along as __context__.
        if raw is None:
            raise InvalidKey("a key must be encodable as UTF-8: it has a lone surrogate")
    elif isinstance(key, bytes):
        raw = bytes(key)
    else:
        raise InvalidKey(f"a key is str or bytes, not {type(key).__name__}")
    if not 1 <= len(raw) <= MAX_KEY_BYTES:
        raise InvalidKey(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(raw)}")
    return raw


def key_hash(key: bytes) -> str:
    """16 hexadecimal digits that stand for a key in logs and comments of statements; the same under every seed.

    Names the key to whoever knows it; short keys can be guessed from it, so it hides nothing from an attacker.
    """
    return Routing.tag(key).decode()


def fingerprint(topology: Topology) -> bytes:
    """16 bytes that are equal exactly if two topologies send every key to the same slot of the same name.

    Covers what is fixed for life (name, tables, buckets, rows_per_bucket, the seed as what it makes of a probe, the
    layout's version); never the map, the epoch or shard ids.
    """
    seed = mmh3_x64_128_digest(_PROBE, topology.seed).hex()
    sizes = f"tables={topology.tables} buckets={topology.buckets} rows={topology.rows_per_bucket}"
    text = f"lockrouter layout={LAYOUT} name={topology.name} {sizes} seed={seed}"
    return blake2b(text.encode("ascii"), digest_size=16).digest()


class Routing:
    """The routes of one map; immutable, any number of threads may ask."""

    __slots__ = ("_buckets", "_rows", "_seed", "_shard_of", "_tables")

    def __init__(self, config: RouterConfig) -> None:
        topology = config.topology
        self._seed = topology.seed
        self._buckets = topology.buckets
        self._rows = topology.rows_per_bucket
        self._tables = topology.tables
        owner = [""] * topology.buckets
        for shard in config.shards:
            for first, last in shard.ranges():
                owner[first : last + 1] = [shard.id] * (last + 1 - first)
        self._shard_of = tuple(owner)

    def route(self, key: bytes) -> Address:
        """The address of an encoded key; no I/O, the same time whatever the number of shards."""
        low, high = mmh3_x64_128_utupledigest(key, self._seed)
        bucket = high % self._buckets
        # A named tuple's own constructor is a function more for the same object.
        return _new(
            Address, (bucket, self._shard_of[bucket], bucket % self._tables, bucket * self._rows + low % self._rows)
        )

    @staticmethod
    def tag(key: bytes) -> bytes:
        """`key_hash` as 16 bytes: what a locking statement says of its key to whoever looks at the server."""
        return hexlify(mmh3_x64_128_digest(key)[:8])

    def shard_of_bucket(self, bucket: int) -> str:
        """The id of the shard that owns a bucket. Raises: IndexError outside of 0 to buckets - 1."""
        if bucket < 0:
            raise IndexError(bucket)
        return self._shard_of[bucket]
