"""When so much is down that a local lock would be one of many: two shards or more, with enough of the buckets."""

from __future__ import annotations

import itertools

import pytest
from prometheus_client import CollectorRegistry

from lockrouter.config import parse
from lockrouter.core import Core

SHARES = {"a": 50, "b": 30, "c": 20}
"""Of a hundred buckets."""
SETS = [chosen for size in range(4) for chosen in itertools.combinations(SHARES, size)]


def core_with(ratio: float) -> Core:
    first, parts = 0, []
    for name, share in SHARES.items():
        parts.append(
            f'[[shard]]\nid = "{name}"\nurl = "mysql+pymysql://app@127.0.0.1:1/locks_{name}"\n'
            f'buckets = ["{first}-{first + share - 1}"]\n'
        )
        first += share
    head = '[topology]\nname = "storm"\nepoch = 1\ntables = 1\nbuckets = 100\nrows_per_bucket = 1\n'
    return Core(
        parse(head + f'[router]\non_outage = "local"\nstorm_ratio = {ratio}\n' + "".join(parts)), CollectorRegistry()
    )


@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.7, 0.8, 0.81, 1.0])
@pytest.mark.parametrize("down", SETS, ids="+".join)
def test_two_shards_with_enough_buckets_are_a_storm(ratio: float, down: tuple[str, ...]) -> None:
    core = core_with(ratio)
    for name in down:
        while core.shards[name].breaker.closed:
            core.shards[name].fault(ConnectionError("dead"))
    assert core.storm() is (len(down) >= 2 and sum(SHARES[name] for name in down) >= ratio * 100)
    for name in down:
        core.shards[name].breaker.success()
    assert not core.storm()
    core.close()


def test_a_shard_that_is_probed_is_down_still() -> None:
    core = core_with(0.8)
    for name in ("a", "b"):
        breaker = core.shards[name].breaker
        while breaker.closed:
            core.shards[name].fault(ConnectionError("dead"))
        breaker._probe_at = 0.0
        assert breaker.take_probe()
    assert core.storm()
    core.close()
