"""A process that is told to end leaves nothing on any server: no session, no lock, nobody who waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockrouter.testing.cluster import Cluster
from lockrouter.testing.exclusion_run import provision
from tests.support.observe import Observer, Routers, eventually, keys_on

pytestmark = pytest.mark.server

SERVICE = """
import signal, sys, threading, msgspec, lockrouter
file, held, busy, leased = sys.argv[1:]
config, replace = lockrouter.load(file), msgspec.structs.replace
config = replace(config, router=replace(config.router, close_timeout=0.5))
told, holding = [], threading.Event()
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
with lockrouter.LockRouter(config) as router:
    def work():
        lock = router.lock(held, timeout=5.0)
        lock.on_lost(told.append)
        lease = router.lease(leased, ttl=60)
        holding.set()
        threading.Event().wait()
    def wait():
        try: router.lock(busy, timeout=600.0)
        except lockrouter.RouterClosed: told.append("woken")
    threads = [threading.Thread(target=target, daemon=True) for target in (work, wait, wait)]
    for thread in threads: thread.start()
    holding.wait(20.0)
    print("ready", flush=True)
    signal.pause()
"""


def everywhere(routers: Routers) -> list[int]:
    return [len(server.sessions()) for server in routers.observers]


def quietly(routers: Routers, before: list[int]) -> None:
    eventually(lambda: everywhere(routers) == before, 5.0, lambda: everywhere(routers))


@pytest.fixture
def server(routers: Routers) -> Observer:
    return routers.observers[0]


def test_a_service_that_is_terminated(routers: Routers, cluster: Cluster, server: Observer) -> None:
    """Its waiters at the server are ended there, its locks and sessions are gone; its leases are free at once."""
    router = routers.make()
    held, busy = keys_on(router, 0, 2, prefix="service")
    leased = keys_on(router, 0, prefix="leased-service")[0]
    router.warm()
    router.lease(leased, ttl=5).release()
    with router.lock(busy, timeout=5.0) as mine:
        eventually(lambda: len(server.sessions()) >= 4)
        settled = everywhere(routers)
        command = [sys.executable, "-c", SERVICE, str(cluster.shards_file), held, busy, leased]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            server.await_waiters()
            assert router.try_lock(held) is None
            assert router.try_lease(leased, ttl=5) is None
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20.0) == 0
            assert time.monotonic() - began < 6.0
        quietly(routers, settled)
        assert server.waiters() == []
        mine.check()
    got = router.try_lock(held)
    assert got is not None
    got.release()
    lease = router.try_lease(leased, ttl=5)
    assert lease is not None
    lease.release()


def test_locust_that_is_terminated(cluster: Cluster, routers: Routers, tmp_path: Path) -> None:
    provision(cluster)
    root = Path(__file__).resolve().parents[2] / "loadtest"
    before = everywhere(routers)
    command = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        "uniform_accounts.py",
        "--headless",
        "--users",
        "20",
        "--spawn-rate",
        "20",
    ]
    command += ["--shards", str(cluster.shards_file), "--run-time", "60s", "--only-summary"]
    log = tmp_path / "locust.log"
    with (
        log.open("w") as out,
        subprocess.Popen(command, cwd=root, stdout=out, stderr=subprocess.STDOUT, env={**os.environ}) as process,
    ):
        try:
            eventually(lambda: sum(everywhere(routers)) >= sum(before) + 12, 30.0, lambda: log.read_text())
            process.send_signal(signal.SIGTERM)
            process.wait(20.0)
        finally:
            process.kill()
    said = log.read_text()
    assert "Traceback" not in said, said
    quietly(routers, before)
    assert all(not any(server.locks().values()) for server in routers.observers)
