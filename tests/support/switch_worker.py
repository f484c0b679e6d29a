"""A process that locks, increments without any other protection, and records from when to when it believed to hold.

`python -m tests.support.switch_worker FILE FOLDER KEYS SEED`: see `Workers`. Its last line is a JSON list of intervals
`[key, from, to, token]`, where a lock whose loss it was told of ends at that moment.
"""

from __future__ import annotations

import json
import random
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lockrouter import LockLost, LockRouter, LockTimeout, ShardError
from tests.support.observe import eventually
from tests.support.workers import Workers

__all__ = ["Interval", "counted_through", "overlaps", "unordered"]

Interval = tuple[str, float, float, int]


def main() -> None:
    """Run until the end of input."""
    file, folder, keys, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    dice = random.Random(seed)
    router = LockRouter.from_file(file)
    print("ready", flush=True)
    sys.stdin.readline()
    done: list[Interval] = []
    while not select.select([sys.stdin], [], [], 0)[0]:
        key = f"switch:{dice.randrange(keys)}"
        try:
            held = router.lock(key, timeout=1.0)
        except LockTimeout:
            continue
        except ShardError:
            time.sleep(0.02)
            continue
        began = time.monotonic()
        counter = folder / key
        value = int(counter.read_text() or 0) if counter.exists() else 0
        time.sleep(dice.uniform(0.0, 0.02))
        counter.write_text(str(value + 1))
        ended = time.monotonic()
        done.append((key, began, ended, held.token))
        try:
            held.release(confirm=True)
        except (LockLost, ShardError):
            print(f"lost {key}", file=sys.stderr)
    router.close()
    print(json.dumps(done), flush=True)


def overlaps(done: list[Interval]) -> list[tuple[Interval, Interval]]:
    """Pairs of intervals of one key that two holders had at one time."""
    found, last = [], dict[str, Interval]()
    for one in sorted(done, key=lambda each: each[1]):
        before = last.get(one[0])
        if before is not None and one[1] < before[2]:
            found.append((before, one))
        if before is None or one[2] > before[2]:
            last[one[0]] = one
    return found


def unordered(done: list[Interval]) -> list[tuple[Interval, Interval]]:
    """Pairs of intervals of one key, the later of which has no higher token."""
    found, last = [], dict[str, Interval]()
    for one in sorted(done, key=lambda each: each[1]):
        before = last.get(one[0])
        if before is not None and one[3] <= before[3]:
            found.append((before, one))
        last[one[0]] = one
    return found


def counted_through(file: Path, folder: Path, change: Callable[[], object]) -> list[Interval]:
    """What three processes did to three counters while `change` happened, and some time before and after.

    Every increment was counted, no two holders of a key overlapped, and the later one's token was the higher.
    """
    counters = [folder / f"switch:{number}" for number in range(3)]
    with Workers("tests.support.switch_worker", [str(file), str(folder), str(len(counters))], 3) as workers:
        workers.go()
        eventually(lambda: all(counter.exists() for counter in counters), 20.0)
        change()
        changed_at = time.time()
        eventually(lambda: all(counter.stat().st_mtime > changed_at for counter in counters), 20.0)
        done = [(each[0], each[1], each[2], each[3]) for line in workers.finish() for each in json.loads(line)]
    for counter in counters:
        assert int(counter.read_text()) == sum(key == counter.name for key, *_ in done)
    assert overlaps(done) == []
    assert unordered(done) == []
    return done


if __name__ == "__main__":
    main()
