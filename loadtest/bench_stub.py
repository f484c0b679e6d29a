"""A router whose one shard answers from memory: what a lock costs the client, without a server or the kernel.

Everything of the package runs as it does in a service (routing, gate, breaker, pool, protocol, metrics); only the
wire is replaced. What the replacement itself costs is measured apart, so that it can be subtracted.
"""

from __future__ import annotations

import re
import time
from typing import Any, cast

from bench_routing import config_of
from prometheus_client import CollectorRegistry

from lockrouter import LockRouter
from lockrouter.control import Rights
from lockrouter.deadline import now
from lockrouter.protocol.effects import Operation
from lockrouter.protocol.packets import QUIT, ROLLBACK, execution, query
from lockrouter.protocol.wire import Wire
from lockrouter.session import Session

__all__ = ["KEYS", "StubWire", "cycle", "cycle_cost", "stub_cost", "stub_router"]

KEYS = tuple(f"account:{number}" for number in range(512))

_EXECUTES = execution(1)
_SLOT = re.compile(rb"slot = +(\d+)")
_OK = b"\x07\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00"
_CLOCK = b"1900000000.000001"
_MOST = 2048


class _NoSocket:
    """Stands where a socket would: takes the options the wire sets, and does nothing."""

    def settimeout(self, seconds: float | None) -> None:
        """Nothing waits here."""

    def fileno(self) -> int:
        """No descriptor."""
        return -1


class _NoConnection:
    """What a session reads of a PyMySQL connection when it takes its socket over."""

    server_version = "9.7.0"

    def __init__(self) -> None:
        self._sock = _NoSocket()

    def thread_id(self) -> int:
        """Any number."""
        return 1


class StubWire(Wire):
    """Answers a ROLLBACK with OK and a locking SELECT with its one row, one reply for each `receive`."""

    __slots__ = ("_granted", "_made", "_replies")

    def __init__(self) -> None:
        super().__init__(cast(Any, _NoSocket()))
        self._made: dict[bytes, bytes] = {ROLLBACK: _OK, QUIT: b""}
        self._granted: dict[tuple[int, bool], bytes] = {}
        self._replies: list[bytes] = []

    def send(self, data: bytes) -> None:
        """Have the reply ready."""
        reply = self._made.get(data)
        if reply is None:
            reply = self._grant(data)
        self._replies.append(reply)

    def _grant(self, data: bytes) -> bytes:
        """Make the reply; only so many statements are remembered, and every slot."""
        setting, _, executed = data.partition(_EXECUTES)
        found = _SLOT.search(data)
        if executed:
            slot = int.from_bytes(executed[-4:], "little")
        elif found is not None:
            slot = int(found[1])
        else:
            raise ValueError(f"the stub has no reply to {data!r}")
        name = (slot, bool(executed))
        reply = self._granted.get(name)
        if reply is None:
            reply = self._granted[name] = _grant(*name)
        if executed and setting:
            return _OK + reply
        if len(self._made) < _MOST:
            self._made[data] = reply
        return reply

    def receive(self, until: float, least: int = 1) -> bytes:
        """Return the oldest reply, or all, where one would not be enough."""
        replies = self._replies
        if least == 1 or len(replies) == 1:
            return replies.pop(0)
        data = b"".join(replies)
        replies.clear()
        return data

    def receive_now(self) -> bytes | None:
        """Return the oldest reply, if there is one."""
        return self._replies.pop(0) if self._replies else None

    def readable(self) -> bool:
        """True while a reply waits."""
        return bool(self._replies)

    def close(self) -> None:
        """Nothing is open."""


def _grant(slot: int, executed: bool) -> bytes:
    """The reply of a MySQL server that grants that row, to a prepared statement or a text."""
    names = ((b"slot", 3), (b"epoch", 3), (b"UNIX_TIMESTAMP(SYSDATE(6))", 246), (b"@@global.read_only", 8))
    columns = (_column(*name) for name in names)
    if executed:
        numbers = slot.to_bytes(4, "little") + (1).to_bytes(4, "little")
        row = b"\x00\x00" + numbers + bytes((len(_CLOCK),)) + _CLOCK + bytes(8)
    else:
        row = b"".join(bytes((len(value),)) + value for value in (b"%d" % slot, b"1", _CLOCK, b"0"))
    payloads = (bytes((len(names),)), *columns, b"\xfe\x00\x00\x03\x00", row, b"\xfe\x00\x00\x03\x00")
    return b"".join(
        len(payload).to_bytes(3, "little") + bytes((number,)) + payload
        for number, payload in enumerate(payloads, start=1)
    )


def _column(name: bytes, kind: int) -> bytes:
    """A column definition as a server sends it; but for its kind the numbers at its end are nobody's concern here."""
    texts = (b"def", b"locks_0", b"lock_00", b"lock_00", name, name)
    named = b"".join(bytes((len(text),)) + text for text in texts)
    return named + b"\x0c\x3f\x00\x0a\x00\x00\x00" + bytes((kind,)) + b"\x23\x50\x00\x00\x00"


def stub_router(*, rows_per_bucket: int = 512) -> LockRouter:
    """A router of one shard that grants every row from memory; it starts no thread."""
    config = config_of(1, rows_per_bucket)
    router = LockRouter(config, registry=CollectorRegistry())
    core = router._core
    core.started = True
    (shard,) = core.shards.values()
    incarnation = (b"stub", 0)

    def open_one(until: float) -> Operation[Session]:
        session = Session(None, cast(Any, _NoConnection()), shard.grants)
        session.wire = StubWire()
        session.prepared.update(dict.fromkeys(range(config.topology.tables), _EXECUTES))
        session.incarnation = incarnation
        return session
        yield  # what makes this an operation

    shard.pool._openers = (open_one,) * len(shard.pool._openers)
    # Read at a time that has yet to come: the stub's clock stands still and must not look as if it had gone back.
    shard.permit(Rights(incarnation, 1, clock_high=1 << 62, clock=0, received_at=now() + 1e6, wall=time.time()))
    return router


def cycle(router: LockRouter, cycles: int) -> None:
    """Lock and release so many keys, one after the other."""
    lock, keys, count = router.lock, KEYS, len(KEYS)
    for number in range(cycles):
        with lock(keys[number % count]):
            pass


def cycle_cost(*, cycles: int = 20_000, rounds: int = 5) -> float:
    """Microseconds of the process's CPU for one lock and its release against the stub: the best of `rounds`."""
    router = stub_router()
    cycle(router, len(KEYS))  # connects, and makes the replies
    best = min(_cpu(router, cycles) for _ in range(rounds))
    router.close()
    return best / cycles * 1e6


def _cpu(router: LockRouter, cycles: int) -> float:
    began = time.process_time()
    cycle(router, cycles)
    return time.process_time() - began


def stub_cost(*, cycles: int = 50_000, rounds: int = 5) -> float:
    """Microseconds of `cycle_cost` that are the stub's own: two requests taken and two replies given out."""
    wire = StubWire()
    select = query(b"SELECT /*+ MAX_EXECUTION_TIME(2995) */ slot FROM lock_00 WHERE slot = 7 FOR UPDATE /* 00 */")
    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(cycles):
            wire.send(select)
            wire.send(ROLLBACK)
            wire.receive(0.0, 12)
        best = min(best, time.process_time() - began)
    return best / cycles * 1e6


if __name__ == "__main__":
    whole, own = cycle_cost(), stub_cost()
    print(f"{whole:.1f} microseconds of CPU for a lock and its release, {own:.1f} of them the stub's own")
