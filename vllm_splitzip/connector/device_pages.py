"""A layer's KV cache on a GPU, with the interface of `HostPages`.

Modes `fast` and `dense` are coded on the device, straight from and to the paged cache. Mode `max`
takes the blocks' bits to the host, where the CPU codec does the work in the writer's and the
loader's threads.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..codec import host
from ..codec.codebook import Codebook
from ..codec.coded import Blocks, Coded
from ..codec.device import fast as device
from ..codec.device.dense import decode_dense, encode_dense
from ..codec.modes import ITEM_BYTES
from ..codec.packing import channels
from ..codec.scheme import SCHEMES, Scheme
from .pages import block_ids, block_view
from .streams import Backlog

PACKING = "tokens"

_DENSE = ("fast", "dense")
"""Modes whose schemes the kernels of `dense` take."""


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
        scheme = self._scheme(mode)
        if scheme is not None:
            finish = encode_dense(self.view, ids, scheme, mode).result
        elif mode == "fast" and self.format == "bf16":
            assert book is not None
            finish = device.encode_fast(self.view, ids, book).result
        else:
            pending = device.encode_raw(self.view, ids)

            def finish() -> Coded:
                raw = pending.result()
                if mode == "raw":
                    return raw
                rows = raw.dense[0].view(self._words).reshape(ids.size, -1)
                return host.encode(self._host_blocks(rows), mode, book)

        once = _Once(finish)
        self.backlog.add(once, self.block_bytes * len(table))
        return once

    def decode(self, coded: Coded, book: Codebook | None, table: Sequence[int]) -> None:
        """Queue the decoding into the blocks that a block table names. Raises FrameLayoutError."""
        self._decode_to(self.view, coded, book, block_ids(table, self.split))

    def holds(self, coded: Coded, book: Codebook | None, table: Sequence[int]) -> bool:
        """Whether `coded` decodes to exactly the bits of the blocks that a block table names."""
        ids = block_ids(table, self.split)
        source = self.view[torch.from_numpy(ids).to(self.view.device)]
        scratch = torch.empty_like(source)
        self._decode_to(scratch, coded, book, np.arange(ids.size))
        return torch.equal(scratch.view(torch.uint8), source.view(torch.uint8))

    def frame_shape(self, table_length: int) -> tuple[int, int, int, int]:
        """Shape of a frame's layer that covers `table_length` blocks of the block table."""
        return (table_length * self.split, *self.shape)

    def _decode_to(
        self,
        view: torch.Tensor,
        coded: Coded,
        book: Codebook | None,
        ids: npt.NDArray[np.int64],
    ) -> None:
        if coded.mode == "raw":
            device.decode_raw(coded, view, ids)
        elif (scheme := self._scheme(coded.mode)) is not None:
            decode_dense(coded, scheme, view, ids)
        elif coded.mode == "fast" and self.format == "bf16":
            assert book is not None
            device.decode_fast(coded, book, view, ids)
        else:
            rows = np.empty((ids.size, int(np.prod(self.shape))), self._words)
            host.decode(coded, book, self._host_blocks(rows))
            raw = Coded("raw", coded.elements, (rows.reshape(-1).view(np.uint8),))
            device.decode_raw(raw, view, ids)

    def _scheme(self, mode: str) -> Scheme | None:
        """The scheme of a windowed mode that has device code."""
        return None if mode not in _DENSE else SCHEMES[mode].get(self.format)

    @property
    def _words(self) -> type[np.uint8 | np.uint16]:
        return np.uint16 if ITEM_BYTES[self.format] == 2 else np.uint8

    def _host_blocks(self, rows: npt.NDArray[Any]) -> Blocks:
        known = None if self.format == "bytes" else channels(PACKING, self.shape)
        return Blocks(rows, np.arange(len(rows)), self.format, known)


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
