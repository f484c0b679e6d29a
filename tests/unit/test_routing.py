"""Addresses are pinned: whatever changes one of these numbers sends keys to rows nobody else locks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockrouter.config import RouterConfig, RouterOptions, ShardConfig, Topology
from lockrouter.errors import InvalidKey
from lockrouter.routing import LAYOUT, PROTOCOL, Address, Routing, encode, fingerprint, key_hash

ROOT = Path(__file__).parents[2]
BIG = Topology(name="payments", epoch=3, tables=8, buckets=4096, rows_per_bucket=512)
SMALL = Topology(name="local", epoch=1, tables=8, buckets=64, rows_per_bucket=256)
SEEDED = Topology(name="payments", epoch=3, tables=8, buckets=4096, rows_per_bucket=512, seed=0xDEADBEEF)

Vector = tuple[int, int, int]
"""bucket, table, slot"""

GOLDEN: list[tuple[str | bytes, Vector, Vector, Vector]] = [
    # key, BIG, SMALL, SEEDED
    (b"order:12345", (430, 6, 220394), (46, 6, 12010), (2626, 2, 1344596)),
    ("account:42", (1064, 0, 544864), (40, 0, 10336), (2687, 7, 1375889)),
    ("a", (2394, 2, 1225865), (26, 2, 6793), (1917, 5, 981954)),
    ("A", (2359, 7, 1208186), (55, 7, 14202), (2325, 5, 1190689)),
    ("a ", (3729, 1, 1909543), (17, 1, 4391), (4068, 4, 2083047)),
    (b"\0", (1411, 3, 722613), (3, 3, 949), (732, 4, 374907)),
    ("\0\0", (859, 3, 440296), (27, 3, 7144), (2006, 6, 1027201)),
    ("\U0001f512", (3885, 5, 1989192), (45, 5, 11592), (1903, 7, 974654)),
    ("\u00e9", (3647, 7, 1867752), (63, 7, 16360), (2658, 2, 1360935)),
    ("e\u0301", (1193, 1, 610829), (41, 1, 10509), (800, 0, 409601)),
    ("k" * 255, (2392, 0, 1225011), (24, 0, 6195), (2748, 4, 1407467)),
    (bytes(range(1, 256)), (906, 2, 464322), (10, 2, 2754), (850, 2, 435699)),
]


def routing_of(topology: Topology, shards: int = 4) -> Routing:
    width = topology.buckets // shards
    members = tuple(
        ShardConfig(
            id=f"s{number}",
            url=f"mysql+pymysql://u@h/d{number}",
            buckets=(f"{number * width}-{(number + 1) * width - 1}",),
        )
        for number in range(shards)
    )
    return Routing(RouterConfig(topology=topology, router=RouterOptions(on_outage="refuse"), shards=members))


ROUTINGS = [routing_of(BIG), routing_of(SMALL), routing_of(SEEDED)]


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("vector", GOLDEN, ids=lambda vector: ascii(vector[0])[:20])
def test_golden_vectors(vector: tuple[str | bytes, Vector, Vector, Vector], which: int) -> None:
    topology = (BIG, SMALL, SEEDED)[which]
    key, *addresses = vector
    bucket, table, slot = addresses[which]
    shard = f"s{bucket * 4 // topology.buckets}"
    address = ROUTINGS[which].route(encode(key))
    assert address == Address(bucket=bucket, shard=shard, table=table, slot=slot)
    assert slot // topology.rows_per_bucket == bucket
    assert bucket % topology.tables == table


def test_versions_and_fingerprints_are_pinned() -> None:
    assert (PROTOCOL, LAYOUT) == (1, 1)
    assert fingerprint(BIG).hex() == "1a5ddb4ed561b7403620c6a9f5c05d1e"
    assert fingerprint(SMALL).hex() == "c267e36342a04ebe1cb2b461ae3fc07c"
    assert fingerprint(SEEDED).hex() == "cc5c4b0b3471411c60957adf066989d7"
    assert key_hash(b"order:12345") == "eaac640b9ec490df"


def test_the_fingerprint_covers_what_is_fixed_for_life_and_nothing_else() -> None:
    changed = [
        Topology("Payments", 3, 8, 4096, 512),
        Topology("payments", 3, 4, 4096, 512),
        Topology("payments", 3, 8, 2048, 512),
        Topology("payments", 3, 8, 4096, 256),
        Topology("payments", 3, 8, 4096, 512, seed=1),
    ]
    assert len({fingerprint(topology) for topology in [BIG, *changed]}) == 6
    assert fingerprint(Topology("payments", 99, 8, 4096, 512)) == fingerprint(BIG)


def test_another_process_with_another_hash_seed_routes_the_same() -> None:
    script = (
        "from lockrouter.routing import *; from tests.unit.test_routing import GOLDEN, ROUTINGS\n"
        "print([tuple(r.route(encode(v[0]))) for v in GOLDEN for r in ROUTINGS])"
    )
    here = [tuple(routing.route(encode(vector[0]))) for vector in GOLDEN for routing in ROUTINGS]
    for seed in ("1", "4242"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", script]
        found = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
        )
        assert found.stdout.strip() == repr(here)


class Name(str):
    """A subclass of `str` is a `str`."""


class Raw(bytes):
    """A subclass of `bytes` is `bytes`."""


@pytest.mark.parametrize(
    ("key", "raw"),
    [
        ("a", b"a"),
        (b"a", b"a"),
        ("é", b"\xc3\xa9"),
        (b"\xff", b"\xff"),
        ("\0", b"\0"),
        ("k" * 255, b"k" * 255),
        ("\U0001f512" * 63 + "abc", ("\U0001f512" * 63 + "abc").encode()),
        (Name("a"), b"a"),
        (Raw(b"a"), b"a"),
    ],
    ids=range(9),
)
def test_a_key_is_its_bytes(key: str | bytes, raw: bytes) -> None:
    assert encode(key) == raw
    assert type(encode(key)) is bytes


@pytest.mark.parametrize(
    "key",
    [
        *("", b"", "k" * 256, b"k" * 256, "é" * 128, "\U0001f512" * 64, "\ud800", "a\udfff", "\udcff" * 300),
        *(None, True, 0, 1, 1.5, bytearray(b"a"), memoryview(b"a"), ("a",), ["a"], object()),
    ],
    ids=range(19),
)
def test_what_is_no_key(key: object) -> None:
    with pytest.raises(InvalidKey) as caught:
        encode(key)  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)
    assert caught.value.__context__ is None


def test_spellings_are_different_keys() -> None:
    spellings: list[str | bytes] = ["a", "A", "a ", " a", "a\0", "\u00e9", "e\u0301", "\uff41"]
    assert len({encode(key) for key in spellings}) == len(spellings)
    assert len({ROUTINGS[0].route(encode(key)) for key in spellings}) == len(spellings)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=63)


@given(st.one_of(TEXTS, st.binary(min_size=1, max_size=255)))
def test_any_key_routes_into_range_and_alike_as_str_and_bytes(key: str | bytes) -> None:
    raw = encode(key)
    assert raw == (key if isinstance(key, bytes) else encode(key.encode("utf-8")))
    for routing, topology in zip(ROUTINGS, (BIG, SMALL, SEEDED), strict=True):
        bucket, shard, table, slot = routing.route(raw)
        assert 0 <= bucket < topology.buckets
        assert 0 <= table < topology.tables
        assert bucket * topology.rows_per_bucket <= slot < (bucket + 1) * topology.rows_per_bucket
        assert shard == routing.shard_of_bucket(bucket)


@given(st.text(max_size=300))
def test_any_text_is_a_key_or_refused(text: str) -> None:
    try:
        raw = encode(text)
    except InvalidKey:
        size = len(text.encode("utf-8", "surrogatepass"))
        assert not 1 <= size <= 255 or any("\ud800" <= character <= "\udfff" for character in text)
    else:
        assert raw.decode("utf-8") == text


def test_every_bucket_has_the_owner_the_map_names() -> None:
    owners = {bucket: "even" if bucket % 2 == 0 else "odd" for bucket in range(64)}
    members = tuple(
        ShardConfig(
            id=name,
            url=f"mysql+pymysql://u@h/{name}",
            buckets=tuple(str(bucket) for bucket, owner in owners.items() if owner == name),
        )
        for name in ("odd", "even")
    )
    routing = Routing(RouterConfig(topology=SMALL, router=RouterOptions("refuse"), shards=members))
    assert {bucket: routing.shard_of_bucket(bucket) for bucket in range(64)} == owners
    for outside in (-1, 64):
        with pytest.raises(IndexError):
            routing.shard_of_bucket(outside)


def test_the_map_decides_the_shard_and_nothing_else() -> None:
    one, many = routing_of(BIG, 1), routing_of(BIG, 64)
    for number in range(1000):
        key = b"account:%d" % number
        here, there = one.route(key), many.route(key)
        assert here._replace(shard="") == there._replace(shard="")
