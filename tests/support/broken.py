"""Locks that are broken on purpose: what a checker must catch."""

from __future__ import annotations

from typing import Any

from lockrouter.protocol.packets import query
from lockrouter.sql import leases

__all__ = ["forget_owners"]

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
