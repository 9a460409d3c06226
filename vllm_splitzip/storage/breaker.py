"""A circuit breaker: a store that does not answer is left alone for a while, and said so once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 30.0
PATIENCE_S = 1.0  # a caller in a greater hurry than this proves little by timing out
PATIENCE_TIMEOUTS = 3  # ... unless it happens this often in a row


class Breaker:
    """Closed (calls pass), open (calls are refused until the retry time), or trying (one call
    passes to find out). Thread-safe."""

    def __init__(
        self, name: str, consequence: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._consequence = consequence
        self._clock = clock
        self._lock = threading.Lock()
        self._open = False
        self._retry_at = 0.0
        self._delay_s = 0.0
        self._trying = False
        self._timeouts = 0

    @property
    def is_open(self) -> bool:
        return self._open

    def allows(self) -> bool:
        """Whether a call may be made now. When it may be and the breaker is open, the caller is
        the one that tries, and must report how it went."""
        if not self._open:
            return True
        with self._lock:
            if self._open and (self._trying or self._clock() < self._retry_at):
                return False
            self._trying = self._open
            return True

    def succeeded(self) -> None:
        if not self._open and not self._timeouts:
            return
        with self._lock:
            was_open, self._open = self._open, False
            self._trying = False
            self._timeouts = 0
            self._delay_s = 0.0
        if was_open:
            logger.info("%s is back", self._name)

    def failed(self, why: str) -> bool:
        """Opens the breaker, or doubles the wait when it is open and this was a try.

        Returns:
            True when this call opened it.
        """
        with self._lock:
            opened = not self._open
            if opened or self._trying:
                self._delay_s = min(max(self._delay_s * 2, FIRST_RETRY_S), LAST_RETRY_S)
                self._retry_at = self._clock() + self._delay_s
            self._open = True
            self._trying = False
        if opened:
            logger.warning(
                "%s failed (%s); %s until it is back, next try in %g s",
                self._name,
                why,
                self._consequence,
                self._delay_s,
            )
        return opened

    def abandoned(self) -> None:
        """A try ended without showing anything; the next call may try again."""
        with self._lock:
            self._trying = False

    def timed_out(self, waited_s: float) -> bool:
        """A call was given up after `waited_s`. Returns True when that opened the breaker."""
        with self._lock:
            self._timeouts += 1
            hurried = waited_s < PATIENCE_S and self._timeouts < PATIENCE_TIMEOUTS
            if hurried and not self._open:
                return False
        return self.failed(f"no answer within {waited_s:.2f} s")
