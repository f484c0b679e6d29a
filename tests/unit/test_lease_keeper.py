"""The keeper and the queues, alone: a store in memory, a clock that is set, each operation driven step by step."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from lockrouter.config import parse
from lockrouter.core import Core
from lockrouter.deadline import now
from lockrouter.errors import LossReason, Overloaded
from lockrouter.leases import batch, holdings, keeper, renewer, service
from lockrouter.leases.entry import TELL_EARLIER, Entry
from lockrouter.leases.handle import Lease
from lockrouter.leases.queues import Place, Queues
from lockrouter.leases.rows import Item, Said, Seen, Verb
from lockrouter.protocol.effects import Waiter
from lockrouter.session import Gone
from tests.support.fakestore import FakeStore, item

_FILE = """
[topology]
name = "t"
epoch = 1
tables = 2
buckets = 4
rows_per_bucket = 4
[router]
on_outage = "refuse"
[[shard]]
id = "s"
url = "mysql+pymysql://u@127.0.0.1:3306/db"
buckets = ["0-3"]
"""


class Told:
    """What the handle of a lease is for the keeper: somebody who has it, and is told of its loss."""

    def __init__(self, told: list[LossReason]) -> None:
        self.callbacks = (told.append,)


class Rig:
    """The leases of a router that is never started, one shard whose store is in memory, and the time."""

    def __init__(self) -> None:
        self.core = Core(parse(_FILE), CollectorRegistry())
        self.leases = self.core.leases
        self.keeper = self.leases.keeper
        self.shard = self.core.shards["s"]
        self.renewer = self.keeper._renewers["s"]
        self.store = FakeStore()
        self.renewer.store = self.store  # type: ignore[assignment]
        self.at = 1000.0
        self.told: list[LossReason] = []
        self.handles: list[Lease] = []

    def now(self) -> float:
        return self.at

    def hold(self, name: str, *, ttl: float = 9.0, keep_alive: bool = True) -> Entry:
        """A lease that was granted just now."""
        asked = item(Verb.ACQUIRE, name, ttl=ttl)
        seen = self.store._acquire(asked.row)
        assert isinstance(seen, Seen)
        entry = Entry(
            asked.row._replace(token=seen.token),
            table=0,
            shard=self.shard,
            key=asked.row.key,
            ttl=ttl,
            deadline=self.at + ttl,
            granted_at=self.at,
            keep_alive=keep_alive,
            thing=None,
        )
        self.leases.entries[entry.row.owner] = entry
        handle = cast(Lease, Told(self.told))
        self.handles.append(handle)
        entry.handle = weakref.ref(handle)
        self.keeper.watch(entry)
        return entry

    def pass_time(self, seconds: float) -> None:
        """Let time pass in small steps, the background doing what is due in each."""
        until = self.at + seconds
        while self.at < until - 1e-9:
            self.at = min(until, self.at + 0.01)
            self.tick()

    def tick(self) -> None:
        for entry in self.keeper._take_due():
            self.keeper._look_at(entry)
        if self.renewer.due or any(tomb.next_at <= self.at for tomb in self.renewer.tombs.values()):
            self.work()

    def work(self) -> None:
        """Run the renewer until it sleeps for longer than now."""
        operation = self.renewer.work()
        effect = operation.send(None)
        while not (effect[0] == 3 and effect[1] > self.at):
            effect = operation.send(None)
        operation.close()

    def asked(self, verb: Verb) -> list[bytes]:
        return [name for called, names in self.store.calls if called is verb for name in names]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A rig whose clock stands still unless it is moved."""
    made = Rig()
    for module in (keeper, renewer, holdings, service, batch):
        monkeypatch.setattr(module, "now", made.now)
    monkeypatch.setattr("tests.support.fakestore.now", made.now)
    yield made
    made.core.metrics.remove_source(made.core.generation)


def test_a_lease_is_renewed_at_a_third_of_its_ttl_from_before_the_request(rig: Rig) -> None:
    entry = rig.hold("a")
    rig.pass_time(2.6)
    assert rig.asked(Verb.RENEW) == []
    rig.pass_time(0.5)
    assert rig.asked(Verb.RENEW) == [b"a"]
    assert 1000 + 2.6 + 9 < entry.deadline <= 1000 + 3.1 + 9
    rig.pass_time(30)
    assert entry.held
    assert 10 <= len(rig.asked(Verb.RENEW)) <= 13


def test_renewals_of_many_come_together(rig: Rig) -> None:
    for number in range(200):
        rig.hold(f"k{number}")
        rig.at += 0.001
    rig.store.calls.clear()
    rig.pass_time(3.2)
    assert len(rig.asked(Verb.RENEW)) == 200
    assert len(rig.store.calls) <= 3


