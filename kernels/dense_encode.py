"""Mode `dense`, and `fast` for E5M2, encode: from the paged cache to coded streams.

A program is one warp, and takes one tile of 2,048 elements. Entries of a tile go to a slot of its
own that has room for all elements, so that nothing can be lost; a second kernel moves them next to
each other, in the stream's order. Where there are so many that coding does not pay, it writes the
blocks as they are over the streams instead.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from .bits import HIGH_BITS, LOW_SEVEN, ONES, count_bits, gather_top_bits
from .lanes import LANES, columns_of
from .launch import has_ptx
from .pages import PAGE_ARGUMENTS, Divisor, Pages
from .planes import no_plane, store_planes, to_planes
from .rotation import rotate
from .tiles import (
    CHUNK,
    CHUNKS,
    INTEGERS,
    PAIRS,
    TILE,
    VECTOR,
    describe_tiles,
    in_low,
    keep_tile,
    load_words,
    step_of,
    unroll_of,
)
from .windows import WindowRule, choose_windows


def entry_limit(elements: int, item: int, packed: int, channels: int) -> int:
    """The most entries with which coded streams may be smaller than the input; may be < 0."""
    dense = (item - 1) * elements + triton.cdiv(elements, TILE.value) * CHUNK.value * packed
    sizes = dense + triton.cdiv(elements, CHUNK.value) + channels
    # An entry takes 10 bits or more.
    return (elements * item - sizes - 1) * 4 // 5


@dataclass(frozen=True, slots=True)
class DenseBuffers:
    """What `dense_encode` writes, on the device. May be used again and again.

    Attributes
    ----------
    elements, channels, item, packed
        The longest run that fits, the most channels, bytes per element, bits packed of each.
    streams
        Room for the run as it is. uint8.
    low, plane4, plane2, plane1
        The dense streams, of whole tiles, as parts of `streams`. uint8.
    windows, bases
        Of each channel. uint8, integers as wide as elements.
    counts
        Entries of each chunk; 255 means 256. uint8.
    numbers, ends
        Entries of each tile, and of it and all before it. int32.
    slots
        Shape: (2, tiles * 2,048), uint8. Positions and excess of entries; each tile has a slot.
    entries
        Shape: (2, most), uint8. The same, next to each other; both rows are aligned.
    """

    elements: int
    channels: int
    item: int
    packed: int
    streams: torch.Tensor
    low: torch.Tensor
    plane4: torch.Tensor
    plane2: torch.Tensor
    plane1: torch.Tensor
    windows: torch.Tensor
    bases: torch.Tensor
    counts: torch.Tensor
    numbers: torch.Tensor
    ends: torch.Tensor
    slots: torch.Tensor
    entries: torch.Tensor

    @classmethod
    def allocate(
        cls, elements: int, channels: int, item: int, packed: int, device: torch.device
    ) -> Self:
        tiles = triton.cdiv(elements, TILE.value)
        most = triton.cdiv(max(entry_limit(elements, item, packed, channels), 0), 16) * 16

        def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        streams = empty(tiles * TILE.value * item)
        sizes = [TILE.value * (item - 1), *(CHUNK.value * (packed & width) for width in (4, 2, 1))]
        parts = streams[: tiles * sum(sizes)].split([tiles * size for size in sizes])
        return cls(
            elements, channels, item, packed, streams, *parts,
            windows=empty(channels),
            bases=empty(channels, dtype=INTEGERS[item]),
            counts=empty(tiles * CHUNKS.value),
            numbers=empty(tiles, dtype=torch.int32),
            ends=empty(tiles, dtype=torch.int32),
            slots=empty(2, tiles * TILE.value),
            entries=empty(2, most),
        )  # fmt: skip


def dense_encode(
    view: torch.Tensor, ids: torch.Tensor, rule: WindowRule, limit: int, buffers: DenseBuffers
) -> None:
    """Code the blocks `ids` (int32) of a cache [B, H, N, C]. Waits for nothing.

    With more than `limit` entries, `buffers.streams` has the blocks as they are. Ids must be those
    of blocks in the cache: nothing here checks them.
    """
    pages, wide = describe_tiles(view, ids.numel())
    elements, item = ids.numel() * view[0].numel(), view.element_size()
    channels = view.shape[1] * view.shape[3]
    room = buffers.elements, buffers.channels, buffers.entries.shape[1], buffers.item
    if any(a > b for a, b in zip((elements, channels, limit, item), room, strict=True)):
        raise ValueError(f"{elements} elements do not fit into buffers for {buffers.elements}")
    tiles, ptx = triton.cdiv(elements, TILE.value), has_ptx(view.device)
    cache = view.view(INTEGERS[item])
    choose_windows(view, ids, rule, buffers.windows, buffers.bases)
    dense_encode_kernel[(tiles,)](
        cache, ids, buffers.bases,
        buffers.low, buffers.plane4, buffers.plane2, buffers.plane1,
        buffers.counts, buffers.numbers, *buffers.slots, elements, *pages.arguments(),
        PACKED=buffers.packed, UNROLL=unroll_of(wide), WIDE=wide, ASM=ptx, num_warps=1,
    )  # fmt: skip
    ends = buffers.ends[:tiles]
    torch.cumsum(buffers.numbers[:tiles], 0, dtype=torch.int32, out=ends)
    dense_collect_kernel[(tiles,)](
        cache, ids, buffers.streams.view(INTEGERS[item]), buffers.numbers, ends,
        *buffers.slots, *buffers.entries, elements, limit, tiles, *pages.arguments(),
        STEP=step_of(wide), WIDE=wide, ASM=ptx, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["elements", *PAGE_ARGUMENTS])
def dense_encode_kernel(
    cache, ids, bases, low, plane4, plane2, plane1,
    counts, numbers, positions, excesses, elements,
    columns, columns_magic, columns_shift, rows, rows_magic, rows_shift,
    heads, heads_magic, heads_shift, block_stride, head_stride, row_stride, column_stride,
    PACKED: tl.constexpr, UNROLL: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    pages = Pages(
        Divisor(columns, columns_magic, columns_shift),
        Divisor(rows, rows_magic, rows_shift),
        Divisor(heads, heads_magic, heads_shift),
        block_stride, head_stride, row_stride, column_stride,
    )  # fmt: skip
    tile = tl.program_id(0)
    begin = tile.to(tl.int64) * TILE
    BITS: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth
    words4, words2, words1 = no_plane(4), no_plane(2), no_plane(1)
    pairs = counts.to(tl.pointer_type(tl.uint16), bitcast=True)
    total = tl.full((), 0, tl.int32)
    for pair in tl.range(0, PAIRS, loop_unroll_factor=UNROLL):
        words, base = load_words(cache, ids, bases, pages, tile, pair, elements, WIDE, ASM)
        top, low_bytes = rotate(words, base, BITS, ASM)
        if BITS == 16:
            tl.store(in_low(low, tile, pair), low_bytes)
        words4, words2, words1 = to_planes(words4, words2, words1, top, pair, PACKED)
        excess = (top >> PACKED) & ((0xFF >> PACKED) * ONES)
        first, second = write_entries(excess, positions + begin + total, excesses + begin + total)
        both = tl.minimum(first, 255) | (tl.minimum(second, 255) << 8)
        tl.store(pairs + tile * PAIRS + pair, both.to(tl.uint16))
        total += first + second
    tl.store(numbers + tile, total)
    store_planes(plane4, plane2, plane1, tile, words4, words2, words1, PACKED)


@triton.jit
def write_entries(excess, positions, excesses):
    """Write a pair's entries in order of position; returns how many its chunks have.

    A lane's excess is four bytes of at most 127 in each of four words.
    """
    lane, column = tl.arange(0, LANES), tl.arange(0, 4)[None, :]
    flags = (excess + LOW_SEVEN) & HIGH_BITS
    own = tl.sum(count_bits(flags).to(tl.int32), axis=1)
    # Both chunks are counted in one; a chunk has at most 256.
    shift = tl.where(lane < LANES // 2, 0, 16)
    number = tl.sum(own << shift, axis=0)
    first, second = number & 0xFFFF, number >> 16
    if number > 0:
        bits = tl.sum(gather_top_bits(flags) << (4 * column).to(tl.uint32), axis=1)
        # A byte cannot count to 256: a chunk that nearly gets there lists all it has.
        first, second = whole_chunk(first), whole_chunk(second)
        full = tl.where(lane < LANES // 2, first, second) == CHUNK
        bits, own = tl.where(full, 0xFFFF, bits), tl.where(full, 2 * VECTOR, own)
        word0, word1, word2, word3 = columns_of(excess)
        rank = tl.cumsum(own, axis=0) - own
        # Every lane writes its first entry, then every lane its second: mostly there is none.
        for _ in range(tl.max(own, axis=0)):
            live = bits != 0
            lowest = bits & (~bits + 1)
            bits ^= lowest
            j = count_bits(lowest - 1)
            even, odd = tl.where(j >= 8, word2, word0), tl.where(j >= 8, word3, word1)
            word = tl.where((j & 4) != 0, odd, even) >> (8 * (j & 3))
            position = (lane % (LANES // 2)) * (2 * VECTOR) + j.to(tl.int32)
            tl.store(positions + rank, position.to(tl.uint8), mask=live)
            tl.store(excesses + rank, word.to(tl.uint8), mask=live)
            rank += 1
    return first, second


@triton.jit
def whole_chunk(number):
    """How many entries a chunk lists that has so many."""
    return tl.where(number >= 255, CHUNK, number)


@triton.jit(do_not_specialize=["elements", "limit", "tiles", *PAGE_ARGUMENTS])
def dense_collect_kernel(
    cache, ids, raw, numbers, ends, positions, excesses, to_positions, to_excesses,
    elements, limit, tiles,
    columns, columns_magic, columns_shift, rows, rows_magic, rows_shift,
    heads, heads_magic, heads_shift, block_stride, head_stride, row_stride, column_stride,
    STEP: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    begin = tile.to(tl.int64) * TILE
    if tl.load(ends + tiles - 1) <= limit:
        number = tl.load(numbers + tile)
        target = tl.load(ends + tile) - number
        for at in range(0, number, LANES):
            entry = at + tl.arange(0, LANES)
            live = entry < number
            source = begin + entry
            position = tl.load(positions + source, mask=live, other=0)
            excess = tl.load(excesses + source, mask=live, other=0)
            tl.store(to_positions + target + entry, position, mask=live)
            tl.store(to_excesses + target + entry, excess, mask=live)
    else:
        pages = Pages(
            Divisor(columns, columns_magic, columns_shift),
            Divisor(rows, rows_magic, rows_shift),
            Divisor(heads, heads_magic, heads_shift),
            block_stride, head_stride, row_stride, column_stride,
        )  # fmt: skip
        keep_tile(cache, ids, raw, pages, tile, elements, STEP, WIDE, ASM)
