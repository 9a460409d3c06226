"""A layer's KV cache as the codec sees it: numbered rows of bit patterns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

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

    def encode(self, table: Sequence[int], mode: str, book: Codebook | None) -> Callable[[], Coded]:
        """Code the blocks that a block table names. They have been read when it returns."""
        coded = host.encode(self.blocks(table), mode, book)
        return lambda: coded

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
        known = None if self.format == "bytes" else channels(self.packing, self.shape)
        return Blocks(self.pages, block_ids(table, self.split), self.format, known)

    def frame_shape(self, table_length: int) -> tuple[int, int, int, int]:
        """Shape of a frame's layer that covers `table_length` blocks of the block table."""
        return (table_length * self.split, *self.shape)


class Pages(Protocol):
    """One layer's paged cache, wherever it is. See `HostPages` for what each member means."""

    @property
    def name(self) -> str: ...
    @property
    def group(self) -> int: ...
    @property
    def format(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...
    @property
    def packing(self) -> str: ...
    @property
    def block_bytes(self) -> int: ...
    def encode(
        self, table: Sequence[int], mode: str, book: Codebook | None
    ) -> Callable[[], Coded]: ...
    def decode(self, coded: Coded, book: Codebook | None, table: Sequence[int]) -> None: ...
    def holds(self, coded: Coded, book: Codebook | None, table: Sequence[int]) -> bool: ...
    def frame_shape(self, table_length: int) -> tuple[int, int, int, int]: ...


def block_ids(table: Sequence[int], split: int) -> npt.NDArray[np.int64]:
    """Kernel blocks of the blocks that a block table names; negative ids stay negative."""
    ids = np.asarray(table, np.int64)
    if split > 1:
        kernel_ids = ids[:, None] * split + np.arange(split)
        ids = np.where(ids[:, None] < 0, -1, kernel_ids).reshape(-1)
    return ids


def host_pages(
    name: str,
    group: int,
    cache: torch.Tensor,
    num_blocks: int,
    cache_dtype: str = "auto",
    isa: str | None = None,
) -> HostPages:
    """View a layer's cache in host memory, as vLLM registers it.

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
    view, kind, split = block_view(name, cache, num_blocks, cache_dtype)
    if not view[0].is_contiguous():
        raise UnsupportedModelError(
            f"layer {name} has a KV cache of strides {cache.stride()}, in which a block's bytes "
            "are not in one piece"
        )
    kernel_blocks, heads, states, content = view.shape
    words = {1: torch.uint8, 2: torch.int16}[ITEM_BYTES[kind]]
    rows = view.view(words).as_strided(
        (kernel_blocks, heads * states * content), (view.stride(0), 1)
    )
    pages = rows.numpy()
    if ITEM_BYTES[kind] == 2:
        pages = pages.view(np.uint16)
    shape = (heads, states, content)
    return HostPages(name, group, kind, shape, pages, packing_of(isa, shape), split)


def block_view(
    name: str, cache: torch.Tensor, num_blocks: int, cache_dtype: str
) -> tuple[torch.Tensor, str, int]:
    """(view of a layer's cache, its number format, kernel blocks per block).

    The view's elements are those of the number format. Raises UnsupportedModelError.
    """
    if cache.dim() != 4 or cache.shape[0] % num_blocks or cache.stride(3) != 1:
        raise UnsupportedModelError(
            f"layer {name} has a KV cache of shape {tuple(cache.shape)} and strides "
            f"{cache.stride()}, expected 4 dimensions, of which the first is a multiple of "
            f"{num_blocks} blocks and the last is contiguous"
        )
    kind = number_format(cache.dtype, cache_dtype)
    view = cache.view(torch.uint8) if kind == "bytes" else cache
    return view, kind, cache.shape[0] // num_blocks
