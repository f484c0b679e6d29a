"""A TCP proxy in front of a real server, for the faults a network has: refusing, silence, cuts, delays, odd packets.

One thread serves all connections of a proxy. Every control method returns when the fault is in place: what a client
sends after the call meets it.
"""

from __future__ import annotations

import contextlib
import enum
import heapq
import itertools
import math
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from lockrouter.testing.server import free_port

__all__ = ["APART", "EXECUTES", "Cut", "Proxy", "Rule", "Way", "Weather", "black_hole", "dead_port"]

EXECUTES = b"\x12\x00\x00\x00\x17"
"""How the packet of a prepared locking statement begins."""

_RST = struct.pack("ii", 1, 0)
_REMEMBER = 20_000
APART = 0.0005
"""Seconds between two pieces of what came as one, so that they arrive as two."""


class Way(enum.Enum):
    """A direction of bytes."""

    UP = "up"
    """From the client to the server."""
    DOWN = "down"
    """From the server to the client."""


class Cut(enum.Enum):
    """How a connection ends for both of its sides."""

    FIN = "fin"
    RST = "rst"
    STALL = "stall"
    """Not at all: nothing more comes or goes, and no side learns that the other one closed."""


class Rule:
    """Applies once: to the first connection that sends a chunk with `marker`, or to the next one that is accepted.

    From then on only `allow` more bytes pass in direction `way`; what comes after the last of them, and the
    connection, ends as `cut` says. With the way DOWN and `allow` 0 the request arrives and its reply never does.
    `stalled` connections whose server side should survive the client are exactly what an unplugged client leaves.
    """

    def __init__(
        self,
        way: Way,
        allow: int,
        cut: Cut,
        *,
        marker: bytes | None = None,
        forge: Callable[[socket.socket], None] | None = None,
    ) -> None:
        self.way = way
        self.allow = allow
        self.cut = cut
        self.marker = marker
        self.forge = forge
        """Instead of all that: the chunk with the marker goes nowhere, and this speaks to the client from then on, in a
        thread of its own and on a blocking socket, until it returns or the connection is ended."""
        self.met = threading.Event()
        """Set once the connection was chosen."""
        self.struck = threading.Event()
        """Set once the bytes ran out and the connection was cut."""


class _Link:
    """One client's connection and its twin to the server."""

    def __init__(self, number: int, client: socket.socket, server: socket.socket) -> None:
        self.number = number
        self.sides = {Way.UP: client, Way.DOWN: server}
        self.rule: Rule | None = None
        self.stalled = False
        self.said = b""
        self.silent: set[Way] = set()
        self.due = dict.fromkeys(Way, 0.0)
        """Nothing of a direction may be forwarded before this moment: what came earlier goes first."""

    def other(self, way: Way) -> socket.socket:
        return self.sides[Way.DOWN if way is Way.UP else Way.UP]


class Weather:
    """What becomes of bytes on their way; nothing by default."""

    def __init__(self) -> None:
        self.delay = 0.0
        self.rate = 0.0
        self.piece = 0
        self.window = 0.0

    def pieces(self, data: bytes, earliest: float) -> Iterator[tuple[float, bytes]]:
        """The data in pieces, each with the moment at which it goes on, none before `earliest`."""
        due = max(earliest, time.monotonic() + self.delay)
        if self.window:
            due = max(earliest, math.ceil(due / self.window) * self.window)
        size = self.piece or len(data)
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            if self.rate:
                due += len(piece) / self.rate
            elif start:
                due += APART
            yield due, piece


