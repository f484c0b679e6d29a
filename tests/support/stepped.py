"""A process whose routers see the clock of every server shifted by as many seconds as that server is told, at any time.

    python -m tests.support.stepped CLUSTER_DIRECTORY WHAT

No test may step a machine's clock. But every statement of lockrouter reads the server's clock by one of two words of
SQL, and here these words are read with `long_query_time` added, a global variable that means nothing to these servers:
setting it is what a step of the clock is. WHAT is row or lease; prints "fine".
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import CodeType, ModuleType
from typing import Any

_START = 1000
_SHIFTED = "({} + INTERVAL @@global.long_query_time SECOND)"


class _Shifted(importlib.machinery.SourceFileLoader):
    """Compiles a module of SQL with the shifted clock."""

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_source(fullname) or ""
        for word in ("SYSDATE(6)", "NOW(6)", "NOW()"):
            source = source.replace(word, _SHIFTED.format(word))
        return compile(source, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the package's modules of SQL before anybody else does."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if not fullname.startswith("lockrouter.sql."):
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if found is None or found.origin is None:
            return None
        return importlib.util.spec_from_loader(fullname, _Shifted(fullname, found.origin))


def main() -> int:
    """Step the clock of a shard's server under locks of the kind given."""
    sys.meta_path.insert(0, _Finder())
    from lockrouter.testing.cluster import Cluster
    from tests.support.observe import Observer, Routers

    directory, what = sys.argv[1:]
    routers = Routers(Cluster.open(directory))
    server: Observer = routers.observers[0]
    before = server.ask("SELECT @@global.long_query_time")[0][0]
    term = server.meta("term")
    server.ask(f"SET GLOBAL long_query_time = {_START}")
    try:
        {"row": _row, "lease": _lease}[what](routers, server)
    finally:
        server.ask(f"SET GLOBAL long_query_time = {before}")
        # As a server whose clock was put right: a new term, before anybody else grants here.
        server.ask("UPDATE lock_meta SET term_identity = 'a clock that was put right'")
        routers.finish()
    assert server.meta("term") >= term
    server.close()
    print("fine")
    return 0


def _step(server: Any, seconds: float) -> None:
    server.ask("SET GLOBAL long_query_time = @@global.long_query_time + %s", seconds)


def _row(routers: Any, server: Any) -> None:
    """Exclusion is untouched; a step back starts a new term, and later tokens are above all earlier ones."""
    from tests.support.observe import eventually, keys_on

    one, two = routers.make(), routers.make()
    key = keys_on(one, 0, prefix="stepped")[0]
    inside, seen, wrong, stop = [0], [], [], threading.Event()

    def work(router: Any) -> None:
        from lockrouter import LockLost, LockTimeout, ShardError

        while not stop.is_set():
            with suppress(LockLost, LockTimeout, ShardError), router.lock(key, timeout=5.0) as held:
                inside[0] += 1
                if inside[0] != 1:
                    wrong.append("two holders at once")
                time.sleep(0.002)
                inside[0] -= 1
                seen.append(held.token)

    threads = [threading.Thread(target=work, args=(router,)) for router in (one, two)]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: len(seen) > 20)
        term = server.meta("term")
        _step(server, 30)
        count = len(seen)
        eventually(lambda: len(seen) > count + 20)
        _step(server, -60)
        began = time.monotonic()
        eventually(lambda: server.meta("term") > term, 5.0)
        assert time.monotonic() - began < 0.5 + 2.0, "a step back is noticed within role_check"
        eventually(lambda: one.health()["shard-0"]["term"] == two.health()["shard-0"]["term"] == server.meta("term"))
        known, highest = len(seen), max(seen)
        eventually(lambda: len(seen) > known + 20)
        late = seen[known + 4 :]  # four may have been granted before the new term was known
        assert min(late) > highest, "a token after the new term is above every one before"
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []


def _lease(routers: Any, server: Any) -> None:
    """Within `clock_skew` a step forward changes nothing; beyond it a lease may go early, with a higher token."""
    import pytest

    from lockrouter import LockLost
    from tests.support.observe import eventually, keys_on

    one, two = routers.make(), routers.make()
    small, large, back = keys_on(one, 0, 3, prefix="stepped")
    first = one.lease(small, ttl=2, timeout=10, keep_alive=False)
    _step(server, 0.4)
    while first.remaining() > 0.05:
        assert two.try_lease(small, ttl=2) is None or not first.remaining(), "taken over before its deadline"
        time.sleep(0.02)
    with pytest.raises(LockLost):
        first.release()
    first = one.lease(large, ttl=5, keep_alive=False)
    _step(server, 10)
    second = two.lease(large, ttl=5, timeout=2)
    assert first.remaining() > 0, "early: its holder still counts on it"
    assert second.token > first.token, "the token orders them"
    with pytest.raises(LockLost):
        first.check()
    with pytest.raises(LockLost):
        first.release()
    second.release()
    first = one.lease(back, ttl=1, keep_alive=False)
    _step(server, -5)
    second = eventually(lambda: two.try_lease(back, ttl=1), 15.0)
    assert first.lost, "a step back lets nobody in early"
    assert second.token > first.token
    second.release()
    with pytest.raises(LockLost):
        first.release()


if __name__ == "__main__":
    sys.exit(main())
