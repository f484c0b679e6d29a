"""Several keys of different classes are one call: the strictest rules of all apply."""

from __future__ import annotations

import itertools

import pytest

from lockrouter.errors import ConfigError
from lockrouter.lockset import strictest
from lockrouter.options import ResolvedClass

LOOSE = ResolvedClass(prefix="a", on_outage="local", timeout=5.0)
STRICT = ResolvedClass(prefix="b", on_outage="refuse", timeout=1.0, max_waiters=3, max_hold=2.0, kill=True, frozen=True)
OTHER = ResolvedClass(prefix="c", on_outage="local", timeout=2.0, max_waiters=9, max_hold=1.0)


def test_of_several_classes_the_strictest_applies() -> None:
    for order in itertools.permutations((LOOSE, STRICT, OTHER)):
        rule = strictest(order)
        assert (rule.on_outage, rule.timeout, rule.max_waiters) == ("refuse", 1.0, 3)
        assert (rule.max_hold, rule.kill, rule.frozen) == (1.0, True, True)
    alone = strictest([LOOSE])
    assert (alone.on_outage, alone.timeout, alone.max_waiters, alone.frozen) == ("local", 5.0, None, False)


def test_a_key_of_a_lease_s_class_is_no_row() -> None:
    with pytest.raises(ConfigError, match="mode"):
        strictest([LOOSE, ResolvedClass(prefix="d", mode="lease", on_outage="local", timeout=1.0)])
