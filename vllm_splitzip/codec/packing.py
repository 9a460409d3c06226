"""Where a channel's elements lie in a block, by the name of the attention kernels' packing.

A channel is one dimension of one KV head's keys or values. Its elements, one per token, are of
about the same size, so modes `dense` and `max` keep a window of exponents for each.

===========  ================================================================================
packing      a block [heads, states, content] in memory order
===========  ================================================================================
tokens       one head's state is K || V of a token: GPU backends, and MLA everywhere
cpu-vec      per head keys [dim, state], then values [state, dim]: vLLM on CPUs without AMX
cpu-amx      per head keys [state / 16, dim / 2, 16 states, 2 dims],
             then values [dim / 16, state / 2, 16 dims, 2 states]: vLLM on CPUs with AMX
halves       any other: one window for each half of a head, that is for its K and its V
===========  ================================================================================
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

PACKINGS = frozenset({"tokens", "cpu-vec", "cpu-amx", "halves"})

_BY_ISA = {"vec": "cpu-vec", "vec16": "cpu-vec", "amx": "cpu-amx"}


@dataclass(frozen=True, slots=True, eq=False)
class Channels:
    """The channels of a block row.

    Attributes
    ----------
    packing
        The name that a frame carries.
    of_position
        Shape: (row,), uint32. Each element's channel. All channels occur equally often.
    number
        How many there are.
    """

    packing: str
    of_position: npt.NDArray[np.uint32]
    number: int

    @property
    def states(self) -> int:
        """Elements of each channel in a row."""
        return self.of_position.size // max(1, self.number)

    def positions(self) -> npt.NDArray[np.int64]:
        """Shape: (number, states). Where each channel's elements lie, ascending."""
        order = np.argsort(self.of_position, kind="stable")
        return order.reshape(self.number, self.states)


def packing_of(isa: str | None, shape: tuple[int, int, int]) -> str:
    """Packing of a layer's blocks of `shape` (heads, states, content).

    Parameters
    ----------
    isa
        Instruction set that vLLM's CPU attention works with; None for all other backends.
    """
    _, states, content = shape
    packing = "tokens" if isa is None else _BY_ISA.get(isa, "halves")
    if content % 2 and packing != "tokens":
        return "tokens"  # Not K and V of one size: then they are no CPU attention's.
    if packing == "cpu-amx" and (states % 16 or content % 64):
        return "halves"
    return packing


@lru_cache(maxsize=64)
def channels(packing: str, shape: tuple[int, int, int]) -> Channels:
    """The channels of blocks of `shape` (heads, states, content). Raises KeyError.

    Raises
    ------
    ValueError
        When blocks of this shape cannot be packed like that.
    """
    heads, states, content = shape
    dims, size = content // 2, heads * states * content
    if packing == "tokens":
        per_head = content
        within = np.broadcast_to(np.arange(content), (states, content))
    elif packing == "cpu-vec":
        per_head = content
        keys = np.repeat(np.arange(dims), states)
        values = np.tile(np.arange(dims, content), states)
        within = np.concatenate([keys, values])
    elif packing == "cpu-amx":
        per_head = content
        pairs = np.arange(dims).reshape(1, -1, 1, 2)
        keys = np.broadcast_to(pairs, (states // 16, dims // 2, 16, 2))
        groups = np.arange(dims, content).reshape(-1, 1, 16, 1)
        values = np.broadcast_to(groups, (dims // 16, states // 2, 16, 2))
        within = np.concatenate([keys.reshape(-1), values.reshape(-1)])
    elif packing == "halves":
        per_head = 2
        within = np.repeat(np.arange(2), dims * states)
    else:
        raise KeyError(packing)
    if size and ((content % 2 and packing != "tokens") or within.size != states * content):
        raise ValueError(f"blocks of shape {shape} cannot be packed as {packing}")
    of_position = np.arange(heads)[:, None] * per_head + within.reshape(1, -1)
    return Channels(packing, of_position.reshape(-1).astype(np.uint32), heads * per_head)
