"""What the application's user may do on a shard, compared with what it should."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from lockrouter.config import Endpoint
from lockrouter.sql.admin import Grant
from lockrouter.urls import is_loopback

__all__ = ["excess", "missing", "parse", "summary", "user_hosts"]

_LINE = re.compile(r"GRANT (?P<verbs>.+?) ON (?P<database>`(?:[^`]|``)+`|\*)\.(?P<table>`(?:[^`]|``)+`|\*) TO ")
_ROLE = re.compile(r"GRANT (?P<role>.+?) TO ")
_VERB = re.compile(r"(?P<verb>[A-Z][A-Z_ ]*[A-Z])(?: \((?P<columns>[^)]*)\))?(?:, ?|$)")


def user_hosts(endpoints: Iterable[Endpoint]) -> tuple[str, ...]:
    """The hosts the application's user is created for: any, or this machine's names where the shard is on loopback."""
    hosts = [endpoint.host for endpoint in endpoints]
    if not all(is_loopback(host) for host in hosts):
        return ("%",)
    # Which of these a server sees depends on its skip_name_resolve, and on the socket.
    return ("127.0.0.1", "localhost", "::1") if any(":" in host for host in hosts) else ("127.0.0.1", "localhost")


def parse(lines: Iterable[str]) -> set[Grant]:
    """The privileges that the lines of SHOW GRANTS name; "*" stands for every database or table."""
    found = set()
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            role = _ROLE.match(line)
            found.add(Grant("*", f"role {role['role'] if role else line}", database="*"))
            continue
        database, table = _bare(match["database"]), _bare(match["table"])
        for verb in _VERB.finditer(match["verbs"]):
            columns = frozenset(_bare(name) for name in (verb["columns"] or "").split(", ") if name)
            found.add(Grant(table, verb["verb"], columns, database))
        if " WITH GRANT OPTION" in line:
            found.add(Grant(table, "GRANT OPTION", database=database))
    return {each for each in found if each.privilege != "USAGE"}


def missing(wanted: Iterable[Grant], held: set[Grant], database: str) -> list[Grant]:
    """Those of `wanted` that nothing in `held` covers: neither the table, nor its database, nor a global grant."""

    def covers(have: Grant, want: Grant) -> bool:
        return (
            have.database in ("*", want.database or database)
            and have.table in ("*", want.table)
            and have.privilege in (want.privilege, "ALL PRIVILEGES")
            and (not have.columns or (bool(want.columns) and want.columns <= have.columns))
        )

    return [want for want in wanted if not any(covers(have, want) for have in held)]


def excess(wanted: Sequence[Grant], held: set[Grant], database: str) -> list[Grant]:
    """Those of `held` that reach further than `wanted` on the tables it names, alone, by database or globally.

    Other tables are the application's own affair, in this database as in others: `transaction` is made for them.
    """
    allowed = {(want.database or database, want.table, want.privilege): want for want in wanted}
    places = {place[:2] for place in allowed}

    def reaches(have: Grant) -> bool:
        return any(have.database in ("*", name) and have.table in ("*", table) for name, table in places)

    def needed(have: Grant) -> bool:
        want = allowed.get((have.database or database, have.table, have.privilege))
        return want is not None and (not want.columns or (bool(have.columns) and have.columns <= want.columns))

    return [have for have in held if reaches(have) and not needed(have)]


def summary(grants: Iterable[Grant], database: str) -> str:
    """The grants in one line: the same privileges on several tables are said once."""
    verbs: dict[str, set[str]] = defaultdict(set)
    for each in grants:
        verbs[f"{each.database or database}.{each.table}"].add(str(each))
    tables: dict[str, list[str]] = defaultdict(list)
    for name in sorted(verbs):
        tables[", ".join(sorted(verbs[name]))].append(name)
    return "; ".join(f"{what} on {', '.join(names)}" for what, names in sorted(tables.items()))


def _bare(name: str) -> str:
    return name.strip("`").replace("``", "`") if name.startswith("`") else name
