"""Every kind of socket, and every PyMySQL: TLS, unix sockets, the oldest version, and one of unknown insides."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymysql
import pytest

from lockrouter import ConfigError, LockLost, LockRouter, LockTimeout, LossReason, ShardUnavailable
from lockrouter.admin.verify import verify
from lockrouter.session import dial
from lockrouter.testing.binaries import Vendor, cache_directory
from lockrouter.testing.cluster import Cluster
from tests.support.certificates import make_certificates
from tests.support.observe import Routers, eventually, in_thread, keys_on, soon_enough
from tests.support.proxy import Proxy, black_hole
from tests.support.servers import provision

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secured(
    vendor: Vendor, tmp_path_factory: pytest.TempPathFactory, certificates: dict[str, Path]
) -> Iterator[Cluster]:
    """One server that speaks TLS with a certificate of that authority, and plainly through its unix socket only."""
    options: dict[str, Any] = {f"ssl-{name}": str(path) for name, path in certificates.items()}
    folder = tmp_path_factory.mktemp("secured") / vendor
    with Cluster.up(folder, 1, vendor, options={**options, "require-secure-transport": "ON"}) as cluster:
        config, text = cluster.shards_file, f'tls_ca = "{certificates["ca"]}"\n'
        for file in (config, cluster.admin_file):
            file.write_text(re.sub(r"(?m)^(url = .*)$", rf"\1\n{text.strip()}", file.read_text("utf-8")), "utf-8")
        provision(cluster)
        yield cluster


@pytest.fixture
def secure(secured: Cluster) -> Iterator[Routers]:
    kept = Routers(secured)
    yield kept
    kept.finish()


@pytest.fixture(params=["known driver", "unknown driver"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether PyMySQL is of a version whose insides are known."""
    if request.param == "unknown driver":
        monkeypatch.setattr(pymysql, "VERSION", (9, 0, 0, "final"))
    return bool(request.param == "known driver")


@pytest.fixture(params=["tls", "unix"])
def way(request: pytest.FixtureRequest, secure: Routers, certificates: dict[str, Path]) -> dict[str, Any]:
    """What makes a router use that kind of socket."""
    return {"tls_ca": str(certificates["ca"])} if request.param == "tls" else {"unix": True}


def gives(kind: type[Exception], router: LockRouter, key: str, timeout: float) -> None:
    with pytest.raises(kind):
        router.lock(key, timeout=timeout)


def exercise(routers: Routers, **changes: Any) -> None:
    """What row locks are for, through two routers of that kind."""
    router, other = routers.make(**changes), routers.make(**changes)
    server = routers.observers[0]
    key, second, third = keys_on(router, 0, 3, prefix="driver")
    with router.lock(key, timeout=5.0, confirm=True) as held:
        held.check()
        assert other.try_lock(key) is None
        for timeout in (0.3, 0.05):
            soon_enough(timeout + 0.1, lambda: gives(LockTimeout, other, key, timeout))  # noqa: B023 - called now
        waiting = in_thread(lambda: other.lock(key, timeout=20.0))
        server.await_waiters()
    got = waiting.result()
    assert got.token > held.token
    got.release()
    for _ in range(50):
        router.lock(key, timeout=5.0).release()
    with router.lock(key, shared=True) as reader:
        assert not reader.degraded
        shared = other.try_lock(key, shared=True)
        assert shared is not None
        shared.release()
    counter = [0]

    def count(caller: LockRouter) -> None:
        for _ in range(20):
            with caller.lock_all([key, second, third], timeout=20.0):
                seen = counter[0]
                time.sleep(0)
                counter[0] = seen + 1

    threads = [in_thread(lambda caller=caller: count(caller)) for caller in (router, other) * 3]  # type: ignore[misc]
    for thread in threads:
        thread.result()
    assert counter == [120]
    held = router.lock(second, timeout=5.0)
    told: list[LossReason] = []
    held.on_lost(told.append)
    threading.Event().wait(0.12)
    server.kill(eventually(server.holders)[0])
    began = time.monotonic()
    eventually(lambda: held.lost)
    assert time.monotonic() - began < 1.0
    with pytest.raises(LockLost):
        held.release()
    assert eventually(lambda: told) == [LossReason.CLOSED]


