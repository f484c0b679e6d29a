"""The shard file: what is accepted, and one clear `ConfigError` without a password for everything else."""

from __future__ import annotations

import copy
import pickle
import pprint
import traceback
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lockrouter.config import (
    ClassRules,
    KeyClass,
    PoolOptions,
    RouterConfig,
    RouterOptions,
    ShardConfig,
    Topology,
    load,
    parse,
)
from lockrouter.errors import ConfigError

SHARDS = Path(__file__).parents[2] / "shards"
SECRET = "s3cr3t-Pw"
CA = """-----BEGIN CERTIFICATE-----
MIIBkTCCATegAwIBAgIUPooyGn3RCuOTWIRGc0XoWf9HQ3kwCgYIKoZIzj0EAwIw
HTEbMBkGA1UEAwwSbG9ja3JvdXRlciB0ZXN0IENBMCAXDTI2MTEzMDE4MTYzMloY
DzIxMjYxMTA2MTgxNjMyWjAdMRswGQYDVQQDDBJsb2Nrcm91dGVyIHRlc3QgQ0Ew
WTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAARMRTJ1QyuCTut5w6zZ4UDoPbjLq/We
1wPuBTquY+zg3UAopcdJtL1Bt21NluOFtbic8WIDTtnwTVs3MFoaDxv3o1MwUTAd
BgNVHQ4EFgQUUrU7djoOmT3sjACQbazacr/RP80wHwYDVR0jBBgwFoAUUrU7djoO
mT3sjACQbazacr/RP80wDwYDVR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNIADBF
AiACKJ2yYP6aQpt+zlP/IobYeCirFK5wettAoTgc192yXAIhAIF55kr0lcImECvb
zZZMLctvtJ1K1uKz3JF+MFw6SMfa
-----END CERTIFICATE-----
"""
VALID = f"""
[topology]
name = "test"
epoch = 3
tables = 8
buckets = 64
rows_per_bucket = 256
seed = 0
[router]
on_outage = "local"
timeout = 3.0
[pool]
size = 16
[breaker]
failures = 5
[transaction]
isolation = "READ COMMITTED"
[[shard]]
id = "one"
url = "mysql+pymysql://app:{SECRET}@127.0.0.1:3306/locks_1"
buckets = ["0-15", "31", "16-30"]
[[shard]]
id = "two"
url = "mysql+pymysql://app@10.0.0.10:3307/locks_2"
buckets = ["32-63"]
[[class]]
prefix = "payment:"
on_outage = "refuse"
[[class]]
prefix = "job:"
mode = "lease"
timeout = 9
"""
ONE = f"app:{SECRET}@127.0.0.1:3306/locks_1"
TWO = "app@10.0.0.10:3307/locks_2"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TEST_PW", SECRET)
    monkeypatch.setenv("TEST_EMPTY", "")
    monkeypatch.delenv("TEST_UNSET", raising=False)
    (tmp_path / "pw").write_bytes(SECRET.encode() + b"\n")
    (tmp_path / "pw-crlf").write_bytes(SECRET.encode() + b"\r\n")
    (tmp_path / "empty").write_bytes(b"\n")
    (tmp_path / "long").write_bytes(SECRET.encode() * 1000)
    (tmp_path / "latin").write_bytes(SECRET.encode() + b"\xe9")
    (tmp_path / "folder").mkdir()
    (tmp_path / "ca.pem").write_text(CA)


def edited(old: str, new: str, text: str = VALID) -> str:
    assert text.count(old) == 1, f"{old!r} must be there once"
    return text.replace(old, new)


def on_two(*lines: str) -> str:
    return edited('buckets = ["32-63"]', "\n".join(('buckets = ["32-63"]', *lines)))


def texts_of(error: BaseException) -> Iterator[str]:
    """Everything that a log of the error, however thorough, may show."""
    yield from traceback.format_exception(error)
    seen: set[int] = set()
    queue: list[BaseException | None] = [error]
    while queue:
        one = queue.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield from (str(one), repr(one), repr(vars(one)), repr(one.args))
        queue += [one.__cause__, one.__context__]


