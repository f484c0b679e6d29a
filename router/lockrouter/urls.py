"""Where a shard answers: its URL taken apart, without ever showing a password.

SQLAlchemy parses the URL; its own errors repeat the URL, so none of them leaves this module, not even as a context.
A part of a URL is shown in an error only if it cannot be a piece of a badly quoted password.
"""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy.engine import URL, make_url

from .errors import ConfigError

__all__ = ["Endpoint", "endpoints_of", "is_loopback", "resolve_password", "resolve_tls_ca"]

DRIVER = "mysql+pymysql"
DEFAULT_PORT = 3306
MAX_PASSWORD_BYTES = 4096
SAFE_NAME = re.compile(r"[A-Za-z0-9_$-]{1,64}\Z")
"""Names that go into SQL or onto screens: nothing here can end a quoted identifier."""

_HOST = re.compile(r"[A-Za-z0-9_.-]{1,255}\Z")
_PORT = re.compile(r"[0-9]{1,5}\Z")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SHOWABLE = re.compile(r"[A-Za-z0-9_.+$-]{1,64}\Z")
_QUOTING = "in a user or password write @ as %40, : as %3A and / as %2F"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address of a shard and what it takes to log in there; the password stays out of its repr."""

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    database: str
    unix_socket: str | None = None
    tls_ca: str | None = None


def endpoints_of(url: str, *, password: str | None, tls_ca: str | None) -> tuple[Endpoint, ...]:
    """The addresses a URL names, in its order; at least one. `password` is what another source gave, or None.

    Raises:
        ConfigError: field "url": not a URL, another driver than mysql+pymysql, no user, no or an unsafe database, a
            bad host or port, an address named twice, an unknown argument, a literal password off loopback or beside
            another source.
    """
    parsed = _parse(url)
    database = _database(parsed)
    user = parsed.username
    if not user or len(user) > 80 or not user.isprintable():
        raise _bad("no user: expected 1 to 80 printable characters before the @")
    if password is not None and parsed.password is not None:
        raise _bad("more than one password source: one in the URL, another in password_env or password_file")
    sockets, hosts = _arguments(parsed)
    if sockets:
        addresses = [("localhost", DEFAULT_PORT)]
        if len(sockets) > 1 or hosts or parsed.host not in (None, "localhost") or not sockets[0].startswith("/"):
            raise _bad("unix_socket takes one absolute path and no other host than localhost")
    elif hosts:
        if parsed.host is not None:
            raise _bad("hosts both before the database and as host= arguments: use one of the two")
        addresses = [_split_host(text) for text in hosts]
    else:
        addresses = [(_host(parsed.host), DEFAULT_PORT if parsed.port is None else parsed.port)]
    _check_addresses(addresses, literal=parsed.password, local=bool(sockets))
    secret = password if password is not None else str(parsed.password or "")
    socket = sockets[0] if sockets else None
    return tuple(Endpoint(host, port, user, secret, database, socket, tls_ca) for host, port in addresses)


def is_loopback(host: str) -> bool:
    """Whether packets to `host` stay on this machine: 127.0.0.0/8, ::1 or localhost. No name is looked up."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def resolve_password(env: str | None, file: str | None, folder: Path) -> str | None:
    """The password an environment variable or a file holds (one trailing newline stripped); None if neither is named.

    Raises:
        ConfigError: fields "password_env", "password_file": both named, unset, unreadable, empty, over 4,096 bytes.
    """
    if env is not None and file is not None:
        raise ConfigError("more than one password source: password_env and password_file", field="password_env")
    if env is not None:
        return _from_environment(env)
    return None if file is None else _from_file(file, folder)


def resolve_tls_ca(tls_ca: str | None, folder: Path) -> str | None:
    """The absolute path of a readable file of CA certificates, or None.

    Raises:
        ConfigError: field "tls_ca": it cannot be read, or holds no certificate.
    """
    if tls_ca is None:
        return None
    path = str((folder / tls_ca).absolute())
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError:
        raise ConfigError(f"{tls_ca!r} holds no PEM certificate", field="tls_ca") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {tls_ca!r}: {_reason(error)}", field="tls_ca") from None
    return path


