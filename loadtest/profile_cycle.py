"""Where the client's CPU goes in one lock and its release, against a server that answers from memory.

`python loadtest/profile_cycle.py [--cycles 50000] [--top 20] [--update-readme]` prints, as Markdown, the cost of a
cycle by the parts of the package, and then its functions by own time. The cost is measured without the profiler;
the profiler only says how it is shared out, and makes small functions look dearer than they are.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from collections import Counter
from pathlib import Path
from typing import Any

from bench_readme import put
from bench_stub import KEYS, cycle, cycle_cost, stub_cost, stub_router

__all__ = ["to_readme"]

Function = tuple[str, int, str]

_PARTS = {
    "the call and its handle": "router quick acquire rowlock core deadline config options lockset claim",
    "routing": "routing",
    "gate, who nests with whom": "gate owners",
    "pool, breaker, shard": "pool breaker shard control tokens backoff",
    "session and protocol": "session watcher packets wire effects statements callers",
    "metrics": "metrics",
}
_STUB = frozenset({"bench_stub", "profile_cycle"})


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cycles", type=int, default=50_000, help="locks in the profile")
    parser.add_argument("--top", type=int, default=20, help="functions shown")
    parser.add_argument("--update-readme", action="store_true", help="put the output into loadtest/README.md")
    options = parser.parse_args()
    text = markdown(options.cycles, options.top)
    print(text)
    if options.update_readme:
        put("profile", text)
    return 0


def to_readme() -> None:
    """Put both tables into loadtest/README.md."""
    put("profile", markdown(50_000, 20))


def markdown(cycles: int, top: int) -> str:
    """Both tables."""
    cost = cycle_cost() - stub_cost()
    functions = profile(cycles)
    whole = sum(own for own, _ in functions.values())
    parts: Counter[str] = Counter()
    for function, (own, _) in functions.items():
        parts[_part(function)] += own  # type: ignore[assignment]  # a counter of fractions
    lines = [
        f"{cost:.1f} µs of CPU for a lock and its release, without a server and the kernel:",
        "",
        "| part | µs | share |",
        "| --- | ---: | ---: |",
        *(f"| {part} | {own / whole * cost:.1f} | {own / whole:.0%} |" for part, own in parts.most_common()),
        "",
        f"The {top} dearest functions, built-in ones counted to who calls them:",
        "",
        "| function | µs | calls |",
        "| --- | ---: | ---: |",
    ]
    dearest = sorted(functions.items(), key=lambda item: -item[1][0])[:top]
    lines += [f"| `{_name(one)}` | {own / whole * cost:.2f} | {calls / cycles:.1f} |" for one, (own, calls) in dearest]
    return "\n".join(lines)


def profile(cycles: int) -> dict[Function, tuple[float, int]]:
    """Own seconds (with the built-in functions that it calls) and calls of each function; the stub's are left out."""
    router = stub_router()
    cycle(router, len(KEYS))
    profiler = cProfile.Profile()
    profiler.enable()
    cycle(router, cycles)
    profiler.disable()
    router.close()
    stats: dict[Function, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    own: Counter[Function] = Counter()
    for function, (_, _, seconds, _, callers) in stats.items():
        if function[0] != "~":
            own[function] += seconds
            continue
        for caller, (_, _, its, _) in callers.items():
            own[caller] += its
    return {one: (own[one], stats[one][1]) for one in own if one[0] != "~" and Path(one[0]).stem not in _STUB}


def _part(function: Function) -> str:
    stem = Path(function[0]).stem
    return next((part for part, modules in _PARTS.items() if stem in modules.split()), "other packages")


def _name(function: Function) -> str:
    file, _, name = function
    return f"{Path(file).name} {name}"


if __name__ == "__main__":
    raise SystemExit(main())
