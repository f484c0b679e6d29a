"""The handle of a row lock: what a caller holds between the grant and the release."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from lockrouter.deadline import now
from lockrouter.errors import ConfigError, LockLost, LossReason, NotHeld, NoToken
from lockrouter.gate import Hold, Told
from lockrouter.owners import forget
from lockrouter.promotion import promote
from lockrouter.protocol.effects import drive
from lockrouter.session import Gone, Session, Silent, State

if TYPE_CHECKING:
    from lockrouter.core import Core
    from lockrouter.routing import Address

__all__ = ["RowLock"]


class RowLock:
    """A held row lock, and its own context manager: leaving the block releases it.

    Holding is never certain until the release is confirmed; `lost` and `check` tell what can be known before.
    A handle is released once, by any thread. One that is collected unreleased is released then, with a
    `ResourceWarning`.
    """

    _told: tuple[Told, ...]
    __slots__ = ("_confirm", "_core", "_hold", "_key", "_token", "_told", "address", "attached", "generation", "key")

    def __init__(
        self,
        core: Core,
        key: str | bytes,
        raw: bytes,
        address: Address,
        confirm: bool,
        hold: Hold | None = None,
        token: int = 0,
    ) -> None:
        self._core = core
        self.generation = core.generation
        self._hold = hold
        self._key = raw
        # True while there is a hold to release.
        self.attached = hold is not None
        self._confirm = confirm
        self._token = token
        self.key = key
        self.address = address

    def attach(self, hold: Hold, token: int) -> None:
        """Let the handle have what was taken for it."""
        self._hold = hold
        self._token = token
        self.attached = True

    def join(self, hold: Hold) -> None:
        """Be one more handle of a hold, for another key of its row: counted and attached in one step."""
        self._hold = hold
        self._core.gates.add_key(hold, self._key, self)

    def discard(self) -> None:
        """Have the background release what is held, when the call that made this handle was interrupted."""
        if self.attached:
            self.attached = False
            self._core.orphans.append((self._held, self._key))

    @property
    def _held(self) -> Hold:
        assert self._hold is not None
        return self._hold

    @property
    def degraded(self) -> bool:
        """True, for the lock's whole life, promoted or not, if it was taken while excluding this process only."""
        return self._held.degraded

    @property
    def token(self) -> int:
        """The fencing token: greater than that of every earlier exclusive holder of this key.

        Raises:
            NoToken: the lock is degraded and was not promoted.
        """
        hold = self._held
        if hold.degraded:
            if hold.base and self.attached:
                self._token = self._core.gates.token_of(hold, self._key)
            if not hold.base or self._token < hold.base:
                raise NoToken("a degraded lock excludes this process only and has no token")
        return self._token

    @property
    def lost(self) -> bool:
        """True once the lock is known to have ended under its holder; no I/O, by the session's state and the clock."""
        return self._loss() is not None

    def _loss(self) -> LossReason | None:
        if self.generation is not self._core.generation:
            return LossReason.FORKED
        return self._core.loss_of(self._held)

    def on_lost(self, callback: Callable[[LossReason], object]) -> None:
        """Have `callback(reason)` called once when the lock is lost, on a thread of its own; at once if it is lost."""
        told = Told(callback)
        reason = self._loss() or self._core.gates.subscribe(self._held, told)
        if reason is not None:
            callback(reason)
        else:
            self._told = (*getattr(self, "_told", ()), told)

    def promote(self, timeout: float | None = None) -> bool:
        """True: from now on the row itself is held, and `token` is one; a lock that was never degraded is so already.

        For a degraded lock whose shard is back. What was done before stays unprotected: the lock excluded this process
        only, and `degraded` says so for its whole life. Handles nested in it are promoted with it.

        Args:
            timeout: seconds to wait for other holders of the row; None: the default of the key's class; 0: one try.

        Returns:
            False: the row stayed busy, and the lock is as it was.

        Raises:
            NotHeld: it was released.
            LockLost: it is lost.
            ShardError: the shard is not back, or one of its other kinds.
        """
        if not self.attached:
            raise self._not_held()
        reason = self._loss()
        if reason is not None:
            raise self._lost_error(reason)
        if not self._held.local:
            return True
        if not promote(self._core, self._held, self._key, timeout):
            return False
        self._token = self._core.gates.token_of(self._held, self._key)
        return True

    def check(self) -> None:
        """Ask the server, in one round trip: afterwards the lock was held, on a writable primary, a moment ago.

        A degraded lock asks nobody: it excludes this process only.

        Raises:
            LockLost: it is lost.
            NotHeld: it was released.
            ConfigError: the row is held inside a transaction of the caller's own (`lock_in`): only that can be asked.
        """
        hold = self._held
        if not self.attached:
            raise self._not_held()
        reason = self._loss()
        if reason is None and not hold.local:
            if hold.session is None:
                raise ConfigError("the row is held inside a transaction of the caller's own: only that can be asked")
            reason, _ = self._core.ask_server(hold)
            if reason is not None:
                self._core.lose_hold(hold, reason)
        if reason is not None:
            raise self._lost_error(reason)

    def release(self, *, confirm: bool = False) -> None:
        """Free the row soon: its ROLLBACK is sent, not awaited. Any thread may release.

        With `confirm` it is awaited, one round trip, and proves that the lock was held to the end (but not for a lock
        nested in `lock_in`: there the caller's own commit is the proof). A shared lock's release is always awaited.

        Raises:
            NotHeld: this handle was released before.
            LockLost: the lock is known to be lost, or could not be confirmed.
        """
        if self.generation is not self._core.generation:
            return
        core, hold = self._core, self._held
        if not self.attached:
            raise self._not_held()
        if not confirm and core.let_go(hold, self):
            return
        try:
            reason = self._release(core, hold, confirm)
        except NotHeld:
            raise self._not_held() from None
        except BaseException:
            if not self.attached and not hold.count:
                # An interrupt came between the last handle's end and the row's: the background does the rest.
                core.unfinished.append(hold)
            raise
        if reason is not None:
            core.lose_hold(hold, reason)
            raise self._lost_error(reason)

    def _release(self, core: Core, hold: Hold, confirm: bool) -> LossReason | None:
        reason = core.loss_of(hold)
        last = core.gates.uncount(hold, self._key, self)
        try:
            if confirm and reason is None and hold.session is not None:
                reason = self._confirmed(hold, hold.session) if last else core.ask_server(hold)[0]
        finally:
            if last:
                core.free(hold)
                forget(hold)
        return reason

    def _confirmed(self, hold: Hold, session: Session) -> LossReason | None:
        with session.mutex:
            if session.hold is not (hold.party or hold) or session.state != State.HOLDING:
                return LossReason.CLOSED
            try:
                alive = drive(session.confirm(now() + hold.shard.config.pool.connect_timeout))
            except Gone:
                return LossReason.CLOSED
            except Silent:
                return LossReason.SILENT
        return None if alive else LossReason.TRANSACTION_ENDED

    def _lost_error(self, reason: LossReason) -> LockLost:
        shown = self._core.shown(self._key)
        return LockLost(f"the lock of key {shown} is lost: {reason.value}", key=self._key, reason=reason)

    def _not_held(self) -> NotHeld:
        return NotHeld(f"the lock of key {self._core.shown(self._key)} was released before")

    def __enter__(self) -> RowLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hold = self._hold
        if not self.attached or hold is None or (not self._confirm and self._core.let_go(hold, self)):
            return
        try:
            self.release(confirm=self._confirm)
        except LockLost as lost:
            if error is None:
                raise
            error.add_note(f"and the lock was lost meanwhile: {lost}")

    def __repr__(self) -> str:
        state = "released" if not self.attached else "degraded" if self._hold and self._hold.local else "held"
        return f"<RowLock {self._core.shown(self._key)} {self.address} {state}>"

    def __del__(self) -> None:
        # No I/O here: a finaliser may run anywhere. The next acquisition or the background thread releases the row.
        if not getattr(self, "attached", False) or self.generation is not self._core.generation:
            return
        shown, hold = repr(self), self._hold
        self.attached = False
        if hold is not None and hold.count:
            self._core.orphans.append((hold, self._key))
            warnings.warn(f"{shown} was dropped without release", ResourceWarning, stacklevel=2, source=self)
