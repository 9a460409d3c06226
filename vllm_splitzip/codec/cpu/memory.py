"""Checked addresses of blocks and streams, as the compiled loops take them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import FrameLayoutError
from ..coded import Blocks, Bytes
from .pool import ALIGNMENT

STREAM_BYTES = 1 << 17
"""From this size on, output bypasses the cache: what uses it comes after all other layers."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Where a run's blocks are. Valid as long as `blocks` and `table` are alive."""

    address: int
    stride: int
    table: npt.NDArray[np.int64]
    ids: int
    row: int
    aligned: bool


def source(blocks: Blocks, widths: tuple[int, ...]) -> Pages:
    """Blocks that will be read.

    Raises
    ------
    IndexError
        When the table names a block that does not exist.
    """
    pages = _pages(blocks, widths)
    ids = pages.table
    # As unsigned numbers the negative ones are the largest.
    if ids.size and ids.view(np.uint64).max() >= blocks.pages.shape[0]:
        raise IndexError(
            f"block ids from {ids.min()} to {ids.max()}, the cache has {blocks.pages.shape[0]}"
        )
    return pages


def target(blocks: Blocks, widths: tuple[int, ...]) -> Pages:
    """Blocks that will be written, negative ids passed over.

    Raises
    ------
    FrameLayoutError
        When the table names a block that does not exist.
    """
    pages = _pages(blocks, widths)
    if not blocks.pages.flags.writeable:
        raise ValueError("the pages to decode into are read-only")
    if pages.table.size and pages.table.max() >= blocks.pages.shape[0]:
        raise FrameLayoutError(
            f"block id {pages.table.max()}, the cache has {blocks.pages.shape[0]} blocks"
        )
    return pages


def _pages(blocks: Blocks, widths: tuple[int, ...]) -> Pages:
    pages = blocks.pages
    if pages.dtype.kind != "u" or pages.itemsize not in widths:
        raise ValueError(f"pages of {pages.dtype}, expected unsigned of {widths} bytes")
    # NumPy gives the only column of a one-element row any stride.
    contiguous = pages.ndim == 2 and (pages.shape[1] < 2 or pages.strides[1] == pages.itemsize)
    if not contiguous or not pages.flags.aligned:
        raise ValueError(f"pages must be aligned rows, these are {pages.shape}, {pages.strides}")
    address, stride = pages.ctypes.data, pages.strides[0]
    table = np.ascontiguousarray(blocks.table, np.int64)
    return Pages(
        address=address,
        stride=stride,
        table=table,
        ids=table.ctypes.data,
        row=pages.shape[1],
        aligned=address % ALIGNMENT == 0 and stride % ALIGNMENT == 0,
    )


class Stream:
    """A received stream, checked, and where it is as long as this object lives.

    Raises
    ------
    FrameLayoutError
        When it is missing, not bytes, not of `size` bytes, or not a multiple of `width`.
    """

    __slots__ = ("address", "held", "size")

    def __init__(
        self, name: str, stream: Bytes | None, size: int | None = None, width: int = 1
    ) -> None:
        if stream is None:
            raise FrameLayoutError(f"stream {name} is missing")
        if stream.dtype != np.uint8 or stream.ndim != 1:
            raise FrameLayoutError(f"stream {name} is {stream.dtype}{stream.shape}, expected bytes")
        if stream.size % width or (size is not None and stream.size != size):
            expected = f"a multiple of {width}" if size is None else size
            raise FrameLayoutError(f"stream {name} has {stream.size} bytes, expected {expected}")
        self.held, self.size = stream, stream.size
        self.address = stream.ctypes.data
        if not stream.flags.c_contiguous or self.address % width:
            self.held = stream.copy()
            self.address = self.held.ctypes.data
