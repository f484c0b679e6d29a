"""Whoever answers at a shard's address: no packet hangs, crashes or inflates the client, or gets its password or files.

A stranger that says anything at all may stand before a server that grants to others, so nothing degrades around it.
"""

from __future__ import annotations

import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pymysql
import pytest
from prometheus_client import CollectorRegistry

from lockrouter import LockRouter, LockRouterError, PoolTimeout, RowLock, ShardError, ShardUnavailable
from lockrouter.admin.verify import verify
from lockrouter.config import RouterConfig, parse
from lockrouter.routing import PROTOCOL, fingerprint
from lockrouter.testing.cluster import Cluster
from tests.support.certificates import make_certificates
from tests.support.fakeserver import FakeServer, error, greeting, let_in, ok, packet, receive
from tests.support.observe import Routers, eventually, keys_on, soon_enough
from tests.support.proxy import Cut, Proxy, Rule, Way

PASSWORD = "open-sesame"
KEY = "some:key"
TIMEOUT = 0.4
MEMORY = 3 << 20
"""Bytes that a client may use at most while it is lied to: a reply of 16 MB, or of no end, takes more."""

Serve = Callable[[socket.socket], None]


def config_for(port: int, *, host: str = "127.0.0.1", connect_timeout: float = 0.3, **breaker: Any) -> RouterConfig:
    options = "\n".join(f"{name} = {value}" for name, value in ({"failures": 2, "probe_after": 0.2} | breaker).items())
    return parse(
        f"""
        [topology]
        name = "hostile"
        epoch = 1
        tables = 1
        buckets = 4
        rows_per_bucket = 4
        [router]
        on_outage = "local"
        close_timeout = 0.2
        [pool]
        size = 4
        connect_timeout = {connect_timeout}
        [breaker]
        {options}
        [[shard]]
        id = "only"
        url = "mysql+pymysql://app:{PASSWORD}@{host}:{port}/locks"
        buckets = ["0-3"]
        """
    )


@pytest.fixture
def routers() -> Iterator[Callable[..., LockRouter]]:
    made: list[LockRouter] = []

    def make(port: int, **breaker: Any) -> LockRouter:
        made.append(LockRouter(config_for(port, **breaker), registry=CollectorRegistry()))
        return made[-1]

    yield make
    for router in made:
        router.close()


def outcome(router: LockRouter, timeout: float = TIMEOUT) -> RowLock | LockRouterError:
    try:
        held = router.lock(KEY, timeout=timeout)
    except LockRouterError as failure:
        return failure
    held.release()
    return held


def flood(line: socket.socket, data: bytes) -> None:
    """Say it again and again until the client has had enough."""
    while True:
        line.sendall(data)


def after_login(*said: bytes) -> Serve:
    """Greets; whatever the client answers, the next thing is said."""

    def serve(line: socket.socket) -> None:
        line.sendall(greeting())
        for data in said:
            receive(line)
            line.sendall(data)
        receive(line)

    return serve


def switch_to(plugin: bytes, data: bytes = b"abcdefghijklmnopqrst\0") -> bytes:
    return packet(b"\xfe" + plugin + b"\0" + data, 2)


def a_packet_of_16_mb(line: socket.socket) -> None:
    line.sendall(b"\xff\xff\xff\x00")
    flood(line, bytes(65536))


def packets_of_no_end(line: socket.socket) -> None:
    for number in range(1 << 30):
        line.sendall(b"\xff\xff\xff" + bytes([number & 0xFF]))
        for _ in range(256):
            line.sendall(bytes(65535))
        line.sendall(bytes(255))


def a_login_of_no_end(line: socket.socket) -> None:
    line.sendall(greeting(plugin=b"caching_sha2_password"))
    receive(line)
    for number in range(2, 1 << 30):
        line.sendall(packet(b"\x01\x03" + bytes(500), number))


