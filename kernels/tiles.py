"""Tiles of 2,048 elements of a run, as the windowed modes take them, in registers of one warp.

A tile is 8 chunks of 256 elements, of each of which a lane holds 8 neighbours. So every lane has in
its own registers what the planes pack together, see `codec/planes.py`, and all accesses to a chunk
are those of one piece of memory. Some chunks of a tile are a tensor [STEP, 32, 8].

Unlike mode `fast`, these modes need to know of every element which channel it belongs to: its head
and its column. So what is contiguous in a block is not merged as in `pages.py`.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl

from .pages import Divisor, Pages, divide, place

TILE: tl.constexpr = tl.constexpr(2048)
CHUNK: tl.constexpr = tl.constexpr(256)
CHUNKS: tl.constexpr = tl.constexpr(8)
"""Chunks of a tile."""
LANES: tl.constexpr = tl.constexpr(32)
VECTOR: tl.constexpr = tl.constexpr(8)
"""Neighbouring elements that a lane takes together."""

_LIMIT = (1 << 31) - TILE.value
"""Elements of a run are counted in 32 bits; the last tile goes past its end."""

INTEGERS = {1: torch.uint8, 2: torch.int16}
"""What elements are to the kernels, by their size."""


def describe_tiles(view: torch.Tensor, blocks: int) -> tuple[Pages, bool]:
    """(description, whether its units are vectors) of a view [B, H, N, C], for a run of `blocks`.

    Raises
    ------
    ValueError
        When the view is not one of 1- or 2-byte elements in four dimensions, or the run too long.
    """
    if view.dim() != 4 or view.element_size() not in INTEGERS or 0 in view.shape:
        raise ValueError(f"a cache is [B, H, N, C] of 1 or 2 bytes, not {view.dtype} {view.shape}")
    if blocks * view[0].numel() >= _LIMIT:
        raise ValueError(f"{blocks} blocks are too many for one launch")
    _, *sizes = view.shape
    strides, vector = view.stride(), VECTOR.value
    # Offsets within a block are sums of three products, which have to stay below 2^31.
    wide = (
        strides[3] == 1
        and sizes[2] % vector == 0
        and all(stride % vector == 0 for stride in strides[:3])
        and view.data_ptr() % (vector * view.element_size()) == 0
        and max(strides[0], *(n * s for n, s in zip(sizes, strides[1:], strict=True))) < _LIMIT // 4
    )
    if wide:
        sizes[2] //= vector
        strides = (*(stride // vector for stride in strides[:3]), 1)
    heads, rows, columns = (Divisor.of(size) for size in sizes)
    return Pages(columns, rows, heads, *strides), wide


def step_of(wide: bool) -> int:
    """Chunks that are taken at once: the loads of all are under way together, or registers suffice.

    Where units are elements, each has an address of its own.
    """
    return CHUNKS.value if wide else 1


def unroll_of(wide: bool) -> int:
    """Chunks whose code is compiled one after the other: loads of one need not wait for another."""
    return CHUNKS.value if wide else 1


@triton.jit
def find(unit, pages, WIDE: tl.constexpr):
    """(index into the block table, offset within the block, channel) of a unit, in units."""
    unit = unit.to(tl.uint32)
    row = divide(unit, pages.columns)
    head = divide(row, pages.rows)
    index = divide(head, pages.heads)
    column = (unit - row * pages.columns.value).to(tl.int32)
    row = (row - head * pages.rows.value).to(tl.int32)
    head = (head - index * pages.heads.value).to(tl.int32)
    channel = head * pages.columns.value + column
    if not WIDE:
        column, row, head = column.to(tl.int64), row.to(tl.int64), head.to(tl.int64)
    offset = head * pages.head_stride + row * pages.row_stride + column * pages.column_stride
    return index.to(tl.int32), offset, channel


@triton.jit
def in_tile(first, STEP: tl.constexpr):
    """Where in their tile the elements of the chunks from `first` on are. Shape: (STEP, 32, 8)."""
    chunk = (first + tl.arange(0, STEP))[:, None, None] * CHUNK
    lane = tl.arange(0, LANES)[None, :, None] * VECTOR
    return chunk + lane + tl.arange(0, VECTOR)[None, None, :]


@triton.jit
def addresses(
    ids, pages, tile, first, elements, STEP: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr
):
    """(offset in the cache, channel, block) of each element of some chunks, all in elements.

    The block is negative where the run has ended. Its shape is (STEP, 32, 1) where units are
    vectors.
    """
    if WIDE:
        units = (first + tl.arange(0, STEP))[:, None] * LANES + tl.arange(0, LANES)[None, :]
        unit = tile * (TILE // VECTOR) + units
        index, offset, channel = find(unit, pages, WIDE)
        # Runs are whole rows, and rows whole vectors.
        block = tl.load(ids + index, mask=unit < elements // VECTOR, other=-1)[:, :, None]
        within = tl.arange(0, VECTOR)[None, None, :]
        at = (place(block, offset[:, :, None], pages, WIDE, ASM) * VECTOR) + within
        channel = (channel * VECTOR)[:, :, None] + within
    else:
        element = tile * TILE + in_tile(first, STEP)
        index, offset, channel = find(element, pages, WIDE)
        block = tl.load(ids + index, mask=element < elements, other=-1)
        at = place(block, offset, pages, WIDE, ASM)
    return at, channel, block


@triton.jit
def load_words(
    cache, ids, bases, pages, tile, chunk, elements, WIDE: tl.constexpr, ASM: tl.constexpr
):
    """A chunk's elements and their bases, four in a word; 0 where the run has ended.

    Shape: (32, 2), uint64 or uint32, as 2- or 1-byte elements need.
    """
    BITS: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth
    WORD: tl.constexpr = tl.uint64 if BITS == 16 else tl.uint32
    UNSIGNED: tl.constexpr = tl.uint16 if BITS == 16 else tl.uint8
    lane, half = tl.arange(0, LANES), tl.arange(0, 2)[None, :]
    if WIDE:
        unit = tile * (TILE // VECTOR) + chunk * LANES + lane
        index, offset, channel = find(unit, pages, WIDE)
        # Runs are whole rows, and rows whole vectors.
        live = unit < elements // VECTOR
        block = tl.load(ids + index, mask=live, other=0)
        at = (place(block, offset, pages, WIDE, ASM) * 2)[:, None] + half
        channel = (channel * 2)[:, None] + half
        cache = cache.to(tl.pointer_type(WORD), bitcast=True)
        bases = bases.to(tl.pointer_type(WORD), bitcast=True)
        words = tl.load(cache + at, mask=live[:, None], other=0)
        base = tl.load(bases + channel, mask=live[:, None], other=0)
    else:
        words = tl.zeros((LANES, 2), WORD)
        base = words
        for i in tl.static_range(4):
            element = tile * TILE + chunk * CHUNK + lane[:, None] * VECTOR + half * 4 + i
            live = element < elements
            index, offset, channel = find(element, pages, WIDE)
            block = tl.load(ids + index, mask=live, other=0)
            word = tl.load(cache + place(block, offset, pages, WIDE, ASM), mask=live, other=0)
            words |= word.to(UNSIGNED, bitcast=True).to(WORD) << (BITS * i)
            word = tl.load(bases + channel, mask=live, other=0)
            base |= word.to(UNSIGNED, bitcast=True).to(WORD) << (BITS * i)
    return words, base


@triton.jit
def load_bases(bases, pages, tile, chunk, elements, WIDE: tl.constexpr):
    """The bases of a chunk's elements, as `load_words` has them."""
    BITS: tl.constexpr = bases.dtype.element_ty.primitive_bitwidth
    WORD: tl.constexpr = tl.uint64 if BITS == 16 else tl.uint32
    UNSIGNED: tl.constexpr = tl.uint16 if BITS == 16 else tl.uint8
    lane, half = tl.arange(0, LANES), tl.arange(0, 2)[None, :]
    if WIDE:
        unit = tile * (TILE // VECTOR) + chunk * LANES + lane
        _, _, channel = find(unit, pages, WIDE)
        bases = bases.to(tl.pointer_type(WORD), bitcast=True)
        live = unit < elements // VECTOR
        base = tl.load(bases + (channel * 2)[:, None] + half, mask=live[:, None], other=0)
    else:
        base = tl.zeros((LANES, 2), WORD)
        for i in tl.static_range(4):
            element = tile * TILE + chunk * CHUNK + lane[:, None] * VECTOR + half * 4 + i
            _, _, channel = find(element, pages, WIDE)
            word = tl.load(bases + channel, mask=element < elements, other=0)
            base |= word.to(UNSIGNED, bitcast=True).to(WORD) << (BITS * i)
    return base


@triton.jit
def store_words(
    cache, ids, pages, tile, chunk, elements, words, WIDE: tl.constexpr, ASM: tl.constexpr
):
    """The inverse of `load_words`; blocks with a negative id are passed over."""
    BITS: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth
    lane, half = tl.arange(0, LANES), tl.arange(0, 2)[None, :]
    if WIDE:
        unit = tile * (TILE // VECTOR) + chunk * LANES + lane
        index, offset, _ = find(unit, pages, WIDE)
        block = tl.load(ids + index, mask=unit < elements // VECTOR, other=-1)
        at = (place(block, offset, pages, WIDE, ASM) * 2)[:, None] + half
        cache = cache.to(tl.pointer_type(words.dtype), bitcast=True)
        tl.store(cache + at, words, mask=(block >= 0)[:, None])
    else:
        for i in tl.static_range(4):
            element = tile * TILE + chunk * CHUNK + lane[:, None] * VECTOR + half * 4 + i
            index, offset, _ = find(element, pages, WIDE)
            block = tl.load(ids + index, mask=element < elements, other=-1)
            at = place(block, offset, pages, WIDE, ASM)
            word = (words >> (BITS * i)).to(cache.dtype.element_ty)
            tl.store(cache + at, word, mask=block >= 0)


@triton.jit
def in_low(low, tile, chunk):
    """Where the low bytes of a chunk's elements are, four in a word."""
    within = tl.arange(0, LANES)[:, None] * 2 + tl.arange(0, 2)[None, :]
    low = low.to(tl.pointer_type(tl.uint32), bitcast=True)
    return low + tile.to(tl.int64) * (TILE // 4) + chunk * (CHUNK // 4) + within


@triton.jit
def load_low(low, tile, chunk, elements, BITS: tl.constexpr):
    """Those low bytes, of elements of 16 bits; 0 where the run has ended."""
    words = tl.zeros((LANES, 2), tl.uint32)
    if BITS == 16:
        within = chunk * CHUNK + tl.arange(0, LANES)[:, None] * VECTOR
        # Behind the stream there is room for the rest of the last word.
        words = tl.load(in_low(low, tile, chunk), mask=tile * TILE + within < elements, other=0)
    return words


@triton.jit
def keep_tile(
    cache, ids, raw, pages, tile, elements,
    STEP: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Write a tile's elements as they are, where coding them does not pay."""
    begin = tile.to(tl.int64) * TILE
    for chunk in range(0, CHUNKS, STEP):
        at, _, block = addresses(ids, pages, tile, chunk, elements, STEP, WIDE, ASM)
        words = tl.load(cache + at, mask=block >= 0, other=0)
        tl.store(raw + begin + in_tile(chunk, STEP), words)
