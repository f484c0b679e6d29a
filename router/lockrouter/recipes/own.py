"""Leases of the recipes' own kinds: no key of a user can meet one, and none of another recipe."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lockrouter.errors import LossReason
from lockrouter.leases.handle import Lease, checked_ttl
from lockrouter.leases.rows import Kind, digest
from lockrouter.recipes.home import Home
from lockrouter.recipes.talk import Refused, patience
from lockrouter.routing import encode
from lockrouter.sql import recipes as sql

if TYPE_CHECKING:
    from lockrouter.config import ResolvedClass
    from lockrouter.core import Core
    from lockrouter.routing import Address

__all__ = ["Held", "Kind", "OwnLease", "Place", "holder_of", "holders", "take"]


class Held(NamedTuple):
    """A lease that is held, as it was read; `left` is the seconds until it expires, negative in the margin after."""

    owner: bytes
    token: int
    left: float
    key: bytes
    payload: bytes


class OwnLease(Lease):
    """A lease of a recipe: with what its statements need to name it, and one more way to end."""

    __slots__ = ()

    @property
    def digest(self) -> bytes:
        """Its name in its table."""
        return self._entry.row.k

    @property
    def holder(self) -> tuple[bytes, int]:
        """Owner id and token, as the row has them."""
        return self._entry.row.owner, self._entry.row.token

    @property
    def reason(self) -> LossReason:
        """Why it is lost, once it is."""
        return self._loss() or LossReason.STOLEN

    def leave(self, at_least: float) -> None:
        """Hold it no more, but let nobody have it before `at_least` seconds after it was taken, by the server's clock.

        Raises:
            LockLost: it had been lost before.
            NotHeld: it was released before.
            ShardError: no answer; it ends when it would have expired.
        """
        if self._generation is not self._leases.generation:
            return
        self._require_open()
        entry = self._entry
        try:
            reason = self._leases.let_be(entry)
        finally:
            # An interrupt may have come before anything was done: then it is to be released yet.
            self._open = entry.held
        if reason is None:
            place = (entry.row.bucket, entry.row.k)
            packet = sql.end_lease(entry.table, place, self.holder, int(at_least * 1e6))
            home = Home(self._leases.shards, entry.shard, entry.row.bucket)
            until = patience(entry.shard, self._leases.config.router.timeout)
            try:
                ended = home.change([packet], until)
            except Refused as refused:
                raise refused.as_shard_error(home.shard) from None
            # Asked again after a lost reply, the statement finds nothing left to change.
            if not ended and not self._has_the_row(home, until):
                reason = LossReason.STOLEN
        if reason is not None:
            raise self._lost_error(reason)

    def _has_the_row(self, home: Home, until: float) -> bool:
        row, (owner, token) = self._entry.row, self.holder
        rows = home.rows(sql.open_leases(self._entry.table, row.bucket, [row.k]), until)
        return [found[1:3] for found in rows] == [(owner, b"%d" % token)]

    def drop(self) -> None:
        """Give it up without waiting for the shard: the background frees its row."""
        if self._open:
            self._leases.drop(self._entry)
            self._open = self._entry.held


class Place:
    """Where a lease of a kind is, or one of several that belong together and share the bucket of a name."""

    def __init__(
        self, core: Core, kind: Kind, name: str | bytes, part: bytes = b"", *, address: Address | None = None
    ) -> None:
        self.core = core
        self.kind = kind
        self.name = name
        raw = encode(name)
        self.address: Address = address or core.routing.route(raw)
        self.home = Home(core.shards, core.shards[self.address.shard], self.address.bucket)
        self.key = raw + part
        self.digest = digest(core.config.topology.name, kind, self.key)
        self.shown = core.shown(raw)

    def part(self, part: bytes) -> Place:
        """Another lease of the same bucket."""
        return Place(self.core, self.kind, self.name, part)

    def count_parts(self, prefix: bytes, least: int, until: float) -> int:
        """How many leases of this name are held whose part is the prefix and a number from `least` on; by `until`."""
        begins = self.key + prefix
        rows = _read(self, sql.leases_of_kind(self.address.table, self.address.bucket, self.kind), until)
        parts = [held.key.removeprefix(begins) for held in rows.values() if held.key.startswith(begins)]
        return sum(part.isdigit() and int(part) >= least for part in parts)


def take(place: Place, *, ttl: float, rule: ResolvedClass | None = None, until: float | None = None) -> OwnLease | None:
    """The lease, kept alive until it is released, if it is free now; None: somebody holds it.

    Its payload says to operators, and to who is kept out, which process has it. The shard must answer until `until`;
    None: within `connect_timeout`.

    Raises:
        ShardError: the shard does not answer.
    """
    leases = place.core.leases
    lease, _ = leases.acquire(
        place.kind,
        place.key,
        ttl=checked_ttl(ttl),
        timeout=0.0,
        payload=f"{socket.gethostname()}:{os.getpid()}".encode(),
        rule=rule,
        address=place.address,
        name=place.name,
        make=OwnLease,
        until=until,
    )
    assert lease is None or isinstance(lease, OwnLease)
    return lease


def holders(base: Place, places: Sequence[Place], until: float | None = None) -> dict[bytes, Held]:
    """Which of some leases of one bucket are held, by their digests; one plain SELECT, answered by `until`.

    Raises:
        ShardError: the shard does not answer.
    """
    wanted = sql.open_leases(base.address.table, base.address.bucket, [place.digest for place in places])
    return _read(base, wanted, until)


def holder_of(place: Place) -> Held | None:
    """Who holds a lease, or None: nobody. Raises as `holders`."""
    return holders(place, [place]).get(place.digest)


def _read(place: Place, packet: bytes, until: float | None) -> dict[bytes, Held]:
    home, skew, found = place.home, place.core.config.router.clock_skew, {}
    for k, owner, token, left, key, payload in home.rows(
        packet, until or patience(home.shard, place.core.config.router.timeout)
    ):
        seconds = int(left or 0) / 1e6
        if owner and seconds + skew > 0:
            found[k or b""] = Held(owner, int(token or 0), seconds, key or b"", payload or b"")
    return found
