"""Time in which something was under way, however many of it there were at once."""

import threading
import time
from collections.abc import Callable

MOST = 4
"""A measurement ends after so many, though others are still under way."""


class BusyClock:
    """Measures a stage that several threads work in.

    Four objects that share a link take four times as long each, and together no longer. So not
    their own seconds count, but those in which any was under way. Thread-safe.

    Parameters
    ----------
    report
        Called with (amount, seconds) for one round of objects, with the lock held.
    """

    def __init__(
        self,
        report: Callable[[float, float], None],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._report = report
        self._now = now
        self._lock = threading.Lock()
        self._under_way = self._most = self._done = 0
        self._amount = self._since = 0.0

    def enter(self) -> None:
        """One more is under way."""
        with self._lock:
            if self._under_way == 0:
                self._begin(self._now())
            self._under_way += 1
            self._most = max(self._most, self._under_way)

    def leave(self, amount: float) -> None:
        """One is done. Amount 0: it moved nothing, and says nothing of the stage."""
        with self._lock:
            self._under_way -= 1
            if amount > 0:
                self._done += 1
                self._amount += amount
            if self._done and (self._under_way == 0 or self._done >= MOST):
                now = self._now()
                rounds = -(-self._done // max(1, self._most))
                self._report(self._amount / rounds, (now - self._since) / rounds)
                self._begin(now)

    def _begin(self, now: float) -> None:
        self._since = now
        self._most = self._under_way
        self._done = 0
        self._amount = 0.0
