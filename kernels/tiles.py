"""Tiles of 2,048 elements of a run, as the windowed modes take them, in registers of one warp.

A tile is 4 pairs of chunks of 256 elements, of each of which a lane holds 16 neighbours: lanes 0 to
15 have the first chunk of a pair. So every lane has in its own registers what the planes pack
together, see `codec/planes.py`, but for the plane of 1 bit, where lanes t and t + 16 share bytes.
Low bytes and planes are then 128 bits a lane and access, as are a lane's elements, in two accesses.
Some chunks of a tile are a tensor [STEP, 32, 8].

Unlike mode `fast`, these modes need to know of every element which channel it belongs to: its head
and its column. So what is contiguous in a block is not merged as in `pages.py`.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl

from .lanes import LANES, apart, side_by_side
from .pages import Divisor, Pages, divide, place

TILE: tl.constexpr = tl.constexpr(2048)
CHUNK: tl.constexpr = tl.constexpr(256)
CHUNKS: tl.constexpr = tl.constexpr(8)
"""Chunks of a tile."""
VECTOR: tl.constexpr = tl.constexpr(8)
"""Neighbouring elements that are one access where the layout allows."""
PAIR: tl.constexpr = tl.constexpr(512)
PAIRS: tl.constexpr = tl.constexpr(4)
"""Pairs of chunks of a tile."""
GROUP: tl.constexpr = tl.constexpr(32)
"""Neighbouring elements that two lanes take together, and whose place is found but once."""

_LIMIT = (1 << 31) - TILE.value
"""Elements of a run are counted in 32 bits; the last tile goes past its end."""

INTEGERS = {1: torch.uint8, 2: torch.int16}
"""What elements are to the kernels, by their size."""


def describe_tiles(view: torch.Tensor, blocks: int) -> tuple[Pages, int]:
    """(description, elements in its units) of a view [B, H, N, C], for a run of `blocks`.

    Units are groups, vectors or, as 0 says, elements that have nothing to do with each other.
    Strides count vectors, or else elements.

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
    unit = 0
    if wide:
        unit = GROUP.value if sizes[2] % GROUP.value == 0 else vector
        sizes[2] //= unit
        strides = (*(stride // vector for stride in strides[:3]), unit // vector)
    heads, rows, columns = (Divisor.of(size) for size in sizes)
    return Pages(columns, rows, heads, *strides), unit


def step_of(wide: int) -> int:
    """Chunks that are taken at once: the loads of all are under way together, or registers suffice.

    Where units are elements, each has an address of its own.
    """
    return CHUNKS.value if wide else 1


def unroll_of(wide: int) -> int:
    """Pairs whose code is compiled one after the other: loads of one need not wait for another."""
    return PAIRS.value if wide else 1


@triton.jit
def find(unit, pages, WIDE: tl.constexpr):
    """(index into the block table, offset within the block, channel) of a unit, in units.

    The offset is in strides' units.
    """
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
def find_vector(vector, pages, WIDE: tl.constexpr):
    """As `find` of a vector, all in vectors."""
    if WIDE == GROUP:
        vector = vector.to(tl.uint32)
        index, offset, channel = find(vector // (GROUP // VECTOR), pages, WIDE)
        within = (vector % (GROUP // VECTOR)).to(tl.int32)
        offset, channel = offset + within, channel * (GROUP // VECTOR) + within
    else:
        index, offset, channel = find(vector, pages, WIDE)
    return index, offset, channel


@triton.jit
def find_both(tile, pair, elements, pages, APART: tl.constexpr, WIDE: tl.constexpr):
    """(indices, offsets, channels, whether in the run) of each lane's two vectors of a pair.

    All in vectors. They are neighbours, or APART is 2: a lane has every other one of four.
    """
    lane = tl.arange(0, LANES)
    within = lane % 2 * (2 if APART == 1 else 1)
    if WIDE == GROUP:
        group = tile * (TILE // GROUP) + pair * (PAIR // GROUP) + lane // 2
        index, offset, channel = find(group, pages, WIDE)
        offset, channel = offset + within, channel * (GROUP // VECTOR) + within
        # Runs are whole rows, and rows whole groups.
        live = group < elements // GROUP
        return (
            (index, index), (offset, offset + APART), (channel, channel + APART), (live, live)
        )  # fmt: skip
    vector = tile * (TILE // VECTOR) + pair * (PAIR // VECTOR) + lane // 2 * 4 + within
    index, offset, channel = find(vector, pages, WIDE)
    second = find(vector + APART, pages, WIDE)
    end = elements // VECTOR
    return (
        (index, second[0]), (offset, second[1]), (channel, second[2]),
        (vector < end, vector + APART < end),
    )  # fmt: skip


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
        index, offset, channel = find_vector(unit, pages, WIDE)
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
    cache, ids, bases, pages, tile, pair, elements, WIDE: tl.constexpr, ASM: tl.constexpr
):
    """A pair's elements and their bases, four in a word; 0 where the run has ended.

    Shape: (32, 4), uint64 or uint32, as 2- or 1-byte elements need.
    """
    BITS: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth
    WORD: tl.constexpr = tl.uint64 if BITS == 16 else tl.uint32
    UNSIGNED: tl.constexpr = tl.uint16 if BITS == 16 else tl.uint8
    if WIDE:
        index, offset, channel, live = find_both(tile, pair, elements, pages, 1, WIDE)
        cache = cache.to(tl.pointer_type(WORD), bitcast=True)
        block = tl.load(ids + index[0], mask=live[0], other=0)
        at = place(block, offset[0], pages, WIDE, ASM)
        first = tl.load(words_of(cache, at), mask=live[0][:, None], other=0)
        if WIDE == GROUP:
            at += 1
        else:
            block = tl.load(ids + index[1], mask=live[1], other=0)
            at = place(block, offset[1], pages, WIDE, ASM)
        second = tl.load(words_of(cache, at), mask=live[1][:, None], other=0)
        words = side_by_side(first, second)
        bases = bases.to(tl.pointer_type(WORD), bitcast=True)
        first = tl.load(words_of(bases, channel[0]), mask=live[0][:, None], other=0)
        second = tl.load(words_of(bases, channel[1]), mask=live[1][:, None], other=0)
        base = side_by_side(first, second)
    else:
        words = tl.zeros((LANES, 4), WORD)
        base = words
        for i in tl.static_range(4):
            element = element_of(tile, pair) + i
            live = element < elements
            index, offset, channel = find(element, pages, WIDE)
            block = tl.load(ids + index, mask=live, other=0)
            word = tl.load(cache + place(block, offset, pages, WIDE, ASM), mask=live, other=0)
            words |= word.to(UNSIGNED, bitcast=True).to(WORD) << (BITS * i)
            word = tl.load(bases + channel, mask=live, other=0)
            base |= word.to(UNSIGNED, bitcast=True).to(WORD) << (BITS * i)
    return words, base


@triton.jit
def words_of(pointer, vector):
    """Where the two words of a vector of each lane are. Shape: (32, 2)."""
    return pointer + (vector * 2)[:, None] + tl.arange(0, 2)[None, :]


@triton.jit
def element_of(tile, pair):
    """The first element of each of a pair's words. Shape: (32, 4)."""
    word = tl.arange(0, LANES)[:, None] * 4 + tl.arange(0, 4)[None, :]
    return tile * TILE + pair * PAIR + word * 4


@triton.jit
def load_bases(bases, pages, tile, pair, elements, WIDE: tl.constexpr):
    """The bases of a pair's elements, four in a word, as `exchange` has these.

    Where the run has ended they are those of any channels: find never leaves them.
    """
    BITS: tl.constexpr = bases.dtype.element_ty.primitive_bitwidth
    WORD: tl.constexpr = tl.uint64 if BITS == 16 else tl.uint32
    UNSIGNED: tl.constexpr = tl.uint16 if BITS == 16 else tl.uint8
    if WIDE:
        _, _, channel, _ = find_both(tile, pair, elements, pages, 2, WIDE)
        bases = bases.to(tl.pointer_type(WORD), bitcast=True)
        first, second = tl.load(words_of(bases, channel[0])), tl.load(words_of(bases, channel[1]))
        base = side_by_side(first, second)
    else:
        base = tl.zeros((LANES, 4), WORD)
        for i in tl.static_range(4):
            _, _, channel = find(element_of(tile, pair) + i, pages, WIDE)
            word = tl.load(bases + channel)
            base |= word.to(UNSIGNED, bitcast=True).to(WORD) << (BITS * i)
    return base


@triton.jit
def store_words(
    cache, ids, pages, tile, pair, elements, words, WIDE: tl.constexpr, ASM: tl.constexpr
):
    """Write a pair's elements, exchanged; blocks with a negative id are passed over."""
    BITS: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth
    if WIDE:
        index, offset, _, live = find_both(tile, pair, elements, pages, 2, WIDE)
        cache = cache.to(tl.pointer_type(words.dtype), bitcast=True)
        first, second = apart(words)
        block = tl.load(ids + index[0], mask=live[0], other=-1)
        at = place(block, offset[0], pages, WIDE, ASM)
        tl.store(words_of(cache, at), first, mask=(block >= 0)[:, None])
        if WIDE == GROUP:
            at += 2
        else:
            block = tl.load(ids + index[1], mask=live[1], other=-1)
            at = place(block, offset[1], pages, WIDE, ASM)
        tl.store(words_of(cache, at), second, mask=(block >= 0)[:, None])
    else:
        for i in tl.static_range(4):
            element = element_of(tile, pair) + i
            index, offset, _ = find(element, pages, WIDE)
            block = tl.load(ids + index, mask=element < elements, other=-1)
            at = place(block, offset, pages, WIDE, ASM)
            word = (words >> (BITS * i)).to(cache.dtype.element_ty)
            tl.store(cache + at, word, mask=block >= 0)


@triton.jit
def in_low(low, tile, pair):
    """Where the low bytes of a pair's elements are, four in a word."""
    within = tl.arange(0, LANES)[:, None] * 4 + tl.arange(0, 4)[None, :]
    low = low.to(tl.pointer_type(tl.uint32), bitcast=True)
    return low + tile.to(tl.int64) * (TILE // 4) + pair * (PAIR // 4) + within


@triton.jit
def load_low(low, tile, pair, BITS: tl.constexpr):
    """Those low bytes, of elements of 16 bits. Behind the stream there is room for a tile."""
    words = tl.zeros((LANES, 4), tl.uint32)
    if BITS == 16:
        words = tl.load(in_low(low, tile, pair))
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