def test_every_kind_of_socket(secure: Routers, way: dict[str, Any], driver: bool) -> None:
    exercise(secure, **way)
    router = secure.make(**way)
    key = keys_on(router, 0, prefix="driver")[0]
    if driver:
        with router.transaction(key, timeout=5.0) as connection:
            assert connection.exec_driver_sql("SELECT 1").scalar_one() == 1
    else:
        with pytest.raises(ConfigError, match="PyMySQL"), router.transaction(key, timeout=5.0):
            pass


def test_tls_is_verified_and_never_given_up(secure: Routers, tmp_path: Path) -> None:
    """Another authority's certificate is no proof, without TLS the server refuses, and neither is an outage: others
    may be granted rows there, so nothing is degraded around it."""
    stranger = make_certificates(tmp_path)["ca"]
    refused: tuple[dict[str, Any], ...] = ({"tls_ca": str(stranger)}, {})
    for changes in refused:
        router = secure.make(**changes, breaker={"failures": 1})
        for _ in range(3):
            with pytest.raises(ShardUnavailable):
                router.lock(keys_on(router, 0)[0], timeout=2.0)
        eventually(lambda: router.health()["shard-0"]["state"] == "refused")  # noqa: B023 - called now


def test_a_certificate_for_another_host_is_refused(
    secure: Routers, vendor: Vendor, certificates: dict[str, Path], tmp_path: Path, driver: bool
) -> None:
    """It is of an authority that is trusted, and of a server elsewhere."""
    server = secure.observers[0]
    reload = "ALTER INSTANCE RELOAD TLS" if vendor is Vendor.MYSQL else "FLUSH SSL"
    elsewhere = make_certificates(tmp_path, "192.0.2.1", "db.example.com")
    ours = {name: path.read_bytes() for name, path in certificates.items()}
    trusted = str(elsewhere["ca"])
    for name, path in certificates.items():
        path.write_bytes(elsewhere[name].read_bytes())
    try:
        server.ask(reload)
        router = secure.make(tls_ca=trusted, breaker={"failures": 1})
        for _ in range(3):
            with pytest.raises(ShardUnavailable, match="certificate"):
                router.lock(keys_on(router, 0)[0], timeout=2.0)
        eventually(lambda: router.health()["shard-0"]["state"] == "refused")
        found = verify(secure.configure(tls_ca=trusted))
        assert found and "certificate" in found[0].text
    finally:
        for name, data in ours.items():
            certificates[name].write_bytes(data)
        server.ask(reload)
    secure.make(tls_ca=str(certificates["ca"])).lock("any", timeout=5.0).release()


@pytest.mark.slow
def test_a_server_without_tls_is_refused_where_tls_was_asked_for(
    vendor: Vendor, tmp_path: Path, certificates: dict[str, Path], driver: bool
) -> None:
    options: dict[str, Any] = {"skip-ssl": True} if vendor is Vendor.MARIADB else {"tls-version": ""}
    with Cluster.up(tmp_path / "plain", 1, vendor, options=options) as cluster:
        provision(cluster)
        kept = Routers(cluster)
        router = kept.make(tls_ca=str(certificates["ca"]))
        with pytest.raises(ShardUnavailable):
            router.lock("any", timeout=5.0)
        with pytest.raises((ShardUnavailable, ConfigError)), router.transaction("any", timeout=5.0):
            pass
        kept.make().lock("any", timeout=5.0).release()
        kept.finish()


@pytest.mark.slow
def test_an_unknown_driver_on_the_plain_network(
    routers: Routers, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pymysql, "VERSION", (9, 0, 0, "final"))
    exercise(routers)
    threads = {thread.name for thread in threading.enumerate()}
    assert "lockrouter-bridge" in threads, "it is the other way that was tested"
    with Proxy(cluster.port(0)) as proxy:
        router = routers.make(
            ports={0: proxy.port},
            router={"ghost_timeout": 2, "on_outage": "refuse"},
            pool={"connect_timeout": 0.5},
            breaker={"failures": 1000},
        )
        key, other = keys_on(router, 0, 2, prefix="driver")
        held = router.lock(key, timeout=5.0)
        threading.Event().wait(2.5)
        held.check()  # kept alive
        proxy.stop()
        soon_enough(0.5, lambda: gives(ShardUnavailable, router, other, 0.3))
        eventually(lambda: held.lost, 3.0)
        with pytest.raises(LockLost):
            held.release()
        proxy.accept()
        with router.lock(key, timeout=15.0, confirm=True) as again:
            assert again.token > held.token
        router.close()


