"""The shard file: decoded into frozen structs, complete and consistent, or one `ConfigError`.

A `RouterConfig` that exists is valid, whether it came from a file or was built in Python.
"""

from __future__ import annotations

import os
import re
import tomllib
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from .configcheck import Checker
from .errors import ConfigError
from .options import (
    BreakerOptions,
    Isolation,
    KeyClass,
    Mode,
    OnOutage,
    PoolOptions,
    ResolvedClass,
    RouterOptions,
    ShardConfig,
    Topology,
    TransactionOptions,
)
from .urls import Endpoint

__all__ = [
    "BreakerOptions",
    "ClassRules",
    "Endpoint",
    "Isolation",
    "KeyClass",
    "Mode",
    "OnOutage",
    "PoolOptions",
    "ResolvedClass",
    "RouterConfig",
    "RouterOptions",
    "ShardConfig",
    "Topology",
    "TransactionOptions",
    "load",
    "parse",
]

_TABLES: dict[str, type[msgspec.Struct]] = {
    "topology": Topology,
    "router": RouterOptions,
    "pool": PoolOptions,
    "breaker": BreakerOptions,
    "transaction": TransactionOptions,
    "shard": ShardConfig,
    "class": KeyClass,
}
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything a router needs to know; checked when made, whoever makes it.

    Raises:
        ConfigError: naming the file (if `path` is given), the field and the value of the first mistake.
    """

    topology: Topology
    router: RouterOptions
    shards: tuple[ShardConfig, ...]
    pool: PoolOptions = PoolOptions()
    breaker: BreakerOptions = BreakerOptions()
    transaction: TransactionOptions = TransactionOptions()
    classes: tuple[KeyClass, ...] = ()
    path: str | None = None
    """The file it was read from; password and CA files named relatively are sought beside it."""

    def __post_init__(self) -> None:
        for name, table in _tables_of(self):
            _check_types(name, table, self.path)
        checker = Checker(self.path)
        checker.topology(self.topology)
        checker.router(self.router)
        checker.pool(self.pool, self.breaker)
        checker.transaction(self.transaction)
        checker.shards(self.topology, self.shards, self.folder)
        checker.classes(self.classes)

    @property
    def folder(self) -> Path:
        """The folder that relative file names start from."""
        return Path(self.path).parent if self.path else Path()

    def endpoints(self, shard: ShardConfig) -> tuple[Endpoint, ...]:
        """The shard's addresses, with its password as it is now. Raises: ConfigError, as `ShardConfig.endpoints`."""
        return shard.endpoints(self.folder)

    def class_of(self, key: bytes) -> ResolvedClass:
        """The rules for a key: those of the longest prefix it starts with, byte by byte, else those of [router]."""
        return self.rules.of(key)

    @cached_property
    def rules(self) -> ClassRules:
        """The classes, laid out for look-up."""
        return ClassRules(self)


class ClassRules:
    """The classes of a configuration, laid out for look-up; immutable."""

    __slots__ = ("_by_prefix", "_default", "_lengths")

    def __init__(self, config: RouterConfig) -> None:
        inherit = config.router
        self._default = ResolvedClass(prefix="", on_outage=inherit.on_outage, timeout=inherit.timeout)
        self._by_prefix = {rule.prefix.encode(): _resolve(rule, inherit) for rule in config.classes}
        self._lengths = tuple(sorted({len(prefix) for prefix in self._by_prefix}, reverse=True))

    def of(self, key: bytes) -> ResolvedClass:
        """As `RouterConfig.class_of`; one dictionary look-up per distinct length of prefix."""
        for length in self._lengths:
            found = self._by_prefix.get(key[:length])
            if found is not None:
                return found
        return self._default


def load(path: str | os.PathLike[str]) -> RouterConfig:
    """The configuration in a shard file.

    Raises:
        ConfigError: the file cannot be read, or as `parse`.
    """
    file = os.fspath(path)
    try:
        raw = Path(file).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a file name"
        raise ConfigError(f"cannot read the shard file: {reason}", file=file) from None
    return parse(raw, file=file)


