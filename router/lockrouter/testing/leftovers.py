"""What a server still holds for the application's user: after everybody has closed, nothing."""

from __future__ import annotations

import time
from contextlib import closing

from lockrouter.testing.binaries import Vendor
from lockrouter.testing.cluster import Cluster
from lockrouter.testing.shardfiles import APPLICATION

__all__ = ["leftovers"]

_SESSIONS = "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE USER = %s"
_ROW_LOCKS = {
    Vendor.MYSQL: "SELECT COUNT(*) FROM performance_schema.data_locks WHERE OBJECT_SCHEMA LIKE 'locks\\_%'",
    Vendor.MARIADB: "SELECT COUNT(*) FROM information_schema.INNODB_TRX WHERE trx_rows_locked > 0",
}


def leftovers(cluster: Cluster, patience: float = 2.0) -> list[str]:
    """A line for each server that after `patience` seconds still has sessions of the application's user or row locks.

    A server notices the end of a connection a moment after it was closed: that moment is the patience.
    """
    until = time.monotonic() + patience
    while (found := _look(cluster)) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def _look(cluster: Cluster) -> list[str]:
    found = []
    for index in range(len(cluster)):
        with closing(cluster.connect(index)) as connection, connection.cursor() as cursor:
            cursor.execute(_SESSIONS, (APPLICATION,))
            sessions = cursor.fetchall()[0][0]
            cursor.execute(_ROW_LOCKS[cluster.vendor])
            row_locks = cursor.fetchall()[0][0]
        if sessions or row_locks:
            found.append(f"shard-{index}: {sessions} sessions and {row_locks} row locks are left")
    return found
