"""What one route costs: microseconds per key for maps of 1, 4 and 64 shards. Run it: it prints a line for each."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from lockrouter.config import RouterConfig, RouterOptions, ShardConfig, Topology
from lockrouter.routing import Routing, encode

SHARDS = (1, 4, 64)
BUCKETS = 4096


def config_of(shards: int, rows_per_bucket: int = 512) -> RouterConfig:
    """A map of 4,096 buckets in even ranges over `shards` shards (a divisor of 4,096); nothing listens there."""
    width = BUCKETS // shards
    members = tuple(
        ShardConfig(
            id=f"bench-{number}",
            url=f"mysql+pymysql://bench@127.0.0.1:3306/bench_{number}",
            buckets=(f"{number * width}-{(number + 1) * width - 1}",),
        )
        for number in range(shards)
    )
    topology = Topology(name="bench", epoch=1, tables=8, buckets=BUCKETS, rows_per_bucket=rows_per_bucket)
    return RouterConfig(topology=topology, router=RouterOptions(on_outage="refuse"), shards=members)


def measure(shards: Sequence[int] = SHARDS, *, keys: int = 50_000, rounds: int = 5) -> dict[int, float]:
    """Microseconds per key (encoding included) by number of shards: the best of `rounds` over `keys` account keys."""
    names = [f"account:{number}" for number in range(keys)]
    found = {}
    for count in shards:
        routing = Routing(config_of(count))
        found[count] = min(_seconds(routing, names) for _ in range(rounds)) / keys * 1e6
    return found


def _seconds(routing: Routing, names: Sequence[str]) -> float:
    route = routing.route
    began = perf_counter()
    for name in names:
        route(encode(name))
    return perf_counter() - began


if __name__ == "__main__":
    for count, cost in measure().items():
        print(f"{count:3d} shards: {cost:.2f} microseconds per key")
