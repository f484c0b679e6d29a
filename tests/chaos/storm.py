"""Carries out a plan of faults: lanes side by side; in each lane one fault after the other, undone before the next."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress

import msgspec
import pymysql

from lockrouter.deadline import now
from tests.chaos.plan import Fault
from tests.chaos.site import Site
from tests.support.observe import Observer
from tests.support.proxy import Cut, Proxy, Rule, Way
from tests.support.workers import Workers

__all__ = ["Storm", "Struck"]

_MARKERS = (b"FOR UPDATE", b"ROLLBACK", b"INTO lease_", b"UPDATE lease_", b"COMMIT", b"lock_meta")
"""Of the requests that are cut: locking and freeing of rows and leases, the caller's commit, the router's own looks."""


class Struck(msgspec.Struct, frozen=True):
    """A fault that happened, by the clock all processes share."""

    kind: str
    target: str
    """A shard's id, or a worker's process id."""
    began: float
    ended: float
    """When it was undone: a server answered again, bytes passed again, a process ran again."""


class Storm:
    """The faults of one round; `join` returns when all are over."""

    def __init__(self, site: Site, fleet: Workers, plan: list[Fault], shards: tuple[str, ...]) -> None:
        self._site = site
        self._fleet = fleet
        self._shards = shards
        self.struck: list[Struck] = []
        self._troubles: list[BaseException] = []
        self._began = time.monotonic()
        lanes: dict[str, list[Fault]] = {}
        for fault in plan:
            lanes.setdefault(fault.lane, []).append(fault)
        self._threads = [
            threading.Thread(target=self._lane, args=(faults,), name=lane, daemon=True)
            for lane, faults in lanes.items()
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait for all lanes; raises what went wrong in the storm itself."""
        for thread in self._threads:
            thread.join()
        for trouble in self._troubles:
            raise trouble

    def _lane(self, faults: list[Fault]) -> None:
        observer = self._site.observer(faults[0].target) if faults[0].lane.startswith("shard") else None
        try:
            for fault in faults:
                time.sleep(max(0.0, self._began + fault.at - time.monotonic()))
                began = now()
                if observer is None:
                    target = self._strike_worker(fault)
                else:
                    target = self._shards[fault.target]
                    self._strike_shard(fault, observer)
                self.struck.append(Struck(fault.kind, target, began, now()))
        except BaseException as error:  # noqa: BLE001 - raised by `join`
            self._troubles.append(error)
        finally:
            if observer is not None:
                observer.close()

    def _strike_worker(self, fault: Fault) -> str:
        process = self._fleet.running[fault.target]
        if fault.kind == "kill worker":
            self._fleet.kill(fault.target)
        else:
            self._fleet.freeze(fault.target, fault.length)
        return str(process.pid)

    def _strike_shard(self, fault: Fault, observer: Observer) -> None:
        cluster, local = self._site.places[fault.target]
        proxy = self._site.proxies[fault.target]
        if fault.kind == "kill sessions":
            _kill_sessions(observer, int(fault.amount))
        elif fault.kind == "restart server":
            cluster.kill(local)
            time.sleep(fault.length)
            cluster.start(local)
        elif fault.kind == "freeze server":
            cluster.pause(local)
            time.sleep(fault.length)
            cluster.resume(local)
        elif fault.kind == "read only":
            observer.ask("SET GLOBAL read_only = 1")
            time.sleep(fault.length)
            observer.ask("SET GLOBAL read_only = 0")
        elif fault.kind in ("fin", "rst"):
            proxy.cut(Cut(fault.kind), after=int(fault.amount))
        else:
            _weather(proxy, fault)


def _weather(proxy: Proxy, fault: Fault) -> None:
    """What the network does to all connections of a shard for a while."""
    kind, amount = fault.kind, fault.amount
    if kind == "delay":
        proxy.delay(amount)
    elif kind == "throttle":
        proxy.throttle(amount)
    elif kind == "split":
        proxy.split(max(1, int(amount)))
    elif kind == "merge":
        proxy.merge(amount)
    elif kind == "silence":
        proxy.stop()
    elif kind == "silence up":
        proxy.stop(Way.UP)
    elif kind == "silence down":
        proxy.stop(Way.DOWN)
    elif kind == "refuse":
        proxy.refuse()
    else:
        _add_rules(proxy, fault)
    time.sleep(fault.length)
    proxy.accept()


def _add_rules(proxy: Proxy, fault: Fault) -> None:
    dice = random.Random(f"{fault.at} {fault.amount}")
    for _ in range(int(fault.amount)):
        marker = dice.choice(_MARKERS)
        if fault.kind == "cut in request":
            rule = Rule(Way.UP, dice.randrange(40), dice.choice([Cut.FIN, Cut.RST]), marker=marker)
        elif fault.kind == "stall before reply":
            rule = Rule(Way.DOWN, dice.randrange(2), Cut.STALL, marker=marker)
        else:
            rule = Rule(Way.DOWN, dice.choice([0, 0, 3]), dice.choice([Cut.FIN, Cut.RST]), marker=marker)
        proxy.add(rule)


def _kill_sessions(observer: Observer, count: int) -> None:
    """KILL some of the application's connections, busy ones first: these hold and wait."""
    found = sorted(observer.sessions(), key=lambda seen: seen.command == "Sleep")
    for session in found[:count]:
        with suppress(pymysql.err.OperationalError):  # it may have ended by itself
            observer.kill(session.id)