def test_not_kept_alive_it_is_lost_just_before_its_deadline(rig: Rig) -> None:
    entry = rig.hold("a", ttl=2, keep_alive=False)
    rig.pass_time(2 - TELL_EARLIER - 0.02)
    assert entry.held
    rig.pass_time(0.03)
    assert entry.lost is LossReason.EXPIRED
    assert rig.asked(Verb.RENEW) == []
    assert rig.told == [LossReason.EXPIRED]
    rig.pass_time(1)
    assert rig.store.owner("a") == ""  # freed by its tombstone, not before its deadline


def test_without_answers_it_is_lost_in_time_and_once(rig: Rig) -> None:
    def fail(items: Sequence[Item]) -> None:
        raise Gone("cut")

    entry = rig.hold("a", ttl=3)
    rig.store.before = fail
    rig.pass_time(3 - TELL_EARLIER - 0.02)
    assert entry.held
    assert entry.deadline == 1003.0
    assert len(rig.asked(Verb.RENEW)) > 2  # tried again and again
    rig.pass_time(0.03)
    assert entry.lost is LossReason.EXPIRED
    rig.store.before = None
    rig.pass_time(20)
    assert rig.told == [LossReason.EXPIRED]
    assert rig.store.owner("a") == ""


def test_one_failed_renewal_is_made_up_for(rig: Rig) -> None:
    def fail_once(items: Sequence[Item]) -> None:
        rig.store.before = None
        raise Gone("cut")

    entry = rig.hold("a", ttl=3)
    rig.store.before = fail_once
    rig.pass_time(2)
    assert entry.held
    assert entry.deadline > 1003.5
    assert rig.shard.stats.renewals == {"failed": 1, "renewed": 1}


def test_refused_is_lost_for_ever(rig: Rig) -> None:
    entry = rig.hold("a", ttl=3)
    k = entry.row.k
    rig.store.rows[k] = rig.store.rows[k]._replace(owner=b"another")
    rig.pass_time(1.1)
    assert entry.lost is LossReason.STOLEN
    rig.store.rows[k] = rig.store.rows[k]._replace(owner=entry.row.owner)
    calls = len(rig.asked(Verb.RENEW))
    rig.pass_time(10)
    assert entry.lost is LossReason.STOLEN
    assert len(rig.asked(Verb.RENEW)) == calls
    assert rig.store.owner("a") == ""


def test_a_released_entry_is_never_renewed(rig: Rig) -> None:
    entry = rig.hold("a", ttl=3)
    rig.at += 1.0
    for due in rig.keeper._take_due():
        rig.keeper._look_at(due)  # its renewal is due, and not yet made
    assert list(rig.renewer.due) == [entry]
    assert rig.leases.take_out(entry)
    rig.pass_time(10)
    assert rig.asked(Verb.RENEW) == []
    assert not rig.leases.entries


def test_an_answer_to_a_released_or_overdue_entry_changes_nothing(rig: Rig) -> None:
    entry = rig.hold("a", ttl=3)
    rig.at += 3.1
    rig.leases.renewed(entry, Said.DONE, rig.at, 3.0)
    assert entry.deadline == 1003.0
    rig.tick()
    assert entry.lost is LossReason.EXPIRED


def test_a_later_answer_never_shortens(rig: Rig) -> None:
    entry = rig.hold("a", ttl=60)
    rig.leases.renewed(entry, Said.DONE, rig.at, 2.0)
    assert entry.deadline == 1060.0


def test_what_the_server_says_is_left_bounds_the_deadline(rig: Rig) -> None:
    entry = rig.hold("a", ttl=60)
    rig.at += 30
    seen = Seen(entry.row.owner, entry.row.token, 1, b"a", 31.0, 0.0, True)
    rig.leases.renewed(entry, seen, rig.at, 60.0)
    assert entry.deadline == 1061.0


def test_a_tombstone_is_released_with_growing_pauses_until_its_ttl_has_passed(rig: Rig) -> None:
    row = item(Verb.ACQUIRE, "a", ttl=20).row
    rig.leases.bury(rig.shard, 0, row, 20.0)
    rig.pass_time(1)
    early = len(rig.asked(Verb.RELEASE))
    assert early >= 4
    rig.store._acquire(row)  # the request arrives after all
    rig.pass_time(1)
    assert rig.store.owner("a") == ""
    rig.pass_time(17)
    assert len(rig.asked(Verb.RELEASE)) < 30
    assert rig.keeper.tombs() == 1
    rig.pass_time(10)
    assert rig.keeper.tombs() == 0
    assert rig.asked(Verb.RENEW) == []


