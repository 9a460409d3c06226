"""Mode `dense`, and `fast` for E5M2, on a CPU: from vLLM's paged cache to streams and back."""

from functools import partial

import numpy as np

from ..errors import FrameLayoutError
from . import cpu_dense_loops as loops
from .coded import Blocks, Bytes, Coded
from .cpu_memory import STREAM_BYTES, Stream, source, target
from .cpu_pool import aligned_bytes
from .cpu_threads import DEFAULT_THREADS, run, spans
from .cpu_windows import choose_windows, spread_bases
from .planes import TILE, plane_bytes, tiles_of, widths
from .reference_dense import ESCAPE_CHUNK
from .scheme import Scheme

JOB_TILES = 512
"""Least work for a thread, 2 MiB of words: below it the hand-over costs more than it saves."""


def encode_dense(
    blocks: Blocks, scheme: Scheme, mode: str = "dense", threads: int = DEFAULT_THREADS
) -> Coded | None:
    """Code a run of blocks with known channels, or None where that would not make it smaller.

    Raises
    ------
    IndexError
        When the table names a block that does not exist.
    """
    assert blocks.channels is not None
    item, elements = scheme.number_format.item, blocks.elements
    pages = source(blocks, (item,))
    chunks = -(-elements // ESCAPE_CHUNK)
    sizes = scheme.dense_bytes(elements)
    room = elements * item - sum(sizes) - chunks - blocks.channels.number
    limit = (room - 1) * 4 // 5
    if limit < 0:
        return None
    windows = choose_windows(pages, blocks.channels, scheme)
    bases = spread_bases(windows, blocks.channels, scheme)
    dense = [aligned_bytes(size) for size in sizes]
    counts = aligned_bytes(chunks)
    streams = _addresses(dense, scheme)
    streaming = elements * item >= STREAM_BYTES
    found: list[tuple[int, int, Bytes, Bytes]] = []

    def code(begin: int, end: int) -> None:
        if sum(number for _, number, _, _ in found) > limit:
            return
        # Room for many times what real KV needs, and for the worst that pays if that is short.
        for most in (min(limit, (end - begin) * TILE // 16), limit):
            positions, excess = aligned_bytes(most + TILE), aligned_bytes(most + TILE)
            number = loops.encode_tiles(
                pages.address, pages.stride, pages.ids, pages.row, elements, begin, end,
                bases.ctypes.data, item, scheme.packed, *streams, counts.ctypes.data,
                positions.ctypes.data, excess.ctypes.data, most, int(streaming),
            )  # fmt: skip
            if number <= most:
                break
        found.append((begin, number, positions[:number], excess[:number]))

    run([partial(code, *span) for span in spans(tiles_of(elements), JOB_TILES, threads)], threads)
    entries = sum(number for _, number, _, _ in found)
    if entries > limit:
        return None
    found.sort(key=lambda part: part[0])
    excess = np.concatenate([np.zeros(0, np.uint8), *(part[3] for part in found)])
    kinds, others = aligned_bytes(-(-entries // 4)), aligned_bytes(entries)
    number = loops.pack_excess(
        excess.ctypes.data, entries, scheme.packed, kinds.ctypes.data, others.ctypes.data
    )
    coded = Coded(
        mode=mode,
        elements=elements,
        dense=tuple(dense),
        tables={
            "windows": windows,
            "counts": counts,
            "positions": np.concatenate([np.zeros(0, np.uint8), *(part[2] for part in found)]),
            "kinds": kinds,
            "others": others[:number],
        },
    )
    return coded if coded.nbytes < elements * item else None


def decode_dense(
    coded: Coded, scheme: Scheme, blocks: Blocks, threads: int = DEFAULT_THREADS
) -> None:
    """Write a coded run into its blocks; those with a negative id are passed over.

    Raises
    ------
    FrameLayoutError
        When the streams contradict each other or the blocks. Nothing has been written then.
    """
    assert blocks.channels is not None
    item, elements = scheme.number_format.item, blocks.elements
    pages = target(blocks, (item,))
    streams = received_streams(coded, scheme, blocks)
    windows = Stream("windows", coded.tables.get("windows"), blocks.channels.number)
    chunks = -(-elements // ESCAPE_CHUNK)
    counts = Stream("counts", coded.tables.get("counts"), chunks)
    positions = Stream("positions", coded.tables.get("positions"))
    kinds = Stream("kinds", coded.tables.get("kinds"), -(-positions.size // 4))
    others = Stream("others", coded.tables.get("others"))
    excess = aligned_bytes(positions.size)
    if loops.total(counts.address, 0, chunks) != positions.size:
        raise FrameLayoutError(
            f"{positions.size} entries, but their counts add up to "
            f"{loops.total(counts.address, 0, chunks)}"
        )
    number = loops.unpack_excess(
        kinds.address, positions.size, scheme.packed, others.address, others.size,
        excess.ctypes.data,
    )  # fmt: skip
    if number != others.size:
        raise FrameLayoutError(f"{number} entries are of kind 0, but there are {others.size}")
    bases = spread_bases(windows.held, blocks.channels, scheme)
    addresses = _addresses([stream.held for stream in streams], scheme)
    streaming = pages.aligned and pages.row % TILE == 0 and elements * item >= STREAM_BYTES

    def code(begin: int, end: int) -> None:
        loops.decode_tiles(
            pages.address, pages.stride, pages.ids, pages.row, elements, begin, end,
            bases.ctypes.data, item, scheme.packed, *addresses, counts.address,
            positions.address, excess.ctypes.data, int(streaming),
        )  # fmt: skip

    run([partial(code, *span) for span in spans(tiles_of(elements), JOB_TILES, threads)], threads)


def received_streams(coded: Coded, scheme: Scheme, blocks: Blocks) -> list[Stream]:
    """The dense streams. Raises FrameLayoutError where they are not what the blocks need."""
    sizes = scheme.dense_bytes(blocks.elements)
    if coded.elements != blocks.elements or len(coded.dense) != len(sizes):
        raise FrameLayoutError(
            f"{coded.elements} elements in {len(coded.dense)} dense streams, "
            f"expected {blocks.elements} in {len(sizes)}"
        )
    return [
        Stream(f"dense[{index}]", stream, size)
        for index, (stream, size) in enumerate(zip(coded.dense, sizes, strict=True))
    ]


def _addresses(dense: list[Bytes], scheme: Scheme) -> tuple[int, int, int, int]:
    """Addresses of the low bytes and the planes of 4, 2 and 1 bits; 0 for what there is not."""
    addresses = [stream.ctypes.data for stream in dense]
    low = addresses.pop(0) if scheme.number_format.item == 2 else 0
    by_width = dict(zip(widths(scheme.packed), addresses, strict=True))
    return low, by_width.get(4, 0), by_width.get(2, 0), by_width.get(1, 0)
