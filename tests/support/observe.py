"""What servers say of the locks, sessions and waiters on them, and routers that must leave nothing of theirs there."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
import pymysql
from prometheus_client import CollectorRegistry

from lockrouter import LockRouter, RouterConfig, load
from lockrouter.config import KeyClass
from lockrouter.testing.binaries import Vendor
from lockrouter.testing.cluster import Cluster
from lockrouter.testing.shardfiles import APPLICATION

__all__ = ["Observer", "Routers", "Seen", "elapsed", "eventually", "in_thread", "keys_on", "sharing_row", "soon_enough"]

T = TypeVar("T")

_INSECURE = (1045, 3159)
"""What MariaDB and MySQL say to a login without TLS where they insist on it."""
_CACHED_FOR = 0.11
"""InnoDB shows its transactions from a cache that is not refreshed while it is read more often than each 0.1 s."""


class Seen(NamedTuple):
    """One session of the application's user, as the server lists it."""

    id: int
    command: str
    info: str


class Observer:
    """One shard's server through the eyes of its administrator; connects anew when the server was restarted."""

    def __init__(self, cluster: Cluster, index: int) -> None:
        self.cluster = cluster
        self.index = index
        self.database = f"locks_{index}"
        self._connection: pymysql.Connection[Any] | None = None
        self._lent: list[pymysql.Connection[Any]] = []
        self._looked_at = 0.0

    def ask(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """The rows of a statement, run in the shard's database with autocommit."""
        if self._connection is not None:
            try:
                return self._run(self._connection, statement, values)
            except (pymysql.err.OperationalError, pymysql.err.InterfaceError) as error:
                if error.args and error.args[0] not in (0, 2006, 2013, 4031, 1927):
                    raise
                self._connection.close() if self._connection.open else None
        self._connection = self._open()
        return self._run(self._connection, statement, values)

    def connect(self) -> pymysql.Connection[Any]:
        """A new administrator's connection to the shard's database; the caller closes it, or `end_strangers` does."""
        made = self._open()
        self._lent.append(made)
        return made

    def end_strangers(self) -> None:
        """Close what `connect` has given out: what a test that failed has locked must not be locked for the next."""
        while self._lent:
            lent = self._lent.pop()
            if lent.open:
                lent.close()

    def _open(self) -> pymysql.Connection[Any]:
        # Preparing for TLS takes PyMySQL ten times as long as all the rest.
        try:
            return self.cluster.connect(self.index, database=self.database, ssl_disabled=True)
        except pymysql.err.OperationalError as error:
            if error.args[0] not in _INSECURE:
                raise
        return self.cluster.connect(self.index, database=self.database)

    def _run(
        self, connection: pymysql.Connection[Any], statement: str, values: tuple[object, ...]
    ) -> list[tuple[Any, ...]]:
        with connection.cursor() as cursor:
            cursor.execute(statement, values or None)
            return list(cursor.fetchall())

    # -- sessions -----------------------------------------------------------------------------------------------

    def sessions(self) -> list[Seen]:
        """The application's sessions."""
        if self.cluster.vendor is Vendor.MYSQL:
            listed = self.ask("SELECT ID, USER, COMMAND, INFO FROM performance_schema.processlist")
        else:
            listed = [(row[0], row[1], row[4], row[7]) for row in self.ask("SHOW FULL PROCESSLIST")]
        return [
            Seen(int(number), command, info or "")
            for number, user, command, info in listed
            if user == APPLICATION and command != "Killed"
        ]

    def locking(self) -> list[Seen]:
        """The sessions that execute a locking statement: at rest, those are the waiting ones."""
        return [seen for seen in self.sessions() if "FOR UPDATE" in seen.info and seen.command != "Sleep"]

    def waiters(self) -> list[int]:
        """Connection ids of the application that wait for a row, as the server itself says."""
        return self.locks()["waiters"]

    def holders(self) -> list[int]:
        """Connection ids of the application whose transactions hold at least one row."""
        return self.locks()["holders"]

    def locks(self) -> dict[str, list[int]]:
        """Both at one moment, by name."""
        return self._locks_mysql() if self.cluster.vendor is Vendor.MYSQL else self._locks_mariadb()

    def _locks_mysql(self) -> dict[str, list[int]]:
        rows = self.ask(
            "SELECT DISTINCT t.PROCESSLIST_ID, l.LOCK_STATUS FROM performance_schema.data_locks l "
            "JOIN performance_schema.threads t ON t.THREAD_ID = l.THREAD_ID "
            "WHERE l.LOCK_TYPE = 'RECORD' AND t.PROCESSLIST_USER = %s",
            APPLICATION,
        )
        return {
            "holders": [int(row[0]) for row in rows if row[1] == "GRANTED"],
            "waiters": [int(row[0]) for row in rows if row[1] == "WAITING"],
        }

    def _locks_mariadb(self) -> dict[str, list[int]]:
        if not self.sessions():
            return {"holders": [], "waiters": []}
        time.sleep(max(0.0, self._looked_at + _CACHED_FOR - time.monotonic()))
        rows = self.ask("SELECT trx_mysql_thread_id, trx_state, trx_rows_locked FROM information_schema.INNODB_TRX")
        self._looked_at = time.monotonic()
        mine = {seen.id for seen in self.sessions()} if rows else set()
        return {
            "holders": [int(row[0]) for row in rows if row[0] in mine and row[1] != "LOCK WAIT" and row[2]],
            "waiters": [int(row[0]) for row in rows if row[0] in mine and row[1] == "LOCK WAIT"],
        }

    def await_waiters(self, count: int = 1, seconds: float = 10.0) -> list[int]:
        """Return the connection ids once `count` sessions wait on the server."""
        return eventually(lambda: found if len(found := self.waiters()) >= count else None, seconds)

    def kill(self, connection_id: int) -> None:
        """The server ends that connection, as an operator's KILL does."""
        self.ask(f"KILL {connection_id}")

    # -- data ---------------------------------------------------------------------------------------------------

    def meta(self, column: str) -> Any:
        """One column of `lock_meta`."""
        return self.ask(f"SELECT {column} FROM lock_meta")[0][0]

    def clock_us(self) -> int:
        """The server's clock in microseconds."""
        return int(self.ask("SELECT CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS UNSIGNED)")[0][0])

    def close(self) -> None:
        """Close the administrator's connection."""
        if self._connection is not None and self._connection.open:
            self._connection.close()
        self._connection = None


class Routers:
    """Makes routers for one test, and proves afterwards that nothing of them is left anywhere."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.config = load(cluster.shards_file)
        self.observers = [Observer(cluster, index) for index in range(len(cluster))]
        self._threads = set(threading.enumerate())
        self._made: list[tuple[LockRouter, CollectorRegistry]] = []

    def configure(
        self,
        *,
        ports: Mapping[int, int] | None = None,
        password: str | None = None,
        tls_ca: str | None = None,
        unix: bool = False,
        classes: tuple[KeyClass, ...] = (),
        router: Mapping[str, Any] | None = None,
        pool: Mapping[str, Any] | None = None,
        breaker: Mapping[str, Any] | None = None,
        transaction: Mapping[str, Any] | None = None,
    ) -> RouterConfig:
        """The cluster's configuration with some fields changed, and with shards behind other ports."""
        config, replace = self.config, msgspec.structs.replace
        shards = []
        for index, shard in enumerate(config.shards):
            url = shard.url.replace(
                f":{self.cluster.port(index)}/", f":{(ports or {}).get(index) or self.cluster.port(index)}/"
            )
            if password is not None:
                url = url.replace(url.split("@")[0].rsplit(":", 1)[1] + "@", f"{password}@")
            if unix:
                url = url.replace(f"127.0.0.1:{self.cluster.port(index)}", "localhost")
                url += f"?unix_socket={self.cluster.socket(index)}"
            shards.append(replace(shard, url=url, tls_ca=tls_ca))
        return replace(
            config,
            shards=tuple(shards),
            classes=classes,
            router=replace(config.router, **(router or {})),
            pool=replace(config.pool, **(pool or {})),
            breaker=replace(config.breaker, **(breaker or {})),
            transaction=replace(config.transaction, **(transaction or {})),
        )

    def make(self, **changes: Any) -> LockRouter:
        """A router with a registry of its own; closed at the end of the test."""
        registry = CollectorRegistry()
        made = LockRouter(self.configure(**changes), registry=registry)
        self._made.append((made, registry))
        return made

    def metric(self, router: LockRouter, name: str, **labels: str) -> float:
        """The value of one metric of one router; 0.0 where it has none yet."""
        return self._metrics(router).get((name, *sorted(labels.values())), 0.0)

    def _metrics(self, router: LockRouter) -> dict[tuple[str, ...], float]:
        registry = next(registry for made, registry in self._made if made is router)
        samples = (sample for family in registry.collect() for sample in family.samples)
        return {(sample.name, *sorted(sample.labels.values())): sample.value for sample in samples}

    def waiting(self, router: LockRouter, index: int = 0) -> int:
        """How many callers of the router wait for rows of a shard, in the process or at the server."""
        return int(self.metric(router, "lockrouter_waiters", shard=f"shard-{index}"))

    def held(self, router: LockRouter, index: int = 0, mode: str = "row") -> int:
        """How many locks of a shard the router holds."""
        return int(self.metric(router, "lockrouter_held", shard=f"shard-{index}", mode=mode))

    def user_password(self) -> str:
        """The application user's password."""
        return self.config.shards[0].url.split("@")[0].rsplit(":", 1)[1]

    def quiet(self, seconds: float = 5.0) -> None:
        """No lock is held or waited for: not in the routers, not on the servers, and every pooled session is idle."""
        gc.collect()
        for router, _ in self._made:
            eventually(lambda: not self._busy(router), seconds, lambda: self._busy(router))  # noqa: B023 - called now
        for observer in self.observers:
            eventually(lambda: not _on_server(observer), seconds, lambda: _on_server(observer))  # noqa: B023

    def _busy(self, router: LockRouter) -> list[str]:
        found, metrics = [], self._metrics(router)
        for shard, state in router.health().items():
            held = {mode: metrics.get(("lockrouter_held", *sorted((mode, shard))), 0.0) for mode in ("row", "local")}
            waiting, pool = metrics.get(("lockrouter_waiters", shard), 0.0), state["pool"]
            if any(held.values()) or waiting or pool["busy"] or pool["waiting"]:
                found.append(f"{shard}: held {held}, waiting {waiting}, pool {pool}")
        return found

    def finish(self) -> None:
        """Close the routers; then no session, no lock, no waiter and no thread of theirs remains."""
        try:
            for observer in self.observers:
                observer.end_strangers()
            self.quiet()
        finally:
            for router, _ in self._made:
                router.close()
            try:
                self._nothing_left()
            finally:
                for observer in self.observers:
                    observer.close()

    def _nothing_left(self) -> None:
        gc.collect()  # connections of an engine whose making was interrupted
        for observer in self.observers:
            eventually(lambda: not observer.sessions(), 5.0, observer.sessions)  # noqa: B023 - called now
            assert not _on_server(observer)
        eventually(lambda: not self._new_threads(), 5.0, self._new_threads)

    def _new_threads(self) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread not in self._threads]