def questions_of_no_end(line: socket.socket) -> None:
    line.sendall(greeting())
    receive(line)
    line.sendall(switch_to(b"dialog", b"\x02Password: "))
    for number in range(4, 1 << 30, 2):
        receive(line)
        line.sendall(packet(b"\x02Password: ", number))


def half_a_login_twice(line: socket.socket) -> None:
    line.sendall(greeting(plugin=b"sha256_password"))
    receive(line)
    line.sendall(packet(b"\x01-----BEGIN PUBLIC KEY-----\nno key\n-----END PUBLIC KEY-----\n", 2))
    receive(line)


def a_file_please(line: socket.socket) -> None:
    """In reply to every statement, the driver's own SET NAMES included."""
    line.sendall(greeting())
    receive(line)
    line.sendall(ok(2))
    while True:
        receive(line)
        line.sendall(packet(b"\xfb/etc/passwd", 1))


def in_each_reply(data: bytes) -> Serve:
    def serve(line: socket.socket) -> None:
        let_in(line)
        while True:
            receive(line)
            line.sendall(data)

    return serve


STRANGERS: dict[str, Serve] = {
    "a packet of 16 MB": a_packet_of_16_mb,
    "packets of no end": packets_of_no_end,
    "a login of no end": a_login_of_no_end,
    "questions of no end": questions_of_no_end,
    "another protocol": lambda line: line.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" * 20),
    "a greeting of nothing": lambda line: line.sendall(packet(b"", 0)),
    "a greeting cut short": lambda line: line.sendall(packet(b"\x0a8.4.0\0abc", 0)),
    "a version that is none": lambda line: line.sendall(greeting(b"x.y") + bytes(100)),
    "a plugin that is no text": lambda line: line.sendall(greeting(plugin=b"\xff\xfe")),
    "an unknown plugin": after_login(switch_to(b"strange")),
    "a plugin that is no word": after_login(switch_to(b"\xff\xfe\xfd")),
    "the password in plain text": after_login(switch_to(b"mysql_clear_password")),
    "a key that is none": half_a_login_twice,
    "a file instead of a login": after_login(packet(b"\xfb/etc/passwd", 2)),
    "a file": a_file_please,
    "a file later": in_each_reply(packet(b"\xfb/etc/passwd", 1)),
    "a wrong number": after_login(ok(9)),
    "rows for a setting": in_each_reply(
        packet(b"\x01", 1) + packet(b"\x03def", 2) + packet(b"\xfe\0\0\2\0", 3) + packet(b"\x011", 4)
        + packet(b"\xfe\0\0\2\0", 5)
    ),
}  # fmt: skip


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_gets_nothing_and_holds_nobody_up(routers: Callable[..., LockRouter], stranger: str) -> None:
    with FakeServer(STRANGERS[stranger]) as server:
        router = routers(server.port)
        outcome(router)  # what is loaded or compiled once is not what is measured
        tracemalloc.start()
        try:
            soon_enough(TIMEOUT + 0.15, lambda: outcome(router))
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most < MEMORY
        eventually(lambda: router.health()["only"]["state"] in ("refused", "open"))
        for _ in range(6):
            failure = outcome(router)
            assert isinstance(failure, (ShardUnavailable, PoolTimeout)), failure
        assert PASSWORD.encode() not in server.heard
        assert b"root:" not in server.heard
        soon_enough(1.5, router.close, tries=1)


@pytest.mark.parametrize(
    "stranger", ["another protocol", "questions of no end", "the password in plain text", "a file", "a file later"]
)
def test_a_stranger_before_a_driver_of_unknown_insides(
    routers: Callable[..., LockRouter], monkeypatch: pytest.MonkeyPatch, stranger: str
) -> None:
    """It is as discreet. Its login is bounded in time, not in size; of garbled replies to statements nothing is known
    but that its stream has ended, which is what a dead server's does."""
    monkeypatch.setattr(pymysql, "VERSION", (9, 0, 0, "final"))
    with FakeServer(STRANGERS[stranger]) as server:
        router = routers(server.port)
        soon_enough(TIMEOUT + 0.15, lambda: outcome(router))
        for _ in range(6):
            failure = outcome(router)
            assert "file" in stranger or isinstance(failure, (ShardUnavailable, PoolTimeout)), failure
        assert PASSWORD.encode() not in server.heard
        assert b"root:" not in server.heard


