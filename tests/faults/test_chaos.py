"""The chaos run in short, over four shards of both vendors; and that it finds locks that are broken.

The long one: `make chaos`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lockrouter.testing.binaries import Vendor
from tests.chaos.plan import Fault
from tests.chaos.run import chaos
from tests.chaos.site import Site
from tests.support.servers import Clusters

pytestmark = [pytest.mark.server, pytest.mark.timeout(240)]


def site_of(clusters: Clusters, folder: Path, on_outage: str = "local") -> Site:
    """Shards on two of the session's servers of each vendor."""
    return Site(folder, on_outage, {vendor: clusters.get(vendor) for vendor in Vendor})


def quick(fault: Fault) -> bool:
    """Faults that leave a short run time to recover."""
    return fault.length < 4.0


def test_every_invariant_holds_while_everything_fails(clusters: Clusters, tmp_path: Path) -> None:
    with site_of(clusters, tmp_path) as site:
        report = chaos(site, seed=5, seconds=9.0, processes=4, choose=quick)
    print(report)
    assert report.violations == []
    assert sum(report.faults.values()) >= 10
    idle = [name for name, verdict in report.verdicts.items() if not verdict.checks]
    assert set(idle) <= {"I4"}, f"never checked: {idle}"
    assert sum(outcomes["ok"] for outcomes in report.operations.values()) > 500


@pytest.mark.parametrize("what", ["share_rows", pytest.param("take_owned", marks=pytest.mark.slow)])
def test_broken_locks_are_found(clusters: Clusters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setenv("BREAK", what)
    with site_of(clusters, tmp_path) as site:
        report = chaos(site, seed=5, seconds=3.0, processes=3, choose=lambda _: False, rests=False)
    print(report)
    kinds = {"share_rows": ("/row/", "/set/"), "take_owned": ("/lease/", "/guard/", "/set/")}[what]
    found = report.verdicts["I1"].violations
    assert found
    assert all(any(kind in text for kind in kinds) for text in found), "what is not broken is blamed"
