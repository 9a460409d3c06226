"""Mode `max`, encode: from the paged cache to coded streams.

A program is one warp, and takes one tile of 2,048 elements. The binades that the first level hands
on, a quarter of all in real KV, go to a list of the tile's own, in element order; the levels behind
it shorten that list in place, and write their digits to a slot of the tile's own. Both have room
for all elements, so that nothing can be lost. A second kernel moves what belongs to the stream
next to each other; where that is so much that coding does not pay, it writes the blocks as they
are over the streams instead.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from .bits import ONES, whole_bytes
from .cascade import DIGITS, LISTED, NEXT, append, code_level, handed_on, up_to_each
from .lanes import LANES, columns_of
from .launch import has_ptx
from .pages import PAGE_ARGUMENTS, Divisor, Pages
from .planes import no_plane, store_planes, to_planes
from .rotation import rotate
from .tiles import (
    CHUNK,
    INTEGERS,
    PAIRS,
    TILE,
    describe_tiles,
    in_low,
    keep_tile,
    load_words,
    step_of,
)
from .windows import WindowRule, choose_windows


def escape_bytes_limit(elements: int, item: int, packed: int, channels: int) -> int:
    """The most bytes of escapes with which coded streams are smaller than the input; may be < 0."""
    tiles = triton.cdiv(elements, TILE.value)
    return elements - tiles * (CHUNK.value * packed + 2) - channels - 1


@dataclass(frozen=True, slots=True)
class MaxBuffers:
    """What `max_encode` writes, on the device. May be used again and again.

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
    sizes, lasts
        Bytes of each tile's escapes, and how many of them are those of level 5. int16.
    ends
        Bytes of escapes of each tile and all before it. int64.
    listed, digits
        Shape: (tiles * 2,048,), (tiles * 1,536,), uint8. The tiles' working memory.
    escapes
        Shape: (most,), uint8. The escapes of all tiles, next to each other.
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
    sizes: torch.Tensor
    lasts: torch.Tensor
    ends: torch.Tensor
    listed: torch.Tensor
    digits: torch.Tensor
    escapes: torch.Tensor

    @classmethod
    def allocate(
        cls, elements: int, channels: int, item: int, packed: int, device: torch.device
    ) -> Self:
        tiles = triton.cdiv(elements, TILE.value)

        def empty(size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        streams = empty(tiles * TILE.value * item)
        sizes = [TILE.value * (item - 1), *(CHUNK.value * (packed & width) for width in (4, 2, 1))]
        parts = streams[: tiles * sum(sizes)].split([tiles * size for size in sizes])
        return cls(
            elements, channels, item, packed, streams, *parts,
            windows=empty(channels),
            bases=empty(channels, INTEGERS[item]),
            sizes=empty(tiles, torch.int16),
            lasts=empty(tiles, torch.int16),
            ends=empty(tiles, torch.int64),
            listed=empty(tiles * LISTED.value),
            digits=empty(tiles * DIGITS.value),
            escapes=empty(max(escape_bytes_limit(elements, item, packed, channels), 0)),
        )  # fmt: skip


def max_encode(
    view: torch.Tensor, ids: torch.Tensor, rule: WindowRule, limit: int, buffers: MaxBuffers
) -> None:
    """Code the blocks `ids` (int32) of a cache [B, H, N, C]. Waits for nothing.

    With more than `limit` bytes of escapes, `buffers.streams` has the blocks as they are. Ids must
    be those of blocks in the cache: nothing here checks them.
    """
    pages, wide = describe_tiles(view, ids.numel())
    elements, item = ids.numel() * view[0].numel(), view.element_size()
    channels = view.shape[1] * view.shape[3]
    room = buffers.elements, buffers.channels, buffers.escapes.numel(), buffers.item
    if any(a > b for a, b in zip((elements, channels, limit, item), room, strict=True)):
        raise ValueError(f"{elements} elements do not fit into buffers for {buffers.elements}")
    tiles, ptx = triton.cdiv(elements, TILE.value), has_ptx(view.device)
    below = buffers.packed - 2
    cache = view.view(INTEGERS[item])
    choose_windows(view, ids, rule, buffers.windows, buffers.bases)
    max_encode_kernel[(tiles,)](
        cache, ids, buffers.bases,
        buffers.low, buffers.plane4, buffers.plane2, buffers.plane1,
        buffers.sizes, buffers.lasts, buffers.listed, buffers.digits, elements, *pages.arguments(),
        BELOW=below, WIDE=wide, ASM=ptx, num_warps=1,
    )  # fmt: skip
    ends = buffers.ends[:tiles]
    torch.cumsum(buffers.sizes[:tiles], 0, dtype=torch.int64, out=ends)
    max_collect_kernel[(tiles,)](
        cache, ids, buffers.streams.view(INTEGERS[item]), buffers.sizes, buffers.lasts, ends,
        buffers.listed, buffers.digits, buffers.escapes, elements, limit, tiles,
        *pages.arguments(), STEP=step_of(wide), WIDE=wide, ASM=ptx, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["elements", *PAGE_ARGUMENTS])
def max_encode_kernel(
    cache, ids, bases, low, plane4, plane2, plane1, sizes, lasts, listed, digits, elements,
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
    tile = tl.program_id(0)
    listed += tile.to(tl.int64) * LISTED
    digits += tile.to(tl.int64) * DIGITS
    BITS: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth
    RING: tl.constexpr = 0xFF >> BELOW
    words4, words2, words1 = no_plane(4), no_plane(2), no_plane(1)
    second = tl.full((), 0, tl.int32)
    for pair in tl.range(0, PAIRS, loop_unroll_factor=1):
        words, base = load_words(cache, ids, bases, pages, tile, pair, elements, WIDE, ASM)
        top, low_bytes = rotate(words, base, BITS, ASM)
        if BITS == 16:
            tl.store(in_low(low, tile, pair), low_bytes)
        flags = handed_on(top, BELOW)
        plain = top | (whole_bytes(flags, ASM) & ((NEXT << BELOW) * ONES))
        words4, words2, words1 = to_planes(words4, words2, words1, plain, pair, BELOW + 2)
        second += list_pair(listed, second, (top >> BELOW) & (RING * ONES), flags)
    store_planes(plane4, plane2, plane1, tile, words4, words2, words1, BELOW + 2)

    # What lanes have written others read: here, and between one level and the next.
    tl.debug_barrier()
    third = code_level(listed, second, digits, 0, 2, RING)
    fourth, last = third ^ third, third ^ third
    if third > 0:
        tl.debug_barrier()
        fourth = code_level(listed, third, digits, second, 3, RING)
        if fourth > 0:
            tl.debug_barrier()
            last = code_level(listed, fourth, digits, second + third, 4, RING)
    size = (second + third + fourth + 3) // 4 + last
    tl.store(sizes + tile, size.to(tl.int16))
    tl.store(lasts + tile, last.to(tl.int16))


@triton.jit
def list_pair(listed, at, binades, flags):
    """Append to the list, from index `at` on, the binades that have a flag; returns how many.

    Four of each are a word: [32, 4].
    """
    number0, number1, number2, own = up_to_each(flags)
    at += tl.cumsum(own, axis=0) - own
    word0, word1, word2, word3 = columns_of(binades)
    ones0, ones1, ones2, ones3 = columns_of(flags >> 7)
    append(listed, at, word0, ones0)
    append(listed, at + number0, word1, ones1)
    append(listed, at + number1, word2, ones2)
    append(listed, at + number2, word3, ones3)
    return tl.sum(own, axis=0)


@triton.jit(do_not_specialize=["elements", "limit", "tiles", *PAGE_ARGUMENTS])
def max_collect_kernel(
    cache, ids, raw, sizes, lasts, ends, listed, digits, escapes, elements, limit, tiles,
    columns, columns_magic, columns_shift, rows, rows_magic, rows_shift,
    heads, heads_magic, heads_shift, block_stride, head_stride, row_stride, column_stride,
    STEP: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tl.load(ends + tiles - 1) <= limit:
        size, last = tl.load(sizes + tile).to(tl.int32), tl.load(lasts + tile).to(tl.int32)
        escapes += tl.load(ends + tile) - size
        digits += tile.to(tl.int64) * DIGITS
        # The bytes of level 5 are what is left in the list.
        listed += tile.to(tl.int64) * LISTED
        copy_bytes(digits, escapes, size - last)
        copy_bytes(listed, escapes + (size - last), last)
    else:
        pages = Pages(
            Divisor(columns, columns_magic, columns_shift),
            Divisor(rows, rows_magic, rows_shift),
            Divisor(heads, heads_magic, heads_shift),
            block_stride, head_stride, row_stride, column_stride,
        )  # fmt: skip
        keep_tile(cache, ids, raw, pages, tile, elements, STEP, WIDE, ASM)


@triton.jit
def copy_bytes(source, target, number):
    """Copy so many bytes from one address to another."""
    for first in range(0, number, LANES):
        at = first + tl.arange(0, LANES)
        live = at < number
        tl.store(target + at, tl.load(source + at, mask=live, other=0), mask=live)