@pytest.mark.parametrize("code", [1040, 1047, 1129, 1130, 1203, 1226, 1290, 1836, 2003, 2013, 2055, 3118, 4151, 6000])
@pytest.mark.parametrize("where", ["greeting", "login", "statement"])
def test_an_error_is_an_answer_whatever_its_number(routers: Callable[..., LockRouter], code: int, where: str) -> None:
    """1047 is what a Galera node without a quorum says, 1836 a server in read-only mode; later servers have others.

    2003, a client's own code, is what MySQL Router says when it reaches no server.
    """
    serve: dict[str, Serve] = {
        "greeting": lambda line: line.sendall(error(0, code)),
        "login": after_login(error(2, code)),
        "statement": in_each_reply(error(1, code)),
    }
    with FakeServer(serve[where]) as server:
        router = routers(server.port, failures=1)
        for _ in range(3):
            failure = outcome(router, 0.2)
            assert isinstance(failure, ShardError), failure
            assert router.health()["only"]["breaker"] == "closed"
        eventually(lambda: router.health()["only"]["state"] == "refused")
        assert str(code) in str(router.health()["only"]["why"])
        with pytest.raises(ShardError):
            router.try_lock(KEY)


@pytest.mark.parametrize(("control", "rows_"), [(b"8", b"8"), (b"7", b"8"), (b"8", b"7")])
def test_a_proxy_that_shares_connections_is_refused(
    routers: Callable[..., LockRouter], control: bytes, rows_: bytes
) -> None:
    """The connection's id, asked for, is not the one of its login: rows would be locked on somebody else's session."""
    started = b"1700000000"

    def rows(*values: bytes) -> bytes:
        parts = [bytes([len(values)]), *[b"\x03def"] * len(values), b"\xfe\0\0\2\0"]
        parts += [b"".join(bytes([len(value)]) + value for value in values), b"\xfe\0\0\2\0"]
        return b"".join(packet(part, number) for number, part in enumerate(parts, 1))

    def serve(line: socket.socket) -> None:
        let_in(line, b"10.11.18-MariaDB")
        while True:
            asked = receive(line)
            if b"SLEEP" in asked:
                line.sendall(rows(b"1", b"0", b"2"))
            elif b"m.clock_high" in asked:
                known = (
                    control,
                    b"identity",
                    started,
                    b"hostile",
                    str(PROTOCOL).encode(),
                    print_,
                    b"1",
                    b"1",
                    b"identity",
                )
                line.sendall(rows(*known, started + b"000000", b"1800000003000000", b"", b"1800000001.000000", b"0"))
            elif b"m.fingerprint" in asked:
                line.sendall(rows(rows_, b"identity", started, str(PROTOCOL).encode(), print_, b"1"))
            elif b"prefix" in asked or b"wsrep_on" in asked:
                line.sendall(packet(b"\x01", 1) + packet(b"\x03def", 2) + packet(b"\xfe\0\0\2\0", 3))
                line.sendall(packet(b"\xfe\0\0\2\0", 4))
            else:
                line.sendall(ok(1))

    print_ = fingerprint(config_for(1).topology)
    with FakeServer(serve) as server:
        router = routers(server.port, failures=1)
        for _ in range(3):
            with pytest.raises(ShardUnavailable, match="shares server connections"):
                router.lock(KEY, timeout=1.0)
        if control == b"8":
            eventually(lambda: "proxy" in str(router.health()["only"]["why"]))


def drip(line: socket.socket) -> None:
    """Each byte comes in time for whoever bounds each read alone."""
    for byte in greeting() * 1000:
        line.sendall(bytes([byte]))
        time.sleep(0.03)


