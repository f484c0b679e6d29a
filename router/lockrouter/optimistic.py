"""The version-column way: nothing is locked, and a write counts only if the row is still as it was read.

It suits rows that seldom meet two writers: a lost race costs the whole work once more. Rows that often do are better
served by a lock, or by one atomic UPDATE. Needs no router and no shard: any database of SQLAlchemy will do.
"""

from __future__ import annotations

import functools
import inspect as inspection
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from sqlalchemy import Column, Table, inspect, update
from sqlalchemy.exc import DBAPIError, NoInspectionAvailable
from sqlalchemy.orm import Mapper
from sqlalchemy.orm.exc import StaleDataError

from lockrouter.errors import LockRouterError
from lockrouter.fencing import Target, connection_of

__all__ = ["Conflict", "compare_and_set", "retry"]

P = ParamSpec("P")
Result = TypeVar("Result")

_ROLLED_BACK = frozenset({1020, 1213})
"""Errors with which a server has rolled a transaction back because of another one (MariaDB's 1020 under snapshots)."""


class Conflict(LockRouterError):
    """The row was changed by another writer between reading and writing, in every attempt."""


def compare_and_set(
    conn: Target,
    table: Any,
    key: Any,
    version: int,
    values: Mapping[Any, Any],
    *,
    column: Any = None,
) -> bool:
    """True: the row was still at `version`; it now has `values`, and version + 1. False: nothing was changed.

    False says that another writer was faster, or that there is no such row. Then begin again with reading, in a new
    transaction: under REPEATABLE READ the old one goes on showing the row as it was. One UPDATE, which locks the row
    until the transaction ends. Correct whether the connection counts matched or changed rows (`CLIENT_FOUND_ROWS`),
    because the version changes in every row that matches. Objects a Session has loaded are not refreshed.

        >>> from sqlalchemy import insert, select
        >>> with engine.begin() as conn:
        ...     _ = conn.execute(insert(wallet).values(id=7, balance=100, version=1))
        >>> with engine.begin() as conn:
        ...     row = conn.execute(select(wallet).where(wallet.c.id == 7)).one()
        ...     compare_and_set(conn, wallet, 7, row.version, {"balance": row.balance + 50})
        ...     compare_and_set(conn, wallet, 7, row.version, {"balance": row.balance + 50})  # by now at version 2
        True
        False

    Args:
        conn: a SQLAlchemy Connection or Session.
        table: a Core `Table` or a mapped class.
        key: of the primary key: one value, a tuple in the order of its columns, or a mapping by name.
        version: as it was read, an int.
        values: what to write, by column name, column, or attribute of the mapped class.
        column: the version column; by default the mapper's `version_id_col`, else the one called "version".

    Raises:
        TypeError, ValueError: an argument does not fit the table; says which.
    """
    if isinstance(version, bool) or not isinstance(version, int):
        raise TypeError(f"version: expected the int that was read, got {version!r}")
    where = _Columns(table)
    counter = where.version(column)
    chosen = {where.named(name): value for name, value in values.items()}
    if counter in chosen:
        raise ValueError(f"values: {counter.name} is the version, which compare_and_set itself writes")
    statement = (
        update(where.table).where(*where.matches(key), counter == version).values({**chosen, counter: version + 1})
    )
    changed = connection_of(conn).execute(statement).rowcount
    if changed not in (0, 1):
        raise ValueError(f"{changed} rows of {where.table.name} were changed: its primary key is not unique")
    return changed == 1


