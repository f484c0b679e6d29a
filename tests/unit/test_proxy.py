"""What the proxy does to bytes: they are late, few, in pieces or together, and always all of them and in order."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.proxy import APART, Cut, Proxy, Rule, Way, Weather

TEXT = bytes(range(256)) * 4


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A server that accepts one connection when it is asked to."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(10.0)
        yield made


@pytest.fixture
def proxy(listener: socket.socket) -> Iterator[Proxy]:
    with Proxy(listener.getsockname()[1]) as made:
        yield made


@pytest.fixture
def ends(listener: socket.socket, proxy: Proxy) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Client and server, connected through the proxy."""
    with socket.create_connection(("127.0.0.1", proxy.port), 10.0) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server, _ = listener.accept()
        with server:
            server.settimeout(10.0)
            yield client, server


def take(side: socket.socket, size: int) -> list[bytes]:
    """What arrives until it is so many bytes, in the portions in which it came."""
    portions: list[bytes] = []
    while sum(map(len, portions)) < size:
        portions.append(side.recv(65536))
        assert portions[-1], "the connection ended"
    return portions


def test_split_in_small_pieces(proxy: Proxy, ends: tuple[socket.socket, socket.socket]) -> None:
    client, server = ends
    proxy.split(16)
    client.sendall(TEXT)
    assert b"".join(take(server, len(TEXT))) == TEXT


def test_pieces_go_on_one_by_one() -> None:
    """In how many portions they are read is the reader's affair: a busy one finds several at once."""
    weather = Weather()
    weather.piece = 16
    pieces = list(weather.pieces(TEXT, 100.0 + time.monotonic()))
    assert [piece for _, piece in pieces] == [TEXT[start : start + 16] for start in range(0, len(TEXT), 16)]
    moments = [due for due, _ in pieces]
    assert all(later - earlier >= APART * 0.99 for earlier, later in itertools.pairwise(moments))


def test_merged_within_a_moment(proxy: Proxy, ends: tuple[socket.socket, socket.socket]) -> None:
    client, server = ends
    proxy.merge(0.5)
    for start in range(0, 64, 8):
        client.sendall(TEXT[start : start + 8])
        time.sleep(0.002)
    portions = take(server, 64)
    assert b"".join(portions) == TEXT[:64]
    assert len(portions) <= 2


def test_throttled_both_ways(proxy: Proxy, ends: tuple[socket.socket, socket.socket]) -> None:
    proxy.throttle(len(TEXT) / 0.3)
    for sender, receiver in (ends, reversed(ends)):
        began = time.monotonic()
        sender.sendall(TEXT)
        assert b"".join(take(receiver, len(TEXT))) == TEXT
        assert time.monotonic() - began >= 0.29


def test_what_was_late_is_not_overtaken(proxy: Proxy, ends: tuple[socket.socket, socket.socket]) -> None:
    client, server = ends
    proxy.delay(0.3)
    client.sendall(b"first ")
    time.sleep(0.05)
    proxy.accept()
    client.sendall(b"second")
    assert b"".join(take(server, 12)) == b"first second"


def test_a_rule_that_was_met_is_over_with_the_others(proxy: Proxy, ends: tuple[socket.socket, socket.socket]) -> None:
    client, server = ends
    rule = proxy.add(Rule(Way.UP, 10, Cut.FIN, marker=b"mark"))
    client.sendall(b"mark")
    take(server, 4)
    assert rule.met.is_set()
    proxy.accept()
    client.sendall(TEXT)
    assert b"".join(take(server, len(TEXT))) == TEXT


def test_it_remembers_what_was_said(proxy: Proxy, ends: tuple[socket.socket, socket.socket]) -> None:
    client, server = ends
    client.sendall(b"FOR UPDATE, FOR UPDATE")
    take(server, 22)
    assert proxy.said(b"FOR UPDATE") == 2
    assert proxy.said(b"ROLLBACK") == 0


def test_threads_end(proxy: Proxy) -> None:
    proxy.close()
    assert f"proxy-{proxy.port}" not in {thread.name for thread in threading.enumerate()}