def _on_server(observer: Observer) -> dict[str, list[int]]:
    return {name: ids for name, ids in observer.locks().items() if ids}


def eventually(
    probe: Callable[[], T | None],
    seconds: float = 10.0,
    shown: Callable[[], object] | None = None,
    *,
    every: float = 0.01,
) -> T:
    """Return what `probe` answers as soon as that is true; fails when it is not within `seconds`."""
    until = time.monotonic() + seconds
    while True:
        found = probe()
        if found:
            return found
        assert time.monotonic() < until, f"not within {seconds:g} s: {(shown or probe)()!r}"
        time.sleep(every)


def elapsed(call: Callable[[], object]) -> float:
    """Seconds a call takes, whatever comes of it."""
    began = time.monotonic()
    try:
        call()
    except Exception:  # noqa: BLE001 - the outcome is another test's
        pass
    return time.monotonic() - began


def soon_enough(bound: float, call: Callable[[], object], *, tries: int = 6) -> None:
    """The call can end within `bound` seconds: on a crowded machine at least one of some tries does."""
    took = []
    for _ in range(tries):
        took.append(elapsed(call))
        if took[-1] <= bound:
            return
    raise AssertionError(f"never within {bound:g} s: {took}")


def keys_on(router: LockRouter, index: int, count: int = 1, *, prefix: str = "key") -> list[str]:
    """So many keys of a shard, each on a row of its own; other processes and tests get others for another prefix."""
    found: dict[int, str] = {}
    for number in range(1_000_000):
        key = f"{prefix}:{number}"
        address = router.route(key)
        if address.shard == f"shard-{index}":
            found.setdefault(address.slot, key)
            if len(found) == count:
                return list(found.values())
    raise AssertionError("no such keys")


def sharing_row(router: LockRouter, key: str) -> str:
    """Another key of the same row."""
    slot = router.route(key).slot
    prefix = key.partition(":")[0]
    return next(found for number in range(10**7) if router.route(found := f"{prefix}:twin:{number}").slot == slot)


class in_thread(threading.Thread):  # noqa: N801 - used like a function
    """Runs `call` in a thread of its own from the start; `result` waits for what it returned or raised."""

    def __init__(self, call: Callable[[], Any], *, name: str | None = None) -> None:
        super().__init__(name=name, daemon=True)
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            self._error = error
        finally:
            del self._call

    def result(self, seconds: float = 30.0) -> Any:
        """Return what the call returned, or raise what it raised."""
        self.join(seconds)
        assert not self.is_alive(), f"still running after {seconds:g} s"
        error, self._error = self._error, None
        if error is not None:
            raise error
        value, self._value = self._value, None
        return value
