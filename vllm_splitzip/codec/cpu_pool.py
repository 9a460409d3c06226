"""Memory for coded streams that is used again, since fresh memory costs more than the codec.

The kernel hands out a page at its first touch, and clears it: 3 GB/s where the loops do 14.
"""

from collections import defaultdict, deque
from typing import Any

import numpy as np

from .coded import Bytes

ALIGNMENT = 64

IDLE_BYTES = 512 << 20
"""Most that is kept of each size."""

_idle: defaultdict[int, deque[Any]] = defaultdict(deque)


class _Lease:
    """Owns a buffer while any array looks at it; what NumPy keeps as those arrays' base."""

    def __init__(self, size: int) -> None:
        steps = 1 << max(12, size.bit_length() - 3)
        self.size = -(-size // steps) * steps
        try:
            self.space = _idle[self.size].pop()
        except IndexError:
            self.space = np.empty(self.size + ALIGNMENT, np.uint8)
        address = self.space.ctypes.data
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (address + -address % ALIGNMENT, False),
        }

    def __del__(self) -> None:
        # Runs wherever the collector does, perhaps inside the lines above: no locks, and only
        # operations that the interpreter cannot interrupt.
        idle = _idle[self.size]
        if len(idle) * self.size < IDLE_BYTES:
            idle.append(self.space)


def aligned_bytes(size: int) -> Bytes:
    """Uninitialised bytes at an address that vectors can be streamed to."""
    return np.asarray(_Lease(size))
