"""Every verb at full speed for a while leaves memory, threads, descriptors and server sessions flat.

The longer one: `make soak`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lockrouter.testing.binaries import Vendor
from tests.chaos.site import Site
from tests.chaos.soak import Sample, Soak, soak
from tests.support.servers import Clusters


@pytest.mark.server
@pytest.mark.slow
def test_a_soak_stays_flat(clusters: Clusters, tmp_path: Path) -> None:
    with Site(tmp_path, "refuse", {vendor: clusters.get(vendor) for vendor in Vendor}) as site:
        found = soak(site, seconds=45.0)
    print(f"\n{found}")
    assert found.growth == []
    assert found.samples[-1].operations > 20_000


@pytest.mark.parametrize("name", ["rss", "threads", "descriptors", "sessions"])
def test_growth_is_found(name: str) -> None:
    flat = Sample(1, 80.0, 12, 30, 16)
    assert Soak(9.0, [flat] * 9).growth == []
    growing = [flat._replace(**{name: getattr(flat, name) + 2 * number}) for number in range(9)]
    assert [text.split()[0] for text in Soak(9.0, growing).growth] == [name]