def drip_later(line: socket.socket) -> None:
    let_in(line)
    receive(line)
    for byte in packet(bytes(60000), 1):
        line.sendall(bytes([byte]))
        time.sleep(0.03)


@pytest.mark.parametrize("slow", [drip, drip_later])
def test_a_reply_that_drips_is_no_reply(routers: Callable[..., LockRouter], slow: Serve) -> None:
    """The caller's deadline and the probe's own end it; then the shard is one that does not answer."""
    with FakeServer(slow) as server:
        router = routers(server.port, failures=10_000)
        soon_enough(TIMEOUT + 0.15, lambda: outcome(router))
        router = routers(server.port)
        outcome(router)
        eventually(lambda: router.health()["only"]["breaker"] != "closed", 5.0)
        seen = server.accepted
        eventually(lambda: server.accepted > seen + 1, 5.0)  # probe after probe: each one ends
        held = outcome(router)
        assert isinstance(held, RowLock) and held.degraded


def test_a_server_that_denies_its_tls_hears_nothing_of_the_login(
    routers: Callable[..., LockRouter], tmp_path: Path
) -> None:
    """Whoever sits between strips the offer of TLS from the greeting: neither a name nor a scramble follows."""
    ca = make_certificates(tmp_path)["ca"]
    with FakeServer(after_login(switch_to(b"mysql_clear_password"))) as server:
        config = config_for(server.port)
        encrypted = msgspec.structs.replace(config, shards=(msgspec.structs.replace(config.shards[0], tls_ca=str(ca)),))
        with LockRouter(encrypted, registry=CollectorRegistry()) as router:
            for _ in range(3):
                with pytest.raises(ShardUnavailable, match="TLS"):
                    router.lock(KEY, timeout=1.0)
            with pytest.raises(ShardUnavailable, match="TLS"), router.transaction(KEY, timeout=1.0):
                pass
        assert "TLS" in verify(encrypted)[0].text
        assert server.accepted > 3
        assert server.heard == b""


def test_an_administrator_is_as_careful(routers: Callable[..., LockRouter]) -> None:
    for stranger in ("a packet of 16 MB", "another protocol", "the password in plain text", "questions of no end"):
        with FakeServer(STRANGERS[stranger]) as server:
            found = verify(config_for(server.port))
            assert [finding.shard for finding in found] == ["only"]
            assert PASSWORD.encode() not in server.heard
            assert PASSWORD not in repr(found)


