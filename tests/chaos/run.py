"""One chaos run: rounds of faults under load, each followed by a rest in which everything is looked at."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry

from lockrouter import LockRouter
from lockrouter.testing.binaries import Vendor
from tests.chaos.checkup import Checkup, routes
from tests.chaos.invariants import Findings, invariants
from tests.chaos.plan import Fault, make_plan
from tests.chaos.probes import probes
from tests.chaos.report import Report, report_of
from tests.chaos.site import COUNTER, SHARDS, Site
from tests.chaos.storm import Storm, Struck
from tests.chaos.story import Story
from tests.support.history import read
from tests.support.judges import Verdict, together
from tests.support.observe import Observer
from tests.support.workers import Workers

__all__ = ["PROCESSES", "chaos"]

PROCESSES = 8
ROUND = 30.0
_SETTLE = 8.0


def chaos(
    site: Site,
    *,
    seed: int,
    seconds: float,
    processes: int = PROCESSES,
    choose: Callable[[Fault], bool] = lambda _: True,
    rests: bool = True,
    say: Callable[[str], object] = lambda _: None,
) -> Report:
    """Run, and judge.

    Args:
        seconds: of load and faults in all; the rests between the rounds come on top.
        choose: which of the planned faults are carried out.
        rests: False: only the history is judged, and what the processes leave behind.
        say: is told what is going on.
    """
    rounds = max(1, round(seconds / ROUND))
    length = seconds / rounds
    struck: list[Struck] = []
    checkups: list[Checkup] = []
    left: list[str] = []
    found: dict[str, list[Verdict]] = {}
    figures: Counter[str] = Counter()
    with Workers("tests.chaos.process", [str(site.shards_file), str(site.folder)], processes) as fleet:
        for number in range(rounds):
            plan = [fault for fault in make_plan(seed, number, length, len(SHARDS), processes) if choose(fault)]
            say(f"round {number + 1} of {rounds}: {len(plan)} faults in {length:.0f} s")
            began = time.monotonic()
            fleet.go()
            storm = Storm(site, fleet, plan, SHARDS)
            storm.join()
            struck += storm.struck
            time.sleep(max(0.0, began + length - time.monotonic()))
            if not rests:
                continue
            checkups += [msgspec.json.decode(said, type=Checkup) for said in fleet.rest()]
            left += _nothing_held(site, f"after round {number + 1}")
            for name, verdict in probes(site).items():
                found.setdefault(name, []).append(verdict)
        said = fleet.end()
    for text in said:
        figures.update(json.loads(text))
    left += _no_sessions(site)
    bugs = {name.removeprefix("bug "): number for name, number in figures.items() if name.startswith("bug ")}
    (site.folder / "struck.json").write_bytes(msgspec.json.encode(struck))
    story = Story(read(site.folder), struck)
    findings = Findings(
        checkups=checkups,
        routes=_routes(site),
        left=Verdict((rounds + 1) * len(SHARDS), left),
        probes={name: together(verdicts) for name, verdicts in found.items()},
        sets=site.sets(),
        sums=_sums(site),
        money=site.accounts[0].total,
        bugs=bugs,
    )
    programs = {Vendor.MYSQL: site.places[0][0], Vendor.MARIADB: site.places[2][0]}
    names = ", ".join(f"{vendor} {cluster.version}" for vendor, cluster in programs.items())
    operations = sum(attempt.outcome is not None for attempt in story.attempts)
    headline = (
        f"chaos, seed {seed}, {seconds:.0f} s in {rounds} rounds, {processes} processes, on_outage={site.on_outage}; "
        f"two shards each on {names}: {operations:,} acquisitions, {len(struck)} faults"
    )
    return report_of(headline, story, invariants(story, findings), figures)


def _routes(site: Site) -> str:
    with LockRouter(site.config, registry=CollectorRegistry()) as router:
        return routes(router)


def _nothing_held(site: Site, when: str) -> list[str]:
    """What servers say is held or waited for while everybody rests."""
    return _within(site, lambda observer: {name: ids for name, ids in observer.locks().items() if ids}, when)


def _no_sessions(site: Site) -> list[str]:
    """What servers still have of processes that have ended."""
    return _within(site, lambda observer: observer.sessions() or observer.locks()["holders"], "at the end")


def _within(site: Site, look: Callable[[Observer], object], when: str) -> list[str]:
    until = time.monotonic() + _SETTLE
    found = []
    for name, observer in zip(SHARDS, site.observers, strict=True):
        while seen := look(observer):
            if time.monotonic() > until:
                found.append(f"{name} {when}: {seen}")
                break
            time.sleep(0.1)
    return found


def _sums(site: Site) -> dict[str, tuple[int, int]]:
    found = {}
    for name, observer in zip(SHARDS, site.observers, strict=True):
        rows = {int(number): int(balance) for number, balance in observer.ask("SELECT id, balance FROM account")}
        counted = rows.pop(COUNTER)
        found[name] = (sum(rows.values()), counted)
    return found


def run_alone(folder: Path, *, seed: int, seconds: float, on_outage: str, say: Callable[[str], object]) -> Report:
    """The same on servers of its own."""
    with Site(folder, on_outage) as site:
        return chaos(site, seed=seed, seconds=seconds, say=say)
