"""What must be true after a load test, whatever its figures are: the locks excluded. Else Locust exits with 1.

All of Locust's processes must run on one machine: the proof is memory that they share.
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

from locust import events
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import LocalRunner, MasterRunner

from lockrouter import RowLock
from lockrouter.testing.exclusion import Proof, judge, wait_closed

__all__ = ["Exclusion"]

_PATIENCE = 15.0


class Exclusion:
    """The proof of a scenario with `n` counters: made once, in the scenario's module.

    Each process joins it when Locust starts; the last to end, the master or the only one, judges.
    """

    def __init__(self, n: int) -> None:
        """Have Locust's events join, close and judge the proof."""
        self._n = n
        self._proof: Proof | None = None
        self._over = False
        self._inside = 0
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        listen: Any = events  # Locust leaves its hooks untyped
        listen.init.add_listener(self._join)
        listen.test_stop.add_listener(self._leave)
        listen.quitting.add_listener(self._judge)

    def increment(self, i: int, held: RowLock | None, pause: float = 0.0) -> None:
        """Increment counter `i`, unprotected, inside its lock; under a degraded one nothing is proven nor counted.

        Args:
            i: one of the `n` counters, the same for the same key everywhere.
            held: the lock; None counts as well, and shows that the proof notices.
            pause: how long to stay inside.
        """
        if self._proof is None or (held is not None and held.degraded):
            return
        if self._over:
            raise StopUser
        self._inside += 1
        try:
            self._proof.increment(i, token=None if held is None else held.token, pause=pause)
        finally:
            self._inside -= 1

    def _folder(self, environment: Environment) -> str:
        options: Any = environment.parsed_options
        if not options.proof:
            if not isinstance(environment.runner, LocalRunner):
                raise SystemExit("several processes prove exclusion in one folder: name it with --proof DIR")
            self._temporary = tempfile.TemporaryDirectory(prefix="lockrouter-proof-")
            options.proof = self._temporary.name
        return str(options.proof)

    def _join(self, environment: Environment, **_: object) -> None:
        folder = self._folder(environment)
        if not isinstance(environment.runner, MasterRunner):
            self._proof = Proof(folder, self._n)

    def _leave(self, **_: object) -> None:
        """Close the proof when the last user has left it: a test that is stopped early may have users yet."""
        self._over = True
        until = time.monotonic() + _PATIENCE
        while self._inside and time.monotonic() < until:
            time.sleep(0.01)
        if self._proof is not None:
            self._proof.close()

    def _judge(self, environment: Environment, **_: object) -> None:
        self._leave()
        if not isinstance(environment.runner, MasterRunner | LocalRunner):
            return
        folder = self._folder(environment)
        wait_closed(folder, _PATIENCE)
        verdict = judge(folder, self._n)
        if not verdict.kept:
            environment.process_exit_code = 1
        print(f"exclusion {'held' if verdict.kept else 'FAILED'}: {verdict}", file=sys.stderr, flush=True)
        if self._temporary is not None:
            self._temporary.cleanup()
            environment.parsed_options.proof = ""  # type: ignore[union-attr] # nothing is saved there any more