def refused(text: str | bytes, file: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse(text, file=str(file))
    error = caught.value
    assert error.file == str(file)
    assert str(error).startswith(f"{file}: ")
    for shown in texts_of(error):
        assert SECRET not in shown
    return error


MISTAKES: dict[str, tuple[str, str, str]] = {
    # name: (text, field, what the message also names)
    "unknown table": (VALID + "[pol]\nsize = 1\n", "pol", "did you mean 'pool'"),
    "unknown top-level value": ("path = 'x'\n" + VALID, "path", "unknown field 'path'"),
    "unknown field": (edited("tables = 8", "tabels = 8"), "topology.tabels", "did you mean 'tables'"),
    "unknown field of a shard": (on_two(f'password = "{SECRET}"'), "shard[1].password", "password_env"),
    "unknown field of a class": (edited("timeout = 9", "tiemout = 9"), "class[1].tiemout", "timeout"),
    "unknown field, nothing near": (edited("size = 16", "qqq = 1"), "pool.qqq", "known are size"),
    "a field like msgspec's messages": (edited("size = 16", '"x` - at `$.y[0]" = 1'), "pool.y[0].x", "unknown field"),
    "no on_outage": (edited('on_outage = "local"', ""), "router.on_outage", "required"),
    "no router table": (edited('[router]\non_outage = "local"\ntimeout = 3.0\n', ""), "router.on_outage", "required"),
    "bad on_outage": (edited('on_outage = "local"', 'on_outage = "ignore"'), "router.on_outage", "'ignore'"),
    "bad on_outage of a class": (edited('"refuse"', '"ignore"'), "class[0].on_outage", "'ignore'"),
    "on_outage of another type": (edited('on_outage = "local"', "on_outage = true"), "router.on_outage", "True"),
    "bad mode": (edited('"lease"', '"table"'), "class[1].mode", "'table'"),
    "no topology": (edited(VALID[: VALID.index("[router]")], ""), "topology", "missing"),
    "no shard": (VALID[: VALID.index("[[shard]]")], "shard", "missing"),
    "shard is no array": (VALID[: VALID.index("[[shard]]")] + "[shard]\nid = 1", "shard", "array"),
    "topology is no table": ("topology = 5\n" + VALID[VALID.index("[router]") :], "topology", "5"),
    "no id": (edited('id = "two"', ""), "shard[1].id", "required"),
    "no url": (edited(f'url = "mysql+pymysql://{TWO}"', ""), "shard[1].url", "required"),
    "no buckets": (edited('buckets = ["32-63"]', ""), "shard[1].buckets", "required"),
    "no prefix": (edited('prefix = "job:"', ""), "class[1].prefix", "required"),
    "wrong type": (edited("tables = 8", 'tables = "8"'), "topology.tables", "'8'"),
    "bool for a number": (edited("tables = 8", "tables = true"), "topology.tables", "True"),
    "float for whole seconds": (edited("[pool]", "ghost_timeout = 2.5\n[pool]"), "router.ghost_timeout", "2.5"),
    "a date": (edited("timeout = 3.0", "timeout = 2026-01-01"), "router.timeout", "float"),
    "url of another type": (edited(f'"mysql+pymysql://{ONE}"', f'["{ONE}"]'), "shard[0].url", "array"),
    "overlapping buckets": (edited('"32-63"', '"30-63"'), "shard.buckets", "30-31 belong to 'one' and 'two'"),
    "buckets twice": (edited('"32-63"', '"32-63", "40"'), "shard.buckets", "40 belong to 'two' twice"),
    "missing buckets": (edited('"32-63"', '"33-40", "42-62"'), "shard.buckets", "32, 41, 63 belong to no shard"),
    "many gaps": (edited('"32-63"', "'33','35','37','39','41','43'"), "shard.buckets", "and 2 more ranges"),
    "bucket out of range": (edited('"32-63"', '"32-64"'), "shard.buckets", "32-64 of 'two'"),
    "reversed range": (edited('"32-63"', '"63-32"'), "shard[1].buckets", "'63-32'"),
    "no range": (edited('"32-63"', '"all"'), "shard[1].buckets", "'all'"),
    "negative range": (edited('"32-63"', '"-1-63"'), "shard[1].buckets", "'-1-63'"),
    "range with a space": (edited('"32-63"', '"32 - 63"'), "shard[1].buckets", "'32 - 63'"),
    "range of other digits": (edited('"32-63"', '"٣٢-63"'), "shard[1].buckets", "-63"),
    "range as number": (edited('"32-63"', "32"), "shard[1].buckets[0]", "32"),
    "no shard in the list": ("shard = []\n" + VALID[: VALID.index("[[shard]]")], "shard.buckets", "0-63 belong to no"),
    "duplicate id": (edited('id = "two"', 'id = "one"'), "shard[1].id", "'one' is the id of shard[0]"),
    "unsafe id": (edited('id = "two"', 'id = "tw`o"'), "shard[1].id", "tw`o"),
    "newline in id": (edited('id = "two"', 'id = "two\\n"'), "shard[1].id", "two\\n"),
    "empty id": (edited('id = "two"', 'id = ""'), "shard[1].id", "''"),
    "long id": (edited('id = "two"', f'id = "{"x" * 65}"'), "shard[1].id", "xxx"),
    "negative weight": (on_two("weight = -1"), "shard[1].weight", "-1"),
    "same database": (edited(TWO, "app@127.0.0.1:3306/locks_1"), "shard[1].url", "'locks_1' there belongs to 'one'"),
    "duplicate prefix": (edited('"job:"', '"payment:"'), "class[1].prefix", "'payment:' is the prefix of class[0]"),
    "empty prefix": (edited('"job:"', '""'), "class[1].prefix", "''"),
    "long prefix": (edited('"job:"', f'"{"é" * 128}"'), "class[1].prefix", "éé"),
    "kill without max_hold": (edited("timeout = 9", "kill = true"), "class[1].kill", "max_hold"),
    "a lease that degrades": (edited("timeout = 9", 'on_outage = "local"'), "class[1].on_outage", "never degrades"),
    "isolation": (edited('"READ COMMITTED"', '"READ"'), "transaction.isolation", "'READ'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_every_mistake_names_file_field_and_value(name: str, tmp_path: Path) -> None:
    text, field, told = MISTAKES[name]
    error = refused(text, tmp_path / "shards.toml")
    assert error.field == field
    assert f": {field}: " in str(error)
    assert told in str(error)


URLS = {
    "driver": (f"mysql://u:{SECRET}@127.0.0.1/d", "'mysql'"),
    "other database": (f"postgresql+psycopg://u:{SECRET}@127.0.0.1/d", "'postgresql+psycopg'"),
    "not a URL": (SECRET, "not a URL"),
    "empty": ("", "not a URL"),
    "no database": (f"mysql+pymysql://u:{SECRET}@127.0.0.1:3306", "no database"),
    "empty database": (f"mysql+pymysql://u:{SECRET}@127.0.0.1:3306/", "no database"),
    "unsafe database": (f"mysql+pymysql://u:{SECRET}@127.0.0.1/d`x", "database's name"),
    "database with a quote": (f"mysql+pymysql://u:{SECRET}@127.0.0.1/d'", "database's name"),
    "no user": ("mysql+pymysql://127.0.0.1:3306/d", "no user"),
    "no host": (f"mysql+pymysql://u:{SECRET}@/d", "no host"),
    "port zero": (f"mysql+pymysql://u:{SECRET}@127.0.0.1:0/d", "bad port: 0"),
    "port too high": (f"mysql+pymysql://u:{SECRET}@127.0.0.1:65536/d", "bad port: 65536"),
    "port no number": (f"mysql+pymysql://u:{SECRET}@127.0.0.1:abc/d", "not a URL"),
    "port in a host argument": ("mysql+pymysql://u@/d?host=a:b", "bad port: 'b'"),
    "empty port in an argument": ("mysql+pymysql://u@/d?host=a:", "bad port"),
    "hosts in both places": ("mysql+pymysql://u@a/d?host=b", "one of the two"),
    "a host twice": ("mysql+pymysql://u@/d?host=a:3306&host=A", "A:3306 is named twice"),
    "bad host": ("mysql+pymysql://u@/d?host=a%20b", "bad host"),
    "unknown argument": (f"mysql+pymysql://u@127.0.0.1/d?password={SECRET}", "unknown argument 'password'"),
    "relative socket": ("mysql+pymysql://u@/d?unix_socket=mysql.sock", "absolute path"),
    "socket and host": ("mysql+pymysql://u@10.0.0.1/d?unix_socket=/run/m", "absolute path"),
    "two sockets": ("mysql+pymysql://u@/d?unix_socket=/a&unix_socket=/b", "absolute path"),
    "literal password": (f"mysql+pymysql://u:{SECRET}@10.0.0.10/d", "not for 10.0.0.10"),
    "literal password, a name": (f"mysql+pymysql://u:{SECRET}@localhost.example/d", "loopback"),
    "literal password, mixed hosts": (f"mysql+pymysql://u:{SECRET}@/d?host=127.0.0.1&host=db", "not for db"),
    "empty literal password": ("mysql+pymysql://u:@10.0.0.10/d", "loopback"),
    "password with @": (f"mysql+pymysql://u:x@{SECRET}@127.0.0.1/d", "%40"),
    "password with @ and /": (f"mysql+pymysql://u:x@127.0.0.1/{SECRET}@h/d", "%40"),
    "password in the port": (f"mysql+pymysql://u@127.0.0.1:{SECRET}/d", "not a URL"),
    "password as driver": (f"{SECRET}!x://u@h/d", ""),
}


@pytest.mark.parametrize("name", URLS)
def test_a_bad_url_is_refused_without_being_repeated(name: str, tmp_path: Path) -> None:
    url, told = URLS[name]
    text = edited(f'"mysql+pymysql://{TWO}"', f'"{url}"')
    error = refused(text, tmp_path / "shards.toml")
    assert error.field == "shard[1].url"
    assert told in str(error)
    assert "(shard 'two')" in str(error)


SECRETS = {
    "two sources": (('password_env = "TEST_PW"', 'password_file = "pw"'), "password_env", "more than one"),
    "variable unset": (('password_env = "TEST_UNSET"',), "password_env", "TEST_UNSET is not set"),
    "variable empty": (('password_env = "TEST_EMPTY"',), "password_env", "TEST_EMPTY is empty"),
    "no variable's name": ((f'password_env = "{SECRET}"',), "password_env", "not the name"),
    "file missing": (('password_file = "gone"',), "password_file", "'gone': No such file"),
    "file is a folder": (('password_file = "folder"',), "password_file", "'folder': Is a directory"),
    "file empty": (('password_file = "empty"',), "password_file", "'empty' is empty"),
    "file too long": (('password_file = "long"',), "password_file", "4096 bytes"),
    "file not UTF-8": (('password_file = "latin"',), "password_file", "'latin' is not UTF-8"),
    "file with NUL": (('password_file = "a\\u0000b"',), "password_file", "not a file name"),
    "CA missing": (('tls_ca = "gone.pem"',), "tls_ca", "'gone.pem': No such file"),
    "CA is a password file": (('tls_ca = "pw"',), "tls_ca", "'pw' holds no PEM certificate"),
    "CA is a folder": (('tls_ca = "folder"',), "tls_ca", "'folder'"),
}


@pytest.mark.parametrize("name", SECRETS)
def test_a_password_or_ca_that_cannot_be_had_is_refused_at_load(name: str, tmp_path: Path) -> None:
    lines, field, told = SECRETS[name]
    error = refused(on_two(*lines), tmp_path / "shards.toml")
    assert error.field == f"shard[1].{field}"
    assert told in str(error)


def test_a_literal_password_beside_another_source_is_refused(tmp_path: Path) -> None:
    text = edited('id = "one"', 'id = "one"\npassword_env = "TEST_PW"')
    assert "more than one password source" in str(refused(text, tmp_path / "f"))


NUMBERS: dict[str, dict[str, tuple[object, ...]]] = {
    "[topology]": {
        "epoch": (0, -1, 2**32),
        "tables": (0, -1, 101, 65),
        "buckets": (0, -1, 65_537),
        "rows_per_bucket": (0, -1, 2**32, 2**26, 10**400),
        "seed": (-1, 2**32),
    },
    "[router]": {
        "timeout": (-1, "nan", "inf", "-inf", 1e10),
        "ghost_timeout": (1, 0, -1, 3601),
        "role_check": (0, -0.5, "nan", 61),
        "grant_window": (0.9, "nan", "inf"),
        "clock_skew": (-0.1, "nan", "inf"),
        "storm_ratio": (-0.1, 1.1, "nan"),
        "handover_limit": (-1, 64),
        "handover_time": (-1, "nan", "inf"),
        "close_timeout": (-1, "nan", "inf"),
    },
    "[pool]": {"size": (0, -1, 10_001), "min_idle": (-1, 17), "connect_timeout": (0, -1, "nan", "inf")},
    "[breaker]": {
        "failures": (0, -1),
        "retries": (-1, 101),
        "retry_delay": (-1, "nan", "inf"),
        "probe_after": (0, -1, "nan", "inf"),
    },
    "[transaction]": {
        "lock_wait": (0, -1),
        "idle": (0, -1),
        "time_zone": ('"x\' y"', '""', '"Europe/Berlin"', '"SYSTEM"', '"+15:00"', '"01:00"'),
    },
    '"job:"': {"timeout": (-1, "nan", "inf"), "max_waiters": (0, -1), "max_hold": (0, -1, "nan", "inf")},
}


@pytest.mark.parametrize(
    ("header", "field", "value"),
    [(header, field, value) for header, fields in NUMBERS.items() for field in fields for value in fields[field]],
)
def test_numbers_out_of_range_are_refused(header: str, field: str, value: object, tmp_path: Path) -> None:
    head, tail = VALID.split(header)
    body, bracket, rest = tail.partition("\n[")
    kept = [line for line in body.split("\n") if not line.startswith(f"{field} =")]
    text = head + header + "\n".join((kept[0], f"{field} = {value}", *kept[1:])) + bracket + rest
    error = refused(text, tmp_path / "shards.toml")
    assert str(error.field).endswith(f".{field}") or (field, value) == ("rows_per_bucket", 2**26)
    assert str(value).strip("\"'")[:10].rstrip("0") in str(error)


def test_the_bounds_themselves_are_accepted() -> None:
    text = edited("timeout = 3.0", "timeout = 0\nghost_timeout = 2\nrole_check = 1\ngrant_window = 2\nstorm_ratio = 1")
    config = parse(edited("seed = 0", "seed = 4294967295", text))
    assert (config.router.timeout, config.topology.seed) == (0.0, 2**32 - 1)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"[topology\nname = 1", "line 1"),
        (f'[router]\non_outage = "local"\nurl = {SECRET}\n'.encode(), "line 3"),
        (f'[router]\nurl = "{SECRET}'.encode(), "not TOML"),
        (b"\xff\xfe[topology]", "not UTF-8: byte 0xff at offset 0"),
        (SECRET.encode() + b"\xe9", "not UTF-8: byte 0xe9 at offset 9"),
        (b"a = 1\na = 2", "Cannot overwrite a value at the end, line 2"),
        (b"[a]\n[a]\n[b]", "line 2"),
        (b"a = " + b"9" * 5000, "too many digits"),
        (b"a = " + b"[" * 5000, "not TOML"),
        (b"", "missing"),
    ],
)
def test_what_is_no_toml_names_the_line(raw: bytes, told: str, tmp_path: Path) -> None:
    assert told in str(refused(raw, tmp_path / "shards.toml"))


