"""Every cell of the README's table of guarantees, and the tests that prove it; what no other module proves is here.

The names in `CELLS` are unique in `tests/`. A row or a column that is added to the table needs its tests here.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockrouter import LockLost, LockRouter
from lockrouter.deadline import now
from lockrouter.testing.cluster import Cluster
from tests.support.observe import Observer, Routers, eventually, keys_on
from tests.support.proxy import Cut, Proxy

ROOT = Path(__file__).parents[2]
COLUMNS = ("row lock", "lease, lossless replication", "lease, asynchronous replication", "degraded (local) lock")
NONE: tuple[str, ...] = ()
"""The cell says "-": the fault cannot meet that lock."""

_LEASE_ENDS = (
    "test_an_expired_lease_of_a_dead_process_is_free_clock_skew_later",
    "test_killed_connections_are_replaced",
)
_LEASE_FROZEN = (
    "test_a_paused_process_finds_out_the_moment_it_wakes",
    "test_with_every_packet_dropped_the_holder_is_told_in_time",
)
_DRAINED = (
    "test_planned_switchover_after_drain_never_two_holders_and_leases_are_kept",
    "test_planned_switchover_of_a_group_after_drain_never_two_holders_and_leases_are_kept",
)
_LEASE_RESTART = ("test_a_server_that_restarts_keeps_the_leases",)
_LEASE_CLOCK = ("test_a_step_of_the_servers_clock[lease]", "test_a_token_ahead_of_the_clock_still_rises")
_LEASE_OUTAGE = (
    "test_an_outage_is_an_error_never_an_answer",
    "test_a_silent_shard_bounds_every_verb",
    "test_with_every_packet_dropped_the_holder_is_told_in_time",
)
_CLIENT = ("test_a_clients_clock_that_steps_and_a_pause_touch_nothing", "test_the_clock_never_goes_back")

CELLS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "holder ends, or its connection is cut": (
        ("test_a_holder_that_ends_or_is_cut_frees_its_row_at_once", "test_a_loss_is_known_within_half_a_second"),
        _LEASE_ENDS,
        _LEASE_ENDS,
        ("test_a_dropped_degraded_handle_is_released", "test_a_degraded_lock_ends_with_its_process"),
    ),
    "holder frozen, unplugged, black-holed": (
        (
            "test_a_frozen_holder_is_freed_and_finds_out",
            "test_a_partitioned_holder_is_told_before_the_server_frees_its_row",
            "test_a_stalled_connection_alone_is_found_out_by_its_ping",
        ),
        _LEASE_FROZEN,
        _LEASE_FROZEN,
        NONE,
    ),
    "server restarts": (
        ("test_a_server_killed_under_holders_and_waiters", "test_a_router_goes_on_over_a_restart"),
        _LEASE_RESTART,
        _LEASE_RESTART,
        NONE,
    ),
    "planned switchover after `lockrouter drain`": (
        (
            *_DRAINED,
            "test_planned_switchover_after_drain_row_lock_of_who_stays_is_lost_and_told",
        ),
        _DRAINED,
        _DRAINED,
        NONE,
    ),
    "unplanned failover": (
        (
            "test_unplanned_failover_row_lock_is_lost_in_time_and_lossless_leases_are_kept",
            "test_unplanned_failover_row_lock_a_primary_in_the_minority_grants_nothing_after_the_window",
            "test_unplanned_failover_row_lock_a_woken_primary_is_left_when_it_says_that_it_is_demoted",
            "test_unplanned_failover_row_lock_lossless_semi_sync_without_its_replica_grants_nothing_after_the_window",
            "test_a_second_primary_that_grants_ends_what_is_held_on_the_first",
        ),
        ("test_unplanned_failover_row_lock_is_lost_in_time_and_lossless_leases_are_kept",),
        (
            "test_unplanned_failover_asynchronous_lease_two_until_the_next_renewal_and_the_token_orders_them",
            "test_the_writes_of_the_old_primary_are_lost_and_the_token_rises_all_the_same",
            "test_after_a_new_term_only_the_holder_goes_on_for_one_ttl",
            "test_renewing_by_key_alone_keeps_two_holders",
        ),
        NONE,
    ),
    "server's clock steps": (
        ("test_a_step_of_the_servers_clock[row]", "test_a_reservation_far_ahead_means_the_clock_went_back"),
        _LEASE_CLOCK,
        _LEASE_CLOCK,
        NONE,
    ),
    "client's clock steps, GC pause, suspend": (
        _CLIENT,
        _CLIENT,
        _CLIENT,
        ("test_degraded_locks_of_two_processes_do_not_exclude_each_other",),
    ),
    "shard does not answer": (
        (
            "test_a_dead_shard_is_refused_or_degraded_by_class",
            "test_an_unreachable_shard_is_given_up_in_time_by_every_verb",
        ),
        _LEASE_OUTAGE,
        _LEASE_OUTAGE,
        (
            "test_degraded_locks_exclude_the_whole_process",
            "test_a_degraded_lock_stays_one_when_the_shard_is_back",
            "test_degraded_locks_of_two_processes_do_not_exclude_each_other",
        ),
    ),
}  # fmt: skip


def table() -> dict[str, list[str]]:
    """The README's table: the cells by the fault of their row."""
    text = (ROOT / "README.md").read_text("utf-8")
    head, *lines = re.search(r"^\| fault \|.*?(?=\n\n)", text, re.MULTILINE | re.DOTALL)[0].splitlines()  # type: ignore[index]
    assert tuple(cell.strip() for cell in head.strip("|").split("|")[1:]) == COLUMNS
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    return {row[0]: row[1:] for row in rows}


