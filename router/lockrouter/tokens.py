"""Fencing tokens: 63 bits, `term (9) | ticks (48) | pass (6)`.

Ticks are steps of four microseconds of the server's clock since 2026-01-01 UTC, read after the grant; no two grants of
one row fall into one. The pass counts what this process granted by itself since, and lies below the clock's unit, so
that no number of passes reaches the token of a later grant by the server.
"""

from __future__ import annotations

__all__ = ["END_US", "EPOCH_US", "MAX_PASS", "MAX_TERM", "base_token", "micros", "parts"]

EPOCH_US = 1_767_225_600_000_000
"""2026-01-01T00:00:00Z in microseconds since 1970."""
END_US = EPOCH_US + (1 << 48) * 4
"""The first microsecond that 48 bits of ticks cannot say, in 2061."""
MAX_TERM = 511
MAX_PASS = 63
_TICK_US = 4


def base_token(term: int, clock_us: int) -> int:
    """Return the token of pass 0 for a grant at the server's clock `clock_us` (microseconds since 1970, UTC).

    Raises:
        ValueError: the clock is before 2026 or after 2061; a token of it would not be in order.
    """
    if not EPOCH_US <= clock_us < END_US:
        raise ValueError(f"a clock of {clock_us} microseconds cannot be told by a token")
    return term << 54 | (clock_us - EPOCH_US) // _TICK_US << 6


def parts(token: int) -> tuple[int, int, int]:
    """Return term, the clock in microseconds since 1970 (UTC, in steps of four), and pass of a token."""
    return token >> 54, (token >> 6 & (1 << 48) - 1) * _TICK_US + EPOCH_US, token & MAX_PASS


def micros(text: bytes) -> int:
    """Return the microseconds of a server's decimal seconds, such as `b"1767225600.000004"`.

    Raises:
        ValueError: not such a number.
    """
    whole, _, fraction = text.partition(b".")
    if not (whole + fraction).isdigit():
        raise ValueError(f"no decimal seconds: {text!r}")
    return int(whole) * 1_000_000 + int(fraction.ljust(6, b"0")[:6] or 0)
