"""Locks that are broken on purpose: what a checker must catch."""

from __future__ import annotations

import os
from typing import Any

from lockrouter.protocol.packets import query
from lockrouter.sql import leases, statements

__all__ = ["break_as_told", "forget_owners", "share_rows", "take_owned"]

_CHECK = b" WHERE l.owner = v.owner AND (v.token = 0 OR l.token = v.token)"
_HEADER = 5


def forget_owners() -> None:
    """In this process: renewals and releases of leases go by the key alone, whoever owns the row by now."""
    change = leases._change

    def careless(*arguments: Any, **named: Any) -> bytes:
        statement = change(*arguments, **named)[_HEADER:]
        assert _CHECK in statement
        return query(statement.replace(_CHECK, b" WHERE 1 = 1"))

    leases._change = careless


def take_owned() -> None:
    """In this process: each acquisition of a lease takes what it asks for, as if it were free."""
    right = leases.take

    def wrong(*arguments: Any) -> bytes:
        return query(right(*arguments)[_HEADER:].replace(b".owner = '' OR ", b".owner = '' OR 1 = 1 OR "))

    setattr(leases, "take", wrong)  # noqa: B010 - a variant made wrong on purpose


def share_rows() -> None:
    """In this process: an exclusive row lock is one that others can have at the same time."""
    for dialect, tail in ((statements.MYSQL, b" FOR SHARE"), (statements.MARIADB, b" LOCK IN SHARE MODE")):
        object.__setattr__(dialect, "lock_tail", tail)
        object.__setattr__(dialect, "try_tail", dialect.try_share_tail)


def break_as_told() -> None:
    """Break in this process what the environment's BREAK names, one of the functions here."""
    name = os.environ.get("BREAK")
    if name:
        globals()[name]()
