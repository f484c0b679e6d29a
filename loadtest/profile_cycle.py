"""Where the client's CPU goes in one lock and its release, against a server that answers from memory.

`python loadtest/profile_cycle.py [--cycles 50000] [--top 30] [--update-readme]` prints the cost of a cycle as it is,
of its parts that can be called alone, and then the functions by own time under the profiler, which makes small
functions look dearer than they are: trust the order, not the sum.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from pathlib import Path

from bench_readme import put
from bench_routing import measure
from bench_stub import KEYS, cycle, cycle_cost, stub_cost, stub_router


def main() -> int:
    """Print both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cycles", type=int, default=50_000, help="locks in the profile")
    parser.add_argument("--top", type=int, default=30, help="functions shown")
    parser.add_argument("--update-readme", action="store_true", help="put the output into loadtest/README.md")
    options = parser.parse_args()
    whole, stub, route = cycle_cost(), stub_cost(), measure((1,), keys=20_000)[1]
    lines = [
        f"CPU of a lock and its release, in microseconds: {whole:.1f}",
        f"  the stub's own {stub:.1f}; a route {route:.1f}; all the rest {whole - stub - route:.1f}",
        "",
        *profile(options.cycles, options.top),
    ]
    print("\n".join(lines))
    if options.update_readme:
        put("profile", "\n".join(["```text", *lines, "```"]))
    return 0


def profile(cycles: int, top: int) -> list[str]:
    """The functions with the most own time as lines: own and total microseconds and calls, all per cycle."""
    router = stub_router()
    cycle(router, len(KEYS))
    profiler = cProfile.Profile()
    profiler.enable()
    cycle(router, cycles)
    profiler.disable()
    router.close()
    found = [
        (own / cycles * 1e6, total / cycles * 1e6, calls / cycles, _name(*function))
        for function, (_, calls, own, total, _) in pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
    ]
    found.sort(reverse=True)
    lines = [f"{'own us':>7} {'total us':>8} {'calls':>6}  function (profiled: {sum(row[0] for row in found):.1f} us)"]
    lines += [f"{own:7.2f} {total:8.2f} {calls:6.2f}  {name}" for own, total, calls, name in found[:top]]
    return lines


def _name(file: str, line: int, function: str) -> str:
    if file == "~":
        return function
    path = Path(file)
    folder = f"{path.parent.name}/" if path.parent.name in ("protocol", "sql") else ""
    return f"{folder}{path.name}:{line} {function}"


if __name__ == "__main__":
    raise SystemExit(main())
