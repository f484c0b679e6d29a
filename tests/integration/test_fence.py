"""`fence`: a protected database refuses older tokens; and the command that prepares one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.orm import Session
from typer.testing import CliRunner

from lockrouter import ConfigError, InvalidKey, LockRouter, Stale
from lockrouter.cli import app
from lockrouter.testing.cluster import Cluster
from tests.support.observe import Observer, in_thread, keys_on

pytestmark = pytest.mark.server

DATABASE = "protected_by_fence"


@pytest.fixture
def url(cluster: Cluster, server: Observer) -> Iterator[URL]:
    """An administrator's URL of an empty database that is no shard."""
    server.ask(f"DROP DATABASE IF EXISTS {DATABASE}")
    server.ask(f"CREATE DATABASE {DATABASE}")
    yield make_url(cluster.admin_url(0)).set(database=DATABASE)
    server.ask(f"DROP DATABASE {DATABASE}")


def initialise(url: URL) -> str:
    result = CliRunner().invoke(app, ["init", "--fence", url.render_as_string(hide_password=False)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(params=["found rows", "changed rows"])
def engine(url: URL, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Connections that count rows in one of the two ways; the fence must not care."""
    initialise(url)
    flags = {"client_flag": 2 if request.param == "found rows" else 0, "ssl_disabled": True}
    made = create_engine(url, connect_args=flags)
    if request.param == "changed rows":
        made = create_engine(url, creator=lambda: _plain(url))
    yield made
    made.dispose()


def _plain(url: URL) -> object:
    import pymysql

    return pymysql.connect(
        host=url.host,
        port=url.port or 0,
        user=url.username,
        password=str(url.password),
        database=url.database,
        ssl_disabled=True,
    )


def test_lower_tokens_are_stale_equal_ones_pass(router: LockRouter, engine: Engine) -> None:
    for token, passes in ((5, True), (5, True), (4, False), (6, True), (5, False), (2**63 - 1, True), (6, False)):
        with engine.begin() as connection:
            if passes:
                router.fence(connection, "account:1", token)
            else:
                with pytest.raises(Stale, match=str(token)):
                    router.fence(connection, "account:1", token)
    with engine.begin() as connection:
        router.fence(connection, "account:2", 1)


def test_it_is_part_of_the_callers_transaction(router: LockRouter, engine: Engine) -> None:
    with engine.connect() as connection:
        router.fence(connection, b"account:1", 9)
        connection.rollback()
    with engine.begin() as connection:
        router.fence(connection, "account:1", 8)
        late = in_thread(lambda: _fence(router, engine, 7))
        late.join(0.3)
        assert late.is_alive(), "the key's row is locked until the transaction ends"
    with pytest.raises(Stale):
        late.result()


def _fence(router: LockRouter, engine: Engine, token: int) -> None:
    with engine.begin() as connection:
        router.fence(connection, "account:1", token)


def test_sessions_and_real_tokens(router: LockRouter, engine: Engine) -> None:
    key = keys_on(router, 0)[0]
    with router.lock(key) as first:
        old = first.token
    with router.lock(key) as second, Session(engine) as session:
        router.fence(session, key, second.token)
        session.commit()
    with pytest.raises(Stale), Session(engine) as session:
        router.fence(session, key, old)


def test_wrong_arguments(router: LockRouter, engine: Engine) -> None:
    with engine.connect() as connection:
        for wrong in (0, -1, 2**63):
            with pytest.raises(ValueError, match="token"):
                router.fence(connection, "k", wrong)
        for untyped in ("5", 5.0, True, None):
            with pytest.raises(TypeError):
                router.fence(connection, "k", untyped)  # type: ignore[arg-type]
        with pytest.raises(InvalidKey):
            router.fence(connection, "", 5)
        with pytest.raises(TypeError):
            router.fence(object(), "k", 5)  # type: ignore[arg-type]
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as autocommit:
        with pytest.raises(ConfigError):
            router.fence(autocommit, "k", 5)
        autocommit.execute(text("SELECT 1"))


def test_the_command_is_repeatable_and_shows_no_password(url: URL) -> None:
    assert DATABASE in initialise(url)
    assert "nothing to create" in initialise(url)
    wrong = url.set(password="not-the-password")
    result = CliRunner().invoke(app, ["init", "--fence", wrong.render_as_string(hide_password=False)])
    assert result.exit_code != 0
    assert "not-the-password" not in result.output
    assert CliRunner().invoke(app, ["init"]).exit_code == 2