def test_an_orphan_is_released_at_once(rig: Rig) -> None:
    row = item(Verb.ACQUIRE, "a", ttl=600).row
    rig.leases.bury(rig.shard, 0, row, 600.0)
    rig.pass_time(60)
    rig.store._acquire(row)
    rig.leases.bury(rig.shard, 0, row, 600.0)
    rig.tick()
    assert rig.store.owner("a") == ""


def test_a_lease_whose_handle_is_gone_is_given_up(rig: Rig) -> None:
    entry = rig.hold("a")
    handle = Lease(rig.leases, "a")
    entry.handle = weakref.ref(handle)
    rig.pass_time(4)
    assert entry.held
    del handle
    rig.pass_time(4)
    assert not entry.held
    assert rig.store.owner("a") == ""


def test_a_strangers_lock_fails_only_its_own_lease(rig: Rig) -> None:
    entries = [rig.hold(name, ttl=3) for name in "abc"]
    rig.store.rows_locked = {entries[1].row.k}
    rig.pass_time(3)
    assert [entry.held for entry in entries] == [True, False, True]


@dataclass
class Caller:
    """One who waits."""

    number: int
    name: tuple[int, bytes] = (1, b"k")
    waiter: Waiter = field(default_factory=Waiter)
    shard: Any = None
    polls: bool = False
    gone: bool = False


def entry_of(caller: Caller) -> Entry:
    row = item(Verb.ACQUIRE, "k", str(caller.number)).row
    return Entry(
        row,
        table=0,
        shard=caller.shard,
        key=b"k",
        ttl=9,
        deadline=now() + 9,
        granted_at=now(),
        keep_alive=False,
        thing=0,
    )


def test_the_first_leads_and_the_others_queue_in_order() -> None:
    queues, callers = Queues(), [Caller(number) for number in range(4)]
    places = [queues.enter(caller, wait=True, max_waiters=None) for caller in callers]
    assert places == [Place.LEAD, Place.QUEUED, Place.QUEUED, Place.QUEUED]
    for number, caller in enumerate(callers):
        assert [queues.leads(other) for other in callers] == [other is caller for other in callers]
        held = entry_of(caller)
        queues.granted(caller, held)
        assert not any(queues.leads(other) for other in callers)
        assert queues.holder((1, b"k")) is held
        queues.freed(held)
        if number < 3:
            assert not callers[number + 1].waiter._lock.locked() or queues.leads(callers[number + 1])
    assert not queues._queues


def test_who_would_not_wait_asks_only_where_the_answer_is_not_known() -> None:
    queues, lead, other = Queues(), Caller(0), Caller(1)
    assert queues.enter(lead, wait=True, max_waiters=None) is Place.LEAD
    assert queues.enter(other, wait=False, max_waiters=None) is Place.LEAD  # the lead knows no more
    lead.polls = True
    assert queues.enter(other, wait=False, max_waiters=None) is Place.BUSY
    held = entry_of(lead)
    queues.granted(lead, held)
    assert queues.enter(other, wait=False, max_waiters=None) is Place.BUSY
    queues.freed(held)


def test_too_many_waiters() -> None:
    queues = Queues()
    queues.enter(Caller(0), wait=True, max_waiters=1)
    queues.enter(Caller(1), wait=True, max_waiters=1)
    with pytest.raises(Overloaded):
        queues.enter(Caller(2), wait=True, max_waiters=1)


@pytest.mark.parametrize("seed", range(100))
def test_a_queue_has_a_holder_or_a_lead_after_every_block(seed: int) -> None:
    dice, queues = random.Random(seed), Queues()
    inside: dict[int, Caller] = {}
    held: dict[int, Entry] = {}
    number = 0
    for _ in range(300):
        act = dice.random()
        leads = [caller for caller in inside.values() if queues.leads(caller)]
        assert len(leads) <= 1
        if act < 0.4:
            number += 1
            caller = Caller(number)
            if queues.enter(caller, wait=True, max_waiters=None) is not Place.BUSY:
                inside[number] = caller
        elif act < 0.6 and leads:
            caller = leads[0]
            held[caller.number] = entry_of(caller)
            queues.granted(caller, held[caller.number])
            queues.leave(caller)
            del inside[caller.number]
        elif act < 0.8 and inside:
            caller = inside.pop(dice.choice(list(inside)))
            queues.leave(caller)
        elif held:
            queues.freed(held.pop(dice.choice(list(held))))
        for queue in queues._queues.values():
            assert queue.held is not None or queue.lead is not None
    for entry in held.values():
        queues.freed(entry)
    for caller in inside.values():
        queues.leave(caller)
    assert not queues._queues