class _Columns:
    """The columns of a Core table or of a mapped class, by what callers call them."""

    def __init__(self, table: Any) -> None:
        self._mapper: Mapper[Any] | None = None
        self.table: Table
        if isinstance(table, Table):
            self.table = table
            return
        try:
            mapper = inspect(table)
        except NoInspectionAvailable:
            mapper = None
        if not isinstance(mapper, Mapper) or not isinstance(mapper.local_table, Table):
            raise TypeError(f"table: expected a SQLAlchemy Table or a mapped class, got {table!r}")
        self._mapper, self.table = mapper, mapper.local_table

    def named(self, name: Any) -> Column[Any]:
        """The column of a name, of a column, or of a mapped attribute."""
        if not isinstance(name, str):
            name = getattr(name, "key", name)
        found: Any = None
        if self._mapper is not None and name in self._mapper.columns:
            found = self._mapper.columns[name]
        elif name in self.table.c:
            found = self.table.c[name]
        if not isinstance(found, Column) or found.table is not self.table:
            raise ValueError(f"{self.table.name} has no column {name!r}")
        return found

    def version(self, column: Any) -> Column[Any]:
        """The version column."""
        if column is None and self._mapper is not None and self._mapper.version_id_col is not None:
            column = self._mapper.version_id_col
        return self.named("version" if column is None else column)

    def matches(self, key: Any) -> list[Any]:
        """The conditions that a row has this primary key."""
        columns = list(self.table.primary_key.columns)
        if not columns:
            raise ValueError(f"{self.table.name} has no primary key")
        if isinstance(key, Mapping):
            given = {self.named(name): value for name, value in key.items()}
        else:
            parts = list(key) if isinstance(key, Sequence) and not isinstance(key, str | bytes) else [key]
            given = dict(zip(columns, parts, strict=False)) if len(parts) == len(columns) else {}
        if set(given) != set(columns):
            names = ", ".join(column.name for column in columns)
            raise ValueError(f"key: expected one value for each of ({names}) of {self.table.name}, got {key!r}")
        missing = [column.name for column, value in given.items() if value is None]
        if missing:
            raise ValueError(f"key: {missing[0]} is None, which equals nothing")
        return [column == value for column, value in given.items()]


def retry(*, attempts: int = 5, jitter: float = 0.05) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """A decorator: the function is called again while it meets a faster writer, at most `attempts` times in all.

    A conflict is: it returned `False` (what `compare_and_set` answered), it raised `Conflict` or SQLAlchemy's
    `StaleDataError`, or the server rolled its transaction back because of another one (1213, and 1020 of MariaDB). So
    the function must be one transaction, opened in it, and have no effect outside that may not happen twice.

        >>> from sqlalchemy import select
        >>> @retry(attempts=10, jitter=0.02)
        ... def recharge(number, amount):
        ...     with engine.begin() as conn:
        ...         row = conn.execute(select(wallet).where(wallet.c.id == number)).one()
        ...         return compare_and_set(conn, wallet, number, row.version, {"balance": row.balance + amount})
        >>> recharge(7, 25)
        True

    Args:
        attempts: at least 1.
        jitter: seconds; the pause before attempt n + 1 is a random one of at most n times as long. 0: none.

    Raises:
        Conflict: by the decorated function, when it returned False in every attempt.
        Whatever the last attempt raised.
    """
    if isinstance(attempts, bool) or not isinstance(attempts, int):
        raise TypeError(f"attempts: expected an int, got {attempts!r}")
    if attempts < 1:
        raise ValueError(f"attempts: at least 1, got {attempts}")
    if isinstance(jitter, bool) or not isinstance(jitter, int | float):
        raise TypeError(f"jitter: expected seconds, got {jitter!r}")
    if not 0 <= jitter < math.inf:
        raise ValueError(f"jitter: expected 0 or more seconds, got {jitter!r}")

    def decorate(function: Callable[P, Result]) -> Callable[P, Result]:
        if inspection.iscoroutinefunction(function):
            raise TypeError("retry decorates plain functions, not coroutine functions")

        @functools.wraps(function)
        def repeated(*args: P.args, **kwargs: P.kwargs) -> Result:
            for number in range(1, attempts + 1):
                try:
                    result = function(*args, **kwargs)
                except (Conflict, StaleDataError, DBAPIError) as error:
                    if number == attempts or not _is_conflict(error):
                        raise
                else:
                    if result is not False:
                        return result
                if number < attempts:
                    time.sleep(random.uniform(0.0, jitter * number))
            raise Conflict(f"{function.__qualname__}: another writer was faster in each of {attempts} attempts")

        return repeated

    return decorate


def _is_conflict(error: BaseException) -> bool:
    if not isinstance(error, DBAPIError):
        return True
    original = error.orig
    return bool(original is not None and original.args and original.args[0] in _ROLLED_BACK)