# -- other versions ---------------------------------------------------------------------------------------------------

OTHER_VERSION = """
import sys, threading, time, pymysql, lockrouter
from lockrouter.session import driver_is_known
file, key, other, where, known = sys.argv[1:]
assert pymysql.__file__.startswith(where), pymysql.__file__
assert driver_is_known() is (known == "known")
router, second = (lockrouter.LockRouter.from_file(file) for _ in range(2))
with router.lock(key, timeout=5.0, confirm=True) as held:
    held.check()
    assert second.try_lock(key) is None
    try: second.lock(key, timeout=0.2)
    except lockrouter.LockTimeout: pass
    else: raise AssertionError
    waiting = threading.Thread(target=lambda: second.lock(key, timeout=20.0).release())
    waiting.start()
waiting.join()
for _ in range(200): router.lock(key, timeout=5.0).release()
with router.lock_all([key, other], timeout=5.0) as both: both.check()
held = router.lock(other, timeout=5.0)
time.sleep(0.1)
second._core.shards[held.address.shard].kill(held._held.session)
until = time.monotonic() + 5
while not held.lost: assert time.monotonic() < until; time.sleep(0.01)
try: held.release()
except lockrouter.LockLost: pass
else: raise AssertionError
if known == "known":
    with router.transaction(key, timeout=5.0) as connection:
        assert connection.exec_driver_sql("SELECT 1").scalar_one() == 1
    assert router.run(key, lambda connection: connection.exec_driver_sql("SELECT 2").scalar_one()) == 2
router.close(); second.close()
until = time.monotonic() + 5
while threading.active_count() > 1: assert time.monotonic() < until; time.sleep(0.01)
print("fine")
"""


def run_with(folder: Path, cluster: Cluster, router: LockRouter, known: str) -> None:
    key, other = keys_on(router, 0, 2, prefix="version")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", OTHER_VERSION, str(cluster.shards_file), key, other, str(folder), known]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fine\n"


def test_the_oldest_supported_version(cluster: Cluster, router: LockRouter) -> None:
    """What pyproject.toml allows; the newest is what all other tests run with."""
    assert pymysql.VERSION[:2] >= (1, 2)
    folder = cache_directory() / "pymysql-1.1.0"
    if not folder.is_dir():
        made = folder.with_name(f".{folder.name}.{os.getpid()}")
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(made), "PyMySQL==1.1.0"],
            check=True,
            capture_output=True,
        )
        made.rename(folder)
    run_with(folder, cluster, router, "known")


def test_a_version_with_other_insides(cluster: Cluster, router: LockRouter, tmp_path: Path) -> None:
    """A copy of PyMySQL whose private attributes have other names: whoever touches one fails."""
    folder = tmp_path / "other"
    shutil.copytree(Path(pymysql.__file__).parent, folder / "pymysql", ignore=shutil.ignore_patterns("__pycache__"))
    for file in folder.rglob("*.py"):
        text = re.sub(r"\b(_sock|_rfile|_closed|_result|_current_timeout)\b", r"\1_renamed", file.read_text("utf-8"))
        file.write_text(re.sub(r"(?m)^VERSION = .*$", 'VERSION = (2, 0, 0, "final")', text), "utf-8")
    run_with(folder, cluster, router, "unknown")


def test_of_a_name_s_addresses_one_that_answers_is_enough(routers: Routers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them is black-holed: it must not take all the time there is."""
    config = routers.configure()
    endpoint = dataclasses.replace(config.endpoints(config.shards[0])[0], host="two.test")
    with black_hole() as deaf:

        def found(host: str, port: int, **_: Any) -> list[Any]:
            assert (host, port) == ("two.test", endpoint.port)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", each)) for each in (deaf, port)]

        monkeypatch.setattr(socket, "getaddrinfo", found)
        began = time.monotonic()
        session = dial(endpoint, 1.0, None)
        assert 0.4 < time.monotonic() - began < 1.0
        session.close()
