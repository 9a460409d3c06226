"""Codec modes by name for KV cache in host memory."""

import numpy as np

from ..errors import FrameLayoutError
from . import cpu, cpu_dense, reference_max
from .codebook import Codebook
from .coded import Blocks, Coded
from .modes import mode_for
from .scheme import SCHEMES


def encode(blocks: Blocks, mode: str, book: Codebook | None) -> Coded:
    """Code `blocks` in `mode`, or in `raw` where the mode would not make them smaller."""
    coded = _encode(blocks, mode_for(mode, blocks.format), book)
    return coded if coded is not None else cpu.encode_raw(blocks)


def _encode(blocks: Blocks, mode: str, book: Codebook | None) -> Coded | None:
    if mode == "raw":
        return None
    scheme = SCHEMES[mode].get(blocks.format)
    if scheme is None:
        assert book is not None
        return cpu.encode_fast(blocks, book)
    if mode == "max":
        assert blocks.channels is not None
        flat = blocks.pages[blocks.table].reshape(-1)
        coded = reference_max.encode(flat, scheme, blocks.channels)
        return coded if coded.nbytes < flat.nbytes else None
    return cpu_dense.encode_dense(blocks, scheme, mode)


def decode(coded: Coded, book: Codebook | None, blocks: Blocks) -> None:
    """Write a coded run into its blocks; those with a negative id are passed over.

    Raises
    ------
    FrameLayoutError
        When the streams contradict each other or the blocks. Nothing has been written then.
    """
    if coded.mode == "raw":
        cpu.decode_raw(coded, blocks)
        return
    scheme = SCHEMES[coded.mode].get(blocks.format)
    if scheme is None:
        assert book is not None
        cpu.decode_fast(coded, book, blocks)
        return
    if coded.mode != "max":
        cpu_dense.decode_dense(coded, scheme, blocks)
        return
    assert blocks.channels is not None
    if coded.elements != blocks.elements:
        raise FrameLayoutError(f"{coded.elements} elements, expected {blocks.elements}")
    flat = reference_max.decode(coded, scheme, blocks.channels).reshape(-1, blocks.row)
    wanted = np.flatnonzero(blocks.table >= 0)
    blocks.pages[blocks.table[wanted]] = flat[wanted]
