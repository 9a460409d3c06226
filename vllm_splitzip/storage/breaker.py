"""A circuit breaker: a store that does not answer is left alone for a while, and said so once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 30.0
PATIENCE_S = 0.9  # a caller in a greater hurry than this proves little by timing out. (One that
# allows a second has spent some of it before the call.)
PATIENCE_TIMEOUTS = 3  # ... unless it happens this often in a row


class Breaker:
    """Closed: calls pass. Open: calls are refused, but for one after each retry time. Thread-safe.

    A call asks `enter` for a ticket and reports with it how it went. Reports of calls that were
    let in before the breaker opened say nothing about the time after, and are not listened to.
    """

    def __init__(
        self, name: str, consequence: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._consequence = consequence
        self._clock = clock
        self._lock = threading.Lock()
        self._open = False
        self._trying = False
        self._ticket = 0  # counts the times it opened
        self._retry_at = 0.0
        self._delay_s = 0.0
        self._timeouts = 0  # in a row

    @property
    def is_open(self) -> bool:
        return self._open

    def enter(self) -> int | None:
        """A ticket, or None when no call may be made now."""
        with self._lock:
            if self._open and (self._trying or self._clock() < self._retry_at):
                return None
            self._trying = self._open
            return self._ticket

    def succeeded(self, ticket: int) -> None:
        with self._lock:
            if ticket != self._ticket:
                return
            was_open, self._open = self._open, False
            self._trying = False
            self._timeouts = 0
            self._delay_s = 0.0
        if was_open:
            logger.info("%s is back", self._name)

    def failed(self, ticket: int, why: str) -> None:
        with self._lock:
            if ticket != self._ticket:
                return
            opened, self._open = not self._open, True
            self._ticket += 1
            self._trying = False
            self._delay_s = min(max(self._delay_s * 2, FIRST_RETRY_S), LAST_RETRY_S)
            self._retry_at = self._clock() + self._delay_s
        if opened:
            logger.warning(
                "%s failed (%s); %s until it is back, next try in %g s",
                self._name,
                why,
                self._consequence,
                self._delay_s,
            )

    def timed_out(self, ticket: int, waited_s: float) -> None:
        """A call was given up after `waited_s`."""
        with self._lock:
            if ticket != self._ticket:
                return
            self._timeouts += 1
            hurried = waited_s < PATIENCE_S and self._timeouts < PATIENCE_TIMEOUTS
        if self._trying or not hurried:
            self.failed(ticket, f"no answer within {waited_s:.2f} s")

    def abandoned(self, ticket: int) -> None:
        """A call ended without showing anything."""
        with self._lock:
            if ticket == self._ticket:
                self._trying = False
