"""Modes `fast` and `raw` on a CPU: from vLLM's paged cache to streams and back.

>>> coded = encode_fast(blocks, book) or encode_raw(blocks)
"""

from functools import partial

import numpy as np
import numpy.typing as npt

from ..errors import FrameLayoutError
from . import cpu_fast, reference
from .codebook import Codebook
from .coded import CHUNK, Blocks, Bytes, Coded, Words, chunks_of
from .cpu_memory import STREAM_BYTES, aligned_bytes, source, stream_of, target
from .cpu_raw import decode_raw, encode_raw
from .cpu_threads import DEFAULT_THREADS, run, spans

__all__ = ["decode_fast", "decode_raw", "encode_fast", "encode_raw", "warm_up"]

JOB_CHUNKS = 128
"""Least work for a thread, 256 KiB: below it the hand-over costs more than it saves."""


def encode_fast(blocks: Blocks, book: Codebook, threads: int = DEFAULT_THREADS) -> Coded | None:
    """Code a run of BF16 blocks (pages of uint16), or None where that would not make it smaller.

    Raises
    ------
    IndexError
        When the table names a block that does not exist.
    """
    pages = source(blocks, ("uint16",))
    elements, chunks = blocks.elements, chunks_of(blocks.elements)
    limit = (elements - (CHUNK // 2 + 2) * chunks - 1) // 3
    if limit < 0:
        return None
    codes, rest = aligned_bytes(chunks * CHUNK // 2), aligned_bytes(elements)
    counts = np.empty(chunks, np.uint16)
    entries, window = book.decoding_table(), book.window is not None
    found: list[tuple[int, int, Bytes, Bytes]] = []

    def code(begin: int, end: int) -> None:
        if sum(number for _, number, _, _ in found) > limit:
            return
        # Mostly never touched, and then never backed by memory.
        room = min(limit, (end - begin) * CHUNK) + CHUNK
        positions, exponents = np.empty(room, np.uint16), np.empty(room, np.uint8)
        number = cpu_fast.encode_chunks(
            pages.address, pages.stride, pages.table.ctypes.data, pages.row, elements,
            begin, end, codes.ctypes.data, rest.ctypes.data, counts.ctypes.data,
            positions.ctypes.data, exponents.ctypes.data, limit,
            entries.ctypes.data, int(window), int(2 * elements >= STREAM_BYTES),
        )  # fmt: skip
        found.append((begin, number, positions[:number].view(np.uint8), exponents[:number]))

    run([partial(code, *span) for span in spans(chunks, JOB_CHUNKS, threads)], threads)
    if sum(number for _, number, _, _ in found) > limit:
        return None
    found.sort(key=lambda part: part[0])
    return Coded(
        mode="fast",
        elements=elements,
        dense=(codes, rest),
        tables={
            "counts": counts.view(np.uint8),
            "positions": np.concatenate([positions for _, _, positions, _ in found]),
            "exponents": np.concatenate([exponents for _, _, _, exponents in found]),
        },
    )


def decode_fast(
    coded: Coded, book: Codebook, blocks: Blocks, threads: int = DEFAULT_THREADS
) -> None:
    """Write a coded run into its blocks; those with a negative id are passed over.

    Raises
    ------
    FrameLayoutError
        When the streams contradict each other or the blocks. Nothing has been written then.
    """
    pages = target(blocks, ("uint16",))
    elements, chunks = blocks.elements, chunks_of(blocks.elements)
    if coded.elements != elements or len(coded.dense) != 2:
        raise FrameLayoutError(
            f"{coded.elements} elements in {len(coded.dense)} dense streams, "
            f"expected {elements} in 2"
        )
    codes = stream_of("codes", coded.dense[0], chunks * CHUNK // 2)
    rest = stream_of("rest", coded.dense[1], elements)
    counts, positions, exponents, first = _escapes(coded, chunks)
    if elements == 0:
        return
    entries, window = book.decoding_table(), book.window is not None
    whole_vectors = pages.aligned and pages.row % CHUNK == 0
    streaming = whole_vectors and 2 * elements >= STREAM_BYTES

    def code(begin: int, end: int) -> None:
        cpu_fast.decode_chunks(
            pages.address, pages.stride, pages.table.ctypes.data, pages.row, elements,
            begin, end, codes.ctypes.data, rest.ctypes.data, counts.ctypes.data,
            positions.ctypes.data, exponents.ctypes.data, int(first[begin]),
            entries.ctypes.data, int(window), int(streaming),
        )  # fmt: skip

    run([partial(code, *span) for span in spans(chunks, JOB_CHUNKS, threads)], threads)


def _escapes(coded: Coded, chunks: int) -> tuple[Words, Words, Bytes, npt.NDArray[np.int64]]:
    """(counts, positions, exponents, index of each chunk's first escape), safe to follow."""
    tables = coded.tables
    counts = stream_of("counts", tables.get("counts"), 2 * chunks, 2).view(np.uint16)
    positions = stream_of("positions", tables.get("positions"), None, 2).view(np.uint16)
    exponents = stream_of("exponents", tables.get("exponents"))
    first = np.zeros(chunks + 1, np.int64)
    np.cumsum(counts, out=first[1:])
    if not first[-1] == positions.size == exponents.size:
        raise FrameLayoutError(
            f"{positions.size} positions and {exponents.size} exponents of escapes, "
            f"expected {first[-1]}"
        )
    if positions.size:
        last = coded.elements - (chunks - 1) * CHUNK
        in_last = positions[first[-2] :]
        if positions.max() >= CHUNK or (in_last.size and in_last.max() >= last):
            raise FrameLayoutError(
                f"an escape at position {positions.max()} of its chunk, expected less than "
                f"{CHUNK}, and less than {last} in the last one"
            )
    return counts, positions, exponents, first


def warm_up() -> None:
    """Compile everything, or load it from the disk, so that no request has to wait for it.

    Raises
    ------
    RuntimeError
        When the compiled code does not do what the reference does. numba keys its cache by
        each source file's size and time, which a careless upgrade can leave as they were.
    """
    patterns = np.arange(1 << 16, dtype=np.uint16)
    for exponents in (range(115, 131), range(0, 32, 2)):
        book = Codebook(bytes(exponents))
        covered = (patterns & 0x807F) | (book.exponents[9] << 7)
        words = np.where(patterns % 8, covered, patterns).astype(np.uint16)
        expected = reference.encode(words, book)
        for row in (CHUNK, 16):
            blocks = Blocks(words.reshape(-1, row), np.arange(words.size // row))
            back = Blocks(np.zeros_like(blocks.pages), blocks.table)
            coded = encode_fast(blocks, book, threads=1)
            decode_fast(expected, book, back, threads=1)
            same = coded is not None and all(
                np.array_equal(ours, theirs)
                for ours, theirs in zip(
                    (*coded.dense, *coded.tables.values()),
                    (*expected.dense, *expected.tables.values()),
                    strict=True,
                )
            )
            if not same or not np.array_equal(back.pages, blocks.pages):
                raise RuntimeError("the compiled codec is not the reference's; clear numba's cache")
    decode_raw(encode_raw(blocks, threads=1), back, threads=1)
