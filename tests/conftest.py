"""Fixtures of every test: real servers of both vendors."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest

from lockrouter import LockRouter
from lockrouter.testing.binaries import Vendor
from lockrouter.testing.cluster import Cluster

from .support.observe import Observer, Routers
from .support.servers import Clusters, versions

# A run that was started in the background of a shell inherits that SIGINT is ignored; tests and their children send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """Say on which servers this session runs."""
    return versions()


def pytest_collection_finish() -> None:
    """What every import has made stays to the end: the tests' own collections need not look through it each time."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say it again beside the result, where it is read."""
    terminalreporter.write_line(versions())


@pytest.fixture(scope="session", params=list(Vendor), ids=str)
def vendor(request: pytest.FixtureRequest) -> Vendor:
    """Both vendors in turn: a test that asks for it runs on each."""
    chosen: Vendor = request.param
    return chosen


@pytest.fixture(scope="session")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    """The session's clusters, for tests that need another number of shards than `cluster` has."""
    kept = Clusters(tmp_path_factory.mktemp("clusters"))
    yield kept
    kept.close()


@pytest.fixture(scope="session")
def cluster(clusters: Clusters, vendor: Vendor) -> Cluster:
    """Four provisioned shards of the vendor, shared by the whole session."""
    return clusters.get(vendor)


@pytest.fixture
def routers(cluster: Cluster) -> Iterator[Routers]:
    """Routers on the session's cluster; the test ends with the proof that nothing of them is left."""
    kept = Routers(cluster)
    yield kept
    kept.finish()


@pytest.fixture
def router(routers: Routers) -> LockRouter:
    """A router as the shard file describes it."""
    return routers.make()


@pytest.fixture
def other(routers: Routers) -> LockRouter:
    """A second router, which to the first one is what another process is."""
    return routers.make()


@pytest.fixture
def server(routers: Routers) -> Observer:
    """The server of shard-0."""
    return routers.observers[0]


@pytest.fixture
def no_leases(routers: Routers) -> None:
    """The lease tables are empty when the test begins, whatever other tests have left to expire."""
    for server in routers.observers:
        for (table,) in server.ask("SHOW TABLES LIKE 'lease%'"):
            server.ask(f"DELETE FROM {table}")