class Proxy:
    """Listens on `port` of loopback and forwards to `target`, a port of loopback too, or the path of a socket."""

    def __init__(self, target: int | str) -> None:
        self.target = target
        self._selector = selectors.DefaultSelector()
        self._inbox, self._bell = socket.socketpair()
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._lock = threading.Lock()
        self._links: list[_Link] = []
        self._rules: list[Rule] = []
        self._delayed: list[tuple[float, int, _Link, Way, bytes]] = []
        self._numbers = itertools.count()
        self._weather = Weather()
        self._silent: set[Way] = set()
        self._closing = False
        self._watched: set[socket.socket] = set()
        self.accepted = 0
        """Connections accepted so far."""
        # Below the range of outgoing connections: while nobody listens, no client is given this port.
        self.port = free_port(set())
        self._listener: socket.socket | None = self._listen(self.port)
        self._watch(self._inbox, self._answer)
        self._watch(self._listener, self._accept)
        self._thread = threading.Thread(target=self._run, name=f"proxy-{self.port}", daemon=True)
        self._thread.start()

    # -- faults -------------------------------------------------------------------------------------------------

    def refuse(self, *, cut: Cut | None = Cut.RST) -> None:
        """Nobody listens any more; living connections end as `cut` says, or go on with None. Undone by `accept`."""
        self._do(lambda: self._stop_listening(cut))

    def accept(self) -> None:
        """Serve as if nothing had been: listening, not silent, not slow, without rules. Stalled connections are cut."""
        self._do(self._restore)

    def stop(self, *ways: Way, living: bool = True) -> None:
        """Connections are accepted and then silent, in the directions given (both by default).

        Args:
            ways: the directions in which nothing passes any more.
            living: those that are open already, too.
        """
        chosen = set(ways or Way)
        self._do(lambda: self._silence(chosen, living=living))

    def cut(self, how: Cut = Cut.FIN, *, after: int = 0, said: bytes = b"") -> None:
        """End the living connections but the `after` oldest; with `said`, only those whose clients have sent that."""
        self._do(lambda: self._end_all(how, after, said))

    def add(self, rule: Rule) -> Rule:
        """Have `rule` applied to one connection."""
        self._do(lambda: self._rules.append(rule))
        return rule

    def drop(self, rule: Rule) -> None:
        """Take back a rule; a connection that has met it but not used it up goes on as any other."""
        self._do(lambda: self._forget(rule))

    def delay(self, seconds: float) -> None:
        """Every chunk is forwarded so much later, in each direction."""
        self._do(lambda: setattr(self._weather, "delay", seconds))

    def throttle(self, rate: float) -> None:
        """No more than `rate` bytes a second pass in each direction of each connection."""
        self._do(lambda: setattr(self._weather, "rate", rate))

    def split(self, size: int) -> None:
        """What comes is forwarded in pieces of `size` bytes, each a packet of its own."""
        self._do(lambda: setattr(self._weather, "piece", size))

    def merge(self, seconds: float) -> None:
        """What comes within `seconds` in one direction of a connection is forwarded at once, as one."""
        self._do(lambda: setattr(self._weather, "window", seconds))

    def said(self, words: bytes) -> int:
        """How often the clients of the living connections have said that; of each, its first bytes are remembered."""
        return int(self._do(lambda: sum(link.said.count(words) for link in self._links)))

    @property
    def living(self) -> int:
        """Connections that are open."""
        return int(self._do(lambda: len(self._links)))

    # -- life ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Nothing of the proxy is left. Idempotent."""
        if self._closing:
            return
        self._do(self._shut)
        self._thread.join(10.0)
        self._inbox.close()
        self._bell.close()
        self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _do(self, call: Callable[[], Any]) -> Any:
        """Run `call` on the proxy's thread and return its result."""
        future: Future[Any] = Future()
        with self._lock:
            self._calls.append((call, future))
        self._bell.send(b"!")
        return future.result(10.0)

    def _run(self) -> None:
        while not self._closing:
            wait = max(0.0, self._delayed[0][0] - time.monotonic()) if self._delayed else 1.0
            for key, _ in self._selector.select(min(wait, 1.0)):
                if key.fileobj in self._watched:  # else an event before this one ended it
                    key.data()
            self._forward()

    def _forward(self) -> None:
        """Send on what is due; neighbours of one direction that are due at the same moment as one."""
        while self._delayed and self._delayed[0][0] <= time.monotonic():
            due, _, link, way, data = heapq.heappop(self._delayed)
            while self._delayed and self._delayed[0][0] == due and self._delayed[0][2:4] == (link, way):
                data += heapq.heappop(self._delayed)[4]
            self._pass(link, way, data)

    def _answer(self) -> None:
        self._inbox.recv(4096)
        with self._lock:
            calls, self._calls = self._calls, []
        for call, future in calls:
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - delivered to the test that asked
                future.set_exception(error)

    def _listen(self, port: int) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", port), backlog=128)
        listener.setblocking(False)
        return listener

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:
            return
        client.setblocking(True)
        self.accepted += 1
        try:
            server = self._reach()
        except OSError:
            _reset(client)
            return
        server.settimeout(None)
        link = _Link(next(self._numbers), client, server)
        link.silent = set(self._silent)
        self._links.append(link)
        for rule in self._rules:
            if rule.marker is None:
                self._meet(link, rule)
                break
        for way, side in link.sides.items():
            if side.family != socket.AF_UNIX:
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._watch(side, _reader(self, link, way))

    def _reach(self) -> socket.socket:
        if isinstance(self.target, int):
            return socket.create_connection(("127.0.0.1", self.target), 2.0)
        server = socket.socket(socket.AF_UNIX)
        server.settimeout(2.0)
        try:
            server.connect(self.target)
        except OSError:
            server.close()
            raise
        return server

    def _watch(self, side: socket.socket, call: Callable[[], None]) -> None:
        if side not in self._watched:
            self._watched.add(side)
            self._selector.register(side, selectors.EVENT_READ, call)

    def _unwatch(self, side: socket.socket) -> None:
        if side in self._watched:
            self._watched.remove(side)
            self._selector.unregister(side)

    def _forget(self, rule: Rule) -> None:
        if rule in self._rules:
            self._rules.remove(rule)
        for link in self._links:
            if link.rule is rule and not link.stalled:
                link.rule = None

    def _meet(self, link: _Link, rule: Rule) -> None:
        self._rules.remove(rule)
        link.rule = rule
        rule.met.set()

    # -- bytes --------------------------------------------------------------------------------------------------

    def read(self, link: _Link, way: Way) -> None:
        """Take what one side of a connection has sent and pass it on, as far as the faults let it."""
        side = link.sides[way]
        if link.stalled or way in link.silent:
            self._unwatch(side)  # nobody reads: what comes stays where it is, an end of the stream too
            return
        try:
            data = side.recv(65536)
        except OSError:
            self._end(link, Cut.RST)
            return
        if not data:
            self._end(link, Cut.FIN)
            return
        if way is Way.UP and len(link.said) < _REMEMBER:
            link.said += data
        if link.rule is None and way is Way.UP:
            for rule in self._rules:
                if rule.marker is not None and rule.marker in data:
                    self._meet(link, rule)
                    break
            if link.rule is not None and link.rule.forge is not None:
                self._forge(link, link.rule.forge)
                return
        for due, piece in self._weather.pieces(data, link.due[way]):
            link.due[way] = due
            heapq.heappush(self._delayed, (due, next(self._numbers), link, way, piece))
        self._forward()

    def _forge(self, link: _Link, forge: Callable[[socket.socket], None]) -> None:
        for side in link.sides.values():
            self._unwatch(side)
        link.stalled = True

        def speak() -> None:
            with contextlib.suppress(OSError):
                forge(link.sides[Way.UP])

        threading.Thread(target=speak, name="proxy-forger", daemon=True).start()

    def _pass(self, link: _Link, way: Way, data: bytes) -> None:
        if link not in self._links:
            return
        rule = link.rule
        spent = rule is not None and rule.way is way and len(data) >= rule.allow
        if rule is not None and rule.way is way:
            # A reply that may not even begin ends the connection when it comes, not when it is asked for.
            data = data[: rule.allow]
            rule.allow -= len(data)
        try:
            if data:
                link.other(way).sendall(data)
        except OSError:
            self._end(link, Cut.RST)
            return
        if spent:
            assert rule is not None
            self._end(link, rule.cut)
            rule.struck.set()

    def _end(self, link: _Link, how: Cut) -> None:
        if how is Cut.STALL:
            link.stalled = True
            return
        if link not in self._links:
            return
        self._links.remove(link)
        for side in link.sides.values():
            self._unwatch(side)
            if how is Cut.RST:
                _reset(side)
            else:
                side.close()

    def _end_all(self, how: Cut, after: int, said: bytes) -> None:
        for link in self._links[after:]:
            if said in link.said:
                self._end(link, how)

    # -- states -------------------------------------------------------------------------------------------------

    def _stop_listening(self, cut: Cut | None) -> None:
        if self._listener is not None:
            self._unwatch(self._listener)
            self._listener.close()
            self._listener = None
        if cut is not None:
            for link in tuple(self._links):
                self._end(link, cut)

    def _silence(self, ways: set[Way], *, living: bool) -> None:
        self._silent |= ways
        if living:
            for link in self._links:
                link.silent |= ways

    def _restore(self) -> None:
        self._weather = Weather()
        self._silent.clear()
        self._rules.clear()
        for link in tuple(self._links):
            link.rule = None  # what it had met, and had not used up yet
            if link.stalled:
                self._end(link, Cut.RST)
            elif link.silent:
                link.silent.clear()
                for way, side in link.sides.items():
                    self._watch(side, _reader(self, link, way))
        if self._listener is None:
            self._listener = self._listen(self.port)
            self._watch(self._listener, self._accept)

    def _shut(self) -> None:
        self._closing = True
        self._stop_listening(Cut.RST)


def _reader(proxy: Proxy, link: _Link, way: Way) -> Callable[[], None]:
    return lambda: proxy.read(link, way)


def _reset(side: socket.socket) -> None:
    with contextlib.suppress(OSError):
        side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
        side.shutdown(socket.SHUT_RDWR)  # a forger may be blocked in it
    side.close()


@contextlib.contextmanager
def dead_port() -> Iterator[int]:
    """A port of loopback that nobody listens on while the block runs, and that nobody else is given."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@contextlib.contextmanager
def black_hole() -> Iterator[int]:
    """A port of loopback whose machine might as well be unplugged: nothing answers a connection's first packet."""
    with socket.socket() as deaf, contextlib.ExitStack() as stack:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        where = deaf.getsockname()
        while True:  # a queue that is full drops whoever comes
            filler = stack.enter_context(socket.socket())
            filler.settimeout(0.2)
            try:
                filler.connect(where)
            except TimeoutError:
                break
        yield where[1]
