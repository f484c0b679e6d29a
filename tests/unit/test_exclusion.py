"""The proof of exclusion must itself be proven: it notices whatever is wrong, and nothing else."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from lockrouter.testing.exclusion import Counters, Histogram, Proof, judge, wait_closed

THREADS, ROUNDS = 4, 50


def in_threads(work: Callable[[], object]) -> None:
    """Run `work` in four threads at once, fifty times each."""
    start = threading.Barrier(THREADS)

    def loop() -> None:
        start.wait()
        for _ in range(ROUNDS):
            work()

    threads = [threading.Thread(target=loop) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_without_a_lock_increments_are_lost(tmp_path: Path) -> None:
    proof = Proof(tmp_path, 2)
    in_threads(lambda: proof.increment(1, pause=0.0002))
    proof.close()
    verdict = judge(tmp_path, 2)
    assert (verdict.expected, verdict.wrong, verdict.kept) == (THREADS * ROUNDS, 1, False)
    assert verdict.found < verdict.expected
    assert verdict.overlaps
    assert "were not alone" in str(verdict)


def test_with_a_lock_none_is_lost(tmp_path: Path) -> None:
    proof, lock, tokens = Proof(tmp_path, 2), threading.Lock(), iter(range(1, 1000))

    def work() -> None:
        with lock:
            proof.increment(1, token=next(tokens), pause=0.0002)

    in_threads(work)
    proof.close()
    verdict = judge(tmp_path, 2)
    assert verdict.kept
    assert str(verdict) == "expected 200, found 200"


@pytest.mark.parametrize("second", [5, 4], ids=["the same", "a lower one"])
def test_a_token_that_does_not_rise_is_noticed(tmp_path: Path, second: int) -> None:
    proof = Proof(tmp_path, 1)
    assert proof.increment(0, token=5).rising
    assert not proof.increment(0, token=second).rising
    proof.close()
    verdict = judge(tmp_path, 1)
    assert (verdict.expected, verdict.found, verdict.falls, verdict.kept) == (2, 2, 1, False)


def test_several_ledgers_are_one_account(tmp_path: Path) -> None:
    first, second = Proof(tmp_path, 3), Proof(tmp_path, 3)
    first.increment(0, token=1)
    second.increment(0, token=2)
    second.increment(2, token=1)
    first.close()
    assert not wait_closed(tmp_path, 0.1)
    assert not judge(tmp_path, 3).kept, "one process might still add"
    second.close()
    second.close()
    assert wait_closed(tmp_path, 0.1)
    assert judge(tmp_path, 3).kept


def test_an_increment_nobody_accounts_for_is_noticed(tmp_path: Path) -> None:
    proof = Proof(tmp_path, 1)
    proof.increment(0)
    proof.close()
    stranger = Counters(tmp_path / "counters.bin", 1)
    stranger.increment(0)
    stranger.close()
    verdict = judge(tmp_path, 1)
    assert (verdict.expected, verdict.found, verdict.kept) == (1, 2, False)


def test_nothing_counted_proves_nothing(tmp_path: Path) -> None:
    Proof(tmp_path, 1).close()
    assert not judge(tmp_path, 1).kept


@pytest.mark.parametrize("percent", [0.1, 50, 90, 99, 99.9, 100])
def test_percentiles_are_exact_to_a_hundredth(percent: float) -> None:
    chance = random.Random(7)
    values = sorted(chance.lognormvariate(-6, 2) for _ in range(5000))
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    exact = values[max(0, -int(-len(values) * percent // 100) - 1)]
    assert exact - 1e-6 <= histogram.percentile(percent) <= exact * 1.01 + 1e-6
    assert histogram.longest == values[-1]
    assert histogram.count == 5000


def test_histograms_add_subtract_and_travel() -> None:
    one, other = Histogram(), Histogram()
    assert one.percentile(99) == 0.0
    one.record(0.001)
    other.record(0.5)
    other.record(0.0)
    earlier = msgspec.json.decode(msgspec.json.encode(one), type=Histogram)
    assert earlier == one
    one.add(other)
    assert (one.count, one.longest) == (3, 0.5)
    assert one.since(earlier).counts == other.counts
    assert one.percentile(100) == 0.5
