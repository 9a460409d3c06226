"""How the loops of the CPU codec are compiled: without the GIL, and once per machine."""

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Any:
    """numba's compiler, with its result kept on disk where any place for that can be written.

    numba looks beside the source, then in the user's cache directory, and refuses to compile at
    all when it may write to neither, as in a container with a read-only root. That costs
    seconds at start-up, not the codec.
    """
    try:
        return numba.njit(function, nogil=True, cache=True)
    except RuntimeError:
        return numba.njit(function, nogil=True)
