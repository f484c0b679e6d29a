"""What one router is made of: the map, the gates, the shards, and the background that watches over held rows."""

from __future__ import annotations

import logging
import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lockrouter import tokens
from lockrouter.deadline import now
from lockrouter.errors import LockLost, LossReason, RouterClosed
from lockrouter.gate import Gates, Handle, Hold, Party, Request
from lockrouter.leases.service import Leases
from lockrouter.metrics import SEGMENTS, Metrics, multiprocess
from lockrouter.owners import describe
from lockrouter.protocol.effects import SLEEP, Operation, drive
from lockrouter.protocol.packets import IN_TRANSACTION, Rows, is_off
from lockrouter.routing import Routing, fingerprint, key_hash
from lockrouter.session import Gone, Session, Silent, State
from lockrouter.shard import Shard
from lockrouter.watcher import Task, Watcher

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

    from lockrouter.config import ResolvedClass, RouterConfig
    from lockrouter.routing import Address

__all__ = ["Core", "Overdue"]

_log = logging.getLogger("lockrouter")

_BUSY, _HOLDING = State.BUSY, State.HOLDING
_LOOK_EVERY = 0.05
_LOOK_AFTER = 0.05
_MEND_EVERY = 1.0
_LATE = 0.03
"""Seconds past its end after which a wait for a reply is ended from outside; signals may have kept it alive."""

# Degraded locks of one topology exclude each other in the whole process, whatever router took them.
_local_gates: weakref.WeakValueDictionary[bytes, Gates] = weakref.WeakValueDictionary()
_cores: weakref.WeakSet[Core] = weakref.WeakSet()


class Overdue(NamedTuple):
    """A lock that is held for longer than its class's `max_hold`, as `on_overdue` is told of it."""

    key: bytes
    address: Address
    held_for: float
    """Seconds."""
    holder: str
    """The task, greenlet or thread that took it."""
    killed: bool
    """True where the class says `kill`: the lock is lost."""


