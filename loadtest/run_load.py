"""`make load`: one scenario under Locust, without a browser, on a throw-away cluster; Locust's report and our own.

Exits with Locust's code: 1 when exclusion was violated or cannot be proven, or when locks failed.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from slo import collect

from lockrouter.errors import LockRouterError
from lockrouter.testing.binaries import Vendor
from lockrouter.testing.cluster import Cluster
from lockrouter.testing.exclusion_run import provision

__all__ = ["main"]

_HERE = Path(__file__).resolve().parent


def main(arguments: list[str] | None = None) -> int:
    """Run one scenario and return the exit code."""
    asked = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _end)
    try:
        with ExitStack() as clean_up:
            home = Path(clean_up.enter_context(tempfile.TemporaryDirectory(prefix="lockrouter-load-")))
            shards = asked.shards or _cluster(home / "cluster", asked, clean_up)
            proof = home / "proof"
            proof.mkdir()
            code = _locust(asked, shards, proof)
            print(collect(proof))
    except LockRouterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return code


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _cluster(folder: Path, asked: argparse.Namespace, clean_up: ExitStack) -> Path:
    cluster = clean_up.enter_context(Cluster.up(folder, asked.servers, asked.server))
    provision(cluster)
    print(f"{asked.servers} servers of {cluster.vendor} {cluster.version} are up and seeded", flush=True)
    return cluster.shards_file


def _locust(asked: argparse.Namespace, shards: Path, proof: Path) -> int:
    command = [sys.executable, "-m", "locust", "-f", str(asked.scenario), "--headless", "--only-summary"]
    command += ["--users", str(asked.users), "--spawn-rate", str(asked.users), "--run-time", f"{asked.seconds:g}s"]
    command += ["--shards", str(shards), "--proof", str(proof), "--rate", str(asked.rate)]
    command += ["--stop-timeout", "5"]
    if asked.processes > 1:
        command += ["--processes", str(asked.processes)]
    with subprocess.Popen(command) as locust:
        try:
            return locust.wait()
        except BaseException:
            locust.terminate()
            raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="run_load.py", description=__doc__)
    parser.add_argument("--scenario", type=Path, default=_HERE / "uniform_accounts.py")
    parser.add_argument("--shards", type=Path, metavar="FILE", help="a seeded topology instead of a throw-away cluster")
    parser.add_argument("--server", type=Vendor, choices=list(Vendor), default=Vendor.MYSQL)
    parser.add_argument("--servers", type=int, default=4, help="how many to start")
    parser.add_argument("--users", type=int, default=40)
    parser.add_argument("--rate", type=float, default=20.0, help="locks a second and user; 0: as fast as it goes")
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    return parser


if __name__ == "__main__":
    sys.exit(main())
