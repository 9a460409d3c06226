"""Codec modes by name for KV cache in host memory."""

from . import cpu
from .codebook import Codebook
from .coded import Blocks, Coded
from .cpu_dense import decode_dense, encode_dense
from .cpu_max import decode_max, encode_max
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
        return encode_max(blocks, scheme)
    return encode_dense(blocks, scheme, mode)


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
    elif coded.mode == "max":
        decode_max(coded, scheme, blocks)
    else:
        decode_dense(coded, scheme, blocks)
