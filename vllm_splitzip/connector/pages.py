"""A layer's KV cache as the codec sees it: numbered rows of bit patterns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..codec import host
from ..codec.codebook import Codebook
from ..codec.coded import Blocks, Coded
from ..codec.formats import number_format
from ..codec.modes import ITEM_BYTES
from ..codec.packing import channels, packing_of
from ..errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class HostPages:
    """One layer's paged cache in host memory.

    Attributes
    ----------
    name, group
        The layer, and the KV cache group whose block table it is addressed by.
    format
        Number format of its elements.
    shape
        (heads, states, content) of a kernel block, content in elements of the format.
    pages
        Shape: (kernel blocks, heads * states * content), bit patterns.
    packing
        How attention lays a block's elements out, one of `codec.packing.PACKINGS`.
    split
        Kernel blocks per block of the block table; kernels may use smaller blocks than vLLM's
        cache manager does.
    """

    name: str
    group: int
    format: str
    shape: tuple[int, int, int]
    pages: npt.NDArray[Any]
    packing: str
    split: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the block table."""
        return int(self.pages.shape[1]) * self.pages.itemsize * self.split

    def encode(self, table: Sequence[int], mode: str, book: Codebook | None) -> Coded:
        """Code the blocks that a block table names."""
        return host.encode(self.blocks(table), mode, book)

    def decode(self, coded: Coded, book: Codebook | None, table: Sequence[int]) -> None:
        """Write coded blocks to where a block table says. Raises FrameLayoutError."""
        host.decode(coded, book, self.blocks(table))

    def holds(self, coded: Coded, book: Codebook | None, table: Sequence[int]) -> bool:
        """Whether `coded` decodes to exactly the bits of the blocks that a block table names."""
        source = self.blocks(table)
        scratch = np.empty((source.table.size, source.row), source.pages.dtype)
        rows = np.arange(source.table.size)
        host.decode(coded, book, replace(source, pages=scratch, table=rows))
        return np.array_equal(scratch, source.pages[source.table])

    def blocks(self, table: Sequence[int]) -> Blocks:
        """The blocks that a block table names; negative ids stay negative."""
        ids = np.asarray(table, np.int64)
        if self.split > 1:
            kernel_ids = ids[:, None] * self.split + np.arange(self.split)
            ids = np.where(ids[:, None] < 0, -1, kernel_ids).reshape(-1)
        known = None if self.format == "bytes" else channels(self.packing, self.shape)
        return Blocks(self.pages, ids, self.format, known)

    def frame_shape(self, table_length: int) -> tuple[int, int, int, int]:
        """Shape of a frame's layer that covers `table_length` blocks of the block table."""
        return (table_length * self.split, *self.shape)


def layer_pages(
    name: str,
    group: int,
    cache: torch.Tensor,
    num_blocks: int,
    cache_dtype: str = "auto",
    isa: str | None = None,
) -> HostPages:
    """View a layer's cache as vLLM registers it.

    Parameters
    ----------
    cache
        Shape: (kernel blocks, heads, states, content), any strides.
    num_blocks
        Blocks of the block table.
    cache_dtype, isa
        What the layer says its cache holds, and which instruction set packs it, if any does.

    Raises
    ------
    UnsupportedModelError
        When the tensor is not laid out like that, or a block's bytes are not in one piece.
    """
    if cache.dim() != 4 or cache.shape[0] % num_blocks:
        raise UnsupportedModelError(
            f"layer {name} has a KV cache of shape {tuple(cache.shape)}, expected 4 dimensions "
            f"of which the first is a multiple of {num_blocks} blocks"
        )
    kernel_blocks, heads, states, content = cache.shape
    if not cache[0].is_contiguous():
        raise UnsupportedModelError(
            f"layer {name} has a KV cache of strides {cache.stride()}, in which a block's bytes "
            "are not in one piece"
        )
    kind = number_format(cache.dtype, cache_dtype)
    if kind == "bytes":
        content *= cache.element_size()
    words = {1: torch.uint8, 2: torch.int16}[ITEM_BYTES[kind]]
    rows = cache.view(words).as_strided(
        (kernel_blocks, heads * states * content),
        (cache.stride(0) * cache.element_size() // ITEM_BYTES[kind], 1),
    )
    pages = rows.numpy()
    if ITEM_BYTES[kind] == 2:
        pages = pages.view(np.uint16)
    shape = (heads, states, content)
    packing = packing_of(isa, shape)
    return HostPages(name, group, kind, shape, pages, packing, kernel_blocks // num_blocks)