@pytest.mark.parametrize(
    ("name", "told"), [("gone.toml", "No such file"), ("folder", "directory"), ("a\0b", "file name")]
)
def test_a_file_that_cannot_be_read(name: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        load(f"{tmp_path}/{name}")
    assert caught.value.file == f"{tmp_path}/{name}"


def test_a_valid_file_gives_every_value_and_default(tmp_path: Path) -> None:
    file = tmp_path / "shards.toml"
    file.write_text(VALID)
    config = load(file)
    assert config.path == str(file)
    assert config.topology == Topology("test", 3, 8, 64, 256)
    assert config.router == RouterOptions(on_outage="local")
    assert config.pool == PoolOptions(size=16, min_idle=2, connect_timeout=1.0)
    assert [shard.ranges() for shard in config.shards] == [((0, 15), (31, 31), (16, 30)), ((32, 63),)]
    assert config == parse(VALID, file=str(file)) == parse(VALID.encode(), file=str(file))
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert hash(config) == hash(load(file))


def test_a_shard_without_buckets_is_one_that_buckets_will_move_to() -> None:
    text = edited('"32-63"', "").replace('"0-15"', '"0-15", "32-63"')
    assert parse(text).shards[1].ranges() == ()


@pytest.mark.parametrize("source", ['password_env = "TEST_PW"', 'password_file = "pw"', 'password_file = "pw-crlf"'])
def test_the_password_comes_from_its_source(source: str, tmp_path: Path) -> None:
    config = parse(on_two(source, 'tls_ca = "ca.pem"'), file=str(tmp_path / "f"))
    (endpoint,) = config.endpoints(config.shards[1])
    assert (endpoint.host, endpoint.port, endpoint.user, endpoint.database) == ("10.0.0.10", 3307, "app", "locks_2")
    assert endpoint.password == SECRET
    assert endpoint.tls_ca == str(tmp_path / "ca.pem")
    assert SECRET not in repr(endpoint)


def test_a_rotated_password_is_seen_at_the_next_resolution(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(on_two('password_env = "TEST_PW"'))
    monkeypatch.setenv("TEST_PW", "next")
    assert config.endpoints(config.shards[1])[0].password == "next"
    monkeypatch.delenv("TEST_PW")
    with pytest.raises(ConfigError, match="TEST_PW is not set"):
        config.endpoints(config.shards[1])


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("u:p%40%2F%3A@localhost/d", [("localhost", 3306, "p@/:", None)]),
        ("u:p@127.8.9.1:1/d", [("127.8.9.1", 1, "p", None)]),
        ("u:p@[::1]:3307/d", [("::1", 3307, "p", None)]),
        ("u:p@/d?host=[::1]:3307&host=127.0.0.1", [("::1", 3307, "p", None), ("127.0.0.1", 3306, "p", None)]),
        ("u@/d?host=db-a.x&host=db-b.x:3310", [("db-a.x", 3306, "", None), ("db-b.x", 3310, "", None)]),
        ("u:p@/d?unix_socket=/run/m.sock", [("localhost", 3306, "p", "/run/m.sock")]),
        ("u:p@localhost/d?unix_socket=/run/m.sock", [("localhost", 3306, "p", "/run/m.sock")]),
    ],
)
def test_addresses(rest: str, expected: list[tuple[str, int, str, str | None]]) -> None:
    shard = ShardConfig(id="x", url=f"mysql+pymysql://{rest}", buckets=())
    found = [(end.host, end.port, end.password, end.unix_socket) for end in shard.endpoints(".")]
    assert found == expected


