"""Clusters of real servers that live as long as the pytest session, one per vendor and number of shards."""

from __future__ import annotations

from pathlib import Path

from lockrouter.admin.init import init
from lockrouter.admin.seed import seed
from lockrouter.config import load
from lockrouter.testing.binaries import ProgramError, Vendor, find
from lockrouter.testing.cluster import Cluster

__all__ = ["Clusters", "provision", "versions"]


class Clusters:
    """Starts a cluster when it is first asked for and keeps it; `close` takes all of them down."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._up: dict[tuple[Vendor, int], Cluster] = {}

    def get(self, vendor: Vendor, shards: int = 4) -> Cluster:
        """The session's provisioned cluster of that vendor and size. Who breaks a server mends it before leaving."""
        known = (vendor, shards)
        if known not in self._up:
            cluster = Cluster.up(self._home / f"{vendor}-{shards}", shards, vendor)
            self._up[known] = cluster
            provision(cluster)
        return self._up[known]

    def close(self) -> None:
        """No server of the session is left."""
        for cluster in self._up.values():
            cluster.down()
        self._up.clear()


def provision(cluster: Cluster) -> None:
    """The hook between a cluster's start and its first test: creates and seeds what the tests expect in it."""
    config, admin = load(cluster.shards_file), load(cluster.admin_file)
    init(config, admin)
    seed(config, admin)


def versions() -> str:
    """One line with the version of each server the session runs on, or why there is none."""
    parts = []
    for vendor in Vendor:
        try:
            parts.append(f"{vendor} {find(vendor).version}")
        except ProgramError as error:
            parts.append(f"{vendor} MISSING ({error})")
    return "servers: " + ", ".join(parts)
