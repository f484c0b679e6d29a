"""What nobody may learn or do: the password, other data of the server, and SQL through names in a shard file."""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pymysql
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from typer.testing import CliRunner

from lockrouter import ConfigError, LockRouter, LockRouterError, ShardUnavailable
from lockrouter.admin.connect import DENIED
from lockrouter.cli import app
from lockrouter.config import load
from lockrouter.testing.binaries import Vendor
from lockrouter.testing.cluster import Cluster
from tests.support.observe import Routers, eventually, keys_on
from tests.support.proxy import Proxy
from tests.support.servers import Clusters
from tests.support.shards import BUCKETS, ROWS, TABLES, Shards, arguments, drop, make

pytestmark = pytest.mark.server

CANARY = "kingfisher-71"


@pytest.fixture
def servers(clusters: Clusters, vendor: Vendor) -> Cluster:
    """Two servers that other tests may use too, each of these with databases of its own."""
    return clusters.get(vendor, 2)


@pytest.fixture
def shards(servers: Cluster, tmp_path: Path) -> Iterator[Shards]:
    """Two shards, initialised and seeded."""
    made = make(servers, tmp_path, "secure", TABLES, BUCKETS, ROWS)
    yield made.create()
    drop(made)


# -- the password -----------------------------------------------------------------------------------------------------


def told(error: BaseException) -> str:
    """All that an error can show in a log; the locals of its frames, as some reporters collect them, included."""
    shown, one = "".join(traceback.format_exception(error)), error
    while one is not None:
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if frame.f_code.co_filename != __file__:
                shown += repr(frame.f_locals)
        shown += repr(one) + repr(vars(one))
        one = one.__cause__ or one.__context__  # type: ignore[assignment]
    return shown


