"""The figures are exact, whoever scrapes when, and as many for a million keys as for one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from lockrouter.config import RouterConfig, RouterOptions, ShardConfig, Topology
from lockrouter.core import Core
from lockrouter.gate import Hold, Request
from lockrouter.metrics import BOUNDS, SEGMENTS, Metrics, ModeStats, multiprocess

TOPOLOGY = Topology(name="payments", epoch=1, tables=2, buckets=64, rows_per_bucket=16)
ROOT = Path(__file__).parents[2]


def config() -> RouterConfig:
    members = tuple(
        ShardConfig(id=name, url=f"mysql+pymysql://u@h/{name}", buckets=(buckets,))
        for name, buckets in (("a", "0-31"), ("b", "32-63"))
    )
    return RouterConfig(topology=TOPOLOGY, router=RouterOptions(on_outage="refuse"), shards=members)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def joined(registry: CollectorRegistry) -> Core:
    """A router's core whose figures the registry shows, without its background thread."""
    core = Core(config(), registry)
    core.metrics.add_source(core.generation, core._fold)
    return core


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return scraped(registry).get((name, tuple(sorted(labels.items()))))


def scraped(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }


def test_outcomes_are_counted_exactly_whenever_it_is_scraped(registry: CollectorRegistry) -> None:
    core = joined(registry)
    stats = core.shards["a"].stats.row
    total = 0
    for batch in (0, 1, 5, 0, 7, 100):
        for _ in range(batch):
            stats.ended("acquired", 0.001, 3)
        stats.ended("busy", 0.0, 3)
        total += batch
        assert (value(registry, "lockrouter_acquires_total", shard="a", mode="row", outcome="acquired") or 0) == total
    assert value(registry, "lockrouter_acquires_total", shard="a", mode="row", outcome="busy") == 6
    assert value(registry, "lockrouter_acquires_total", shard="b", mode="row", outcome="busy") is None
    assert value(registry, "lockrouter_segment_acquires_total", segment="3") == total + 6


def test_histograms_have_exact_buckets_and_sums(registry: CollectorRegistry) -> None:
    core = joined(registry)
    stats = core.shards["a"].stats.row
    waits = [0.0, 0.0005, 0.00051, 0.003, 0.1, 30.0, 31.0, 1e6]
    for turn in range(3):
        for waited in waits:
            stats.ended("acquired", waited, 0)
            stats.released(waited * 2)
        times = turn + 1
        for name, factor in (("wait", 1), ("hold", 2)):
            labels = {"shard": "a", "mode": "row"}
            assert value(registry, f"lockrouter_{name}_seconds_count", **labels) == len(waits) * times
            total = value(registry, f"lockrouter_{name}_seconds_sum", **labels)
            assert total == pytest.approx(sum(waits) * factor * times)
            for bound in BOUNDS:
                within = sum(waited * factor <= bound for waited in waits) * times
                assert value(registry, f"lockrouter_{name}_seconds_bucket", le=str(bound), **labels) == within
            assert value(registry, f"lockrouter_{name}_seconds_bucket", le="+Inf", **labels) == len(waits) * times


def test_two_scrapes_without_news_are_equal(registry: CollectorRegistry) -> None:
    core = joined(registry)
    core.shards["a"].stats.row.ended("acquired", 0.2, 1)
    core.shards["a"].stats.count_lost("row", "closed")
    core.shards["a"].stats.collided()
    assert scraped(registry) == scraped(registry)
    assert generate_latest(registry) == generate_latest(registry)