def test_no_repr_shows_a_password() -> None:
    rich = pytest.importorskip("rich.console")
    config = parse(VALID)
    screen = StringIO()
    console = rich.Console(file=screen, width=10_000)
    ends = [config.endpoints(shard) for shard in config.shards]
    for value in (config, config.shards, ends):
        console.print(value)
        screen.write(f"{value!r} {value} {pprint.pformat(value)}")
    shown = screen.getvalue()
    assert "locks_1" in shown and "'one'" in shown
    assert SECRET not in shown


def python_made(**changes: Any) -> RouterConfig:
    parts: dict[str, Any] = {
        "topology": Topology("test", 1, 8, 64, 256),
        "router": RouterOptions(on_outage="refuse"),
        "shards": (ShardConfig(id="one", url="mysql+pymysql://u@127.0.0.1/d", buckets=("0-63",)),),
    }
    return RouterConfig(**(parts | changes))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"topology": Topology("test", 1, 8, 65, 256)}, "shard.buckets"),
        ({"topology": Topology("test", 1, True, 64, 256)}, "topology.tables"),
        ({"topology": None}, "topology"),
        ({"router": RouterOptions(on_outage="other")}, "router.on_outage"),  # type: ignore[arg-type]
        ({"router": RouterOptions("local", timeout="1")}, "router.timeout"),  # type: ignore[arg-type]
        ({"router": RouterOptions("local", timeout=float("nan"))}, "router.timeout"),
        ({"shards": ()}, "shard.buckets"),
        ({"shards": []}, "shard"),
        ({"classes": (KeyClass(""),)}, "class[0].prefix"),
        ({"classes": (KeyClass("\ud800"),)}, "class[0].prefix"),
        ({"classes": (KeyClass("a"), KeyClass(b"b"))}, "class[1].prefix"),  # type: ignore[arg-type]
    ],
)
def test_a_configuration_made_in_python_passes_the_same_checks(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        python_made(**changes)
    assert (caught.value.field, caught.value.file) == (field, None)


def test_a_replaced_part_is_checked_again() -> None:
    with pytest.raises(ConfigError, match="storm_ratio"):
        msgspec.structs.replace(python_made(), router=RouterOptions("local", storm_ratio=2))


def test_the_longest_prefix_wins_byte_by_byte() -> None:
    classes = (KeyClass("a", timeout=1), KeyClass("abc", on_outage="local"), KeyClass("é", mode="lease"))
    config = python_made(classes=classes)
    rules = ClassRules(config)
    cases = {b"a": "a", b"ab": "a", b"abc": "abc", b"abcd": "abc", b"A": "", b"\xc3": "", b"\xc3\xa9x": "é", b"x": ""}
    for key, prefix in cases.items():
        assert config.class_of(key).prefix == rules.of(key).prefix == prefix
    assert (config.class_of(b"abc").on_outage, config.class_of(b"abc").timeout) == ("local", 3.0)
    assert (config.class_of(b"a").on_outage, config.class_of(b"a").timeout) == ("refuse", 1)
    assert config.class_of(b"x").max_hold is None and config.class_of(b"x").mode == "row"


def test_the_local_file_loads() -> None:
    config = load(SHARDS / "local.toml")
    assert len(config.shards) == 4
    assert config.class_of(b"payment:1").on_outage == "refuse"


def test_the_example_loads_and_shows_every_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "example.toml").write_text((SHARDS / "example.toml").read_text())
    (tmp_path / "pay-ca.pem").write_text(CA)
    for number in range(4):
        monkeypatch.setenv(f"PAY_{number}_PASSWORD", SECRET)
    config = load(tmp_path / "example.toml")
    assert len(config.endpoints(config.shards[1])) == 2
    assert config.router == RouterOptions(on_outage="refuse")
    assert (config.pool, config.breaker, config.transaction) == tuple(
        python_made().__getattribute__(name) for name in ("pool", "breaker", "transaction")
    )
