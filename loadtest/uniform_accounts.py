"""What do uncontended, short locks cost? Account keys, all equally likely, held for two milliseconds at most."""

from __future__ import annotations

import os
import random

from checks import Exclusion
from lock_user import LockUser
from locust import task

ACCOUNTS = 1000
HOLD = 0.002
UNLOCKED = os.environ.get("LOCKROUTER_LOAD_UNLOCKED") == "1"
"""Take no locks: for the test that the run fails then."""

exclusion = Exclusion(ACCOUNTS)


class AccountUser(LockUser):
    """Books to one account at a time."""

    scenario = "uniform accounts"

    @task
    def book(self) -> None:
        """Lock one account and stay inside for a moment."""
        account = random.randrange(ACCOUNTS)
        pause = random.random() * HOLD
        if UNLOCKED:
            exclusion.increment(account, None, pause)
            return
        with self.client.lock(f"account:{account}", timeout=2.0) as held:
            exclusion.increment(account, held, pause)
