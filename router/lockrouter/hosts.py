"""The hosts of a shard that has several: each is asked for ever what it is, and exactly one may be the primary.

1. One task per host reads it every `role_check` seconds, on a connection of its own, so that a silent host keeps nobody
   waiting; the host in use is read by the control session instead.
2. A host that says itself that it is not the primary loses what this router holds there.
3. A host whose term is lower than one seen on any of them missed something: it is no candidate, and no rival.
4. Of the others exactly one may be writable. A second one, even for a moment, closes the shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from lockrouter.backoff import jittered
from lockrouter.deadline import now
from lockrouter.protocol.effects import SLEEP, Operation
from lockrouter.reading import Reading, look_over, read
from lockrouter.session import Answered, Garbled, Gone, Session, Silent, State

if TYPE_CHECKING:
    from lockrouter.config import Endpoint
    from lockrouter.shard import Shard

__all__ = ["Hosts", "name_of"]

Failure = Gone | Silent | Answered


class _Report(NamedTuple):
    """What came of asking a host last: a reading, or why there is none."""

    reading: Reading | None
    failure: Failure | None


def name_of(endpoint: Endpoint) -> str:
    """A host as operators know it."""
    return f"{endpoint.host}:{endpoint.port}"


class Hosts:
    """What the hosts of one shard said last. Used by the background thread alone, but for `answering`."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._reports: dict[Endpoint, _Report] = {}
        self._sessions: dict[Endpoint, Session] = {}
        # The host that the control session reads; None: the primary is being looked for.
        self.used: Endpoint | None = None
        # The highest term seen on any host, and the server that started it.
        self.highest_term, self.highest_identity = 0, b""

    @property
    def several(self) -> bool:
        """False: there is nothing to choose."""
        return len(self._shard.endpoints) > 1

    def operations(self) -> dict[str, Callable[[], Operation[None]]]:
        """The endless operations that ask, by name; none for a single host."""
        if not self.several:
            return {}
        return {f"host-{number}": self._asking(end) for number, end in enumerate(self._shard.endpoints)}

    def _asking(self, endpoint: Endpoint) -> Callable[[], Operation[None]]:
        return lambda: self._ask_for_ever(endpoint)

    def _ask_for_ever(self, endpoint: Endpoint) -> Operation[None]:
        router, breaker = self._shard.config.router, self._shard.config.breaker
        while True:
            pause = router.role_check
            if self.used == endpoint:
                self._drop(endpoint)
            else:
                try:
                    reading = yield from self._ask(endpoint)
                except (Gone, Silent, Answered) as error:
                    self._heard(endpoint, None, error)
                    pause = max(pause, breaker.probe_after)
                else:
                    self._heard(endpoint, reading, None)
            yield (SLEEP, now() + jittered(pause, spread=0.1), None)

    def _ask(self, endpoint: Endpoint) -> Operation[Reading]:
        session = self._sessions.pop(endpoint, None)
        if session is not None:
            try:
                return (yield from self._read(endpoint, session))
            except Gone:
                pass  # closed while it was idle; that says nothing of the host
        session = yield from self._shard.open_control(endpoint)
        try:
            yield from look_over(session, self._until())
        except BaseException:
            session.die()
            raise
        return (yield from self._read(endpoint, session))

    def _read(self, endpoint: Endpoint, session: Session) -> Operation[Reading]:
        try:
            reading = yield from read(session, self._until())
        except BaseException:
            session.die()
            raise
        session.state = State.IDLE
        self._sessions[endpoint] = session
        return reading

    def _until(self) -> float:
        return now() + self._shard.config.pool.connect_timeout

    def _drop(self, endpoint: Endpoint) -> None:
        session = self._sessions.pop(endpoint, None)
        if session is not None:
            session.close()

    # -- what was said ------------------------------------------------------------------------------------------

    def _heard(self, endpoint: Endpoint, reading: Reading | None, failure: Failure | None) -> None:
        if self.used != endpoint:  # of the host that came into use meanwhile the control session knows more
            self.note(endpoint, reading, failure)

    def note(self, endpoint: Endpoint, reading: Reading | None = None, failure: Failure | None = None) -> None:
        """Remember what a host said, or that it said nothing, and act on it."""
        shard = self._shard
        self._reports[endpoint] = _Report(reading, failure)
        if reading is not None:
            self.see_term(reading)
            if reading.not_primary is not None:
                shard.lose_on(reading.incarnation[0])
        if self._candidate(endpoint) is not None:
            shard.breaker.hasten()
            shard.poke_control()
        elif self.used is None:
            shard.poke_control()

    def see_term(self, reading: Reading) -> None:
        """Remember the highest term, and who started it."""
        if reading.term > self.highest_term:
            self.highest_term, self.highest_identity = reading.term, reading.term_identity

    def leave(self, why: str) -> None:
        """Look for the primary: every host is to be asked now, once."""
        if self.used is not None:
            self.used = None
            self._shard.search(why)
            self._shard.poke_hosts()

    def use(self, endpoint: Endpoint) -> None:
        """The control session reads this host from now on."""
        self.used = endpoint
        self._reports.pop(endpoint, None)

    def _candidate(self, endpoint: Endpoint) -> Reading | None:
        """What a host said that could be the primary."""
        report = self._reports.get(endpoint)
        reading = report.reading if report is not None else None
        if reading is None or reading.not_primary is not None or reading.term < self.highest_term:
            return None
        return reading

    @property
    def asked(self) -> bool:
        """True when every host has said something, or failed to."""
        return len(self._reports) == len(self._shard.endpoints)

    def primary(self) -> Endpoint:
        """The one host that said it is the writable primary.

        Raises:
            Answered: there are two, or none among those that answer.
            Gone, Silent: none answers.
        """
        found = [endpoint for endpoint in self._shard.endpoints if self._candidate(endpoint) is not None]
        if len(found) > 1:
            raise Answered(0, _two(*found[:2]))
        if found:
            return found[0]
        if self.answering() is not None:
            raise Answered(0, f"no host is the writable primary: {self._said()}")
        for report in self._reports.values():
            if report.failure is not None:
                raise report.failure
        raise Gone("no host was asked")

    def rival(self) -> tuple[str, Reading] | None:
        """What a second host said that claims to be the primary beside the one in use, and what to call that."""
        for endpoint in self._shard.endpoints:
            if endpoint != self.used and (reading := self._candidate(endpoint)) is not None and self.used is not None:
                return _two(self.used, endpoint), reading
        return None

    def answering(self) -> str | None:
        """What a host said that answers, and so may be granting, or know who does; None: all are silent."""
        for endpoint, report in tuple(self._reports.items()):
            if report.reading is not None or isinstance(report.failure, Answered | Garbled):
                return f"the primary does not answer, another host does: {name_of(endpoint)}"
        return None

    def _said(self) -> str:
        return "; ".join(f"{name_of(endpoint)}: {self._why(endpoint)}" for endpoint in self._shard.endpoints)

    def _why(self, endpoint: Endpoint) -> str:
        report = self._reports.get(endpoint)
        if report is None:
            return "did not answer in time"
        if report.reading is None:
            return str(report.failure)
        return report.reading.not_primary or (
            f"an older server: its term is {report.reading.term}, {self.highest_term} was seen before"
        )

    def sessions(self) -> list[Session]:
        """The sessions kept at present."""
        return list(self._sessions.values())

    def close(self) -> None:
        """Close them."""
        for session in self.sessions():
            session.close()


def _two(first: Endpoint, second: Endpoint) -> str:
    return f"two writable primaries, {name_of(first)} and {name_of(second)}: exactly one may grant; fence the other"
