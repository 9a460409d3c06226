"""Codec modes by name for KV cache in host memory."""

from . import cpu
from .codebook import Codebook
from .coded import Blocks, Coded


def encode(blocks: Blocks, mode: str, book: Codebook | None) -> Coded:
    """Code `blocks` in `mode`, or in `raw` where the mode would not make them smaller."""
    coded = None
    if mode == "fast":
        assert book is not None
        coded = cpu.encode_fast(blocks, book)
    return coded if coded is not None else cpu.encode_raw(blocks)


def decode(coded: Coded, book: Codebook | None, blocks: Blocks) -> None:
    """Write a coded run into its blocks; those with a negative id are passed over.

    Raises
    ------
    FrameLayoutError
        When the streams contradict each other or the blocks. Nothing has been written then.
    """
    if coded.mode == "raw":
        cpu.decode_raw(coded, blocks)
    else:
        assert book is not None
        cpu.decode_fast(coded, book, blocks)