def test_every_cell_of_the_table_has_its_tests() -> None:
    shown = table()
    assert set(shown) == set(CELLS)
    texts = {path: path.read_text("utf-8") for path in ROOT.joinpath("tests").rglob("test_*.py")}
    defined = [name for text in texts.values() for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)]
    for fault, proofs in CELLS.items():
        for column, cell, names in zip(COLUMNS, shown.get(fault, ["-"] * 4), proofs, strict=True):
            assert names or cell == "-", f"{fault}, {column}: nothing proves {cell!r}"
            for name in set(names):
                assert defined.count(name.partition("[")[0]) == 1, f"{fault}, {column}: {name}"


# -- holder ends, or its connection is cut; row lock ------------------------------------------------------------------

HOLD = """
import os, sys
from lockrouter import LockRouter
router = LockRouter.from_file(sys.argv[1])
held = router.lock(sys.argv[2], timeout=10)
print(held.token, flush=True)
sys.stdin.readline()
os._exit(0)
"""


@pytest.fixture
def holder(cluster: Cluster, router: LockRouter) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """Another process, the key it holds, and its token."""
    key = keys_on(router, 0, prefix="ends")[0]
    command = [sys.executable, "-c", HOLD, str(cluster.shards_file), key]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, key, int(process.stdout.readline())
    process.kill()
    process.communicate()


@pytest.mark.server
@pytest.mark.parametrize("how", ["exit", "kill -9", "KILL"])
def test_a_holder_that_ends_or_is_cut_frees_its_row_at_once(
    holder: tuple[subprocess.Popen[str], str, int], router: LockRouter, server: Observer, how: str
) -> None:
    process, key, token = holder
    assert router.try_lock(key) is None
    if how == "exit":
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    elif how == "kill -9":
        process.send_signal(signal.SIGKILL)
    else:
        server.kill(eventually(server.holders)[0])
    began = time.monotonic()
    with router.lock(key, timeout=10.0) as held:
        assert time.monotonic() - began < 1.5, "far before the server's patience with a silent holder"
        assert held.token > token


@pytest.mark.server
@pytest.mark.parametrize("how", ["fin", "rst"])
def test_a_cut_connection_frees_its_row_at_once(
    cluster: Cluster, routers: Routers, other: LockRouter, how: str
) -> None:
    with Proxy(cluster.port(0)) as proxy:
        router = routers.make(ports={0: proxy.port})
        held = router.lock(keys_on(router, 0, prefix="cut")[0])
        proxy.cut(Cut(how))
        began = time.monotonic()
        with other.lock(held.key, timeout=10.0) as later:
            assert time.monotonic() - began < 1.5
            assert later.token > held.token
        eventually(lambda: held.lost)
        with pytest.raises(LockLost):
            held.release()
        router.close()


