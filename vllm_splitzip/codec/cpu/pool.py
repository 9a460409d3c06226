"""Memory for coded streams that is used again, since fresh memory costs more than the codec.

The kernel clears a page when it is first touched: 3 GB/s where the loops do 15.
"""

import os
from collections import OrderedDict
from threading import RLock

import numpy as np

from ..coded import Bytes

ALIGNMENT = 64

IDLE_BYTES = 256 << 20
"""Most that is kept for later; beyond it, sizes that were not asked for lately go first."""


class _Pool:
    """Idle buffers by size. Its lock may be taken again by a collector's run inside it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.reset()

    def reset(self) -> None:
        """Start anew, as a forked child must: the lock may be held by a thread it lacks."""
        self.lock = RLock()
        self.idle: OrderedDict[int, list[Bytes]] = OrderedDict()
        self.total = 0

    def take(self, size: int) -> Bytes:
        with self.lock:
            buffers = self.idle.get(size)
            if buffers:
                self.total -= size
                return buffers.pop()
        return np.empty(size, np.uint8)

    def give(self, buffer: Bytes) -> None:
        with self.lock:
            self.idle.setdefault(buffer.size, []).append(buffer)
            self.idle.move_to_end(buffer.size)
            self.total += buffer.size
            while self.total > self.limit:
                size, buffers = next(iter(self.idle.items()))
                if buffers:
                    self.total -= size
                    buffers.pop()
                else:
                    del self.idle[size]


class _Lease:
    """A buffer in use. NumPy holds it as the base of the arrays that look at the buffer."""

    def __init__(self, buffer: Bytes, size: int, pool: _Pool) -> None:
        self.buffer, self.pool = buffer, pool
        address = buffer.ctypes.data
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (address + -address % ALIGNMENT, False),
        }

    def __del__(self) -> None:
        self.pool.give(self.buffer)


_pool = _Pool(IDLE_BYTES)
os.register_at_fork(after_in_child=_pool.reset)


def keep_idle(limit: int) -> None:
    """Keep up to `limit` bytes for later. Raise it where more than IDLE_BYTES is held at once."""
    _pool.limit = limit


def aligned_bytes(size: int) -> Bytes:
    """Uninitialised bytes at an address that vectors can be streamed to."""
    # Few different sizes, at most a quarter too large.
    step = 1 << max(12, size.bit_length() - 3)
    buffer = _pool.take(-(-(size + ALIGNMENT) // step) * step)
    return np.asarray(_Lease(buffer, size, _pool))
