"""The handle of a lease: what a caller holds between the grant and the release, without any connection."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from lockrouter.deadline import now
from lockrouter.errors import ConfigError, LockLost, LockRouterError, LossReason, NotHeld
from lockrouter.leases.entry import Entry

if TYPE_CHECKING:
    from lockrouter.config import ResolvedClass
    from lockrouter.leases.service import Leases

__all__ = ["MAX_PAYLOAD", "MAX_TTL", "MIN_TTL", "Lease", "checked_payload", "checked_ttl", "require_lease_mode"]

MIN_TTL, MAX_TTL = 1.0, 7 * 86400.0
MAX_PAYLOAD = 1024


def checked_ttl(ttl: float) -> float:
    """Return a lease's ttl in seconds.

    Raises:
        TypeError: not a number (`bool` is none).
        ValueError: not from 1 second to 7 days.
    """
    if isinstance(ttl, bool) or not isinstance(ttl, (int, float)):
        raise TypeError(f"ttl: expected seconds as int or float, got {ttl!r}")
    if math.isnan(ttl) or not MIN_TTL <= ttl <= MAX_TTL:
        raise ValueError(f"ttl: expected 1 second to 7 days, got {ttl!r}")
    return float(ttl)


def checked_payload(payload: bytes) -> bytes:
    """Return what is stored with a lease.

    Raises:
        TypeError: not bytes.
        ValueError: more than 1,024 of them.
    """
    if not isinstance(payload, bytes):
        raise TypeError(f"payload: expected bytes, got {type(payload).__name__}")
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"payload: at most {MAX_PAYLOAD} bytes, got {len(payload)}")
    return payload


def require_lease_mode(rule: ResolvedClass) -> None:
    """Refuse a key whose class is for row locks; keys of no class may have both.

    Raises:
        ConfigError: it is.
    """
    if rule.prefix and rule.mode != "lease":
        raise ConfigError(f"the class of this key has mode {rule.mode!r}; a lease was asked for", field="mode")


class Lease:
    """A held lease, and its own context manager: leaving the block releases it.

    It needs no connection while it is held, and lives on over a restart of the server. Its holder has it until its own
    deadline, ttl seconds after the request for it, or for its last renewal, was sent; in the background it is renewed
    at a third of its ttl. It is released once, by any thread. One that is collected unreleased is given up then, with a
    `ResourceWarning`.
    """

    __slots__ = ("__weakref__", "_generation", "_held_as", "_leases", "_open", "callbacks", "key")

    def __init__(self, leases: Leases, key: str | bytes) -> None:
        self._leases = leases
        self._generation = leases.generation
        self._held_as: Entry | None = None
        self.callbacks: tuple[Callable[[LossReason], object], ...] = ()
        # True from the grant until it is released, or a release has said that it was lost.
        self._open = False
        self.key = key

    def attach(self, entry: Entry) -> None:
        """Let the handle have what was taken for it."""
        self._held_as = entry
        self._open = True

    @property
    def _entry(self) -> Entry:
        assert self._held_as is not None
        return self._held_as

    @property
    def token(self) -> int:
        """The fencing token: greater than that of every earlier holder of this key."""
        return self._entry.row.token

    @property
    def owner(self) -> str:
        """The id of this very acquisition, as operators see it."""
        return self._entry.row.owner.hex()

    @property
    def ttl(self) -> float:
        """Seconds from a request to the deadline it brings."""
        return self._entry.ttl

    def remaining(self) -> float:
        """Seconds to the holder's own deadline, counted from before the request was sent; 0.0 when it is lost.

        On the local monotonic clock, so it is never more than the server would say.
        """
        if not self._open or self._loss() is not None:
            return 0.0
        return max(0.0, self._entry.deadline - now())

    @property
    def lost(self) -> bool:
        """True once the lease is known to have ended under its holder, at its own deadline at the latest; no I/O."""
        return self._loss() is not None

    def _loss(self) -> LossReason | None:
        if self._generation is not self._leases.generation:
            return LossReason.FORKED
        return self._leases.loss_of(self._entry)

    def on_lost(self, callback: Callable[[LossReason], object]) -> None:
        """Have `callback(reason)` called once when the lease is lost, on a thread of its own; at once if it is lost.

        No later than the holder's own deadline, also when every packet is dropped.
        """
        reason = self._loss() or self._leases.subscribe(self._entry, callback)
        if reason is not None:
            callback(reason)

    def check(self) -> None:
        """Ask the server, in one round trip: afterwards the lease was this holder's a moment ago.

        Raises:
            LockLost: it is lost.
            NotHeld: it was released.
            ShardError: no answer; `lost` still says what is known.
        """
        self._require_open()
        reason = self._loss() or self._leases.check(self._entry)
        if reason is not None:
            raise self._lost_error(reason)

    def renew(self, ttl: float | None = None) -> None:
        """Prolong the lease: afterwards it has at least `ttl` seconds, counted from before the request.

        Args:
            ttl: 1 second to 7 days, also for the renewals to come; None: the present one. A lease is never shortened.

        Raises:
            LockLost: it is lost.
            NotHeld: it was released.
            ShardError: no answer; the lease keeps the deadline it had.
        """
        wanted = self.ttl if ttl is None else checked_ttl(ttl)
        self._require_open()
        reason = self._loss() or self._leases.renew(self._entry, wanted)
        if reason is not None:
            raise self._lost_error(reason)

    def release(self) -> None:
        """Free the lease: when this returns, others can have it at once. Any thread may release.

        Raises:
            NotHeld: this handle was released before.
            LockLost: the lease had been lost before; nobody else's is touched.
            ShardError: no answer, or a refusal; the background goes on trying, and at its expiry it is free anyway.
        """
        if self._generation is not self._leases.generation:
            return
        self._require_open()
        try:
            reason = self._leases.release(self._entry)
        finally:
            # An interrupt may have come before anything was done: then it is to be released yet.
            self._open = self._entry.held
        if reason is not None:
            raise self._lost_error(reason)

    def _require_open(self) -> None:
        if not self._open:
            raise NotHeld(f"the lease of key {self._leases.shown(self._entry.key)} was released before")

    def _lost_error(self, reason: LossReason) -> LockLost:
        shown = self._leases.shown(self._entry.key)
        return LockLost(f"the lease of key {shown} is lost: {reason.value}", key=self._entry.key, reason=reason)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._open:
            return
        try:
            self.release()
        except LockRouterError as trouble:
            if error is None:
                raise
            error.add_note(f"and the lease could not be released: {trouble}")

    def __repr__(self) -> str:
        if self._held_as is None:
            return "<Lease of nothing yet>"  # an error reporter shows the locals of a call that failed
        state = "released" if not self._open else "lost" if self._entry.lost else "held"
        return f"<Lease {self._leases.shown(self._entry.key)} on {self._entry.shard.id} {state}>"

    def __del__(self) -> None:
        # No I/O here: a finaliser may run anywhere. The next acquisition or the background gives it up.
        entry = getattr(self, "_held_as", None)
        if entry is not None and entry.held and self._generation is self._leases.generation:
            self._leases.orphans.append(entry)
            shown, self._open = repr(self), False
            warnings.warn(f"{shown} was dropped without release", ResourceWarning, stacklevel=2, source=self)
