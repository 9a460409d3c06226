"""Codec modes by name for KV cache in host memory."""

import numpy as np

from ..errors import CodebookError, FrameLayoutError, UnknownModeError
from .codebook import Codebook
from .coded import Blocks, Coded
from .cpu import fast as cpu
from .cpu.dense import decode_dense, encode_dense
from .cpu.max import decode_max, encode_max
from .cpu.threads import DEFAULT_THREADS
from .modes import ITEM_BYTES, mode_for, mode_named
from .packing import channels
from .reference import dense as reference_dense
from .reference import max as reference_max
from .scheme import SCHEMES, Scheme


def encode(
    blocks: Blocks, mode: str, book: Codebook | None, threads: int = DEFAULT_THREADS
) -> Coded:
    """Code `blocks` in `mode`, or in `raw` where the mode would not make them smaller.

    Raises
    ------
    UnknownModeError
        When there is no such mode or number format.
    CodebookError
        When the mode needs a codebook and there is none.
    """
    if blocks.format not in ITEM_BYTES:
        raise UnknownModeError(
            f"number format {blocks.format!r}; known: {', '.join(sorted(ITEM_BYTES))}"
        )
    coded = _encode(blocks, mode_for(mode, blocks.format), book, threads)
    return coded if coded is not None else cpu.encode_raw(blocks, threads)


def _encode(blocks: Blocks, mode: str, book: Codebook | None, threads: int) -> Coded | None:
    if mode == "raw":
        return None
    scheme = SCHEMES[mode].get(blocks.format)
    if scheme is None:
        return cpu.encode_fast(blocks, _needed(book), threads)
    if mode == "max":
        return encode_max(blocks, scheme, threads)
    return encode_dense(blocks, scheme, mode, threads)


def decode(
    coded: Coded, book: Codebook | None, blocks: Blocks, threads: int = DEFAULT_THREADS
) -> None:
    """Write a coded run into its blocks; those with a negative id are passed over.

    Raises
    ------
    FrameLayoutError
        When the streams contradict each other or the blocks. Nothing has been written then.
    UnknownModeError
        When there is no such mode.
    CodebookError
        When the streams are read with a codebook and there is none.
    """
    if blocks.format not in mode_named(coded.mode).streams:
        raise FrameLayoutError(f"mode {coded.mode} does not code format {blocks.format!r}")
    if coded.mode == "raw":
        cpu.decode_raw(coded, blocks, threads)
        return
    scheme = SCHEMES[coded.mode].get(blocks.format)
    if scheme is None:
        cpu.decode_fast(coded, _needed(book), blocks, threads)
    elif coded.mode == "max":
        decode_max(coded, scheme, blocks, threads)
    else:
        decode_dense(coded, scheme, blocks, threads)


def _needed(book: Codebook | None) -> Codebook:
    if book is None:
        raise CodebookError("mode fast of BF16 needs a codebook; there is none")
    return book


def warm_up() -> None:
    """Compile everything, or load it from the disk, so that no request has to wait for it.

    Raises
    ------
    RuntimeError
        When the compiled code does not do what the references do. numba keys its cache by each
        source file's size and time, which a careless upgrade can leave as they were.
    """
    cpu.warm_up()
    for mode, schemes in SCHEMES.items():
        for scheme in schemes.values():
            if not _is_like_the_reference(mode, scheme):
                raise RuntimeError(
                    f"compiled mode {mode} is not the reference's; clear numba's cache"
                )


def _is_like_the_reference(mode: str, scheme: Scheme) -> bool:
    """Code some elements near 1, and each 16th anything."""
    name, known = scheme.number_format.name, channels("tokens", (1, 16, 128))
    dtype = np.uint16 if scheme.number_format.item == 2 else np.uint8
    anything = np.arange(8 * known.of_position.size) * 40503
    one = (scheme.number_format.magnitudes >> 1) - (1 << scheme.number_format.mantissa)
    elements = np.where(anything >> 4 & 15, one + anything % 7, anything).astype(dtype)
    if mode == "max":
        expected = reference_max.encode(elements, scheme, known)
    else:
        expected = reference_dense.encode(elements, scheme, known, mode)
    blocks = Blocks(elements.reshape(8, -1), np.arange(8), name, known)
    back = Blocks(np.zeros_like(blocks.pages), blocks.table, name, known)
    decode(expected, None, back)
    coded = encode(blocks, mode, None)
    streams = zip(
        (*coded.dense, *coded.tables.values()),
        (*expected.dense, *expected.tables.values()),
        strict=coded.mode == mode,
    )
    return np.array_equal(back.pages, blocks.pages) and all(
        np.array_equal(ours, theirs) for ours, theirs in streams
    )