def test_the_number_of_series_does_not_depend_on_the_number_of_keys(registry: CollectorRegistry) -> None:
    core = joined(registry)

    def use(keys: int) -> None:
        for number in range(keys):
            key = b"account:%d" % number
            address = core.routing.route(key)
            shard = core.shards[address.shard]
            request = Request(address.slot, key, object(), None, ())
            core.gates.enter(request, wait=False)
            if request.hold is None and core.gates.holder_of(address.slot) is None:
                hold = Hold(address.slot, key, request.thing, None, shard=shard, session=None)
                core.gates.granted(request, hold)
            segment = address.bucket * SEGMENTS // TOPOLOGY.buckets
            shard.stats.row.ended("acquired", 0.001, segment)
            shard.stats.row.ended("busy", 0.001, segment)
            shard.stats.row.released(0.001)

    use(2_000)
    series = scraped(registry)
    use(6_000)
    again = scraped(registry)
    assert series.keys() == again.keys()
    assert not [name for name in again if "account" in str(name)]
    assert len(again) < 500


def test_levels_are_what_is_now(registry: CollectorRegistry) -> None:
    core = joined(registry)
    request = Request(0, b"k", object(), None, ())
    core.gates.enter(request, wait=True)
    assert value(registry, "lockrouter_waiters", shard="a") == 1
    hold = Hold(0, b"k", request.thing, None, shard=core.shards["a"], session=None)
    core.gates.granted(request, hold)
    assert value(registry, "lockrouter_waiters", shard="a") == 0
    assert value(registry, "lockrouter_held", shard="a", mode="local") == 1
    assert value(registry, "lockrouter_held", shard="b", mode="local") == 0
    core.gates.uncount(hold, b"k")
    core.gates.leave(hold)
    assert value(registry, "lockrouter_held", shard="a", mode="local") == 0
    assert value(registry, "lockrouter_breaker_state", shard="a") == 0


def test_two_routers_of_one_registry_add_up(registry: CollectorRegistry) -> None:
    one, two = joined(registry), joined(registry)
    assert one.metrics is two.metrics
    for core, times in ((one, 3), (two, 4)):
        for _ in range(times):
            core.shards["a"].stats.row.ended("acquired", 0.5, 0)
        request = Request(0, b"k", object(), None, ())
        core.gates.enter(request, wait=True)
    for _ in range(2):
        assert value(registry, "lockrouter_acquires_total", shard="a", mode="row", outcome="acquired") == 7
        assert value(registry, "lockrouter_wait_seconds_sum", shard="a", mode="row") == 3.5
        assert value(registry, "lockrouter_waiters", shard="a") == 2


def test_a_closed_router_leaves_its_counts_and_takes_its_levels_away(registry: CollectorRegistry) -> None:
    one, two = joined(registry), joined(registry)
    for core in (one, two):
        core.gates.enter(Request(0, b"k", object(), None, ()), wait=True)
    value(registry, "lockrouter_waiters", shard="a")
    one.shards["a"].stats.row.ended("acquired", 0.5, 0)
    one.metrics.remove_source(one.generation)
    one.metrics.remove_source(one.generation)
    assert value(registry, "lockrouter_acquires_total", shard="a", mode="row", outcome="acquired") == 1
    assert value(registry, "lockrouter_waiters", shard="a") == 1
    two.metrics.remove_source(two.generation)
    assert value(registry, "lockrouter_waiters", shard="a") == 0
    assert not one.metrics._seen and not one.metrics._sources


def test_routers_of_different_registries_have_nothing_in_common() -> None:
    first, second = CollectorRegistry(), CollectorRegistry()
    one, two = joined(first), joined(second)
    assert one.metrics is not two.metrics
    one.shards["a"].stats.row.ended("acquired", 0.5, 0)
    assert value(second, "lockrouter_acquires_total", shard="a", mode="row", outcome="acquired") is None


def test_a_router_made_again_counts_on(registry: CollectorRegistry) -> None:
    for times in range(1, 4):
        core = joined(registry)
        core.shards["a"].stats.row.ended("acquired", 0.5, 0)
        core.metrics.remove_source(core.generation)
        assert value(registry, "lockrouter_acquires_total", shard="a", mode="row", outcome="acquired") == times


