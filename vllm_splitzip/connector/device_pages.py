"""A layer's KV cache on a GPU, with the interface of `HostPages`.

All modes are coded on the device, straight from and to the paged cache.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..codec.codebook import Codebook
from ..codec.coded import Coded
from ..codec.device import modes
from .pages import block_ids, block_view
from .streams import Backlog

PACKING = "tokens"


@dataclass(frozen=True, slots=True)
class DevicePages:
    """One layer's paged cache in device memory.

    Attributes
    ----------
    name, group, format, shape, split
        As those of `HostPages`.
    view
        Shape: (kernel blocks, heads, states, content), any strides; elements of 1 or 2 bytes.
    backlog
        Shared by all layers.
    """

    name: str
    group: int
    format: str
    shape: tuple[int, int, int]
    view: torch.Tensor
    split: int
    backlog: Backlog

    @property
    def packing(self) -> str:
        """Blocks are taken in the logical order, whatever their strides."""
        return PACKING

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the block table."""
        return self.view[0].numel() * self.view.element_size() * self.split

    def encode(self, table: Sequence[int], mode: str, book: Codebook | None) -> Callable[[], Coded]:
        """Queue the coding of the blocks that a block table names; the result waits for it."""
        ids = block_ids(table, self.split)
        pending = modes.encode(self.view, ids, self.format, mode, book)
        once = _Once(pending.result)
        self.backlog.add(once, self.block_bytes * len(table))
        return once

    def decode(self, coded: Coded, book: Codebook | None, table: Sequence[int]) -> None:
        """Queue the decoding into the blocks that a block table names. Raises FrameLayoutError."""
        modes.decode(coded, self.format, book, self.view, block_ids(table, self.split))

    def holds(self, coded: Coded, book: Codebook | None, table: Sequence[int]) -> bool:
        """Whether `coded` decodes to exactly the bits of the blocks that a block table names."""
        ids = block_ids(table, self.split)
        source = self.view[torch.from_numpy(ids).to(self.view.device)]
        scratch = torch.empty_like(source)
        modes.decode(coded, self.format, book, scratch, np.arange(ids.size))
        return torch.equal(scratch.view(torch.uint8), source.view(torch.uint8))

    def frame_shape(self, table_length: int) -> tuple[int, int, int, int]:
        """Shape of a frame's layer that covers `table_length` blocks of the block table."""
        return (table_length * self.split, *self.shape)


def device_pages(
    name: str,
    group: int,
    cache: torch.Tensor,
    num_blocks: int,
    cache_dtype: str,
    backlog: Backlog,
) -> DevicePages:
    """View a layer's cache on a device, as vLLM registers it. Parameters as of `host_pages`.

    Raises
    ------
    UnsupportedModelError
        When the tensor has not the shape of a layer's cache.
    """
    view, kind, split = block_view(name, cache, num_blocks, cache_dtype)
    _, heads, states, content = view.shape
    return DevicePages(name, group, kind, (heads, states, content), view, split, backlog)


class _Once:
    """Calls a function once, whoever asks first, and then keeps only its result."""

    def __init__(self, finish: Callable[[], Coded]) -> None:
        self._lock = threading.Lock()
        self._finish: Callable[[], Coded] | None = finish
        self._coded: Coded | None = None

    def __call__(self) -> Coded:
        with self._lock:
            if self._finish is not None:
                self._coded = self._finish()
                self._finish = None
            assert self._coded is not None
            return self._coded