# -- degraded ---------------------------------------------------------------------------------------------------------

DEGRADED = """
import sys, time
from lockrouter import LockRouter, ShardUnavailable
router = LockRouter.from_file(sys.argv[1])
held = None
while held is None or not held.degraded:
    if held is not None:
        held.release()
    try:
        held = router.lock(sys.argv[2], timeout=3)
    except ShardUnavailable:
        held = None
print("degraded", flush=True)
sys.stdin.readline()
time.time = lambda: 0.0
assert held.degraded and not held.lost
held.check()
time.time = lambda: 1e11
assert router.lock(sys.argv[2]).degraded and not held.lost
held.release()
"""


@pytest.fixture
def apart(cluster: Cluster, router: LockRouter, tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that each hold a degraded lock of one key, because its shard does not answer."""
    key = keys_on(router, 0, prefix="apart")[0]
    with Proxy(cluster.port(0)) as proxy:
        proxy.refuse()
        shards = tmp_path / "shards.toml"
        text = cluster.shards_file.read_text().replace(f":{cluster.port(0)}/", f":{proxy.port}/")
        shards.write_text(text)
        command = [sys.executable, "-c", DEGRADED, str(shards), key]
        made = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        yield made
        for process in made:
            process.kill()
            process.communicate()


@pytest.mark.server
def test_degraded_locks_of_two_processes_do_not_exclude_each_other(apart: list[subprocess.Popen[str]]) -> None:
    """Whatever the clocks of these processes do meanwhile."""
    for process in apart:
        assert process.stdout is not None
        assert process.stdout.readline() == "degraded\n"
    for process in apart:
        process.communicate("\n", timeout=30)
        assert process.returncode == 0


@pytest.mark.server
def test_a_degraded_lock_ends_with_its_process(
    apart: list[subprocess.Popen[str]], router: LockRouter, server: Observer
) -> None:
    for process in apart:
        assert process.stdout is not None
        assert process.stdout.readline() == "degraded\n"
        process.kill()
        process.wait()
    assert not server.locks()["holders"]
    with router.lock(keys_on(router, 0, prefix="apart")[0], timeout=0.0) as held:
        assert not held.degraded


# -- clocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.server
@pytest.mark.parametrize("what", ["row", "lease"])
def test_a_step_of_the_servers_clock(cluster: Cluster, what: str) -> None:
    command = [sys.executable, "-m", "tests.support.stepped", str(cluster.directory), what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "fine\n", done.stdout + done.stderr


PAUSED = """
import sys, time
offset = [0.0]
real, real_ns = time.time, time.time_ns
time.time = lambda: real() + offset[0]
time.time_ns = lambda: real_ns() + int(offset[0] * 1e9)
from lockrouter import LockRouter
router = LockRouter.from_file(sys.argv[1])
row, key = router.lock(sys.argv[2]), sys.argv[2]
lease = router.lease(key, ttl=3)
print("held", flush=True)
for step in (86400.0, -86400.0):
    sys.stdin.readline()
    offset[0] = step
    time.sleep(1.1)
    row.check()
    lease.check()
    print(not row.lost and not lease.lost and 0 < lease.remaining() <= 3, flush=True)
row.release(confirm=True)
lease.release()
router.close()
"""


@pytest.mark.server
def test_a_clients_clock_that_steps_and_a_pause_touch_nothing(cluster: Cluster, router: LockRouter) -> None:
    """A day forward, a day back; and a pause shorter than what the locks allow."""
    key = keys_on(router, 0, prefix="paused")[0]
    command = [sys.executable, "-c", PAUSED, str(cluster.shards_file), key]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "held\n"
        for _ in range(2):
            process.stdin.write("\n")
            process.stdin.flush()
            os.kill(process.pid, signal.SIGSTOP)
            began = now()
            while now() < began + 0.6:
                assert router.try_lock(key) is None
                assert router.try_lease(key, ttl=1) is None
                time.sleep(0.1)
            os.kill(process.pid, signal.SIGCONT)
            assert process.stdout.readline() == "True\n"
        assert process.wait(20.0) == 0
