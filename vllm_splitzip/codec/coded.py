"""What every codec mode produces and consumes: blocks of KV cache and their coded streams."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .packing import Channels

CHUNK = 1024
"""Elements per chunk. Escape positions count from the start of their chunk (uint16)."""

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A run of KV cache blocks of one layer, in host memory.

    Attributes
    ----------
    pages
        Shape: (num_blocks_in_cache, row). The layer's paged cache as bit patterns, one row per
        block; dtype uint16 for 2-byte formats, uint8 for 1-byte ones. Rows may be far apart
        (stride of axis 0 is free), each row is contiguous.
    table
        Shape: (n,), int64. Block ids of the run, in token order. When decoding, a negative id
        means that the block is not wanted: its elements are passed over.
    format
        Number format of the elements, a key of `ITEM_BYTES`.
    channels
        Which channel each element of a row belongs to; None where no mode needs to know.
    """

    pages: npt.NDArray[Any]
    table: npt.NDArray[np.int64]
    format: str = "bf16"
    channels: Channels | None = None

    @property
    def row(self) -> int:
        """Elements per block."""
        return int(self.pages.shape[1])

    @property
    def elements(self) -> int:
        """Elements of the whole run."""
        return int(self.table.size) * self.row


@dataclass(frozen=True, slots=True)
class Coded:
    """The coded streams of one layer's blocks, taken as one flat sequence of elements.

    Attributes
    ----------
    mode
        Name of the codec mode, a key of the registry.
    elements
        Number of elements coded.
    dense
        Streams whose length follows from `elements` alone, in the mode's order.
    tables
        Sparse streams and small tables (escapes), by name.
    """

    mode: str
    elements: int
    dense: tuple[Bytes, ...]
    tables: dict[str, Bytes] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all streams together."""
        return sum(s.nbytes for s in self.dense) + sum(t.nbytes for t in self.tables.values())


def chunks_of(elements: int) -> int:
    """Number of chunks that `elements` elements occupy; the last one may be partly filled."""
    return -(-elements // CHUNK)