class Core:
    """Everything of one router but the verbs."""

    def __init__(
        self,
        config: RouterConfig,
        registry: CollectorRegistry,
        on_overdue: Callable[[Overdue], object] | None = None,
    ) -> None:
        self.config = config
        self._on_overdue = on_overdue
        self.routing = Routing(config)
        buckets = config.topology.buckets
        # Which of the equal parts of the bucket space each bucket lies in.
        self.segments = bytes(bucket * SEGMENTS // buckets for bucket in range(buckets))
        self.class_of = config.rules.of
        self._patience = config.router.ghost_timeout - 0.5
        self._registry = registry
        self._lock = threading.Lock()
        self._build()
        _cores.add(self)

    def _build(self) -> None:
        config = self.config
        self.closed = False
        self.started = False
        self.generation = object()
        self.gates = Gates()
        self.local_gates = _local_gates.setdefault(fingerprint(config.topology), Gates())
        before = getattr(self, "shards", {})
        self.shards = {
            shard.id: Shard(config, shard, on_demoted=self._demoted, like=before.get(shard.id))
            for shard in config.shards
        }
        self.leases = Leases(self)
        # Rows whose ROLLBACK is on its way, and the session it went out on: the next request should follow it there.
        self.affinity: dict[int, Session] = {}
        # What dropped handles hold, and what an interrupt has left half released; see `reap`.
        self.orphans: deque[tuple[Hold, bytes]] = deque()
        self.unfinished: deque[Hold] = deque()
        # What is to be done about transactions whose context manager was dropped inside its block.
        self.forsaken: deque[Callable[[], None]] = deque()
        self._limited = any(rule.max_hold is not None for rule in config.classes)
        self._watcher: Watcher | None = None
        self.metrics = Metrics.of(self._registry)

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Have the background thread run; connections are opened as they are needed. Idempotent."""
        with self._lock:
            if self.closed:
                raise RouterClosed("the router is closed")
            if self.started:
                return
            watcher = self._watcher = Watcher(f"lockrouter-{self.config.topology.name}")
            tasks = [task for shard in self.shards.values() for task in shard.tasks(watcher)]
            tasks.append(Task("lockrouter-look", self._look))
            tasks += self.leases.tasks(watcher)
            if multiprocess():
                tasks.append(Task("lockrouter-metrics", self._fold_often))
            self.metrics.add_source(self.generation, self._fold)
            watcher.start(tasks)
            self.started = True

    def ready(self) -> None:
        """What every call does first: the background runs, and what was dropped is released."""
        if not self.started or self.closed:
            self.start()
        if self.orphans:
            self.reap()

    def close(self) -> None:
        """Refuse callers, wake waiters, wait `close_timeout` for holders, then end everything. Idempotent."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        self.gates.close()
        self.local_gates.wake_all()
        self.leases.queues.wake_all()
        self._interrupt_waiters()
        until = now() + self.config.router.close_timeout
        pause = threading.Event()
        while self._occupied() and now() < until:
            pause.wait(0.005)
        for hold in self.gates.holds():
            self.lose_hold(hold, LossReason.ROUTER_CLOSED)
            if hold.session is not None:
                hold.session.die()
            if hold.degraded:
                self.local_gates.leave(hold)  # another router of this process may have the row now
        self.leases.end(until)
        if self._watcher is not None:
            self._watcher.close(self.config.pool.connect_timeout + 1.0)
            self.metrics.remove_source(self.generation)
        self.leases.close()
        for shard in self.shards.values():
            shard.close()

    def _occupied(self) -> bool:
        """True while somebody holds something, or a statement is to be killed yet."""
        return bool(self.gates.holds() or self.leases.busy or any(shard.keeper.kills for shard in self.shards.values()))

    def _interrupt_waiters(self) -> None:
        """Wake who waits for a session or at a server, and leave no statement behind there."""
        for shard in self.shards.values():
            shard.pool.close()
            shard.interrupt_waiters()

    def disown(self) -> None:
        """In a child process: let go of all that is the parent's, ending nothing of it; nothing here can fail."""
        self.generation = object()
        for shard in self.shards.values():
            for session in (*shard.pool.sessions, *shard.keeper.sessions()):
                session.forget()
        for session in self.leases.sessions():
            session.forget()
        if self._watcher is not None:
            self._watcher.forget()

    def forked(self) -> None:
        """In a child process, disowned: begin afresh at the next call, with what was read of files before the fork."""
        closed = self.closed
        self._lock = threading.Lock()
        self.metrics.forked()
        self._build()
        self.closed = closed

    # -- words --------------------------------------------------------------------------------------------------

    def shown(self, key: bytes) -> str:
        """A key as logs and errors may show it: its hash, unless `log_keys` is on."""
        return repr(key) if self.config.router.log_keys else key_hash(key)

    def storm(self) -> bool:
        """True when two shards or more, owning `storm_ratio` of the buckets, do not answer."""
        shut = [shard for shard in self.shards.values() if not shard.breaker.closed]
        if len(shut) < 2:
            return False
        return sum(shard.buckets for shard in shut) >= self.config.router.storm_ratio * self.config.topology.buckets

    # -- release ------------------------------------------------------------------------------------------------

    def give_up(self, request: Request) -> None:
        """Release what a request has got, where no handle was made of it."""
        hold, request.hold = request.hold, None
        if hold is not None and self.gates.uncount(hold, request.key):
            self.free(hold)

    def free(self, hold: Hold) -> None:
        """Free the row of a hold without handles: handed over, or its ROLLBACK on the way, or its session closed."""
        try:
            self._free(hold)
        except BaseException:
            self.unfinished.append(hold)
            raise

    def let_go(self, hold: Hold, handle: Handle) -> bool:
        """Release the usual hold: of one row through one session, one handle, not known to be lost; with nobody behind
        it, or with somebody who may have the row without the server.

        False: it is not that, and nothing is done. Raises: an interrupt only.
        """
        session = hold.session
        if (
            session is None
            or hold.count != 1
            or hold.party is not None
            or hold.shared
            or hold.lost is not None
            or session.state is not _HOLDING
            or handle.generation is not self.generation
        ):
            return False
        at = now()
        if at > session.safe_from + self._patience:
            return False
        slot = hold.slot
        self.affinity[slot] = session
        try:
            shard: Shard = hold.shard
            if self.gates.release(hold, handle):
                with session.mutex:
                    if session.hold is hold and session.state is _HOLDING:
                        session.last_slots = (slot,)
                        session.send_rollback(self._settled, at)
                shard.pool.give_back(session, hold.lease)
            else:
                self.affinity.pop(slot, None)
                if not self._hand_over(hold, session, at, handle):
                    return False
            shard.stats.row.left.append(at - hold.granted_at)
        except BaseException:
            if not handle.attached:
                self.unfinished.append(hold)
            raise
        # The context's record of it may outlive it; that must not keep the task alive whose context this is.
        hold.thing = None
        return True

    def _free(self, hold: Hold) -> None:
        shard: Shard = hold.shard
        held = now() - hold.granted_at
        if hold.session is None:
            shard.stats.local.released(held)
            self.local_gates.leave(hold)
            self.gates.leave(hold)
            return
        shard.stats.row.released(now() - hold.party.granted_at if hold.degraded and hold.party else held)
        if hold.party is not None:
            self._roll_back(hold.party.holds, hold.party, hold.session, shard)
            return
        if self.gates.has_heir(hold) and self._hand_over(hold, hold.session, now()):
            return
        self._roll_back((hold,), hold, hold.session, shard)

    def _hand_over(self, hold: Hold, session: Session, at: float, handle: Handle | None = None) -> bool:
        """Pass the row to the next local waiter, where the server can be shown to still have it for this session; the
        handle, where there is one, is released in the same step. `at` is now.
        """
        options = self.config.router
        if hold.passes >= options.handover_limit or at - hold.row_at >= options.handover_time:
            return False
        if at > session.safe_from + options.ghost_timeout - 1.5:
            return False
        with session.mutex:
            if session.state is not _HOLDING or session.unread or session.wire.readable():
                return False
            return self.gates.hand_over(hold, handle)

    def _roll_back(self, holds: Sequence[Hold], anchor: Hold | Party, session: Session, shard: Shard) -> None:
        """Free all rows of a session, then leave their gates, latest first."""
        try:
            try:
                with session.mutex:
                    if session.hold is anchor and session.state is _HOLDING:
                        self.send_rollback(session, holds)
            finally:
                shard.pool.give_back(session, holds[0].lease)
        finally:
            for hold in reversed(holds):
                if hold.degraded:
                    self.local_gates.leave(hold)
                self.gates.leave(hold)

    def send_rollback(self, session: Session, holds: Sequence[Hold]) -> None:
        """Put the ROLLBACK of these rows on its way; their next requests follow it on this session."""
        if holds[0].shared:
            # Several readers of a row let go one after the other; one memory per row cannot hold them all.
            session.hold = None
            try:
                drive(session.rollback(now() + self.config.pool.connect_timeout))
            except (Gone, Silent):
                pass  # closed: the server frees the row when it sees the end of the stream
            return
        for hold in holds:
            self.affinity[hold.slot] = session
        session.last_slots = tuple(hold.slot for hold in holds)
        session.send_rollback(self._settled)

    def _settled(self, session: Session) -> None:
        """The server has executed the ROLLBACK of a session: its last rows need no memory of it any more."""
        for slot in session.last_slots:
            if self.affinity.get(slot) is session:
                self.affinity.pop(slot, None)

    def reap(self) -> None:
        """Release what dropped handles held, and finish releases that were interrupted."""
        while self.unfinished:
            try:
                self._finish(self.unfinished.popleft())
            except IndexError:
                return
        while self.forsaken:
            try:
                self.forsaken.popleft()()
            except IndexError:
                return
        while self.orphans:
            try:
                hold, key = self.orphans.popleft()
            except IndexError:
                return
            if self.gates.uncount(hold, key):
                if hold.shared and hold.session is not None:
                    # A reader's release waits for the server, and nothing may wait here: closing frees the row, too.
                    hold.session.die()
                self.free(hold)

    def _finish(self, hold: Hold) -> None:
        if hold.party is not None and hold.party.open:
            return
        holds = hold.party.holds if hold.party is not None else [hold]
        session = hold.session
        if session is not None and session.lease == hold.lease and session.hold in (None, hold, hold.party):
            session.die()
            hold.shard.pool.give_back(session, hold.lease)
        for one in reversed(holds):
            self.local_gates.leave(one)
            self.gates.leave(one)

    # -- loss ---------------------------------------------------------------------------------------------------

    def loss_of(self, hold: Hold) -> LossReason | None:
        """Why the hold is lost, by what is known and by the clock, or None; no I/O."""
        session = hold.session
        if hold.lost is None and session is not None and hold.count:
            reason = session.lost_reason(self.config.router.ghost_timeout)
            if reason is not None and session.hold is (hold.party or hold):
                self.lose(session, reason)
        return hold.lost

    def ask_server(self, hold: Hold) -> tuple[LossReason | None, int]:
        """One trip under the hold: why it is lost, or None and the server's clock in microseconds."""
        session, shard = hold.session, hold.shard
        assert session is not None
        with session.mutex:
            if session.hold is not (hold.party or hold) or session.state is not _HOLDING:
                return LossReason.CLOSED, 0
            try:
                reply = drive(session.exchange(session.dialect.check(), now() + self.config.pool.connect_timeout))
            except Gone:
                return session.end, 0
            except Silent:
                return LossReason.SILENT, 0
            session.state = _HOLDING
        if not isinstance(reply, Rows) or not reply.status & IN_TRANSACTION:
            return LossReason.TRANSACTION_ENDED, 0
        if len(reply.rows) != 1 or not is_off(reply.rows[0][1]) or shard.demoted:
            return LossReason.DEMOTED, 0
        return None, tokens.micros(reply.rows[0][0] or b"")

    def read_clock_again(self, hold: Hold, key: bytes) -> None:
        """Give `key` a token of its own after the passes of this hold are used up.

        Raises:
            LockLost: the hold turned out to be lost.
        """
        session = hold.session
        assert session is not None
        reason, clock = self.ask_server(hold)
        rights = hold.shard.rights
        if reason is None and not (
            rights is not None
            and rights.incarnation == session.incarnation
            and rights.lowest(session.sent_at) <= clock < rights.clock_high
            and tokens.base_token(rights.term, clock) > hold.base
        ):
            reason = LossReason.DEMOTED
        if reason is not None:
            self.lose_hold(hold, reason)
            raise LockLost(f"the lock is lost: {reason.value}", key=key, reason=reason)
        self.gates.rebase(hold, key, tokens.base_token(rights.term, clock))

    def lose(self, session: Session, reason: LossReason) -> None:
        """Mark whoever holds through `session` as lost, and tell."""
        for hold in self.gates.lose(session, reason):
            self._tell(hold, reason)

    def lose_hold(self, hold: Hold, reason: LossReason) -> None:
        """Mark this hold as lost, and tell."""
        if self.gates.lose_hold(hold, reason):
            self._tell(hold, reason)

    def _tell(self, hold: Hold, reason: LossReason) -> None:
        hold.shard.stats.count_lost("local" if hold.local else hold.mode, reason.value)
        _log.warning("lock lost: row %d on shard %s: %s", hold.slot, hold.shard.id, reason.value)
        for found in hold.callbacks:
            told = found()
            if told is not None:
                self._call_back(told.callback, reason, "lockrouter-on-lost")

    def _call_back(self, callback: Callable[[Any], object], what: object, name: str) -> None:
        try:
            threading.Thread(target=callback, args=(what,), name=name, daemon=True).start()
        except RuntimeError:
            _log.exception("no thread could be started for a callback (%s)", name)

    def limit(self, hold: Hold, rule: ResolvedClass) -> None:
        """Watch over how long a hold lasts, where its class bounds that."""
        if rule.max_hold is not None:
            hold.max_hold, hold.kill = rule.max_hold, rule.kill

    def _demoted(self, shard: Shard, reason: LossReason, concerns: Callable[[bytes], bool]) -> None:
        """Lose what is held on the shard's servers of those identities."""
        for session in tuple(shard.pool.sessions):
            if session.hold is not None and concerns(session.incarnation[0]):
                self.lose(session, reason)
        for hold in self.gates.holds():
            if hold.shard is shard and hold.session is None and not hold.degraded and concerns(hold.server):
                self.lose_hold(hold, reason)

    # -- background ---------------------------------------------------------------------------------------------

    def _look(self) -> Operation[None]:
        """Twenty times a second: find held sessions that ended, ping those that are due, release what was dropped."""
        mended_at = 0.0
        while True:
            self.reap()
            for shard in self.shards.values():
                shard.stats.settle()
            self._look_at_limits()
            for shard in self.shards.values():
                if shard.interrupting:
                    shard.interrupting = False
                    shard.interrupt_waiters()
            if now() - mended_at > _MEND_EVERY:
                mended_at = now()
                self._mend()
            held = [
                session
                for shard in self.shards.values()
                for session in tuple(shard.pool.sessions)
                if (hold := session.hold) is not None and now() - hold.granted_at > _LOOK_AFTER
            ]
            if held:
                self._look_at(held)
            yield (SLEEP, self._end_late_waits(), None)

    def _mend(self) -> None:
        """Finish what interrupts may have left half done."""
        self.gates.mend()
        self.local_gates.mend()
        for shard in self.shards.values():
            shard.pool.mend()

    def _end_late_waits(self) -> float:
        """End waits for replies that should be over; returns when to look again."""
        at = now()
        next_look = at + _LOOK_EVERY
        for shard in self.shards.values():
            for session in tuple(shard.pool.sessions):
                if session.state is _BUSY:
                    due = session.until + _LATE
                    if at >= due:
                        session.wire.interrupt()
                    elif due < next_look:
                        next_look = due
        return next_look

    def _look_at_limits(self) -> None:
        """Warn of locks held for half their class's `max_hold`; end those that pass it, where the class says so."""
        if not self._limited:
            return
        for hold in self.gates.holds():
            if hold.max_hold is None or hold.lost is not None:
                continue
            age = now() - hold.granted_at
            if age > hold.max_hold / 2 and not hold.overdue:
                hold.overdue = True
                _log.warning(
                    "row %d on shard %s is held for %.1f s of %.1f", hold.slot, hold.shard.id, age, hold.max_hold
                )
            if age > hold.max_hold and not hold.told:
                hold.told = True
                self._end_overdue(hold, age)

    def _end_overdue(self, hold: Hold, age: float) -> None:
        session = hold.session
        killed = hold.kill and session is not None
        if session is not None and killed:
            self.lose(session, LossReason.KILLED)
            session.die()
            hold.shard.kill(session)  # what may still run in it would keep the row until it ends
        if self._on_overdue is not None:
            told = Overdue(hold.key, self.routing.route(hold.key), age, describe(hold.thing), killed)
            self._call_back(self._on_overdue, told, "lockrouter-on-overdue")

    def _look_at(self, held: list[Session]) -> None:
        readable = _readable(held)
        third = self.config.router.ghost_timeout / 3
        for session in held:
            if not session.mutex.acquire(blocking=False):
                continue  # its holder is talking to the server just now, and will see for itself
            try:
                if session.hold is None:
                    continue
                alive = session.state is _HOLDING
                if alive and session in readable:
                    # Only the answer to our own ping may come: anything else says that the session ended.
                    alive = session.drain()
                if alive and session.ping_sent_at is None and now() - session.safe_from > third:
                    alive = session.send_ping()
                session.attend()
                reason = session.lost_reason(self.config.router.ghost_timeout)
            finally:
                session.mutex.release()
            if not alive or reason is not None:
                self.lose(session, reason or LossReason.CLOSED)

    def _fold_often(self) -> Operation[None]:
        while True:
            self.metrics.fold()
            yield (SLEEP, now() + 1.0, None)

    def _fold(self, metrics: Metrics) -> None:
        """Bring the metrics of this router up to date; called at a scrape."""
        holds = self.gates.holds()
        waiting: dict[str, int] = dict.fromkeys(self.shards, 0)
        for slot, count in self.gates.waiters():
            waiting[self.routing.shard_of_bucket(slot // self.config.topology.rows_per_bucket)] += count
        leased, queued = self.leases.held_by_shard(), self.leases.waiting_by_shard()
        for shard in self.shards.values():
            mine = [hold for hold in holds if hold.shard is shard]
            for mode in ("row", "local", "transaction"):
                held = sum(mode == ("local" if hold.local else hold.mode) for hold in mine)
                metrics.level(metrics.held, (shard.id, mode), held)
            metrics.level(metrics.held, (shard.id, "lease"), leased.get(shard.id, 0))
            metrics.level(metrics.waiters, (shard.id,), waiting[shard.id] + queued.get(shard.id, 0))
            metrics.level(metrics.overdue, (shard.id,), sum(hold.overdue for hold in mine))
            self._fold_shard(metrics, shard)
        self._fold_segments(metrics)

    def _fold_segments(self, metrics: Metrics) -> None:
        rows = [shard.stats.row for shard in self.shards.values()]
        for segment in range(SEGMENTS):
            label, name = str(segment), (self.generation, "segment", segment)
            acquires = sum(stats.segment_acquires[segment] for stats in rows)
            if acquires:
                metrics.count((*name, "n"), metrics.segment_acquires.labels(label), acquires)
                waited = sum(stats.segment_wait[segment] for stats in rows)
                metrics.count((*name, "s"), metrics.segment_wait.labels(label), waited)

    def _fold_shard(self, metrics: Metrics, shard: Shard) -> None:
        who = self.generation
        for state, number in shard.pool.counts().items():
            metrics.level(metrics.pool, (shard.id, state), number)
        metrics.level(metrics.pool_limit, (shard.id,), shard.pool.size)
        metrics.level(metrics.breaker, (shard.id,), shard.breaker.state, add=False)
        rights = shard.rights
        if rights is not None:
            metrics.level(metrics.term, (shard.id,), rights.term, add=False)
            metrics.offset.labels(shard.id).set(rights.offset)
        for (mode, reason), number in tuple(shard.stats.lost.items()):
            name = (who, shard.id, "lost", mode, reason)
            metrics.count(name, metrics.lost.labels(shard.id, mode, reason), number)
        metrics.count((who, shard.id, "collisions"), metrics.collisions.labels(shard.id), shard.stats.collisions)
        modes = {"row": shard.stats.row, "local": shard.stats.local, "transaction": shard.stats.transaction}
        modes["lease"] = shard.stats.lease
        for outcome, number in tuple(shard.stats.renewals.items()):
            metrics.count((who, shard.id, "renewals", outcome), metrics.renewals.labels(shard.id, outcome), number)
        for mode, stats in modes.items():
            outcomes, waits, wait_sum, holding, hold_sum = stats.copy()
            for outcome, number in outcomes.items():
                metrics.count((who, shard.id, mode, outcome), metrics.acquires.labels(shard.id, mode, outcome), number)
            metrics.spread((who, shard.id, mode, "w"), metrics.wait.labels(shard.id, mode), waits, wait_sum)
            metrics.spread((who, shard.id, mode, "h"), metrics.hold.labels(shard.id, mode), holding, hold_sum)


def _readable(sessions: list[Session]) -> set[Session]:
    """The sessions with something to read: in the kernel, or, under TLS, in the library."""
    poll = select.poll()
    by_descriptor: dict[int, Session] = {}
    found: set[Session] = set()
    for session in sessions:
        descriptor = session.wire.sock.fileno()
        if descriptor < 0 or session.wire.buffered():
            found.add(session)
        else:
            by_descriptor[descriptor] = session
            poll.register(descriptor, select.POLLIN)
    return found | {by_descriptor[descriptor] for descriptor, _ in poll.poll(0)}


def _after_fork_in_child() -> None:
    _local_gates.clear()
    cores = tuple(_cores)
    for core in cores:
        core.disown()
    for core in cores:
        core.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
