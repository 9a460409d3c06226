"""Mode `dense`, and `fast` for E5M2, on a CPU: from vLLM's paged cache to streams and back."""

from functools import partial

import numpy as np

from ...errors import FrameLayoutError
from ..coded import Blocks, Bytes, Coded
from ..planes import TILE, tiles_of
from ..reference.dense import ESCAPE_CHUNK
from ..scheme import Scheme
from . import dense_loops as loops
from .memory import STREAM_BYTES, Stream, source, target
from .pick import COMPRESSES
from .threads import DEFAULT_THREADS, run, spans
from .windows import choose_windows, plan_for, spread_bases
from .work import JOB_TILES, by_width, carve, dense_bytes, received, workspace


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
    tiles, chunks = tiles_of(elements), -(-elements // ESCAPE_CHUNK)
    sizes = (*dense_bytes(scheme, elements), chunks, blocks.channels.number)
    limit = (elements * item - sum(sizes) - 1) * 4 // 5
    if limit < 0:
        return None
    (*dense, counts, windows), (*addresses, counts_at, windows_at) = carve(*sizes)
    plan = plan_for(blocks.channels, scheme, pages.table.size)
    _held, bases = workspace("bases", plan.work)
    choose_windows(pages, plan, windows_at, bases)
    streams = by_width(addresses, scheme)
    streaming = int(elements * item >= STREAM_BYTES)
    found: list[tuple[int, Bytes, Bytes]] = []

    def code(begin: int, end: int) -> None:
        if sum(positions.size for _, positions, _ in found) > limit:
            return
        # Room for many times what real KV needs, and for the worst that pays if that is short.
        for most in (min(limit, (end - begin) * TILE // 16), limit):
            room = most + TILE
            lists, address = workspace("lists", 2 * room)
            number = loops.encode_tiles(
                pages.address, pages.stride, pages.ids, pages.row, elements, begin, end,
                bases, item, scheme.packed, *streams, counts_at,
                address, address + room, most, streaming,
                COMPRESSES,
            )  # fmt: skip
            if number <= most:
                break
        found.append((begin, lists[:number].copy(), lists[room : room + number].copy()))

    run([partial(code, *span) for span in spans(tiles, JOB_TILES, threads)], threads)
    found.sort(key=lambda part: part[0])
    positions = np.concatenate([windows[:0], *(part[1] for part in found)])
    excess = np.concatenate([windows[:0], *(part[2] for part in found)])
    if positions.size > limit:
        return None
    kinds, others = loops.packed_excess(excess, scheme.packed)
    coded = Coded(
        mode=mode,
        elements=elements,
        dense=tuple(dense),
        tables={
            "windows": windows,
            "counts": counts,
            "positions": positions,
            "kinds": kinds,
            "others": others,
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
    dense = received(coded, scheme, elements)
    chunks = -(-elements // ESCAPE_CHUNK)
    windows = Stream("windows", coded.tables.get("windows"), blocks.channels.number)
    counts = Stream("counts", coded.tables.get("counts"), chunks)
    entries = loops.total(counts.address, 0, chunks)
    positions = Stream("positions", coded.tables.get("positions"), entries)
    kinds = Stream("kinds", coded.tables.get("kinds"), -(-entries // 4))
    others = Stream("others", coded.tables.get("others"))
    plan = plan_for(blocks.channels, scheme, pages.table.size)
    _held, excess = workspace("lists", entries)
    _held_too, bases = workspace("bases", plan.work)
    number = loops.unpack_excess(
        kinds.address, entries, scheme.packed, others.address, others.size, excess
    )
    if number != others.size:
        raise FrameLayoutError(f"{number} entries are of kind 0, but there are {others.size}")
    spread_bases(windows.address, plan, bases)
    streams = by_width([stream.address for stream in dense], scheme)
    streaming = pages.aligned and pages.row % TILE == 0 and elements * item >= STREAM_BYTES

    def code(begin: int, end: int) -> None:
        loops.decode_tiles(
            pages.address, pages.stride, pages.ids, pages.row, elements, begin, end,
            bases, item, scheme.packed, *streams, counts.address,
            positions.address, excess, int(streaming),
        )  # fmt: skip

    run([partial(code, *span) for span in spans(tiles_of(elements), JOB_TILES, threads)], threads)
