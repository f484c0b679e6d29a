"""The tables as text, the grants, the odds, and what a server's settings say: nothing here needs a server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lockrouter.admin import grants
from lockrouter.admin.finding import listed
from lockrouter.admin.servers import judge
from lockrouter.admin.sizing import sizing
from lockrouter.config import Endpoint, Topology
from lockrouter.sql.admin import Grant, application_grants, quoted
from lockrouter.sql.schema import ddl, fence_ddl, lease_name, lock_name, schema

ROOT = Path(__file__).parents[2]


def test_schema_sql_is_what_the_module_generates() -> None:
    command = [sys.executable, "-W", "error", "-m", "lockrouter.sql.schema"]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (ROOT / "shards/schema.sql").read_text("utf-8") == made


def test_there_is_a_pair_of_tables_per_number_and_one_of_each_other() -> None:
    names = set(schema(3).metadata.tables)
    numbered = {name(n) for n in range(3) for name in (lock_name, lease_name)}
    assert names == numbered | {"lock_bucket", "lock_meta", "once", "run_marker", "frozen", "audit"}
    assert lock_name(0) == "lock_00" and lease_name(99) == "lease_99"
    assert schema(3) is schema(3)


@pytest.mark.parametrize("tables", [0, -1, 101])
def test_the_number_of_tables_is_bounded(tables: int) -> None:
    with pytest.raises(ValueError, match="1 to 100"):
        schema(tables)


def test_no_table_has_text_with_a_collation_or_a_secondary_index() -> None:
    for script in (ddl(1), fence_ddl()):
        lines = [line.strip() for line in script.splitlines()]
        assert not [line for line in lines if "VARCHAR" in line or "TEXT" in line or line.startswith(("KEY", "INDEX"))]
        assert all("ENGINE=InnoDB" in line for line in lines if line.startswith(")"))


def test_a_quoted_name_cannot_end_its_quotes() -> None:
    assert quoted("a`b") == "`a``b`"


WANTED = application_grants(2, mysql=True)


def _lines(database: str = "d") -> list[str]:
    """As MySQL shows exactly what is wanted."""
    lines = ["GRANT USAGE ON *.* TO `u`@`%`"]
    for want in WANTED:
        verb = f"{want.privilege} ({', '.join(map(quoted, sorted(want.columns)))})" if want.columns else want.privilege
        lines.append(f"GRANT {verb} ON {quoted(want.database or database)}.{quoted(want.table)} TO `u`@`%`")
    return lines


def test_exactly_the_wanted_grants_are_neither_missing_nor_too_many() -> None:
    held = grants.parse(_lines())
    assert grants.missing(WANTED, held, "d") == []
    assert grants.excess(WANTED, held, "d") == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("GRANT ALL PRIVILEGES ON *.* TO `u`@`%` WITH GRANT OPTION", "ALL PRIVILEGES, GRANT OPTION on *.*"),
        ("GRANT SELECT, DELETE ON `d`.* TO `u`@`%`", "DELETE, SELECT on d.*"),
        ("GRANT UPDATE (`epoch`, `pad`) ON `d`.`lock_01` TO `u`@`%`", "UPDATE(epoch, pad) on d.lock_01"),
        ("GRANT UPDATE ON `d`.`lock_00` TO `u`@`%`", "UPDATE on d.lock_00"),
        ("GRANT AUDIT_ADMIN,BACKUP_ADMIN ON *.* TO `u`@`%`", "AUDIT_ADMIN, BACKUP_ADMIN on *.*"),
        ("GRANT `boss`@`%` TO `u`@`%`", "role `boss`@`%` on *.*"),
        ("GRANT SELECT, INSERT ON `d`.`accounts` TO `u`@`%`", ""),
        ("GRANT ALL PRIVILEGES ON `business`.* TO `u`@`%`", ""),
    ],
)
def test_excess_is_what_reaches_further_on_tables_of_ours(line: str, found: str) -> None:
    held = grants.parse([*_lines(), line])
    assert grants.summary(grants.excess(WANTED, held, "d"), "d") == found


def test_a_wider_grant_covers_and_a_narrower_one_does_not() -> None:
    update = [Grant("lock_00", "UPDATE", frozenset({"pad"}))]
    assert not grants.missing(update, grants.parse(["GRANT UPDATE ON `d`.* TO `u`@`%`"]), "d")
    assert not grants.missing(update, grants.parse(["GRANT ALL PRIVILEGES ON *.* TO `u`@`%`"]), "d")
    assert grants.missing(update, grants.parse(["GRANT UPDATE ON `other`.* TO `u`@`%`"]), "d") == update
    assert grants.missing(update, grants.parse(["GRANT UPDATE (`epoch`) ON `d`.`lock_00` TO `u`@`%`"]), "d") == update
    whole = [Grant("once", "UPDATE")]
    assert grants.missing(whole, grants.parse(["GRANT UPDATE (`state`) ON `d`.`once` TO `u`@`%`"]), "d") == whole


@pytest.mark.parametrize(
    ("hosts", "accounts"),
    [
        (["127.0.0.1"], ("127.0.0.1", "localhost")),
        (["localhost"], ("127.0.0.1", "localhost")),
        (["::1"], ("127.0.0.1", "localhost", "::1")),
        (["10.0.0.1"], ("%",)),
        (["127.0.0.1", "10.0.0.1"], ("%",)),
    ],
)
def test_the_user_is_made_for_loopback_or_for_any_host(hosts: list[str], accounts: tuple[str, ...]) -> None:
    assert grants.user_hosts([Endpoint(host, 3306, "u", "p", "d") for host in hosts]) == accounts


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"wsrep_on": "ON"}, "multi-writer"),
        ({"group_replication_single_primary_mode": "OFF"}, "multi-writer"),
        ({"binlog_format": "STATEMENT"}, "binlog-format"),
        ({"read_only": "ON"}, "read-only"),
        ({"read_only": "NO_LOCK_NO_ADMIN"}, "read-only"),
        ({"innodb_read_only": "1"}, "read-only"),
    ],
)
def test_settings_that_forbid_locks(settings: dict[str, str], problem: str) -> None:
    assert [finding.problem for finding in judge(settings, "s")] == [problem]


def test_harmless_settings() -> None:
    settings = {"wsrep_on": "OFF", "read_only": "OFF", "group_replication_single_primary_mode": "ON"}
    assert judge({**settings, "binlog_format": "ROW", "innodb_read_only": "OFF"}, "s") == []


def test_sizing_against_odds_known_by_heart() -> None:
    year = sizing(Topology("t", 1, 1, 365, 1), (0, 1, 23, 366))
    assert [round(each.any_shared, 4) for each in year] == [0.0, 0.0, 0.5073, 1.0]
    assert year[1].false_busy == pytest.approx(1 / 365)
    assert year[2].false_busy == pytest.approx(1 - (364 / 365) ** 23)
    assert sizing(Topology("t", 1, 1, 1, 1), (1,))[0].false_busy == 1.0


def test_numbers_are_listed_as_ranges() -> None:
    assert listed([3, 1, 2, 9]) == "1-3, 9"
    assert listed(range(0, 20, 2)) == "0, 2, 4, 6, 8 and 5 more"
