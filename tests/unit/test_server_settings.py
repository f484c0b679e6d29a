"""What `verify`, and a running router, make of a server's settings."""

from __future__ import annotations

import pytest

from lockrouter.admin.servers import judge
from lockrouter.reading import unfit

GOOD_GROUP = {
    "group_replication_group_name": "aadaaaaa-adda-adda-aaaa-aaaaaaddaaaa",
    "group_replication_single_primary_mode": "ON",
    "group_replication_unreachable_majority_timeout": "10",
    "group_replication_exit_state_action": "OFFLINE_MODE",
    "group_replication_member_expel_timeout": "5",
    "group_replication_consistency": "BEFORE_ON_PRIMARY_FAILOVER",
}
GOOD_PAIR = {
    "rpl_semi_sync_master_enabled": "ON",
    "rpl_semi_sync_master_timeout": "4294967295",
    "rpl_semi_sync_master_wait_point": "AFTER_SYNC",
}


def found(settings: dict[str, str]) -> list[tuple[str, bool]]:
    return [(finding.problem, finding.warning) for finding in judge(settings, "s")]


def test_good_settings_are_good() -> None:
    assert found({}) == []
    assert found(GOOD_GROUP) == []
    assert found(GOOD_PAIR) == []
    assert found({"group_replication_consistency": "EVENTUAL"}) == []  # the plug-in is there, and no group


def test_what_is_committed_has_to_be_on_disk() -> None:
    assert found({"innodb_flush_log_at_trx_commit": "1", "log_bin": "ON", "sync_binlog": "1"}) == []
    assert found({"log_bin": "OFF", "sync_binlog": "0"}) == []
    assert found({"innodb_flush_log_at_trx_commit": "2"}) == [("durability", False)]
    assert found({"log_bin": "ON", "sync_binlog": "0"}) == [("durability", True)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("unreachable_majority_timeout", "0"),
        ("exit_state_action", "READ_ONLY"),
        ("member_expel_timeout", "60"),
        ("consistency", "EVENTUAL"),
    ],
)
def test_a_weak_setting_of_a_group_is_named(name: str, value: str) -> None:
    findings = judge({**GOOD_GROUP, f"group_replication_{name}": value}, "s")
    assert [(finding.problem, finding.warning) for finding in findings] == [("group-setting", True)]
    assert findings[0].text.startswith(f"group_replication_{name} is {value}")


@pytest.mark.parametrize(
    ("name", "value"), [("rpl_semi_sync_master_timeout", "10000"), ("rpl_semi_sync_master_wait_point", "AFTER_COMMIT")]
)
def test_a_weak_setting_of_semi_synchronous_replication_is_named(name: str, value: str) -> None:
    findings = judge({**GOOD_PAIR, name: value}, "s")
    assert [(finding.problem, finding.warning) for finding in findings] == [("semi-sync", True)]
    assert findings[0].text.startswith(f"{name} is {value}")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"wsrep_on": "ON"}, "Galera"),
        ({"group_replication_single_primary_mode": "OFF"}, "multi-primary"),
    ],
)
def test_several_writers_are_refused_by_both(settings: dict[str, str], why: str) -> None:
    assert found(settings) == [("multi-writer", False)]
    assert why in str(unfit(settings))


@pytest.mark.parametrize("settings", [{}, {"wsrep_on": "OFF"}, {"group_replication_single_primary_mode": "ON"}])
def test_one_writer_is_fine(settings: dict[str, str]) -> None:
    assert unfit(settings) is None
