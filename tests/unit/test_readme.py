"""The pages name what exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_test_that_the_table_of_faults_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", TESTS.joinpath("README.md").read_text("utf-8")))
    defined = {
        name for file in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text("utf-8"))
    }
    assert len(named) > 60
    assert named <= defined, named - defined
