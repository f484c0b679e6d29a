"""Signals that interrupt every wait for a reply: a timer at 50 Hz must not keep a call beyond its timeout."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lockrouter import LockRouter
from lockrouter.testing.cluster import Cluster
from tests.support.observe import keys_on
from tests.support.proxy import Proxy

pytestmark = pytest.mark.server

TICKING = """
import json, signal, sys, time, msgspec, lockrouter
file, port, own, key, other = sys.argv[1:]
config, replace = lockrouter.load(file), msgspec.structs.replace
shards = (replace(config.shards[0], url=config.shards[0].url.replace(f":{own}/", f":{port}/")), *config.shards[1:])
config = replace(
    config,
    shards=shards,
    breaker=replace(config.breaker, failures=1000),
    router=replace(config.router, ghost_timeout=30, close_timeout=0.1),
    pool=replace(config.pool, connect_timeout=0.4, min_idle=1),
)
router = lockrouter.LockRouter(config)
router.lock(key, timeout=5.0).release(confirm=True)
held = router.lock(other, timeout=5.0)
ticks = 0
def tick(number, frame):
    global ticks
    ticks += 1
signal.signal(signal.SIGALRM, tick)
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
def measured(call, bound):
    began = time.monotonic()
    try: call()
    except lockrouter.LockRouterError as error: what = type(error).__name__
    else: what = "None"
    return what, time.monotonic() - began - bound
with router.lock(key, timeout=5.0): pass
print("ready", flush=True)
sys.stdin.readline()
said = [measured(held.check, 0.4), measured(held.release, 0.0)]
said += [measured(lambda: router.lock(key, timeout=0.5), 0.5) for _ in range(3)]
said += [measured(lambda: router.lock_all([key], timeout=0.3), 0.3) for _ in range(2)]
said += [measured(lambda: router.try_lock(key), 0.4) for _ in range(2)]
signal.setitimer(signal.ITIMER_REAL, 0)
print(json.dumps([ticks, said]), flush=True)
router.close()
"""


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    with Proxy(cluster.port(0)) as between:
        yield between


def test_a_ticking_timer_keeps_no_call_waiting(cluster: Cluster, router: LockRouter, proxy: Proxy) -> None:
    key, other = keys_on(router, 0, 2, prefix="ticking")
    command = [
        sys.executable,
        "-c",
        TICKING,
        str(cluster.shards_file),
        str(proxy.port),
        str(cluster.port(0)),
        key,
        other,
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            proxy.stop()
            process.stdin.write("go\n")
            process.stdin.flush()
            ticks, said = json.loads(process.stdout.readline())
            assert process.wait(20.0) == 0
        finally:
            process.kill()
    assert ticks > 50, "the timer ticked all the time"
    assert [what for what, _ in said[:2]] == ["LockLost", "LockLost"]
    assert {what for what, _ in said[2:]} <= {"ShardUnavailable", "PoolTimeout"}
    late = [late for _, late in said]
    assert max(late) < 1.0, late
    # The call that meets the silent session, and those that cannot connect: on a crowded machine, the best of them.
    assert min(late[2:5]) <= 0.1 and min(late[5:7]) <= 0.1, late
    assert late[2] < 0.3, "the first one waits in the quick path"
