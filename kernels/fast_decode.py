"""Mode `fast`, decode: from coded streams straight into the paged cache, escapes included.

A program is one warp, and takes one chunk at a time, as in `fast_encode`. It writes the chunk as
if there were no escapes, and then, only where there are any, writes those elements again.

Whatever the streams contain, nothing is written outside the run's own blocks, and nothing read
outside the streams.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl

from .bits import LOW_NIBBLES, join, join_pairs
from .book import TABLE, DeviceBook, decode_exponents, look_up_nibbles
from .fast_encode import LANES
from .launch import chunks_per_program, has_ptx
from .pages import CHUNK, GROUP, PAGE_ARGUMENTS, Divisor, Pages, describe, locate, place


def fast_decode(
    view: torch.Tensor,
    ids: torch.Tensor,
    book: DeviceBook,
    codes: torch.Tensor,
    rests: torch.Tensor,
    firsts: torch.Tensor,
    positions: torch.Tensor,
    exponents: torch.Tensor,
) -> None:
    """Write coded blocks into a cache [B, H, N, C] of BF16. Waits for nothing.

    Parameters
    ----------
    ids
        int32. Where the blocks go; negative ones are passed over. Not checked.
    codes, rests
        The dense streams, of whole chunks. uint8.
    firsts
        Shape: (chunks + 1,), int32. Index of each chunk's first escape, and their number.
    positions, exponents
        All escapes. int16, uint8.
    """
    pages, wide = describe(view, ids.numel())
    elements = ids.numel() * view[0].numel()
    chunks = triton.cdiv(elements, CHUNK)
    per_program = chunks_per_program(chunks)
    fast_decode_kernel[(triton.cdiv(chunks, per_program),)](
        view.view(torch.int16), ids, book.decoding,
        codes, rests, firsts, positions, exponents,
        elements // GROUP if wide else elements, chunks, per_program, book.base, *pages.arguments(),
        KIND=book.kind, WIDE=wide, ASM=has_ptx(view.device), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["units", "chunks", "chunks_per_program", "base", *PAGE_ARGUMENTS])
def fast_decode_kernel(
    cache, ids, table,
    codes, rests, firsts, positions, exponents,
    units, chunks, chunks_per_program, base,
    columns, columns_magic, columns_shift, rows, rows_magic, rows_shift,
    heads, heads_magic, heads_shift, block_stride, head_stride, row_stride, column_stride,
    KIND: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    pages = Pages(
        Divisor(columns, columns_magic, columns_shift),
        Divisor(rows, rows_magic, rows_shift),
        Divisor(heads, heads_magic, heads_shift),
        block_stride, head_stride, row_stride, column_stride,
    )  # fmt: skip
    word = tl.arange(0, LANES)[:, None] * 4 + tl.arange(0, 4)[None, :]
    code_words = codes.to(tl.pointer_type(tl.uint32), bitcast=True)
    rest_words = rests.to(tl.pointer_type(tl.uint32), bitcast=True)

    begin = tl.program_id(0) * chunks_per_program
    for step in range(tl.minimum(chunks_per_program, chunks - begin)):
        chunk = begin + step
        both = tl.load(code_words + chunk.to(tl.int64) * 128 + word)
        rest = rest_words + chunk.to(tl.int64) * 256 + word
        low_rests, high_rests = tl.load(rest), tl.load(rest + 128)
        if KIND == TABLE:
            # Exponents of the low and of the high half take turns in these.
            near, far = look_up_nibbles(both, table, ASM)
            low = join_pairs(near, far, 0x20, 0x20, low_rests, ASM)
            high = join_pairs(near, far, 0x31, 0x31, high_rests, ASM)
        else:
            low = decode_exponents(both & LOW_NIBBLES, base, KIND, ASM)
            low = join(low, low_rests, ASM)
            high = decode_exponents((both >> 4) & LOW_NIBBLES, base, KIND, ASM)
            high = join(high, high_rests, ASM)
        store_half(cache, ids, pages, 2 * chunk, units, low, WIDE, ASM)
        store_half(cache, ids, pages, 2 * chunk + 1, units, high, WIDE, ASM)

        first, last = tl.load(firsts + chunk), tl.load(firsts + chunk + 1)
        if first < last:
            # Other lanes have written the elements that this one writes again.
            tl.debug_barrier()
            for escape in range(first, last, LANES):
                write_again(
                    cache, ids, pages, rests, positions, exponents,
                    escape, last, chunk, units, WIDE, ASM,
                )  # fmt: skip


@triton.jit
def store_half(cache, ids, pages, half, units, words, WIDE: tl.constexpr, ASM: tl.constexpr):
    """The inverse of `load_half`; blocks with a negative id are passed over."""
    lane = tl.arange(0, LANES)
    column = tl.arange(0, 4)
    if WIDE:
        # Lane pairs exchange halves of what they hold, so that a store fills whole sectors of 32
        # bytes. This order of axes leads the compiler there: (lane of the pair, pair, word).
        words = tl.permute(tl.reshape(words, (LANES // 2, 2, 4)), (1, 0, 2))
        unit = half * (LANES // 2) + tl.arange(0, LANES // 2)
        index, offset = locate(unit, pages, WIDE)
        block = tl.load(ids + index, mask=unit < units, other=-1)
        at = place(block, offset, pages, WIDE, ASM) * 2
        at = at[None, :, None] + tl.arange(0, 2)[:, None, None] * 4 + column[None, None, :]
        cache = cache.to(tl.pointer_type(tl.uint64), bitcast=True)
        tl.store(cache + at, words, mask=(block >= 0)[None, :, None])
    else:
        for i in tl.static_range(4):
            element = half * (LANES * 16) + lane[:, None] * 16 + column[None, :] * 4 + i
            index, offset = locate(element, pages, WIDE)
            block = tl.load(ids + index, mask=element < units, other=-1)
            at = place(block, offset, pages, WIDE, ASM)
            tl.store(cache + at, (words >> 16 * i).to(tl.int16), mask=block >= 0)


@triton.jit
def write_again(
    cache, ids, pages, rests, positions, exponents, escape, last, chunk, units,
    WIDE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Write up to 32 escaped elements of a chunk, with their own exponents."""
    at = escape + tl.arange(0, LANES)
    live = at < last
    position = tl.load(positions + at, mask=live, other=0).to(tl.int32) & 0xFFFF
    exponent = tl.load(exponents + at, mask=live, other=0).to(tl.int32)
    live &= position < 1024
    rest = tl.load(rests + chunk.to(tl.int64) * 1024 + position, mask=live, other=0).to(tl.int32)
    element = exponent << 7 | rest >> 1 | (rest & 1) << 15
    if WIDE:
        unit, within = chunk * 32 + position // 32, position % 32
    else:
        unit, within = chunk * 1024 + position, 0
    index, offset = locate(unit, pages, WIDE)
    block = tl.load(ids + index, mask=live & (unit < units), other=-1)
    target = place(block, offset, pages, WIDE, ASM) * (8 if WIDE else 1) + within
    tl.store(cache + target, element.to(tl.int16), mask=block >= 0)
