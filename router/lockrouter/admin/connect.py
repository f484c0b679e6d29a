"""Connections for administration: SQLAlchemy, one at a time, to the writable primary of a shard; no pool."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, TypeVar

from pymysql.connections import Connection as DriverConnection
from sqlalchemy import Connection, Executable, Row, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from lockrouter.config import Endpoint, RouterConfig, ShardConfig
from lockrouter.deadline import now
from lockrouter.errors import ConfigError, NotSeeded, ShardError, ShardUnavailable
from lockrouter.handshake import PLAIN_REFUSED, Handshake, log_in, require_tls
from lockrouter.session import driver_is_known
from lockrouter.sql import admin as sql

__all__ = ["DENIED", "administrator", "connected", "each_shard", "error_code", "fetch", "roles", "run", "translated"]

Answer = TypeVar("Answer")

DENIED = frozenset({1044, 1045, 1142, 1143, 1227, 1370, 1410, 1419, 1698})
"""The servers' error codes for "you may not"."""
_MISSING = {1049: "its database does not exist", 1146: "a table is missing"}
_UNANSWERED = frozenset({1040, 1053, 1129, 1152, 1203, 1226, 2002, 2003, 2006, 2013, 2055, 4031})
_READ_ONLY = frozenset({1290, 1836, 3100, 3101})
_READ_TIMEOUT = 120
_LEAST_CONNECT_TIMEOUT = 5.0


def administrator(
    config: RouterConfig, admin: RouterConfig | None, shard: ShardConfig
) -> tuple[RouterConfig, ShardConfig]:
    """The configuration and shard whose credentials to use for `shard`: the administrator's if given, else the file's.

    Raises:
        ConfigError: the administrator's file does not list the shard, or names another database for it.
    """
    if admin is None:
        return config, shard
    found = next((each for each in admin.shards if each.id == shard.id), None)
    if found is None:
        raise ConfigError(f"lists no shard {shard.id!r}", file=admin.path, field="shard")
    if admin.endpoints(found)[0].database != config.endpoints(shard)[0].database:
        raise ConfigError(
            f"another database than the application's file has for {shard.id!r}", file=admin.path, field="url"
        )
    return admin, found


@contextmanager
def connected(
    config: RouterConfig, shard: ShardConfig, *, database: bool = True, writable: bool = True
) -> Iterator[Connection]:
    """A connection to the shard's one writable server, at READ COMMITTED and in UTC; closed afterwards.

    The driver's errors that leave the block become this package's, see `translated`.

    Args:
        database: False leaves the connection without a current database, which may not exist yet.
        writable: False takes a read-only server where no writable one answers, and the first of several writable ones.

    Raises:
        ShardUnavailable: no server answers, none or more than one is writable, access is denied.
        NotSeeded: the database does not exist.
    """
    with ExitStack() as stack:
        candidates: list[tuple[bool, Connection]] = []
        failure: ShardError | None = None
        for endpoint in config.endpoints(shard):
            try:
                with translated(shard.id):
                    connection = stack.enter_context(_connect(endpoint, config))
                    candidates.append((_writable(connection), connection))
            except ShardError as error:
                failure = failure or error
        if not candidates and failure is not None:
            raise failure
        chosen = _choose(shard.id, candidates, writable)
        with translated(shard.id):
            if database:
                run(chosen, sql.use_database(config.endpoints(shard)[0].database))
            yield chosen


def roles(config: RouterConfig, shard: ShardConfig) -> dict[str, bool]:
    """Which of the shard's servers are writable, by "host:port"; those that do not answer are left out."""
    found = {}
    for endpoint in config.endpoints(shard):
        try:
            with translated(shard.id), _connect(endpoint, config) as connection:
                found[f"{endpoint.host}:{endpoint.port}"] = _writable(connection)
        except ShardError:
            continue
    return found


def fetch(
    connection: Connection, statement: Executable, parameters: Mapping[str, Any] | None = None
) -> Sequence[Row[Any]]:
    """The rows of a statement that is a transaction of its own."""
    with connection.begin():
        return connection.execute(statement, parameters or {}).all()


def run(connection: Connection, statement: Executable, parameters: Any = None) -> int:
    """Executes a statement as a transaction of its own, committed; answers the number of rows it changed."""
    with connection.begin():
        return int(connection.execute(statement, parameters or {}).rowcount)


@contextmanager
def translated(shard: str) -> Iterator[None]:
    """Turns the driver's errors into this package's, with the driver's own as the cause.

    Raises:
        ShardUnavailable, NotSeeded, ShardError: as the error's code says.
    """
    try:
        yield
    except DBAPIError as error:
        raise _shard_error(shard, error) from error.orig


