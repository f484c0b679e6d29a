"""`lockrouter drain`: nothing is granted any more, holders finish, leases stay; undone, everything is as before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockrouter import LockRouter, ShardUnavailable
from lockrouter.admin.drain import drain, undo
from lockrouter.cli import app
from lockrouter.config import load
from lockrouter.errors import ConfigError
from lockrouter.testing.cluster import Cluster
from tests.support.observe import Observer, Routers, eventually, in_thread, keys_on

pytestmark = pytest.mark.server

SHARD = 1
NAME = f"shard-{SHARD}"


@pytest.fixture
def routers(cluster: Cluster) -> Iterator[Routers]:
    """Routers on the session's cluster; the shard is not drained when the test is over."""
    kept = Routers(cluster)
    yield kept
    kept.observers[SHARD].ask("UPDATE lock_meta SET drained = ''")
    kept.finish()


@pytest.fixture
def server(routers: Routers) -> Observer:
    """The server that is drained."""
    return routers.observers[SHARD]


def commanded(cluster: Cluster, *more: str, admin: bool = True) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command."""
    words = ["drain", str(cluster.shards_file), NAME, *more]
    result = CliRunner().invoke(app, [*words, *(["--admin", str(cluster.admin_file)] if admin else [])])
    return result.exit_code, result.stdout, result.stderr


def test_it_waits_for_holders_of_every_kind_and_keeps_leases(
    cluster: Cluster, routers: Routers, server: Observer, router: LockRouter, other: LockRouter
) -> None:
    keys = keys_on(router, SHARD, 7, prefix="drain")
    lease = router.lease(keys[5], ttl=2, timeout=5)
    together = router.lock_all(keys[2:4], timeout=5)
    alone = router.lock(keys[0], timeout=5)
    shared = other.lock(keys[1], timeout=5, shared=True)
    with router.transaction(keys[4], timeout=5):
        config, admin = load(cluster.shards_file), load(cluster.admin_file)
        said: list[str] = []
        draining = in_thread(lambda: drain(config, admin, NAME, timeout=20, tell=said.append))
        eventually(lambda: len(said) == 3)
        assert "5 rows are held" in said[2]
        assert int(server.meta("clock_high")) < server.clock_us()
        for one in (router, other, routers.make()):
            with pytest.raises(ShardUnavailable, match="drained"):
                one.lock(keys[6], timeout=1)
        with pytest.raises(ShardUnavailable, match="drained"):
            other.lease(keys[0], ttl=5, timeout=1)
        assert draining.is_alive()
    for held in (alone, shared):
        held.check()
        held.release(confirm=True)
    assert draining.is_alive()
    together.release(confirm=True)
    report = draining.result()
    assert (report.held, report.still_held) == (5, ())
    assert report.leases >= 1
    assert report.server.encode() == server.meta("drained") == server.meta("term_identity")
    lease.check()
    assert int(server.meta("clock_high")) < server.clock_us()
    assert undo(config, admin, NAME)
    assert not undo(config, admin, NAME)
    for one in (router, other):
        eventually(lambda: one.health()[NAME]["state"] == "ok")  # noqa: B023 - called now
        one.lock(keys[0], timeout=5).release()
    lease.release()


def test_a_holder_that_does_not_let_go_is_named_and_the_server_stays_drained(
    cluster: Cluster, server: Observer, router: LockRouter
) -> None:
    key = keys_on(router, SHARD, prefix="stubborn")[0]
    with router.lock(key, timeout=5) as held:
        code, out, _ = commanded(cluster, "--timeout", "4", "--json")
        assert code == 1
        assert json.loads(out)["still_held"] == [router.route(key).slot]
        code, out, _ = commanded(cluster, "--timeout", "1")
        assert code == 1
        assert "still held" in out
        assert server.meta("drained") == server.meta("term_identity")
        held.check()
    code, out, err = commanded(cluster)
    assert (code, "drained in" in out, "marked" in err) == (0, True, True)
    code, out, _ = commanded(cluster, "--undo", "--json")
    assert (code, json.loads(out)) == (0, {"shard": NAME, "undone": True})
    eventually(lambda: router.health()[NAME]["state"] == "ok")
    router.lock(key, timeout=5).release()


def test_an_administrators_file_of_another_environment_is_refused(
    cluster: Cluster, server: Observer, routers: Routers, tmp_path: Path
) -> None:
    """There too the shard has this id and this database: of it nothing would be true here."""
    text = cluster.admin_file.read_text("utf-8")
    elsewhere = text.replace(f":{cluster.port(SHARD)}/", f":{cluster.port(0)}/")
    assert elsewhere != text
    file = tmp_path / "elsewhere.toml"
    file.touch(mode=0o600)
    file.write_text(elsewhere, "utf-8")
    routers.observers[0].ask(f"CREATE DATABASE {server.database}")
    try:
        config, admin = load(cluster.shards_file), load(file)
        for command in (drain, undo):
            with pytest.raises(ConfigError, match="another server"):
                command(config, admin, NAME)
    finally:
        routers.observers[0].ask(f"DROP DATABASE {server.database}")
    assert server.meta("drained") == b""


def test_the_applications_user_may_not_drain(cluster: Cluster, server: Observer) -> None:
    code, _, err = commanded(cluster, admin=False)
    assert code == 2
    assert "--admin" in err
    assert server.meta("drained") == b""


def test_a_shard_that_is_not_in_the_file(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        drain(load(cluster.shards_file), load(cluster.admin_file), "nowhere")


def test_a_renewal_that_comes_late_reserves_nothing(routers: Routers, server: Observer, router: LockRouter) -> None:
    """As sent by a router that read `lock_meta` before the drain and slept since."""
    router.lock(keys_on(router, SHARD, prefix="late")[0], timeout=5).release()
    server.ask("UPDATE lock_meta SET drained = term_identity")
    eventually(lambda: router.health()[NAME]["state"] == "refused")
    before = server.meta("clock_high")
    keeper = router._core.shards[NAME].keeper
    last = keeper._last
    assert last is not None
    keeper._renew(last)
    keeper._new_term(last, "as if its clock had gone back")
    eventually(lambda: keeper._order is None)
    assert server.meta("clock_high") == before
    assert server.meta("term") == last.term
