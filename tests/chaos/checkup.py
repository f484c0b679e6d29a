"""What a worker says of itself while all its threads rest and no fault is in the way."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections import Counter
from contextlib import suppress

import msgspec
from prometheus_client import REGISTRY

from lockrouter import Lease, LockRouter, RowLock, ShardError
from lockrouter.routing import Address

__all__ = ["Checkup", "checkup", "routes"]

LEASES = 10
_TTL = 1.0
_FRESH = 100
_HELD = 4


class Checkup(msgspec.Struct, kw_only=True):
    """One process at rest."""

    left: dict[str, float]
    """What is still held, waited for, busy or kept alive though all was released."""
    gauge: float
    """`lockrouter_held` while so many rows are held, which is ground truth."""
    held: int
    kept: int
    """Leases that the keeper knows of, while so many are held."""
    leases: int
    survived: int
    """Of those, the ones still held long after their first ttl."""
    renewals: float
    """Renewals while they were held."""
    late_renewals: float
    """Renewals after all were released."""
    new_series: int
    """Series that came with so many keys nobody had locked before."""
    fresh: int
    routes: str
    """A digest of where many keys live."""
    threads: int
    trouble: list[str]


def routes(router: LockRouter, number: int = 1000) -> str:
    """A digest of where so many keys live."""
    digest = hashlib.blake2b(digest_size=16)
    for index in range(number):
        address: Address = router.route(f"anything:{index}:é")
        digest.update(repr(tuple(address)).encode())
    return digest.hexdigest()


def checkup(router: LockRouter, seed: int) -> Checkup:
    """Look at everything; takes some seconds."""
    trouble: list[str] = []
    left = _left(router)
    fresh = _lock_fresh(router, seed, trouble)
    # What grows with keys grows with every batch; an outcome that nothing had before comes once.
    counted = [_series()]
    for _ in range(2):
        fresh += _lock_fresh(router, seed, trouble)
        counted.append(_series())
    new_series = min(later - earlier for earlier, later in itertools.pairwise(counted))
    gauge, held = _gauge(router, seed, trouble)
    kept, leases, survived, renewals, late = _leases(router, seed, trouble)
    return Checkup(
        left=left,
        gauge=gauge,
        held=held,
        kept=kept,
        leases=leases,
        survived=survived,
        renewals=renewals,
        late_renewals=late,
        new_series=new_series,
        fresh=fresh,
        routes=routes(router),
        threads=threading.active_count(),
        trouble=trouble,
    )


def _left(router: LockRouter, patience: float = 5.0) -> dict[str, float]:
    """What is left of work that is over; the background has a moment for the last of it."""
    until = time.monotonic() + patience
    while True:
        found: Counter[str] = Counter()
        for family in REGISTRY.collect():
            for sample in family.samples:
                if sample.name in ("lockrouter_held", "lockrouter_waiters") and sample.value:
                    found[f"{sample.name} {sample.labels}"] += int(sample.value)
        for shard, state in router.health().items():
            for name in ("busy", "waiting"):
                if state["pool"][name]:
                    found[f"{shard} pool {name}"] = state["pool"][name]
        if router._core.leases.entries:
            found["leases kept alive"] = len(router._core.leases.entries)
        if not found or time.monotonic() > until:
            return dict(found)
        time.sleep(0.05)


def _series() -> int:
    """All but those of the segments, which are 64 at most, and each there from its first lock on."""
    return sum(
        "segment" not in sample.labels
        for family in REGISTRY.collect()
        if family.name.startswith("lockrouter")
        for sample in family.samples
    )


def _value(name: str) -> float:
    return sum(sample.value for family in REGISTRY.collect() for sample in family.samples if sample.name == name)


def _lock_fresh(router: LockRouter, seed: int, trouble: list[str]) -> int:
    """Lock keys that nobody has locked before."""
    for number in range(_FRESH):
        try:
            held = router.try_lock(f"fresh:{seed}:{number}:{time.monotonic_ns()}")
        except ShardError as error:
            trouble.append(f"at rest: {error!r}")
            continue
        if held is not None:
            held.release()
    return _FRESH


def _gauge(router: LockRouter, seed: int, trouble: list[str]) -> tuple[float, int]:
    """`lockrouter_held` while rows are held, each by a key that no other process uses now."""
    taken: dict[int, RowLock] = {}
    for number in range(1000):
        key = f"gauge:{seed}:{number}"
        if len(taken) < _HELD and router.route(key).slot not in taken:
            try:
                held = router.try_lock(key)
            except ShardError as error:
                trouble.append(f"at rest: {error!r}")
                continue
            if held is not None:
                taken[held.address.slot] = held
    said = sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "lockrouter_held" and sample.labels["mode"] in ("row", "local")
    )
    for held in taken.values():
        held.release()
    return said, len(taken)


def _leases(router: LockRouter, seed: int, trouble: list[str]) -> tuple[int, int, int, float, float]:
    """Leases are kept alive beyond their ttl while they are held, and never after."""
    taken: list[Lease] = []
    before = _value("lockrouter_renewals_total")
    for number in range(LEASES):
        try:
            lease = router.try_lease(f"checkup:{seed}:{number}", ttl=_TTL)
        except ShardError as error:
            trouble.append(f"at rest: {error!r}")
            continue
        if lease is not None:
            taken.append(lease)
    kept = len(router._core.leases.entries)
    time.sleep(2 * _TTL)
    survived = sum(not lease.lost for lease in taken)
    renewals = _value("lockrouter_renewals_total") - before
    for lease in taken:
        with suppress(ShardError):
            lease.release()
    after = _value("lockrouter_renewals_total")
    time.sleep(_TTL)
    return kept, len(taken), survived, renewals, _value("lockrouter_renewals_total") - after
