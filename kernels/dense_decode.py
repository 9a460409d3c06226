"""Mode `dense`, and `fast` for E5M2, decode: from coded streams straight into the paged cache.

A program is one warp, and takes one tile. It writes the tile as if there were no entries, and
then writes the elements again that are listed.

Whatever the streams contain, nothing is written outside the run's own blocks, and nothing read
outside the streams and the room behind them.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl

from .lanes import LANES, exchange
from .launch import has_ptx
from .pages import PAGE_ARGUMENTS, Divisor, Pages, place
from .planes import from_planes, load_planes, unpack_some
from .rotation import unrotate, unrotate_one
from .tiles import (
    CHUNK,
    CHUNKS,
    INTEGERS,
    PAIRS,
    TILE,
    VECTOR,
    describe_tiles,
    find,
    find_vector,
    load_bases,
    load_low,
    store_words,
    unroll_of,
)


def dense_decode(
    view: torch.Tensor,
    ids: torch.Tensor,
    packed: int,
    bases: torch.Tensor,
    low: torch.Tensor,
    planes: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    counts: torch.Tensor,
    firsts: torch.Tensor,
    positions: torch.Tensor,
    excesses: torch.Tensor,
) -> None:
    """Write coded blocks into a cache [B, H, N, C]. Waits for nothing.

    Parameters
    ----------
    ids
        int32. Where the blocks go; negative ones are passed over. Not checked.
    packed
        Bits of an element's top byte in the planes.
    bases
        Of each channel; integers as wide as elements.
    low, planes
        The dense streams; planes of 4, 2 and 1 bits, any tensor for one that there is not. uint8.
        Behind the low bytes there has to be room for the rest of their last tile.
    counts, firsts
        Entries of each chunk (uint8, 255 means 256), index of each tile's first entry (int32).
    positions, excesses
        All entries. uint8.
    """
    pages, wide = describe_tiles(view, ids.numel())
    elements = ids.numel() * view[0].numel()
    dense_decode_kernel[(triton.cdiv(elements, TILE.value),)](
        view.view(INTEGERS[view.element_size()]), ids, bases, low, *planes,
        counts, firsts, positions, excesses, elements, *pages.arguments(),
        PACKED=packed, UNROLL=unroll_of(wide), WIDE=wide, ASM=has_ptx(view.device), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["elements", *PAGE_ARGUMENTS])
def dense_decode_kernel(
    cache, ids, bases, low, plane4, plane2, plane1,
    counts, firsts, positions, excesses, elements,
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
    BITS: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth
    tile = tl.program_id(0)
    words4, words2, words1 = load_planes(plane4, plane2, plane1, tile, PACKED)
    for pair in tl.range(0, PAIRS, loop_unroll_factor=UNROLL):
        top = exchange(from_planes(words4, words2, words1, pair, PACKED), WIDE)
        low_bytes = exchange(load_low(low, tile, pair, BITS), WIDE)
        base = load_bases(bases, pages, tile, pair, elements, WIDE)
        words = unrotate(top, low_bytes, base, BITS, ASM)
        store_words(cache, ids, pages, tile, pair, elements, words, WIDE, ASM)

    chunk = tile * CHUNKS + tl.arange(0, CHUNKS)
    number = tl.load(counts + chunk, mask=chunk * CHUNK < elements, other=0).to(tl.int32)
    number += (number == 255).to(tl.int32)
    ends = tl.cumsum(number, axis=0)
    total = tl.sum(number, axis=0)
    if total > 0:
        # Other lanes have written the elements that this one writes again.
        tl.debug_barrier()
        entries = tl.load(firsts + tile)
        for at_entry in range(0, total, LANES):
            entry = at_entry + tl.arange(0, LANES)
            ended = (entry[:, None] >= ends[None, :]).to(tl.int32)
            chunk_begin = tile * TILE + tl.sum(ended, axis=1) * CHUNK
            write_again(
                cache, ids, bases, low, plane4, plane2, plane1, pages, elements,
                chunk_begin, positions + entries + entry, excesses + entries + entry, entry < total,
                PACKED, WIDE, ASM,
            )  # fmt: skip


@triton.jit
def write_again(
    cache, ids, bases, low, plane4, plane2, plane1, pages, elements,
    element, positions, excesses, live,
    PACKED: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Write up to 32 listed elements with their excess; `element` is where their chunks begin."""
    BITS: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth
    excess = tl.load(excesses, mask=live, other=0).to(tl.uint32)
    element += tl.load(positions, mask=live, other=0).to(tl.int32)
    live &= element < elements
    element = tl.where(live, element, 0)
    top = unpack_some(plane4, plane2, plane1, element, PACKED)
    rotated = (top | (excess << PACKED)) & 0xFF
    if BITS == 16:
        rotated = (rotated << 8) | tl.load(low + element).to(tl.uint32)
    if WIDE:
        index, offset, channel = find_vector(element // VECTOR, pages, WIDE)
        channel = channel * VECTOR + element % VECTOR
    else:
        index, offset, channel = find(element, pages, WIDE)
    block = tl.load(ids + index, mask=live, other=-1)
    at = place(block, offset, pages, WIDE, ASM)
    if WIDE:
        at = at * VECTOR + element % VECTOR
    word = unrotate_one(rotated, tl.load(bases + channel), BITS)
    tl.store(cache + at, word.to(cache.dtype.element_ty), mask=block >= 0)
