"""What the random part of a run cannot show, tried directly while everybody rests, on one shard of each vendor."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from prometheus_client import CollectorRegistry

from lockrouter import LockRouter, LockTimeout, RouterConfig, ShardError, TopologyMismatch
from lockrouter.config import load
from lockrouter.deadline import now
from tests.chaos.jobs import GATES, PERMITS
from tests.chaos.site import SHARDS, Site
from tests.support.judges import Verdict, together
from tests.support.proxy import Proxy

__all__ = ["probes"]

_TTL = 1.0
_SKEW = 0.5
_TRIES = 30
_CALLERS = 8
_DEAD_FOR = 1.5


def probes(site: Site) -> dict[str, Verdict]:
    """Try everything; the shards are well before and after."""
    found: dict[str, list[Verdict]] = defaultdict(list)
    for index in (0, 2):
        with _own_way(site, index) as (router, proxy):
            found["I6"].append(_sent_once(site, index, router, proxy))
            found["I12"].append(_contention(site, index, router))
            found["I12"].append(_one_probe(router, proxy, index))
        found["I8"].append(_other_map(site, index))
    found["I14"].append(_permits_return(site))
    return {name: together(some) for name, some in found.items()}


@contextmanager
def _own_way(site: Site, index: int) -> Iterator[tuple[LockRouter, Proxy]]:
    """A router that reaches one shard through a proxy nobody else uses, and the others as everybody does."""
    cluster, local = site.places[index]
    config = site.config
    with Proxy(cluster.port(local)) as proxy:
        shards = list(config.shards)
        url = shards[index].url.replace(f":{site.proxies[index].port}/", f":{proxy.port}/")
        shards[index] = msgspec.structs.replace(shards[index], url=url)
        breaker = msgspec.structs.replace(config.breaker, failures=2, retry_delay=0.02)
        pool = msgspec.structs.replace(config.pool, connect_timeout=0.4)
        changed = msgspec.structs.replace(config, shards=tuple(shards), breaker=breaker, pool=pool)
        with LockRouter(changed, registry=CollectorRegistry()) as router:
            router.warm()
            yield router, proxy


def _key(router: LockRouter, index: int, what: str) -> str:
    keys = (f"probe:{what}:{number}" for number in range(100_000))
    return next(key for key in keys if router.route(key).shard == SHARDS[index])


@contextmanager
def _occupied(site: Site, index: int, router: LockRouter, key: str) -> Iterator[None]:
    """A stranger has the row of the key."""
    observer = site.observer(index)
    with observer.connect() as stranger, stranger.cursor() as cursor:
        address = router.route(key)
        cursor.execute("BEGIN")
        cursor.execute(f"SELECT slot FROM lock_{address.table:02d} WHERE slot = {address.slot} FOR UPDATE")
        yield
        cursor.execute("ROLLBACK")


def _sent_once(site: Site, index: int, router: LockRouter, proxy: Proxy) -> Verdict:
    """A wait is one statement, and ends at its deadline."""
    key, wrong = _key(router, index, "once"), []
    marker = b"%10d FOR UPDATE" % router.route(key).slot
    with _occupied(site, index, router, key):
        before, began = proxy.said(marker), now()
        try:
            router.lock(key, timeout=0.5).release()
            wrong.append("a row that a stranger has was granted")
        except LockTimeout:
            took = now() - began
            if took > 0.75:
                wrong.append(f"a wait of 0.5 s took {took:.2f} s")
    sent = proxy.said(marker) - before
    if sent != 1:
        wrong.append(f"the locking statement of one wait was sent {sent} times")
    return Verdict(2, wrong)


def _contention(site: Site, index: int, router: LockRouter) -> Verdict:
    """However often a row is busy, its shard is well."""
    key, wrong = _key(router, index, "busy"), []
    with _occupied(site, index, router, key):
        for _ in range(_TRIES):
            if router.try_lock(key) is not None:
                wrong.append("a row that a stranger has was granted")
    breaker = router.health()[SHARDS[index]]["breaker"]
    if breaker != "closed":
        wrong.append(f"after {_TRIES} times busy the breaker is {breaker}")
    return Verdict(_TRIES, wrong)


def _one_probe(router: LockRouter, proxy: Proxy, index: int) -> Verdict:
    """A dead shard is asked once a second or so, however many callers want it; afterwards it grants again."""
    key, wrong = _key(router, index, "probe"), []
    proxy.stop()
    until = now() + 10.0
    while router.health()[SHARDS[index]]["breaker"] == "closed" and now() < until:
        _attempt(router, key)
    before, begun = proxy.accepted, now()
    calls: list[int] = []
    threads = [threading.Thread(target=_hammer, args=(router, key, begun + _DEAD_FOR, calls)) for _ in range(_CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asked = proxy.accepted - before
    # The breaker's probe, the control session and the writer each try once per probe.
    if asked > 3 * (_DEAD_FOR + 1):
        wrong.append(f"{len(calls)} callers' attempts made {asked} connections to a dead shard in {_DEAD_FOR} s")
    proxy.accept()
    until = now() + 10.0
    while said := _attempt(router, key):
        if now() > until:
            state = router.health()[SHARDS[index]]
            wrong.append(f"the shard does not grant again within 10 s: {said}; {state}")
            break
        time.sleep(0.02)
    return Verdict(len(calls), wrong)


def _attempt(router: LockRouter, key: str) -> str:
    """Why the row itself was not granted; empty: it was."""
    try:
        with router.lock(key, timeout=0.2) as held:
            return "degraded" if held.degraded else ""
    except (ShardError, LockTimeout) as error:
        return repr(error)


def _hammer(router: LockRouter, key: str, until: float, calls: list[int]) -> None:
    while now() < until:
        _attempt(router, key)
        calls.append(1)
        time.sleep(0.005)


def _other_map(site: Site, index: int) -> Verdict:
    """A process with another map than the database's is refused."""
    config = load(site.direct_file)
    topology = msgspec.structs.replace(config.topology, rows_per_bucket=32)
    other: RouterConfig = msgspec.structs.replace(config, topology=topology)
    with LockRouter(other, registry=CollectorRegistry()) as router:
        try:
            router.lock(_key(router, index, "map"), timeout=1.0).release()
        except TopologyMismatch:
            return Verdict(1, [])
        return Verdict(1, [f"{SHARDS[index]} granted to a process with another map"])


def _permits_return(site: Site) -> Verdict:
    """Whoever died with a permit: after its ttl all are free."""
    wrong = []
    with LockRouter(site.config, registry=CollectorRegistry()) as router:
        for number in range(GATES):
            gate, taken = router.semaphore(f"gate:{number}", permits=PERMITS, ttl=_TTL), []
            deadline = now() + _TTL + _SKEW + 2.0
            try:
                for _ in range(PERMITS):
                    taken.append(gate.acquire(timeout=max(0.0, deadline - now())))
            except LockTimeout:
                wrong.append(f"gate {number}: {len(taken)} of {PERMITS} permits are free at rest")
            for permit in taken:
                permit.release()
    return Verdict(GATES * PERMITS, wrong)
