"""A block of the gate, or of the queues of leases, that is interrupted anywhere loses nobody who waits there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from lockrouter.deadline import now
from lockrouter.gate import Gates, Hold, Place, Request
from lockrouter.leases.queues import Queues
from tests.support.interrupts import interrupted
from tests.unit.test_gate import Caller, is_empty, woken
from tests.unit.test_lease_keeper import Caller as Asker
from tests.unit.test_lease_keeper import entry_of


@dataclass
class Scene:
    """A holder or a lead of a row, and who waits behind."""

    gates: Gates
    first: Request
    hold: Hold | None
    waiting: list[Request]

    @classmethod
    def of(cls, line: str, *, held: bool) -> Scene:
        """`line`: who came, in order, `x` for exclusive and `s` for shared."""
        gates = Gates()
        asks = []
        for kind in line:
            ask = Caller(gates).ask(1)
            ask.shared = kind == "s"
            asks.append(ask)
        assert gates.enter(asks[0], wait=True) is Place.LEAD
        hold = None
        if held:
            hold = Hold(1, b"k", None, None, shard=None, session=None, base=1)
            hold.shared = asks[0].shared
            gates.granted(asks[0], hold)
        for ask in asks[1:]:
            gates.enter(ask, wait=True)
        return cls(gates, asks[0], hold, asks[1:])

    def leave(self) -> None:
        """The holder goes."""
        assert self.hold is not None
        self.hold.count = 0
        self.gates.leave(self.hold)

    def hand_over(self) -> None:
        """The holder goes, and the row to the next, if that may receive it."""
        assert self.hold is not None
        self.hold.count = 0
        if not self.gates.hand_over(self.hold):
            self.gates.leave(self.hold)

    def give_up_leading(self) -> None:
        """The lead goes."""
        self.gates.leave_queue(self.first)

    def one_gives_up(self) -> None:
        """The first of the waiters goes; the holder stays for now."""
        self.gates.leave_queue(self.waiting[0])

    def one_comes(self) -> None:
        """One more waits."""
        ask = Caller(self.gates).ask(1)
        self.waiting.append(ask)
        self.gates.enter(ask, wait=True)

    def everybody_has_a_turn(self) -> None:
        """Who was made the lead, or was given the row, is awake; each leaves, and the gate is empty in the end."""
        left = [ask for ask in self.waiting if ask.place is not Place.GONE]
        asleep = {ask for ask in left if ask.waiter is not None}
        while left:
            turn = [ask for ask in left if ask.place in (Place.LEAD, Place.HOLDER)]
            assert turn, [ask.place for ask in left]
            for ask in turn:
                assert ask not in asleep or woken(ask)
                left.remove(ask)
                if ask.place is Place.HOLDER:
                    assert ask.hold is not None
                    ask.hold.count = 0
                    self.gates.leave(ask.hold)
                else:
                    self.gates.leave_queue(ask)
        assert is_empty(self.gates)


LINES = ("xx", "xxx", "xsx", "xssx", "ssx", "sxs", "sxx")


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize(
    "block", [Scene.leave, Scene.hand_over, Scene.give_up_leading, Scene.one_gives_up, Scene.one_comes]
)
def test_an_interrupted_block_of_the_gate_loses_no_waiter(block: Callable[[Scene], None], line: str) -> None:
    held = block is not Scene.give_up_leading
    at, struck = 0, True
    while struck:
        scene = Scene.of(line, held=held)
        struck = interrupted(lambda: block(scene), at) is not None  # noqa: B023 - called now
        if struck:
            # What callers do on their way out: the same once more, or giving up.
            if block in (Scene.leave, Scene.hand_over):
                scene.leave()
            elif block is Scene.one_comes and len(scene.waiting) == len(line):
                scene.gates.leave_queue(scene.waiting[-1])
            elif block is not Scene.one_comes:
                block(scene)
        if scene.hold is not None and scene.hold.count:
            scene.leave()
        scene.gates.mend()
        scene.everybody_has_a_turn()
        at += 1
    assert at > 4


@pytest.mark.parametrize("block", ["freed", "leave"])
def test_an_interrupted_block_of_the_queues_loses_no_waiter(block: str) -> None:
    at, struck = 0, True
    while struck:
        queues, (first, *others) = Queues(), [Asker(number) for number in range(3)]
        for caller in (first, *others):
            queues.enter(caller, wait=True, max_waiters=None)
        entry = entry_of(first)
        if block == "freed":
            queues.granted(first, entry)
            entry.released = True
        else:
            first.gone = True
        struck = interrupted(lambda: queues.freed(entry) if block == "freed" else queues.leave(first), at) is not None  # noqa: B023
        queues.mend(())
        for caller in others:
            assert queues.leads(caller) and caller.waiter.wait(now())
            caller.gone = True
            queues.mend(())
        assert not queues._queues
        at += 1
    assert at > 4


def test_a_release_under_way_is_not_mended() -> None:
    queues, caller = Queues(), Asker(0)
    queues.enter(caller, wait=True, max_waiters=None)
    entry = entry_of(caller)
    queues.granted(caller, entry)
    entry.released = True
    queues.mend({entry})
    assert queues.holder(caller.name) is entry
    queues.mend(())
    assert not queues._queues