def test_a_resolver_that_hangs_takes_one_thread_and_no_probe_for_ever(
    routers: Callable[..., LockRouter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are looked up by the system, which nobody can interrupt."""
    hang, real = threading.Event(), socket.getaddrinfo

    def hanging(host: Any, *rest: Any, **more: Any) -> Any:
        if threading.current_thread().name.endswith("-connect"):
            hang.wait(30.0)
        return real(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    with FakeServer(lambda line: line.sendall(error(0, 1040))) as server:
        config = config_for(server.port, host="localhost", connect_timeout=0.1, probe_after=0.05)
        with LockRouter(config, registry=CollectorRegistry()) as router:
            router._core.start()
            eventually(lambda: router.health()["only"]["breaker"] != "closed")
            for _ in range(3):
                eventually(lambda: router.health()["only"]["breaker"] == "half_open")
                eventually(lambda: router.health()["only"]["breaker"] == "open")
            hung = [thread for thread in threading.enumerate() if thread.name.endswith("control-connect")]
            assert len(hung) == 1
            hang.set()
            eventually(lambda: "1040" in str(router.health()["only"]["why"]))


# -- lies in the middle of a real conversation ------------------------------------------------------------------------

ROWS_BEGIN = packet(b"\x01", 1) + packet(b"\x03def", 2) + packet(b"\xfe\0\0\3\0", 3)
LIES: dict[str, Serve] = {
    "a packet of 16 MB": a_packet_of_16_mb,
    "columns of no end": lambda line: flood_numbered(line, packet(b"\x40", 1), b"\x03def"),
    "rows of no end": lambda line: flood_numbered(line, ROWS_BEGIN, b"\xfa" + b"x" * 250),
    "a file": lambda line: line.sendall(packet(b"\xfb/etc/passwd", 1)),
    "another protocol": lambda line: line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "a row of nonsense": lambda line: line.sendall(ROWS_BEGIN + packet(b"\x01x", 4) + packet(b"\xfe\0\0\3\0", 5)),
    "rows in an OK": lambda line: line.sendall(ok(1, 0x000B)),
    "an error without a text": lambda line: line.sendall(packet(b"\xff\x17", 1)),
}
QUICKLY = {"a packet of 16 MB", "a file", "a row of nonsense"}
EXCHANGES = (
    b"SET SESSION autocommit = 0",
    b"m.protocol, m.fingerprint, 2",
    b"FOR UPDATE",
    b"ROLLBACK",
    b"SET SESSION autocommit = 1",
    b"SLEEP(0.001)",
    b"m.clock_high, m.drained",
    b"SELECT prefix",
    b"UPDATE lock_meta",
    b"INTO lease_",
)


def flood_numbered(line: socket.socket, first: bytes, payload: bytes) -> None:
    line.sendall(first)
    number = 1 + first.count(b"\x03def") + first.count(b"\xfe\0\0\3\0")
    for more in range(number + 1, 1 << 30, 256):
        line.sendall(b"".join(packet(payload, more + each) for each in range(256)))


@pytest.mark.server
@pytest.mark.parametrize("lie", [pytest.param(lie, marks=[] if lie in QUICKLY else pytest.mark.slow) for lie in LIES])
def test_a_lie_in_any_exchange_costs_its_connection_alone(real: Routers, cluster: Cluster, lie: str) -> None:
    """Row locks and leases, and what the background says; the next connection tells the truth again."""
    with Proxy(cluster.port(0)) as proxy:
        router = real.make(
            ports={0: proxy.port},
            breaker={"failures": 10_000, "retry_delay": 0.01},
            pool={"connect_timeout": 0.3},
            router={"close_timeout": 0.5, "role_check": 0.05, "grant_window": 0.6},
        )
        key = keys_on(router, 0, prefix="lie")[0]
        router.lock(key, timeout=10.0).release()
        for marker in EXCHANGES:
            eventually(lambda: router.health()["shard-0"]["state"] == "ok")
            with router.lock(key, timeout=10.0) as held:
                assert not held.degraded
            rule = proxy.add(Rule(Way.UP, 0, Cut.RST, marker=marker, forge=LIES[lie]))
            proxy.cut(Cut.RST)  # every connection begins anew, with what is said at its beginning
            tracemalloc.start()
            began = time.monotonic()
            try:
                while not rule.met.is_set():
                    one_of_each(router, key)
                    assert time.monotonic() - began < 6.0, marker
                one_of_each(router, key)
                most = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert time.monotonic() - began < 8.0, marker
            assert most < 2 * MEMORY, marker
            proxy.drop(rule)
        eventually(lambda: router.health()["shard-0"]["state"] == "ok")
        router.lock(key, timeout=10.0).release(confirm=True)
        router.close()


def one_of_each(router: LockRouter, key: str) -> None:
    for call in (
        lambda: router.lock(key, timeout=1.0),
        lambda: router.lock(key, timeout=1.0, confirm=True),
        lambda: router.try_lease(key, ttl=5),
    ):
        try:
            held = call()
            if held is None:
                continue
            assert not getattr(held, "degraded", False)
            with held:
                held.check()
        except LockRouterError:
            pass


@pytest.fixture
def real(cluster: Cluster) -> Iterator[Routers]:
    kept = Routers(cluster)
    yield kept
    kept.finish()