def test_scrapes_while_threads_count_lose_nothing(registry: CollectorRegistry) -> None:
    core = joined(registry)
    stats = core.shards["b"].stats.row
    done = threading.Event()

    def work() -> None:
        for _ in range(2_000):
            stats.ended("acquired", 0.25, 5)

    def scrape() -> None:
        while not done.is_set():
            core.metrics.fold()

    workers = [threading.Thread(target=work) for _ in range(4)]
    scrapers = [threading.Thread(target=scrape) for _ in range(2)]
    for thread in workers + scrapers:
        thread.start()
    for thread in workers:
        thread.join(30)
    done.set()
    for thread in scrapers:
        thread.join(30)
    labels = {"shard": "b", "mode": "row"}
    assert value(registry, "lockrouter_acquires_total", outcome="acquired", **labels) == 8_000
    assert value(registry, "lockrouter_wait_seconds_count", **labels) == 8_000
    assert value(registry, "lockrouter_wait_seconds_sum", **labels) == 2_000
    assert value(registry, "lockrouter_segment_acquires_total", segment="5") == 8_000


def test_a_copy_is_of_one_moment() -> None:
    stats = ModeStats()
    stats.ended("acquired", 0.5, 0)
    outcomes, waits, total, *_ = stats.copy()
    stats.ended("acquired", 0.5, 0)
    assert (outcomes, sum(waits), total) == ({"acquired": 1}, 1, 0.5)


def test_multiprocess_mode_is_the_client_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        monkeypatch.delenv(name, raising=False)
    assert not multiprocess()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/tmp/x")
    assert multiprocess()


def run(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'router'}", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_in_multiprocess_mode_the_sum_of_all_processes_appears(tmp_path: Path) -> None:
    worker = """
        from prometheus_client import CollectorRegistry
        from tests.unit.test_metrics import joined
        from lockrouter.gate import Request
        core = joined(CollectorRegistry())
        for _ in range(5):
            core.shards["a"].stats.row.ended("acquired", 0.25, 3)
        core.gates.enter(Request(0, b"k", object(), None, ()), wait=True)
        core.metrics.fold()
        core.metrics.fold()
    """
    for _ in range(2):
        run(worker, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    shown = run(
        """
        import os
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector
        registry = CollectorRegistry()
        MultiProcessCollector(registry, os.environ["PROMETHEUS_MULTIPROC_DIR"])
        print(generate_latest(registry).decode())
        """,
        PROMETHEUS_MULTIPROC_DIR=str(tmp_path),
    ).splitlines()
    assert 'lockrouter_acquires_total{mode="row",outcome="acquired",shard="a"} 10.0' in shown
    assert 'lockrouter_wait_seconds_sum{mode="row",shard="a"} 2.5' in shown
    assert 'lockrouter_wait_seconds_bucket{le="+Inf",mode="row",shard="a"} 10.0' in shown
    assert 'lockrouter_waiters{shard="a"} 2.0' in shown
    assert 'lockrouter_segment_acquires_total{segment="3"} 10.0' in shown


def test_a_child_process_counts_from_nothing_and_its_scrapes_work() -> None:
    shown = run(
        """
        import os
        from prometheus_client import CollectorRegistry
        from tests.unit.test_metrics import joined, value
        registry = CollectorRegistry()
        core = joined(registry)
        for _ in range(10):
            core.shards["a"].stats.row.ended("acquired", 0.25, 3)
        labels = {"shard": "a", "mode": "row", "outcome": "acquired"}
        before = value(registry, "lockrouter_acquires_total", **labels)
        child = os.fork()
        if not child:
            core.metrics.add_source(core.generation, core._fold)
            core.shards["a"].stats.row.ended("acquired", 0.25, 3)
            after = value(registry, "lockrouter_acquires_total", **labels)
            os._exit(0 if after == before + 1 == value(registry, "lockrouter_acquires_total", **labels) else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert shown.split() == ["0"]


def test_metrics_of_one_registry_are_made_once(registry: CollectorRegistry) -> None:
    assert Metrics.of(registry) is Metrics.of(registry)