def error_code(error: BaseException | None) -> int:
    """The server's or driver's number of an error, 0 if it has none."""
    original = error.orig if isinstance(error, DBAPIError) else error
    number = original.args[0] if original is not None and original.args else 0
    return number if isinstance(number, int) else 0


def each_shard(
    config: RouterConfig, work: Callable[[ShardConfig], Answer], cancel: Callable[[], None] | None = None
) -> dict[str, Answer | ShardError]:
    """Does `work` for all shards at once, a thread each; answers by shard id, a `ShardError` where it ended in one.

    Args:
        cancel: called when the caller is interrupted (Ctrl-C); `work` is waited for all the same.

    Raises:
        Exception: whatever else `work` raised, after all have ended.
    """

    def attempt(shard: ShardConfig) -> Answer | ShardError:
        try:
            return work(shard)
        except ShardError as error:
            return error

    with ThreadPoolExecutor(len(config.shards), thread_name_prefix="lockrouter-admin") as threads:
        running = {shard.id: threads.submit(attempt, shard) for shard in config.shards}
        try:
            wait(running.values())
        except KeyboardInterrupt:
            if cancel is not None:
                cancel()
            raise
    return {shard: future.result() for shard, future in running.items()}


@contextmanager
def _connect(endpoint: Endpoint, config: RouterConfig) -> Iterator[Connection]:
    # Without a database: a server is asked for its role even where the database is missing.
    url = URL.create(
        "mysql+pymysql",
        username=endpoint.user,
        password=endpoint.password,
        host=endpoint.host,
        port=endpoint.port,
    )
    arguments: dict[str, Any] = {
        "connect_timeout": max(config.pool.connect_timeout, _LEAST_CONNECT_TIMEOUT),
        "read_timeout": _READ_TIMEOUT,
        "write_timeout": _READ_TIMEOUT,
        "init_command": "SET time_zone = '+00:00'",
        "program_name": "lockrouter admin",
    }
    if endpoint.unix_socket is not None:
        arguments["unix_socket"] = endpoint.unix_socket
    # PyMySQL would negotiate TLS it does not verify; here TLS is either verified or off.
    if endpoint.tls_ca is not None:
        arguments["ssl"] = _tls(endpoint.tls_ca)
    else:
        arguments["ssl_disabled"] = True
        if endpoint.unix_socket is None:
            arguments["auth_plugin_map"] = PLAIN_REFUSED
    engine = create_engine(
        url, poolclass=NullPool, isolation_level="READ COMMITTED", hide_parameters=True, connect_args=arguments
    )

    @event.listens_for(engine, "do_connect")
    def connect(_dialect: object, _record: object, _positional: object, named: dict[str, Any]) -> DriverConnection[Any]:
        return _log_in(named, encrypted=endpoint.tls_ca is not None and endpoint.unix_socket is None)

    with engine.connect() as connection:
        yield connection


def _log_in(named: dict[str, Any], *, encrypted: bool) -> DriverConnection[Any]:
    known = driver_is_known()
    connection = (Handshake if known else DriverConnection)(**named, defer_connect=True)
    log_in(connection, None, now() + named["connect_timeout"])
    if encrypted and not known:
        require_tls(connection)
    return connection


@lru_cache(maxsize=64)
def _tls(ca: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca)


def _writable(connection: Connection) -> bool:
    return str(fetch(connection, sql.READ_ROLE)[0][0]) in ("0", "OFF")


def _choose(shard: str, candidates: list[tuple[bool, Connection]], writable: bool) -> Connection:
    primaries = [connection for is_writable, connection in candidates if is_writable]
    if not writable:
        return (primaries or [connection for _, connection in candidates])[0]
    if len(primaries) > 1:
        raise ShardUnavailable("two of its servers are writable: stop or fence the wrong one", shard=shard)
    if not primaries:
        raise ShardUnavailable("its server is read-only", shard=shard)
    return primaries[0]


def _shard_error(shard: str, error: DBAPIError) -> ShardError:
    number = error_code(error)
    original = error.orig
    said = str(original.args[1]) if original is not None and len(original.args) > 1 else str(original)
    if number in _MISSING:
        return NotSeeded(f"{_MISSING[number]} ({said}): run `lockrouter init`", shard=shard)
    if number in DENIED:
        return ShardUnavailable(
            f"access denied ({said}); an administrator's credentials go in --admin FILE", shard=shard
        )
    if number in _READ_ONLY:
        return ShardUnavailable(f"its server is read-only ({said})", shard=shard)
    if number in _UNANSWERED or error.connection_invalidated:
        return ShardUnavailable(f"does not answer ({said})", shard=shard)
    return ShardError(f"error {number}: {said}", shard=shard)
