"""No name of a shard file can say more than a name, and no file of the repository names a password."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.dialects.mysql import pymysql

from lockrouter import ConfigError
from lockrouter.config import RouterConfig, load
from lockrouter.routing import Routing
from lockrouter.sql import admin as sql
from lockrouter.urls import is_loopback

ROOT = Path(__file__).resolve().parents[2]
NAME = st.text(st.sampled_from("ab0_$-`'\"\\;:%./*# \0\n\u00e9")) | st.text()
NOTHING_BUT_A_NAME = re.compile(r"[A-Za-z0-9._$-]{1,64}\Z")


@pytest.fixture(scope="module")
def config() -> RouterConfig:
    return load(ROOT / "shards" / "local.toml")


@given(name=NAME)
def test_a_quoted_name_ends_where_it_ends(name: str) -> None:
    quoted = sql.quoted(name)
    assert quoted[0] == quoted[-1] == "`"
    inside = quoted[1:-1]
    assert "`" not in inside.replace("``", "")
    assert inside.replace("``", "`") == name


@given(name=NAME)
def test_what_is_taken_for_a_name_is_one_whatever_says_it(config: RouterConfig, name: str) -> None:
    shard, replace = config.shards[0], msgspec.structs.replace
    changes = {
        "database": {"shards": (replace(shard, url=shard.url.rpartition("/")[0] + "/" + name), *config.shards[1:])},
        "topology": {"topology": replace(config.topology, name=name)},
        "shard": {"shards": (replace(shard, id=name), *config.shards[1:])},
    }
    for what, change in changes.items():
        try:
            taken = replace(config, **change)  # type: ignore[arg-type]
        except ConfigError:
            continue
        found = {
            "database": taken.endpoints(taken.shards[0])[0].database,
            "topology": taken.topology.name,
            "shard": taken.shards[0].id,
        }[what]
        assert NOTHING_BUT_A_NAME.match(found)
    try:
        zone = replace(config, transaction=replace(config.transaction, time_zone=name)).transaction.time_zone
        assert not set(zone) & set("'\"\\`; \n\0")
    except ConfigError:
        pass


@given(name=st.from_regex(r"[A-Za-z0-9_$-]{1,64}", fullmatch=True))
def test_a_statement_with_a_name_is_the_statement_with_that_name(name: str) -> None:
    dialect = pymysql.dialect()
    for statement in (sql.create_database(name), sql.use_database(name), sql.grant(name, "audit", [], 1)):
        said = str(statement.compile(dialect=dialect))
        assert said.count(f"`{name}`") == 1
        rest = said.replace(f"`{name}`", "")
        assert ";" not in rest and "--" not in rest


@given(key=st.binary(min_size=1, max_size=255))
def test_a_key_is_in_a_statement_as_digits_alone(key: bytes) -> None:
    assert re.fullmatch(rb"[0-9a-f]{16}", Routing.tag(key))


def test_no_file_holds_a_password_of_anything_but_this_machine() -> None:
    found = []
    for file in ROOT.rglob("*"):
        parts = file.relative_to(ROOT).parts
        if parts[0] not in ("router", "shards", "loadtest", "ops") or file.suffix not in (
            ".toml",
            ".py",
            ".md",
            ".sql",
        ):
            continue
        text = file.read_text("utf-8")
        for _, secret, host in re.findall(r"://([^\s:/@]+):([^\s@/{]+)@([A-Za-z0-9.-]+)", text):
            if not is_loopback(host):
                found.append((file.name, secret))
        assert "PRIVATE KEY-----" not in text
    assert found == []
