"""A process of the chaos run: every fourth one under gevent, which has to be patched in before anything is imported.

python -m tests.chaos.process SHARDS_FILE FOLDER SEED
"""

from __future__ import annotations

import importlib
import sys

__all__ = ["GREEN", "is_green"]

GREEN = 4


def is_green(seed: int) -> bool:
    """Whether the process of this seed runs on greenlets."""
    return seed % GREEN == 0


def main() -> int:
    """Patch or not, then work."""
    if is_green(int(sys.argv[-1])):
        from gevent import monkey
        from gevent.fileobject import FileObject

        monkey.patch_all()
        sys.stdin = FileObject(0, "r", encoding="utf-8", closefd=False)
    result: int = importlib.import_module("tests.chaos.worker").main()
    return result


if __name__ == "__main__":
    sys.exit(main())
