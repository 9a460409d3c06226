"""Modes `fast` and `raw` on a CPU: from vLLM's paged cache to streams and back.

>>> coded = encode_fast(blocks, book) or encode_raw(blocks)
"""

from functools import lru_cache, partial

import numpy as np

from ...errors import FrameLayoutError
from ..codebook import Codebook
from ..coded import CHUNK, Blocks, Bytes, Coded, chunks_of
from ..reference import fast as reference
from . import fast_loops as loops
from .memory import STREAM_BYTES, Stream, source, target
from .pool import aligned_bytes
from .raw import decode_raw, encode_raw
from .threads import DEFAULT_THREADS, run, spans

__all__ = ["decode_fast", "decode_raw", "encode_fast", "encode_raw", "warm_up"]

HALF = CHUNK // 2

JOB_CHUNKS = 1024
"""Least work for a thread, 2 MiB: below it the hand-over costs more than it saves."""


def encode_fast(blocks: Blocks, book: Codebook, threads: int = DEFAULT_THREADS) -> Coded | None:
    """Code a run of BF16 blocks (pages of uint16), or None where that would not make it smaller.

    Raises
    ------
    IndexError
        When the table names a block that does not exist.
    """
    pages = source(blocks, (2,))
    elements, chunks = blocks.elements, chunks_of(blocks.elements)
    limit = (elements - (HALF + 2) * chunks - 1) // 3
    if limit < 0:
        return None
    after_codes, after_rest = HALF * chunks, HALF * chunks + elements + elements % 2
    memory = aligned_bytes(after_rest + 2 * chunks)
    address = memory.ctypes.data
    _held, book_address, window = _table(book)
    streaming = 2 * elements >= STREAM_BYTES
    found: list[tuple[int, int, Bytes, Bytes]] = []

    def code(begin: int, end: int) -> None:
        if sum(number for _, number, _, _ in found) > limit:
            return
        # Room for many times what real KV needs, and for the worst that pays if that is short.
        for most in (min(limit, (end - begin) * CHUNK // 32), limit):
            lists = aligned_bytes(3 * (most + CHUNK))
            at, after = lists.ctypes.data, 2 * (most + CHUNK)
            number = loops.encode_chunks(
                pages.address, pages.stride, pages.ids, pages.row, elements, begin, end,
                address, address + after_codes, address + after_rest,
                at, at + after, most, book_address, window, int(streaming),
            )  # fmt: skip
            if number <= most:
                break
        found.append((begin, number, lists[: 2 * number], lists[after : after + number]))

    run([partial(code, *span) for span in spans(chunks, JOB_CHUNKS, threads)], threads)
    if sum(number for _, number, _, _ in found) > limit:
        return None
    found.sort(key=lambda part: part[0])
    return Coded(
        mode="fast",
        elements=elements,
        dense=(memory[:after_codes], memory[after_codes : after_codes + elements]),
        tables={
            "counts": memory[after_rest:],
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
    pages = target(blocks, (2,))
    elements, chunks = blocks.elements, chunks_of(blocks.elements)
    if coded.elements != elements or len(coded.dense) != 2:
        raise FrameLayoutError(
            f"{coded.elements} elements in {len(coded.dense)} dense streams, "
            f"expected {elements} in 2"
        )
    codes = Stream("codes", coded.dense[0], HALF * chunks)
    rest = Stream("rest", coded.dense[1], elements)
    counts = Stream("counts", coded.tables.get("counts"), 2 * chunks, width=2)
    exponents = Stream("exponents", coded.tables.get("exponents"))
    positions = Stream("positions", coded.tables.get("positions"), 2 * exponents.size, width=2)
    if not loops.fits(counts.address, positions.address, exponents.size, elements):
        counted = int(counts.held.view(np.uint16).sum(dtype=np.int64))
        furthest = positions.held.view(np.uint16).max(initial=0)
        raise FrameLayoutError(
            f"{exponents.size} escapes up to position {furthest} of a chunk, expected {counted} "
            f"below {CHUNK} and within {elements} elements"
        )
    _held, book_address, window = _table(book)
    whole_vectors = pages.aligned and pages.row % CHUNK == 0
    streaming = whole_vectors and 2 * elements >= STREAM_BYTES

    def code(begin: int, end: int) -> None:
        loops.decode_chunks(
            pages.address, pages.stride, pages.ids, pages.row, elements, begin, end,
            codes.address, rest.address, counts.address,
            positions.address, exponents.address, book_address, window, int(streaming),
        )  # fmt: skip

    run([partial(code, *span) for span in spans(chunks, JOB_CHUNKS, threads)], threads)


@lru_cache(maxsize=256)
def _table(book: Codebook) -> tuple[Bytes, int, int]:
    """(its 16 exponents, their address, whether they are a window)."""
    entries = book.decoding_table()
    return entries, entries.ctypes.data, int(book.window is not None)


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
