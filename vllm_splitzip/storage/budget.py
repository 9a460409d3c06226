"""Who may hold how much of the staging pool, so that nobody waits for memory on an event loop."""

from __future__ import annotations

import threading
import time

PAGE = 4096  # LMCache's allocator hands out whole pages of this many bytes


class Budget:
    """A semaphore counted in bytes, with a deadline. Thread-safe.

    LMCache's own allocation either fails at once or sleeps on the event loop until somebody
    frees memory, which blocks those who would free it. So memory is waited for here, in the
    caller's thread, and LMCache is asked only for what it has.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._in_use = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def in_use(self) -> int:
        """Bytes reserved now."""
        return self._in_use

    def reserve(self, nbytes: int, deadline: float) -> Reservation | None:
        """Waits until `deadline` (time.monotonic, in s) for `nbytes`. None: not to be had."""
        size = -(-nbytes // PAGE) * PAGE
        if size > self.capacity:
            return None
        with self._changed:
            while self._in_use + size > self.capacity and not self._closed:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    return None
            if self._closed:
                return None
            self._in_use += size
        return Reservation(self, size)

    def close(self) -> None:
        """Nothing can be reserved any more; who waits for it ends waiting."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until nothing is reserved. Returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._in_use == 0, timeout_s)

    def _give_back(self, size: int) -> None:
        with self._changed:
            self._in_use -= size
            self._changed.notify_all()


class Reservation:
    """A share of a budget, given back once."""

    __slots__ = ("_budget", "_size")

    def __init__(self, budget: Budget, size: int) -> None:
        self._budget = budget
        self._size = size

    def shrink(self, nbytes: int) -> None:
        """Keeps `nbytes` and gives back the rest."""
        keep = min(-(-nbytes // PAGE) * PAGE, self._size)
        self._budget._give_back(self._size - keep)
        self._size = keep

    def release(self) -> None:
        size, self._size = self._size, 0
        if size:
            self._budget._give_back(size)
