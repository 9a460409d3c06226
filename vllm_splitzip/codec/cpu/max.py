"""Mode `max` on a CPU: from vLLM's paged cache to streams and back."""

from dataclasses import dataclass
from functools import partial

import numpy as np

from ...errors import FrameLayoutError
from ..coded import Blocks, Bytes, Coded
from ..planes import TILE, tiles_of
from ..scheme import Scheme
from . import max_loops as loops
from .memory import STREAM_BYTES, Stream, source, target
from .pick import COMPRESSES
from .threads import DEFAULT_THREADS, run, spans
from .windows import choose_windows, plan_for, spread_bases
from .work import JOB_TILES, by_width, carve, dense_bytes, received, workspace


def encode_max(blocks: Blocks, scheme: Scheme, threads: int = DEFAULT_THREADS) -> Coded | None:
    """Code a run of blocks with known channels, or None where that would not make it smaller.

    Raises
    ------
    IndexError
        When the table names a block that does not exist.
    """
    assert blocks.channels is not None
    item, elements = scheme.number_format.item, blocks.elements
    pages = source(blocks, (item,))
    tiles = tiles_of(elements)
    fixed = (*dense_bytes(scheme, elements), 2 * tiles, blocks.channels.number)
    limit = elements * item - sum(fixed) - 1
    if limit < 0:
        return None
    (*dense, sizes, windows), (*addresses, sizes_at, windows_at) = carve(*fixed)
    plan = plan_for(blocks.channels, scheme, pages.table.size)
    _held, bases = workspace("bases", plan.work)
    choose_windows(pages, plan, windows_at, bases)
    streams = by_width(addresses, scheme)
    streaming = int(elements * item >= STREAM_BYTES)
    found: list[tuple[int, Bytes]] = []

    def code(begin: int, end: int) -> None:
        if sum(escapes.size for _, escapes in found) > limit:
            return
        # Room for twice what real KV needs, and for the worst that pays if that is short.
        for most in (min(limit, (end - begin) * TILE // 6), limit):
            escapes, escapes_at = workspace("lists", most + loops.PART)
            number = loops.encode_tiles(
                pages.address, pages.stride, pages.ids, pages.row, elements, begin, end,
                bases, item, scheme.packed, scheme.below, *streams, sizes_at, escapes_at,
                most, streaming, COMPRESSES,
            )  # fmt: skip
            if number <= most:
                break
        found.append((begin, escapes[:number].copy()))

    run([partial(code, *span) for span in spans(tiles, JOB_TILES, threads)], threads)
    found.sort(key=lambda part: part[0])
    escapes = np.concatenate([windows[:0], *(part for _, part in found)])
    if escapes.size > limit:
        return None
    return Coded(
        mode="max",
        elements=elements,
        dense=tuple(dense),
        tables={"windows": windows, "sizes": sizes, "escapes": escapes},
    )


@dataclass(frozen=True, slots=True)
class MaxStreams:
    """The streams of a run, as long as they have to be and in agreement with each other."""

    dense: list[Stream]
    windows: Stream
    sizes: Stream
    escapes: Stream


def received_max(
    coded: Coded, scheme: Scheme, elements: int, channels: int, threads: int = DEFAULT_THREADS
) -> MaxStreams:
    """The streams of a run of `elements` elements of `channels` channels.

    Raises
    ------
    FrameLayoutError
        When they are those of another run, or contradict each other.
    """
    dense, tiles = received(coded, scheme, elements), tiles_of(elements)
    windows = Stream("windows", coded.tables.get("windows"), channels)
    sizes = Stream("sizes", coded.tables.get("sizes"), 2 * tiles, width=2)
    all_of_them = loops.offset(sizes.address, tiles)
    escapes = Stream("escapes", coded.tables.get("escapes"), all_of_them)
    _, *planes = by_width([stream.address for stream in dense], scheme)
    fitting: list[bool] = []

    def check(begin: int, end: int) -> None:
        fitting.append(
            loops.fits(
                begin, end, scheme.packed, scheme.below, *planes, sizes.address, escapes.address
            )
        )

    run([partial(check, *span) for span in spans(tiles, JOB_TILES, threads)], threads)
    if not all(fitting):
        raise FrameLayoutError("a chunk's escapes are not as many as expected from its first level")
    return MaxStreams(dense, windows, sizes, escapes)


def decode_max(
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
    streams = received_max(coded, scheme, elements, blocks.channels.number, threads)
    low, *planes = by_width([stream.address for stream in streams.dense], scheme)
    tiles = tiles_of(elements)
    plan = plan_for(blocks.channels, scheme, pages.table.size)
    _held, bases = workspace("bases", plan.work)
    spread_bases(streams.windows.address, plan, bases)
    streaming = pages.aligned and pages.row % TILE == 0 and elements * item >= STREAM_BYTES

    def code(begin: int, end: int) -> None:
        loops.decode_tiles(
            pages.address, pages.stride, pages.ids, pages.row, elements, begin, end,
            bases, item, scheme.packed, scheme.below, low, *planes, streams.sizes.address,
            streams.escapes.address, int(streaming), COMPRESSES,
        )  # fmt: skip

    run([partial(code, *span) for span in spans(tiles, JOB_TILES, threads)], threads)
