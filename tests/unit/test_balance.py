"""No bucket, shard, table or row gets more of a million realistic keys than chance allows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from math import sqrt
from operator import mul
from statistics import NormalDist

import pytest

from lockrouter.config import RouterConfig, RouterOptions, ShardConfig, Topology
from lockrouter.routing import Routing

KEYS = 1_000_000
BUCKETS, ROWS, TABLES, SHARDS = 4096, 512, 8, 4
FALSE_ALARM = 1e-7
"""Chance that one comparison of a perfect hash fails; there are fewer than ten times ten."""
TOPOLOGY = Topology(name="payments", epoch=1, tables=TABLES, buckets=BUCKETS, rows_per_bucket=ROWS)
Counts = dict[str, list[int]]


def accounts() -> Iterator[bytes]:
    return (b"account:%d" % number for number in range(10_000_000, 10_000_000 + KEYS))


def uuids() -> Iterator[bytes]:
    digits = random.Random(2026).randbytes(KEYS * 15).hex().encode()
    for at in range(0, KEYS * 30, 30):
        part = digits[at : at + 30]
        yield b"%b-%b-4%b-a%b-%b" % (part[:8], part[8:12], part[12:15], part[15:18], part[18:])


def orders() -> Iterator[bytes]:
    return (b"order:2026-%02d-%02d/%06d" % (1 + n % 12, 1 + n // 12 % 28, n // 336) for n in range(KEYS))


def routing() -> Routing:
    width = BUCKETS // SHARDS
    members = tuple(
        ShardConfig(id=str(n), url=f"mysql+pymysql://u@h/d{n}", buckets=(f"{n * width}-{(n + 1) * width - 1}",))
        for n in range(SHARDS)
    )
    return Routing(RouterConfig(topology=TOPOLOGY, router=RouterOptions(on_outage="refuse"), shards=members))


def counts_of(slots: Iterable[int]) -> Counts:
    """How many keys fell to each bucket, shard, table, row of a bucket, and slot."""
    slot = [0] * (BUCKETS * ROWS)
    for number in slots:
        slot[number] += 1
    bucket = [sum(slot[first : first + ROWS]) for first in range(0, BUCKETS * ROWS, ROWS)]
    row = [sum(slot[first::ROWS]) for first in range(ROWS)]
    table = [sum(bucket[first::TABLES]) for first in range(TABLES)]
    shard, owner = [0] * SHARDS, routing().shard_of_bucket
    for number, count in enumerate(bucket):
        shard[int(owner(number))] += count
    return {"slot": slot, "bucket": bucket, "row": row, "table": table, "shard": shard}


def deviation(counts: list[int]) -> float:
    """Pearson's chi-square against the uniform, as a standard normal (Wilson and Hilferty, 1931)."""
    total, cells = sum(counts), len(counts)
    chi_square = cells * sum(map(mul, counts, counts)) / total - total
    freedom = cells - 1
    return float(((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / sqrt(2 / (9 * freedom)))


def is_beyond_chance(counts: list[int]) -> bool:
    """Whether the counts are less even, or more, than the uniform allows with `FALSE_ALARM`."""
    return abs(deviation(counts)) > NormalDist().inv_cdf(1 - FALSE_ALARM / 2)


@pytest.mark.parametrize("keys", [accounts, uuids, orders])
def test_a_million_keys_spread_evenly(keys: Callable[[], Iterator[bytes]]) -> None:
    route = routing().route
    counts = counts_of(route(key)[3] for key in keys())
    assert all(sum(numbers) == KEYS for numbers in counts.values())
    uneven = {name: round(deviation(numbers), 1) for name, numbers in counts.items() if is_beyond_chance(numbers)}
    assert not uneven


def test_the_test_sees_a_skewed_hash() -> None:
    draw = random.Random(7)
    space = BUCKETS * ROWS
    fair = counts_of(draw.randrange(space) for _ in range(200_000))
    assert not any(is_beyond_chance(numbers) for numbers in fair.values())
    # One key in fifty goes to the lowest 64th of the space.
    skewed = counts_of(draw.randrange(space // 64) if n % 50 == 0 else draw.randrange(space) for n in range(200_000))
    assert all(is_beyond_chance(skewed[name]) for name in ("bucket", "shard"))
    modulo = counts_of(n * ROWS % space for n in range(200_000))
    assert is_beyond_chance(modulo["row"])
    # Too even is not random either: sequential numbers dealt out in turn.
    assert is_beyond_chance(counts_of(range(space))["bucket"])


def test_the_normal_approximation_agrees_with_the_tables() -> None:
    # 99.9 % point of chi-square with 3 degrees of freedom: 16.266; counts built to give it.
    step = sqrt(16.266 * 10_000 / 2)
    exact = [10_000 + step, 10_000 - step, 10_000.0, 10_000.0]
    assert NormalDist().cdf(deviation([round(count) for count in exact])) == pytest.approx(0.999, abs=3e-4)