def parse(text: str | bytes, *, file: str | None = None) -> RouterConfig:
    """The configuration a TOML text holds; `file` is where it came from, for errors and relative file names.

    Raises:
        ConfigError: not UTF-8, not TOML (naming the line), or any mistake in it (naming field and value).
    """
    document = _decode(text, file)
    document.setdefault("router", {})
    parts: dict[str, Any] = {}
    for name in document:
        if name not in _TABLES:
            raise _unknown(name, tuple(_TABLES), "", file)
    for name, kind in _TABLES.items():
        if name in document:
            wanted: Any = tuple[kind, ...] if name in ("shard", "class") else kind  # type: ignore[valid-type]
            parts[name] = _convert(document[name], wanted, name, file)
        elif name in ("topology", "shard"):
            raise ConfigError("missing", file=file, field=name)
    parts["shards"] = parts.pop("shard")
    parts["classes"] = parts.pop("class", ())
    return RouterConfig(path=file, **parts)


def _decode(text: str | bytes, file: str | None) -> dict[str, Any]:
    problem: str
    try:
        return tomllib.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except UnicodeDecodeError as error:
        problem = f"not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}"
    except RecursionError:
        problem = "not TOML: nested too deeply"
    except tomllib.TOMLDecodeError as error:
        problem = _syntax_error(str(error), text)
    except ValueError:
        problem = "not TOML: a number has too many digits"
    # Raised out here: the original errors carry pieces of the text, which may hold a password.
    raise ConfigError(problem, file=file)


def _syntax_error(message: str, text: str | bytes) -> str:
    what, _, where = message.rpartition(" (at ")
    # A message with quotes or brackets repeats a piece of the text, which may be a password.
    what = what if re.fullmatch(r"[A-Za-z /-]+", what) else "syntax error"
    lines = len(text.splitlines())
    return f"not TOML: {what} at {where.rstrip(')').replace('end of document', f'the end, line {lines}')}"


def _convert(value: Any, wanted: Any, name: str, file: str | None) -> Any:
    try:
        return msgspec.convert(value, wanted)
    except msgspec.ValidationError as error:
        text = str(error)
    what, _, path = text.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    field = f"{name}{path if path.startswith('[') or not path else '.' + path}"
    if unknown := _UNKNOWN.fullmatch(what):
        raise _unknown(unknown[1], _TABLES[name.partition("[")[0]].__struct_fields__, field, file)
    if missing := _MISSING.fullmatch(what):
        raise ConfigError("required, but missing", file=file, field=f"{field}.{missing[1]}")
    raise ConfigError(f"{what}{_shown(value, path)}", file=file, field=field)


def _unknown(name: str, known: tuple[str, ...], table: str, file: str | None) -> ConfigError:
    nearest = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; known are {', '.join(known)}"
    return ConfigError(f"unknown field {name!r}{hint}", file=file, field=f"{table}.{name}" if table else name)


def _shown(value: Any, path: str) -> str:
    """The offending value for an error's text; nothing if it may be, or hold, a password."""
    try:
        for part in re.findall(r"\w+", path):
            value = value[int(part)] if isinstance(value, list | tuple) else value[part]
    except (LookupError, TypeError, ValueError):  # a field's name that looks like the end of msgspec's message
        return ""
    plain = isinstance(value, int | float | str) and not re.search(r"[@/]|://", str(value))
    secret = "url" in path or "password" in path
    return f" (the value is {value!r})" if plain and not secret else ""


def _resolve(rule: KeyClass, inherit: RouterOptions) -> ResolvedClass:
    values = msgspec.structs.asdict(rule)
    for name in ("on_outage", "timeout"):
        if values[name] is None:
            values[name] = getattr(inherit, name)
    return ResolvedClass(**values)


def _tables_of(config: RouterConfig) -> list[tuple[str, Any]]:
    single = [(name, getattr(config, name)) for name in ("topology", "router", "pool", "breaker", "transaction")]
    return [*single, ("shard", config.shards), ("class", config.classes)]


def _check_types(name: str, table: Any, file: str | None) -> None:
    """A struct made in Python takes any type; a file's cannot get here with a wrong one."""
    kind, many = _TABLES[name], name in ("shard", "class")
    members = table if many else (table,)
    if not isinstance(members, tuple) or not all(isinstance(member, kind) for member in members):
        raise ConfigError(f"expected a {'tuple of ' if many else ''}{kind.__name__}", file=file, field=name)
    for at, member in enumerate(members):
        label = f"{name}[{at}]" if many else name
        _convert(msgspec.structs.asdict(member), kind, label, file)
