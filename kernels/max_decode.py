"""Mode `max`, decode: from coded streams straight into the paged cache.

A program is one warp, and takes one tile. It restores the levels from the last to the second, each
to a list of the tile's own, and then puts the tile's elements together, in one pass over them.

Whatever the streams contain, nothing is written outside the run's own blocks and the lists, and
nothing read outside the streams, the room behind them and the lists.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl

from .bits import ONES, whole_bytes
from .cascade import (
    LISTED,
    NEXT,
    count_handed_on,
    handed_on,
    restore_level,
    running,
    up_to_each,
)
from .lanes import LANES, columns_of, exchange, side_by_side
from .launch import has_ptx
from .pages import PAGE_ARGUMENTS, Divisor, Pages
from .planes import from_planes, load_planes
from .rotation import unrotate
from .tiles import INTEGERS, PAIRS, TILE, describe_tiles, load_bases, load_low, store_words


def lists_bytes(elements: int) -> int:
    """Bytes of working memory for a run: two lists for each of its tiles."""
    return 2 * triton.cdiv(elements, TILE.value) * LISTED.value


def max_decode(
    view: torch.Tensor,
    ids: torch.Tensor,
    packed: int,
    bases: torch.Tensor,
    low: torch.Tensor,
    planes: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    firsts: torch.Tensor,
    escapes: torch.Tensor,
    lists: torch.Tensor,
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
    firsts
        Shape: (tiles + 1,), int64. Where each tile's escapes begin, and their number of bytes.
    escapes
        uint8.
    lists
        Working memory of at least `lists_bytes`, uint8. May be used again and again.
    """
    pages, wide = describe_tiles(view, ids.numel())
    elements = ids.numel() * view[0].numel()
    if lists.numel() < lists_bytes(elements):
        raise ValueError(f"{elements} elements do not fit into lists of {lists.numel()} bytes")
    max_decode_kernel[(triton.cdiv(elements, TILE.value),)](
        view.view(INTEGERS[view.element_size()]), ids, bases, low, *planes, firsts, escapes, lists,
        elements, *pages.arguments(),
        BELOW=packed - 2, WIDE=wide, ASM=has_ptx(view.device), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["elements", *PAGE_ARGUMENTS])
def max_decode_kernel(
    cache, ids, bases, low, plane4, plane2, plane1, firsts, escapes, lists, elements,
    columns, columns_magic, columns_shift, rows, rows_magic, rows_shift,
    heads, heads_magic, heads_shift, block_stride, head_stride, row_stride, column_stride,
    BELOW: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    pages = Pages(
        Divisor(columns, columns_magic, columns_shift),
        Divisor(rows, rows_magic, rows_shift),
        Divisor(heads, heads_magic, heads_shift),
        block_stride, head_stride, row_stride, column_stride,
    )  # fmt: skip
    BITS: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth
    RING: tl.constexpr = 0xFF >> BELOW
    PACKED: tl.constexpr = BELOW + 2
    tile = tl.program_id(0)
    words4, words2, words1 = load_planes(plane4, plane2, plane1, tile, PACKED)
    handed = tl.zeros((LANES, 4), tl.uint32)
    for pair in tl.static_range(PAIRS):
        # At most 4 of each of the words' bytes.
        handed += handed_on(from_planes(words4, words2, words1, pair, PACKED), BELOW) >> 7
    second = tl.sum(tl.sum((running(handed) >> 24).to(tl.int32), axis=1), axis=0)

    begin = tl.load(firsts + tile)
    escapes += begin
    size = (tl.load(firsts + tile + 1) - begin).to(tl.int32)
    binades = lists + tile.to(tl.int64) * (2 * LISTED)
    if second > 0:
        restore(escapes, size, second, binades, RING)
        # What lanes have written others read.
        tl.debug_barrier()

    at = tl.full((), 0, tl.int32)
    for pair in tl.range(0, PAIRS, loop_unroll_factor=1):
        top = from_planes(words4, words2, words1, pair, PACKED)
        flags = handed_on(top, BELOW)
        own, found = find_binades(binades, at, flags)
        at += own
        top = (top & ~(whole_bytes(flags, ASM) & ((NEXT << BELOW) * ONES))) | (found << BELOW)
        top = exchange(top, WIDE)
        low_bytes = exchange(load_low(low, tile, pair, BITS), WIDE)
        base = load_bases(bases, pages, tile, pair, elements, WIDE)
        words = unrotate(top, low_bytes, base, BITS, ASM)
        store_words(cache, ids, pages, tile, pair, elements, words, WIDE, ASM)


@triton.jit
def restore(part, size, second, binades, RING: tl.constexpr):
    """Write the `second` binades that a tile's first level hands on; `part` are its escapes.

    Behind them there is room for another list, for those of level 3.
    """
    third = count_handed_on(part, size, 0, second)
    if third > 0:
        spare = binades + LISTED
        fourth = count_handed_on(part, size, second, third)
        if fourth > 0:
            bytes_ = (second + third + fourth + 3) // 4
            restore_level(
                part, size, second + third, fourth, part + bytes_, size - bytes_, binades, 4, RING
            )
            tl.debug_barrier()
        restore_level(part, size, second, third, binades, LISTED, spare, 3, RING)
        tl.debug_barrier()
    restore_level(part, size, 0, second, binades + LISTED, LISTED, binades, 2, RING)


@triton.jit
def find_binades(binades, at, flags):
    """(how many flags there are, their elements' binades from index `at` of a list on, else 0).

    Four elements are a word: [32, 4].
    """
    number0, number1, number2, own = up_to_each(flags)
    at += tl.cumsum(own, axis=0) - own
    ones0, ones1, ones2, ones3 = columns_of(flags >> 7)
    first = tl.join(take(binades, at, ones0), take(binades, at + number0, ones1))
    second = tl.join(take(binades, at + number1, ones2), take(binades, at + number2, ones3))
    return tl.sum(own, axis=0), side_by_side(first, second)


@triton.jit
def take(listed, at, ones):
    """The inverse of `append`: 0 for bytes that are not in the list."""
    bytes_ = tl.zeros((LANES,), tl.uint32)
    for i in tl.static_range(4):
        one = (ones >> (8 * i)) & 1
        byte = tl.load(listed + at, mask=one != 0, other=0)
        bytes_ |= byte.to(tl.uint32) << (8 * i)
        at += one.to(tl.int32)
    return bytes_