def _bad(message: str) -> ConfigError:
    return ConfigError(message, field="url")


def _parse(url: str) -> URL:
    parsed: URL | None = None
    try:
        parsed = make_url(url)
    except Exception:  # noqa: BLE001 - whatever SQLAlchemy raises, its text repeats the URL
        pass
    # Raised out here: inside the handler the original would stay reachable as __context__.
    if parsed is None:
        raise _bad(f"not a URL like {DRIVER}://user@host:3306/database ({_QUOTING})")
    if parsed.drivername != DRIVER:
        raise _bad(f"expected the driver {DRIVER}, got {_shown(parsed.drivername)}")
    return parsed


def _shown(value: str) -> str:
    return repr(value) if _SHOWABLE.match(value) else "something not shown here: it may be part of a password"


def _database(parsed: URL) -> str:
    database = parsed.database
    if not database:
        raise _bad("no database after the host")
    if not SAFE_NAME.match(database):
        raise _bad(f"the database's name must be 1 to 64 of A-Z a-z 0-9 _ $ - ; got {_shown(database)} ({_QUOTING})")
    return database


def _arguments(parsed: URL) -> tuple[tuple[str, ...], tuple[str, ...]]:
    for name in parsed.query:
        if name not in ("host", "unix_socket"):
            raise _bad(f"unknown argument {_shown(name)}: only host and unix_socket are taken")

    def values(name: str) -> tuple[str, ...]:
        found = parsed.query.get(name, ())
        return (found,) if isinstance(found, str) else tuple(found)

    return values("unix_socket"), values("host")


def _host(host: str | None) -> str:
    if host and (_HOST.match(host) or _is_address(host)):
        return host
    if not host:
        raise _bad("no host")
    raise _bad(f"bad host: {_shown(host)} ({_QUOTING})")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _split_host(text: str) -> tuple[str, int]:
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") if rest else str(DEFAULT_PORT)
    else:
        host, colon, port = text.partition(":")
        port = port if colon else str(DEFAULT_PORT)
    if not _PORT.match(port):
        raise _bad(f"bad port: {_shown(port)} is not a number from 1 to 65535")
    return _host(host), int(port)


def _check_addresses(addresses: Iterable[tuple[str, int]], *, literal: object, local: bool) -> None:
    seen = set()
    for host, port in addresses:
        if not 1 <= port <= 65535:
            raise _bad(f"bad port: {port} is not a number from 1 to 65535")
        if literal is not None and not (local or is_loopback(host)):
            raise _bad(f"a literal password is taken on loopback only, not for {host}: use password_env, password_file")
        if (host.lower(), port) in seen:
            raise _bad(f"{host}:{port} is named twice")
        seen.add((host.lower(), port))


def _from_environment(name: str) -> str:
    if not _ENV_NAME.match(name):
        # Not shown: whoever writes the password itself here must not find it in a log.
        raise ConfigError("not the name of an environment variable (A-Z a-z 0-9 _)", field="password_env")
    value = os.environ.get(name)
    if not value:
        state = "not set" if value is None else "empty"
        raise ConfigError(f"the environment variable {name} is {state}", field="password_env")
    return value


def _from_file(name: str, folder: Path) -> str:
    try:
        with (folder / name).open("rb") as stream:
            raw = stream.read(MAX_PASSWORD_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {name!r}: {_reason(error)}", field="password_file") from None
    if len(raw) > MAX_PASSWORD_BYTES:
        raise ConfigError(f"{name!r} is longer than {MAX_PASSWORD_BYTES} bytes", field="password_file")
    text: str | None = None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        pass
    if text is None:
        raise ConfigError(f"{name!r} is not UTF-8", field="password_file")
    password = text.removesuffix("\n").removesuffix("\r")
    if not password:
        raise ConfigError(f"{name!r} is empty", field="password_file")
    return password


def _reason(error: Exception) -> str:
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else "not a file name"
