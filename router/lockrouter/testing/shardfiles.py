"""The two shard files of a throw-away cluster: for the application's user and for an administrator."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise

from .server import ClusterError

__all__ = ["APPLICATION", "Scalar", "ShardFile"]

APPLICATION = "lockrouter"
Scalar = str | int | float | bool

_TOPOLOGY: Mapping[str, Scalar] = {
    "name": "local",
    "epoch": 1,
    "tables": 8,
    "buckets": 64,
    "rows_per_bucket": 256,
    "seed": 0,
}


class ShardFile:
    """A shard file's text for servers on loopback, the buckets split evenly over them in order.

    Args:
        topology: fields of `[topology]` that differ from the small default map.
        router: fields of `[router]`, `on_outage` among them.
        extra: TOML text put at the end, for example `[pool]` or `[[class]]`.

    Raises:
        ClusterError: there are fewer buckets than shards.
    """

    def __init__(
        self, shards: int, *, topology: Mapping[str, Scalar], router: Mapping[str, Scalar], extra: str, prefix: str
    ) -> None:
        self._topology = {**_TOPOLOGY, **topology}
        self._router = dict(router)
        self._extra = extra
        self._prefix = prefix
        buckets = int(self._topology["buckets"])
        if not 1 <= shards <= buckets:
            raise ClusterError(f"shards must be 1 to {buckets} (the number of buckets), not {shards}")
        edges = [buckets * index // shards for index in range(shards + 1)]
        self._buckets = [f"{low}-{high - 1}" for low, high in pairwise(edges)]

    def url(self, index: int, port: int, user: str, password: str) -> str:
        """The SQLAlchemy URL of one shard's database."""
        return f"mysql+pymysql://{user}:{password}@127.0.0.1:{port}/{self._prefix}{index}"

    def text(self, shards: Sequence[tuple[str, int]], user: str, password: str) -> str:
        """The whole file for the shards given as id and port."""
        parts = [_table("[topology]", self._topology), _table("[router]", self._router)]
        for index, (shard, port) in enumerate(shards):
            fields = {"id": shard, "url": self.url(index, port, user, password)}
            parts.append(_table("[[shard]]", fields) + f"buckets = [{json.dumps(self._buckets[index])}]\n")
        return "\n".join([*parts, self._extra.strip() + "\n"] if self._extra.strip() else parts)


def _table(header: str, fields: Mapping[str, Scalar]) -> str:
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()]
    return "\n".join([header, *lines]) + "\n"
