"""Where the rows of a recipe are: on the shard of the map, until that one says that their bucket went elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lockrouter.backoff import jittered
from lockrouter.deadline import now
from lockrouter.errors import TopologyMismatch
from lockrouter.protocol.packets import Ok, Rows
from lockrouter.recipes.talk import Refused, talk
from lockrouter.sql.statements import bucket_state, read_bucket

if TYPE_CHECKING:
    from lockrouter.shard import Shard

__all__ = ["Home", "Row"]

Row = tuple[bytes | None, ...]

_PAUSE = 0.05


class Home:
    """The shard that has a bucket open, as far as is known; it is followed from shard to shard as it moves."""

    def __init__(self, shards: Mapping[str, Shard], shard: Shard, bucket: int) -> None:
        self._shards = shards
        self.shard = shard
        self._bucket = bucket

    def rows(self, packet: bytes, until: float) -> list[Row]:
        """What a statement reads whose first two columns are those of `read_bucket`, without these.

        Raises:
            ShardError: the shard does not answer, or the bucket did not open in time where this map looks for it.
        """
        while True:
            try:
                (reply,) = talk(self.shard, [packet], until)
            except Refused as refused:
                raise refused.as_shard_error(self.shard) from None
            opened, moved_to = bucket_state(reply)
            if opened and isinstance(reply, Rows):
                return [row[2:] for row in reply.rows]
            self._follow(moved_to, until)

    def change(self, packets: Sequence[bytes], until: float) -> bool:
        """Whether the last of some statements, committed together, changed a row; each finds none in a closed bucket.

        Raises:
            Refused: a statement met an error of the server's.
            ShardError: as `rows`.
        """
        while True:
            reply = talk(self.shard, packets, until, commit=True)[-1]
            if isinstance(reply, Ok) and reply.affected:
                return True
            before = self.shard
            self.rows(read_bucket(self._bucket), until)
            if self.shard is before:
                return False

    def _follow(self, moved_to: str, until: float) -> None:
        target = self._shards.get(moved_to)
        where = f"bucket {self._bucket} is closed on this shard: it has moved, or is moving"
        if moved_to and target is None:
            raise TopologyMismatch(f"{where}, to shard {moved_to}, which this map does not list", shard=self.shard.id)
        if now() >= until:
            raise TopologyMismatch(where, shard=self.shard.id)
        if target is not None:
            self.shard = target
        time.sleep(jittered(_PAUSE))
