"""Figures of the router that nothing is compared with: CPU, memory, routing, seeding."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

import bench_routing
import bench_seed
from bench_stub import cycle_cost, stub_cost
from sqlalchemy.engine import make_url

from lockrouter.admin.init import init
from lockrouter.admin.seed import seed
from lockrouter.config import RouterConfig, load
from lockrouter.testing.cluster import Cluster
from lockrouter.testing.shardfiles import APPLICATION, Scalar, ShardFile

__all__ = ["Figures", "figures"]

_RSS_SHARDS = 4


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
    seed_rows: int
    seed_rows_per_second: float
    """On one shard."""


def figures(cluster: Cluster, config: RouterConfig, *, quick: bool) -> Figures:
    """Measure all on the cluster's one server, in databases of their own."""
    seeding = bench_seed.measure(*_files(cluster, config, "bench_seed_", 1, _seed_topology(quick)))
    memory = _memory(cluster, config)
    rounds = 2 if quick else 5
    return {
        "cpu_us": cycle_cost(rounds=rounds) - stub_cost(rounds=rounds),
        "route_us": bench_routing.measure((64,), rounds=rounds)[64],
        "rss_mb": memory["router"],
        "rss_interpreter_mb": memory["interpreter"],
        "seed_rows": seeding["rows"],
        "seed_rows_per_second": min(seeding["rows_per_second"].values()),
    }


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


def _memory(cluster: Cluster, config: RouterConfig) -> dict[str, float]:
    prefix = "bench_rss_"
    topology: dict[str, Scalar] = {"name": "bench-rss", "buckets": 64, "rows_per_bucket": 16}
    mine, admin = _files(cluster, config, prefix, _RSS_SHARDS, topology)
    init(mine, admin)
    seed(mine, admin)
    command = [sys.executable, str(Path(__file__).with_name("bench_rss.py")), str(_paths(cluster, prefix)[0])]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found
