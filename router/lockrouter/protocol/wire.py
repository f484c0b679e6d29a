"""One connected socket as operations see it: send all, receive some, look without waiting."""

from __future__ import annotations

import math
import select
import socket
import ssl
import struct

from lockrouter.deadline import now

__all__ = ["Wire"]

_CHUNK = 65536
_SHORT = 4096
_STEP = 0.05
_LONGEST = 3600.0


class Wire:
    """Bytes to and from one server; not thread-safe, the session's rules say who may use it.

    A kernel socket stays in blocking mode. `talk` bounds it by SO_RCVTIMEO, which saves the poll before each read; but
    that bound starts anew after each signal, so whoever uses it needs another that ends the stream under it in the
    end. `receive` polls. TLS and cooperative (gevent) sockets use Python's own timeout.
    """

    __slots__ = ("_bound", "_kernel", "_least", "sock")

    prepares = True
    """Whether statements can be prepared at the other end."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._kernel = type(sock) is socket.socket and type(sock).__module__ == "socket"
        self._bound = 0.0
        self._least = 1
        sock.settimeout(None)
        self.send_within(1)

    def send_within(self, seconds: int) -> None:
        """Bound how long the peer may refuse to take bytes."""
        if self._kernel:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))

    def _set_bound(self, seconds: float) -> None:
        # In steps of 50 ms, rounded up: calls with the usual timeout then find the bound already set.
        bound = math.ceil(max(seconds, 0.001) * 20) / 20
        if bound == self._bound:
            return
        self._bound = bound
        if self._kernel:
            whole = int(bound)
            timeval = struct.pack("ll", whole, round((bound - whole) * 1_000_000))
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        else:
            self.sock.settimeout(bound)

    def send(self, data: bytes) -> None:
        """Hand all of `data` to the kernel; raises OSError."""
        sent = self.sock.send(data)  # of a cooperative socket `sendall` costs several times as much
        if sent == len(data):
            return
        if self._kernel:
            raise OSError("the peer takes no more bytes")
        self.sock.sendall(data[sent:])

    def receive(self, until: float, least: int = 1) -> bytes:
        """Return at least one byte, or `b""` at the end of the stream.

        Args:
            until: the end of waiting, on the package's clock.
            least: a hint that fewer bytes than this are of no use yet, so that one wake-up serves two replies. The
                caller must know that so many will come, or the stream end.

        Raises:
            TimeoutError: nothing came in time.
            OSError: the connection is broken.
        """
        if least != self._least:
            self.expect(least)
        if self._kernel:
            return self._poll(until)
        self._set_bound(until - now())
        try:
            return self.sock.recv(_CHUNK)
        except (BlockingIOError, TimeoutError):
            raise TimeoutError("no reply") from None

    def _poll(self, until: float) -> bytes:
        descriptor = self.sock.fileno()
        if descriptor < 0:
            raise OSError("the socket was closed")
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while True:
            left = until - now()
            if poll.poll(min(max(0.0, left), _LONGEST) * 1000):
                try:
                    return self.sock.recv(_CHUNK, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass
            elif left <= 0:
                raise TimeoutError("no reply")

    def talk(self, data: bytes, until: float, least: int, at: float) -> bytes:
        """Send `data`, then receive: as `send` and `receive`, in one step for what every lock does. `at` is now."""
        if not self._kernel:
            self.send(data)
            received = self.receive(until, least)
            while received and len(received) < least and (more := self.receive(until, least)):
                received += more
            return received
        if self.sock.send(data) != len(data):
            raise OSError("the peer takes no more bytes")
        if least != self._least:
            self.expect(least)
        left = until - at
        if not 0.0 <= self._bound - left <= _STEP:
            self._set_bound(left)
        try:
            return self.sock.recv(_SHORT)
        except BlockingIOError:
            raise TimeoutError("no reply") from None

    def expect(self, least: int) -> None:
        """Let the kernel call the socket readable only when `least` bytes are there, or the stream has ended."""
        if self._kernel and least != self._least:
            self._least = least
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)

    def receive_now(self) -> bytes | None:
        """Return what has arrived, `b""` at the end of the stream, None when there is nothing; never waits."""
        if self._kernel:
            try:
                return self.sock.recv(_CHUNK, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
        if not self.readable():
            return None
        self._bound = 0.0
        self.sock.settimeout(0.0)
        try:
            return self.sock.recv(_CHUNK)
        except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
            return None

    def readable(self) -> bool:
        """True when something, an end of the stream included, waits to be received."""
        if self.buffered():
            return True
        descriptor = self.sock.fileno()
        if descriptor < 0:
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def buffered(self) -> bool:
        """True when the TLS layer has bytes that the kernel no longer shows."""
        return isinstance(self.sock, ssl.SSLSocket) and self.sock.pending() > 0

    def close(self) -> None:
        """Close at once, without a farewell; idempotent."""
        self.interrupt()
        self.sock.close()

    def interrupt(self) -> None:
        """End the stream both ways: a receive that waits, in whatever thread, returns."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def forget(self) -> None:
        """Close this process's descriptor only; the connection itself, which a parent process shares, lives on."""
        self.sock.close()
