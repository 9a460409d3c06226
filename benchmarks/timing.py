"""How one step on a CPU is timed, so that no step pays for the one before it."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

T = TypeVar("T")

SCRATCH = np.ones(128 << 20, np.uint8)


def timed(step: Callable[[], T]) -> tuple[float, T]:
    """(seconds, result) of `step`.

    Before it, the processor's cache is filled with clean lines. This takes long enough, too, for
    OpenMP's threads to stop spinning after a `copy_`, on a core that the next step wants.
    """
    SCRATCH.max()
    start = time.perf_counter()
    result = step()
    return time.perf_counter() - start, result


def empty_cache(like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Memory from torch, aligned as that of vLLM's cache is. Shape: that of `like`."""
    return torch.zeros(like.nbytes, dtype=torch.uint8).numpy().view(like.dtype).reshape(like.shape)
