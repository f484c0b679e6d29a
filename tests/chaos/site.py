"""Four shards on servers of both vendors, each behind a proxy: two of MySQL, then two of MariaDB."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from lockrouter.admin.init import init
from lockrouter.admin.seed import seed
from lockrouter.config import RouterConfig, load
from lockrouter.testing.binaries import Vendor
from lockrouter.testing.cluster import Cluster
from tests.support.accounts import Accounts
from tests.support.observe import Observer
from tests.support.proxy import Proxy
from tests.support.sets import make_sets, members_of

__all__ = ["ACCOUNTS", "COUNTER", "GHOST", "SETS", "SHARDS", "Layout", "Site"]

SHARDS = ("mysql-0", "mysql-1", "mariadb-2", "mariadb-3")
GHOST = 3
"""`ghost_timeout` of the run, in seconds."""
ACCOUNTS = 6
COUNTER = 1000
"""The account that counts the transfers made by `run`; it belongs to nobody and to no sum."""
SETS = 2
"""Sets on each of the two protected databases, one for each vendor."""

_SETTINGS = f"""
[topology]
name = "chaos"
epoch = 1
tables = 2
buckets = 16
rows_per_bucket = 64

[router]
on_outage = "{{on_outage}}"
timeout = 2.0
ghost_timeout = {GHOST}
close_timeout = 3.0

[pool]
size = 10

[transaction]
lock_wait = 3
idle = 3
"""


class Layout(msgspec.Struct, frozen=True):
    """What a worker needs to know beside the shard file: the protected databases, which no proxy stands before."""

    protected: tuple[str, ...]


class Site:
    """The shards, their proxies, files and tables. Closing leaves servers that it did not start as they were."""

    def __init__(self, folder: Path, on_outage: str, clusters: Mapping[Vendor, Cluster] | None = None) -> None:
        """Start what is not given, and create everything.

        Args:
            clusters: running ones with two servers or more each.
        """
        self.folder = folder
        self.on_outage = on_outage
        self._stack = contextlib.ExitStack()
        with self._stack:
            self._started = clusters is None
            if clusters is None:
                clusters = {vendor: self._up(vendor) for vendor in Vendor}
            self.places = [(clusters[Vendor.MYSQL if index < 2 else Vendor.MARIADB], index % 2) for index in range(4)]
            self.proxies = [self._stack.enter_context(Proxy(cluster.port(local))) for cluster, local in self.places]
            self.shards_file = self._write("shards.toml", admin=False, proxied=True)
            self.direct_file = self._write("direct.toml", admin=False, proxied=False)
            self.admin_file = self._write("admin.toml", admin=True, proxied=False)
            self.observers = [self.observer(index) for index in range(4)]
            for observer in self.observers:
                self._stack.callback(observer.close)
            self._drop()
            self._stack.callback(self._drop)
            init(load(self.direct_file), load(self.admin_file))
            seed(load(self.direct_file), load(self.admin_file))
            self.accounts = [Accounts(observer, ACCOUNTS) for observer in self.observers]
            for accounts in self.accounts:
                self._stack.callback(accounts.drop)
                accounts.server.ask(f"INSERT INTO account VALUES ({COUNTER}, 0)")
            self._protect()
            self._stack = self._stack.pop_all()

    def _up(self, vendor: Vendor) -> Cluster:
        return self._stack.enter_context(Cluster.up(self.folder / vendor, 2, vendor))

    @property
    def config(self) -> RouterConfig:
        """As the workers see it."""
        return load(self.shards_file)

    def observer(self, index: int) -> Observer:
        """Another administrator's view of a shard; the caller closes it."""
        cluster, local = self.places[index]
        made = Observer(cluster, local)
        made.database = f"chaos_{index}"
        return made

    def _write(self, name: str, *, admin: bool, proxied: bool) -> Path:
        parts = [_SETTINGS.format(on_outage=self.on_outage)]
        for index, (cluster, local) in enumerate(self.places):
            original = load(cluster.admin_file if admin else cluster.shards_file)
            url, port = original.shards[local].url, cluster.port(local)
            url = url.removesuffix(original.endpoints(original.shards[local])[0].database) + f"chaos_{index}"
            if proxied:
                url = url.replace(f":{port}/", f":{self.proxies[index].port}/")
            owned = f"{4 * index}-{4 * index + 3}"
            parts.append(f'[[shard]]\nid = "{SHARDS[index]}"\nurl = "{url}"\nbuckets = ["{owned}"]\n')
        path = self.folder / name
        path.write_text("\n".join(parts), "utf-8")
        path.chmod(0o600)
        return path

    def _protect(self) -> None:
        """A protected database on one server of each vendor, with the table of the fence and one of sets."""
        urls = []
        for index in (0, 2):
            cluster, local = self.places[index]
            self.observers[index].ask(f"CREATE DATABASE chaos_set_{index}")
            url = cluster.admin_url(local).rpartition("/")[0] + f"/chaos_set_{index}"
            make_sets(url, SETS)
            urls.append(url)
        layout = self.folder / "layout.json"
        layout.touch(mode=0o600)
        self._layout = Layout(tuple(urls))
        layout.write_bytes(msgspec.json.encode(self._layout))

    def sets(self) -> dict[str, list[str]]:
        """The members of every set, by its name."""
        urls = enumerate(self._layout.protected)
        return {f"{where}/{number}": members for where, url in urls for number, members in members_of(url).items()}

    def _drop(self) -> None:
        for index, (cluster, local) in enumerate(self.places):
            cluster.start(local)
            with cluster.connect(local) as connection, connection.cursor() as cursor:
                for name in (f"chaos_{index}", f"chaos_set_{index}"):
                    cursor.execute(f"DROP DATABASE IF EXISTS {name}")

    def close(self) -> None:
        """Nothing of the run is left on any server. Idempotent."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