def test_a_password_is_nowhere_but_in_its_file(
    routers: Routers, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the right one nor a wrong one, in what is logged, raised, measured, printed, or sent as an attribute."""
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "sqlalchemy")
    right, shown = routers.user_password(), []
    registry = CollectorRegistry()
    with Proxy(cluster.port(0)) as proxy:
        config = routers.configure(ports={0: proxy.port}, breaker={"failures": 2}, pool={"connect_timeout": 0.3})
        with LockRouter(config, registry=registry) as router:
            key = keys_on(router, 0, prefix="secret")[0]
            with router.lock(key, timeout=5.0) as held, router.transaction(keys_on(router, 1)[0]) as connection:
                shown += [repr(held), repr(connection), repr(connection.engine.url), str(connection.engine)]
                seen = routers.observers[0].ask("SELECT * FROM performance_schema.session_connect_attrs")
                shown += map(repr, [*seen, *routers.observers[0].sessions()])
                if cluster.vendor is Vendor.MYSQL:
                    assert "lockrouter" in repr(seen), "the attributes are there to be looked at"
            proxy.refuse()
            eventually(lambda: router.health()["shard-0"]["breaker"] != "closed")
            for call in (lambda: router.transaction(key).__enter__(), lambda: router.lease(key, ttl=5), router.warm):
                with pytest.raises(LockRouterError) as caught:
                    call()
                shown.append(told(caught.value))
            shown += [repr(router.health()), generate_latest(registry).decode(), repr(config), repr(config.shards)]
            shown += [repr(config.endpoints(shard)) for shard in config.shards]
    wrong = routers.make(password=CANARY, breaker={"failures": 2})
    for verb in (wrong.lock, wrong.try_lock):
        with pytest.raises(ShardUnavailable) as refused:
            verb(key)
        shown += [told(refused.value), str(refused.value.__context__)]
    shown.append(repr(wrong.health()))
    shown.append(caplog.text)
    assert any("1045" in text for text in shown)
    for text in shown:
        assert right not in text
        assert CANARY not in text


def test_no_command_prints_a_password(shards: Shards, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In words or in JSON, when it works, when the password is wrong, and when the file is; nor is it logged."""
    caplog.set_level(logging.DEBUG, "sqlalchemy")
    runner, said = CliRunner(), []
    admin = load(shards.admin_file)
    secrets = {CANARY, shards.config.endpoints(shards.config.shards[0])[0].password}
    secrets.add(admin.endpoints(admin.shards[0])[0].password)
    text = shards.file.read_text("utf-8")
    files = {"right": text, "wrong": re.sub(r"(://\w+:)[^@]*@", rf"\1{CANARY}@", text)}
    files["broken"] = files["wrong"].replace("mysql+pymysql://", "mysql://")
    files["no file"] = files["wrong"].replace('buckets = ["0-3"]', 'buckets = ["0-3]')
    for name, content in files.items():
        file = tmp_path / f"{name}.toml"
        file.write_text(content, "utf-8")
        for command in (["verify"], ["verify", "--json"], ["verify", "--json", "--sizing"], ["init"], ["seed"]):
            done = runner.invoke(app, [command[0], str(file), *command[1:]])
            said.append(done.output + done.stderr + repr(done.exception))
            assert done.exit_code != 0 or name == "right"
        said.append(runner.invoke(app, ["route", str(file), "a", "--json"]).output)
    said += [runner.invoke(app, [*arguments(command, shards)]).output for command in ("init", "seed", "verify")]
    assert json.loads(runner.invoke(app, ["verify", str(shards.file), "--json"]).stdout)["findings"] == []
    assert "IDENTIFIED BY" in caplog.text, "it was logged what was said"
    for text in (*said, caplog.text):
        assert not [secret for secret in secrets if secret and secret in text], text


# -- SQL through names ------------------------------------------------------------------------------------------------

EVIL = [
    "x`; DROP DATABASE victim; -- ",
    "x%60; DROP DATABASE victim; -- ",
    "x' OR '1'='1",
    "x/**/y",
    "x;y",
    "victim.lock_00",
    "x\\",
    "x\0y",
    "x y",
    "ｘ",
]
ODD = "select--1$-"
"""As odd as a database's name may be."""


@pytest.mark.parametrize("name", EVIL)
def test_a_name_that_could_say_more_is_refused(servers: Cluster, name: str) -> None:
    """Before any connection, in a file as in Python."""
    config = load(servers.shards_file)
    shard = config.shards[0]
    url = shard.url.rsplit("/", 1)[0] + "/"
    replace = msgspec.structs.replace
    for changed in (url + name, url + name.replace("`", "%60").replace(";", "%3B").replace("'", "%27")):
        with pytest.raises(ConfigError):
            broken = replace(config, shards=(replace(shard, url=changed), *config.shards[1:]))
            broken.endpoints(broken.shards[0])
    if "." not in name:  # a topology's name may have one: it is in no statement, but as a value
        with pytest.raises(ConfigError):
            replace(config, topology=replace(config.topology, name=name))
    with pytest.raises(ConfigError):
        replace(config, shards=(replace(shard, id=name), *config.shards[1:]))
    with pytest.raises(ConfigError):
        replace(config, transaction=replace(config.transaction, time_zone=name))


def test_the_oddest_name_is_only_a_name(servers: Cluster, tmp_path: Path) -> None:
    shards = make(servers, tmp_path, "plain", TABLES, BUCKETS, ROWS)
    for file in (shards.file, shards.admin_file):
        file.write_text(file.read_text("utf-8").replace("/plain_", f"/{ODD}"), "utf-8")
    with servers.connect(0) as one, servers.connect(1) as two:
        try:
            shards.create()
            assert shards.problems() == []
            with LockRouter(shards.config, registry=CollectorRegistry()) as router:
                for key in ("a", "*/ DROP TABLE lock_00; /*", "'; --", "`x`"):
                    with router.lock(key, timeout=5.0, confirm=True):
                        pass
                    with router.lease(key, ttl=5, payload=b"'; DROP TABLE lock_00; -- \\'"):
                        pass
                    assert router.once(key, lambda: {"it's": "\\'; --"}) == {"it's": "\\'; --"}
            assert shards.problems() == []
        finally:
            for index, connection in enumerate((one, two)):
                with connection.cursor() as cursor:
                    cursor.execute(f"DROP DATABASE IF EXISTS `{ODD}{index}`")


# -- the application's user -------------------------------------------------------------------------------------------

FORBIDDEN = [
    # Other databases, accounts and secrets.
    "SELECT * FROM private.secrets",
    "INSERT INTO private.secrets VALUES (2)",
    "USE private",
    "SELECT * FROM mysql.user",
    "SELECT * FROM mysql.db",
    "SELECT * FROM performance_schema.threads",
    "SELECT * FROM performance_schema.events_statements_history",
    # Rows of locks.
    "DELETE FROM lock_00",
    "INSERT INTO lock_00 (slot, epoch, pad) VALUES (4000000000, 3, 0)",
    "UPDATE lock_00 SET slot = slot + 1000000 WHERE slot = 0",
    "UPDATE lock_00 SET epoch = 0",
    "REPLACE INTO lock_00 (slot, epoch, pad) VALUES (0, 0, 0)",
    "TRUNCATE TABLE lock_00",
    # What the shard says of itself and its map.
    *(f"UPDATE lock_meta SET {column} = {column}" for column in
      ("id", "topology", "protocol", "fingerprint", "epoch", "drained", "migration")),
    "DELETE FROM lock_meta",
    "INSERT INTO lock_meta (id, topology, protocol, fingerprint, epoch, term) VALUES (2, '', 1, '', 1, 1)",
    "UPDATE lock_bucket SET epoch = 9",
    "UPDATE lock_bucket SET moved_to = 'elsewhere'",
    "DELETE FROM lock_bucket",
    "INSERT INTO lock_bucket (bucket, epoch) VALUES (999, 3)",
    # What operators say.
    "INSERT INTO frozen (prefix, at) VALUES ('x', 0)",
    "DELETE FROM frozen",
    "UPDATE frozen SET why = ''",
    "INSERT INTO audit (at, who, action) VALUES (0, '', '')",
    "UPDATE audit SET who = ''",
    "DELETE FROM audit",
    "UPDATE run_marker SET at = 0",
    # Tables, code, accounts, the server.
    "CREATE TABLE mine (a INT)",
    "CREATE TEMPORARY TABLE mine (a INT)",
    "DROP TABLE lock_00",
    "ALTER TABLE lock_00 ADD COLUMN b INT",
    "RENAME TABLE lock_00 TO lock_99",
    "CREATE INDEX i ON lock_00 (epoch)",
    "CREATE VIEW mine AS SELECT 1",
    "CREATE TRIGGER mine BEFORE UPDATE ON lock_00 FOR EACH ROW SET NEW.pad = 0",
    "CREATE PROCEDURE mine() SELECT 1",
    "CREATE EVENT mine ON SCHEDULE EVERY 1 DAY DO SELECT 1",
    "CREATE DATABASE mine",
    "DROP DATABASE secure_0",
    "CREATE USER mine@localhost",
    "GRANT SELECT ON secure_0.lock_00 TO lockrouter@localhost",
    "LOCK TABLES lock_00 WRITE",
    "SET GLOBAL read_only = 1",
    "SET GLOBAL max_connections = 1",
    "FLUSH TABLES",
    "SHUTDOWN",
    "SELECT 1 INTO OUTFILE '/tmp/lockrouter-was-here'",
    "LOAD DATA INFILE '/etc/hostname' INTO TABLE once",
]  # fmt: skip


def test_the_applications_user_can_do_nothing_else(shards: Shards, servers: Cluster) -> None:
    granted = []
    with servers.connect(0) as root, root.cursor() as operator, shards.application(0) as connection:
        operator.execute("CREATE DATABASE IF NOT EXISTS private")
        operator.execute("CREATE TABLE IF NOT EXISTS private.secrets (a INT)")
        number = root.thread_id()  # type: ignore[no-untyped-call]
        with connection.cursor() as cursor:
            for statement in FORBIDDEN:
                code = refusal(cursor, statement)
                if code not in DENIED:
                    granted.append(f"{statement}: {code}")
            assert refusal(cursor, f"KILL {number}") in (1094, 1095)
            cursor.execute("SHOW FULL PROCESSLIST")
            assert {row[1] for row in cursor.fetchall()} == {"lockrouter"}
            cursor.execute("SHOW DATABASES")
            seen = {row[0] for row in cursor.fetchall()}
            assert not seen & {"private", "mysql", "sys"}
            cursor.execute("SELECT LOAD_FILE('/etc/hostname')")
            assert cursor.fetchall() == ((None,),)
        operator.execute("SELECT 1")
    assert granted == []


def refusal(cursor: Any, statement: str) -> int:
    """The number of the error that a statement ends in, 0 for none."""
    try:
        cursor.execute(statement)
    except pymysql.MySQLError as error:
        return int(error.args[0])
    return 0
