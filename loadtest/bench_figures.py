"""Figures of the router that nothing is compared with: CPU, memory, routing, seeding, fairness, a crowd."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypedDict

import bench_routing
import bench_seed
from bench_stub import cycle_cost, stub_cost
from bench_workers import fairness
from sqlalchemy.engine import make_url

from lockrouter.admin.init import init
from lockrouter.admin.seed import seed
from lockrouter.config import RouterConfig, load
from lockrouter.testing.cluster import Cluster
from lockrouter.testing.shardfiles import APPLICATION, Scalar, ShardFile

__all__ = ["Crowd", "Figures", "figures"]

_SHARDS = 4
_CALLERS, _QUICK_CALLERS = 10_000, 2_000


class Crowd(TypedDict):
    """Callers who want a lock at the same moment, each of a key of its own; seconds."""

    callers: int
    connections: int
    success: float
    """Share of those who got it within the default timeout, 0 to 1."""
    p50: float
    p99: float
    """Until a caller had taken, held and released it."""
    ideal_p99: float
    """The same if all connections held locks all the time and nothing else took any."""
    seconds: float


class Figures(TypedDict):
    """What was measured."""

    cpu_us: float
    """Microseconds of the client's CPU for a lock and its release, the server being replaced by memory."""
    route_us: float
    """Microseconds for a route in a map of 64 shards."""
    rss_mb: float
    """Resident memory of a process with an idle router of 4 connected shards."""
    rss_interpreter_mb: float
    """The same of a bare interpreter."""
    waiting_bytes: float
    """Resident memory that a waiting caller adds to what it needs itself."""
    waiting_callers: int
    residue_bytes: float
    """Resident memory that a key leaves behind."""
    residue_keys: int
    """Over so many."""
    fairness: float
    """Locks of the luckiest of 4 processes over those of the unluckiest."""
    crowd: Crowd
    seed_rows: int
    seed_rows_per_second: float
    """On one shard."""


def figures(cluster: Cluster, config: RouterConfig, *, rounds: int, seconds: float, quick: bool) -> Figures:
    """Measure all on the cluster's one server, in databases of their own."""
    seeding = bench_seed.measure(*_files(cluster, config, "bench_seed_", 1, _seed_topology(quick)))
    cpu, route, residue = _client(quick)
    four, callers = str(_four_shards(cluster, config)), _QUICK_CALLERS if quick else _CALLERS
    memory = _script("bench_rss.py", four)
    return {
        "cpu_us": cpu,
        "route_us": route,
        "rss_mb": memory["router"],
        "rss_interpreter_mb": memory["interpreter"],
        "waiting_bytes": _waiting(str(cluster.shards_file), callers),
        "waiting_callers": callers,
        "residue_bytes": residue,
        "residue_keys": _residue_keys(quick),
        "fairness": fairness(cluster.shards_file, rounds=rounds, seconds=seconds),
        "crowd": _crowd(four, callers, rounds),
        "seed_rows": seeding["rows"],
        "seed_rows_per_second": min(seeding["rows_per_second"].values()),
    }


@lru_cache(maxsize=1)
def _client(quick: bool) -> tuple[float, float, float]:
    """CPU, routing and residue, for which there is no server; the same for all of them."""
    rounds = 2 if quick else 5
    cpu = cycle_cost(rounds=rounds) - stub_cost(rounds=rounds)
    return cpu, bench_routing.measure((64,), rounds=rounds)[64], _script("bench_residue.py", _residue_keys(quick))


def _residue_keys(quick: bool) -> int:
    return 50_000 if quick else 1_000_000


def _waiting(file: str, callers: int) -> float:
    """What waiting adds, for a row or for the pool, whichever is more."""
    parked, *waiting = (_greenlets("bench_waiting.py", file, callers, kind) for kind in ("parked", "row", "pool"))
    return float(max(waiting) - parked)


def _crowd(file: str, callers: int, rounds: int) -> Crowd:
    """The crowd of the rounds whose p99 is in the middle."""
    found: list[Crowd] = [_greenlets("bench_crowd.py", file, callers) for _ in range(rounds)]
    return sorted(found, key=lambda one: one["p99"])[len(found) // 2]


def _greenlets(name: str, *arguments: object) -> Any:
    """The same of a script that runs under gevent."""
    return _script("-m", "gevent.monkey", name, *arguments)


def _script(*words: object) -> Any:
    """What a script of this folder prints as JSON, in a process of its own."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=Path(__file__).parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def _seed_topology(quick: bool) -> dict[str, Scalar]:
    return {"name": "bench-seed", "buckets": 256 if quick else 2048, "rows_per_bucket": 512}


def _paths(cluster: Cluster, prefix: str) -> tuple[Path, Path]:
    return cluster.directory / f"{prefix}shards.toml", cluster.directory / f"{prefix}admin.toml"


def _files(
    cluster: Cluster, config: RouterConfig, prefix: str, shards: int, topology: Mapping[str, Scalar]
) -> tuple[RouterConfig, RouterConfig]:
    """Another topology whose shards are databases of the one server: its shard file and its administrator's."""
    text = ShardFile(shards, topology=topology, router={"on_outage": "refuse"}, extra="", prefix=prefix)
    members = [(f"shard-{number}", cluster.port(0)) for number in range(shards)]
    password = config.endpoints(config.shards[0])[0].password
    admin = make_url(cluster.admin_url(0))
    logins = ((APPLICATION, password), (str(admin.username), str(admin.password)))
    for path, login in zip(_paths(cluster, prefix), logins, strict=True):
        path.touch(mode=0o600)
        path.write_text(text.text(members, *login), "utf-8")
    file, admin_file = _paths(cluster, prefix)
    return load(file), load(admin_file)


def _four_shards(cluster: Cluster, config: RouterConfig) -> Path:
    """The file of a topology of four shards, ready."""
    prefix = "bench_four_"
    topology: dict[str, Scalar] = {"name": "bench-four", "buckets": 256, "rows_per_bucket": 512}
    mine, admin = _files(cluster, config, prefix, _SHARDS, topology)
    init(mine, admin)
    seed(mine, admin)
    return _paths(cluster, prefix)[0]
