"""Mode `fast`, encode: from the paged cache to coded streams, in one pass over the input.

A program is one warp, and takes one chunk of 1,024 elements at a time. Lane t holds elements 16 t
to 16 t + 15 of both halves of the chunk, so that it can pair their codes by itself and every dense
access is one of 128 bits. Only chunks with escapes go through the branch that writes them.

Escapes of a chunk are a run in a workspace, in order of position. Where the run starts is settled
by an atomic counter, so the order of the runs is not determined; `starts` has it.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from .bits import HIGH_NIBBLES, count_bits, gather_top_bits, split, whole_bytes
from .book import DeviceBook, encode_exponents
from .launch import chunks_per_program, has_ptx
from .pages import CHUNK, GROUP, PAGE_ARGUMENTS, Divisor, Pages, describe, locate, place

LANES: tl.constexpr = tl.constexpr(32)


def escape_limit(elements: int) -> int:
    """The most escapes with which coded streams are still smaller than the input; may be < 0."""
    return (elements - (CHUNK // 2 + 2) * triton.cdiv(elements, CHUNK) - 1) // 3


@dataclass(frozen=True, slots=True)
class EncodeBuffers:
    """What `fast_encode` writes, on the device. May be used again and again.

    Attributes
    ----------
    elements
        The longest run that fits.
    codes, rests
        The dense streams, of whole chunks. uint8.
    counts
        Escapes of each chunk. int16.
    starts
        Where the escapes of a chunk start; means nothing for a chunk without any. int32.
    positions, exponents
        Workspace for as many escapes as pay. int16, uint8.
    escapes
        Shape: (1,), int64. Number of escapes. If it is more than `escape_limit`, the streams are
        incomplete, and longer than the input would be.
    """

    elements: int
    codes: torch.Tensor
    rests: torch.Tensor
    counts: torch.Tensor
    starts: torch.Tensor
    positions: torch.Tensor
    exponents: torch.Tensor
    escapes: torch.Tensor

    @classmethod
    def allocate(cls, elements: int, device: torch.device) -> Self:
        chunks = triton.cdiv(elements, CHUNK)
        room = max(escape_limit(elements), 0)

        def empty(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        return cls(
            elements=elements,
            codes=empty(chunks * CHUNK // 2, torch.uint8),
            rests=empty(chunks * CHUNK, torch.uint8),
            counts=empty(chunks, torch.int16),
            starts=empty(chunks, torch.int32),
            positions=empty(room, torch.int16),
            exponents=empty(room, torch.uint8),
            escapes=empty(1, torch.int64),
        )


def fast_encode(
    view: torch.Tensor, ids: torch.Tensor, book: DeviceBook, buffers: EncodeBuffers
) -> None:
    """Code the blocks `ids` (int32) of a cache [B, H, N, C] of BF16. Waits for nothing.

    Ids must be those of blocks in the cache: nothing here checks them.
    """
    pages, wide = describe(view, ids.numel())
    elements = ids.numel() * view[0].numel()
    if elements > buffers.elements:
        raise ValueError(f"{elements} elements do not fit into buffers for {buffers.elements}")
    chunks = triton.cdiv(elements, CHUNK)
    per_program = chunks_per_program(chunks)
    buffers.escapes.zero_()
    fast_encode_kernel[(triton.cdiv(chunks, per_program),)](
        view.view(torch.int16), ids, book.encoding,
        buffers.codes, buffers.rests, buffers.counts, buffers.starts,
        buffers.positions, buffers.exponents, buffers.escapes,
        elements // GROUP if wide else elements, chunks, per_program,
        min(escape_limit(elements), 2**31 - 1), book.base, book.pad, *pages.arguments(),
        KIND=book.kind, WIDE=wide, ASM=has_ptx(view.device), num_warps=1,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "units", "chunks", "chunks_per_program", "limit", "base", "pad", *PAGE_ARGUMENTS
    ]
)  # fmt: skip
def fast_encode_kernel(
    cache, ids, table,
    codes, rests, counts, starts, positions, exponents, escapes,
    units, chunks, chunks_per_program, limit, base, pad,
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
    column = tl.arange(0, 4)[None, :]
    word = tl.arange(0, LANES)[:, None] * 4 + column
    codes = codes.to(tl.pointer_type(tl.uint32), bitcast=True)
    rests = rests.to(tl.pointer_type(tl.uint32), bitcast=True)

    first = tl.program_id(0) * chunks_per_program
    for step in range(tl.minimum(chunks_per_program, chunks - first)):
        chunk = first + step
        low = load_half(cache, ids, pages, 2 * chunk, units, pad, WIDE, ASM)
        high = load_half(cache, ids, pages, 2 * chunk + 1, units, pad, WIDE, ASM)
        low_exponents, low_rests = split(low, ASM)
        high_exponents, high_rests = split(high, ASM)
        rest = rests + chunk.to(tl.int64) * 256 + word
        tl.store(rest, low_rests)
        tl.store(rest + 128, high_rests)

        low_codes, low_bad = encode_exponents(low_exponents, base, table, KIND, ASM)
        high_codes, high_bad = encode_exponents(high_exponents, base, table, KIND, ASM)
        bad = (low_bad | high_bad) & HIGH_NIBBLES
        count = tl.full((), 0, tl.int32)
        if tl.max(tl.max(bad, axis=1), axis=0) != 0:
            low_flags, high_flags = flag_bytes(low_bad), flag_bytes(high_bad)
            low_codes &= ~whole_bytes(low_flags, ASM)
            high_codes &= ~whole_bytes(high_flags, ASM)
            shift = 4 * column.to(tl.uint32)
            bits = tl.sum(gather_top_bits(low_flags) << shift, axis=1)
            bits |= tl.sum(gather_top_bits(high_flags) << shift, axis=1) << 16
            count = write_escapes(
                bits, low_exponents, high_exponents,
                starts + chunk, positions, exponents, escapes, limit,
            )  # fmt: skip
        tl.store(codes + chunk.to(tl.int64) * 128 + word, low_codes | (high_codes << 4))
        tl.store(counts + chunk, count.to(tl.int16))


@triton.jit
def load_half(cache, ids, pages, half, units, pad, WIDE: tl.constexpr, ASM: tl.constexpr):
    """Half a chunk as words of four elements; `pad` where the run has ended. Shape: (32, 4)."""
    lane = tl.arange(0, LANES)
    column = tl.arange(0, 4)
    if WIDE:
        unit = half * (LANES // 2) + lane // 2
        index, offset = locate(unit, pages, WIDE)
        offset += lane % 2 * 2
        cache = cache.to(tl.pointer_type(tl.uint64), bitcast=True)
        # The masked form costs a move for every register, and only the last chunk needs it.
        if (half + 1) * (LANES // 2) <= units:
            block = tl.load(ids + index)
            at = place(block, offset, pages, WIDE, ASM) * 2
            words = tl.load(cache + at[:, None] + column[None, :])
        else:
            live = unit < units
            block = tl.load(ids + index, mask=live, other=0)
            at = place(block, offset, pages, WIDE, ASM) * 2
            pads = pad.to(tl.uint64) * 0x0001000100010001
            words = tl.load(cache + at[:, None] + column[None, :], mask=live[:, None], other=pads)
    else:
        words = tl.zeros((LANES, 4), tl.uint64)
        for i in tl.static_range(4):
            element = half * (LANES * 16) + lane[:, None] * 16 + column[None, :] * 4 + i
            live = element < units
            index, offset = locate(element, pages, WIDE)
            block = tl.load(ids + index, mask=live, other=0)
            at = place(block, offset, pages, WIDE, ASM)
            bits = tl.load(cache + at, mask=live, other=pad)
            words |= bits.to(tl.uint16, bitcast=True).to(tl.uint64) << 16 * i
    return words


@triton.jit
def flag_bytes(bad):
    """Bit 7 of every byte whose high nibble is not 0."""
    return ((bad & 0x70707070) + 0x70707070) | bad


@triton.jit
def write_escapes(
    bits, low_exponents, high_exponents, start_at, positions, exponents, escapes, limit
):  # fmt: skip
    """Reserve space for a chunk's escapes and write them. Returns their number.

    Bit j of a lane's `bits` is its j-th element of the low half, bit 16 + j of the high half.
    """
    lane = tl.arange(0, LANES)
    column = tl.arange(0, 4)[None, :]
    # Both halves are counted in one scan; a half has at most 512 escapes.
    numbers = (count_bits(bits & 0xFFFF) | (count_bits(bits >> 16) << 16)).to(tl.int32)
    total = tl.sum(numbers, 0)
    in_low = total & 0xFFFF
    count = in_low + (total >> 16)
    start = tl.atomic_add(escapes, count.to(tl.int64), sem="relaxed")
    tl.store(start_at, tl.minimum(start, limit).to(tl.int32))
    if start + count <= limit:
        before = tl.cumsum(numbers, 0) - numbers
        low_rank = start + (before & 0xFFFF)
        high_rank = start + in_low + (before >> 16)
        # Every lane writes its first escape, then every lane its second: mostly there is none.
        for _ in range(tl.max(count_bits(bits).to(tl.int32), 0)):
            live = bits != 0
            lowest = bits & (~bits + 1)
            bits ^= lowest
            j = count_bits(lowest - 1)
            is_high = j >= 16
            word = tl.where(is_high[:, None], high_exponents, low_exponents)
            word = tl.sum(tl.where(column == (j[:, None] >> 2 & 3), word, 0), axis=1)
            rank = tl.where(is_high, high_rank, low_rank)
            position = 16 * lane + j.to(tl.int32) + tl.where(is_high, 512 - 16, 0)
            tl.store(positions + rank, position.to(tl.int16), mask=live)
            tl.store(exponents + rank, (word >> 8 * (j & 3)).to(tl.uint8), mask=live)
            low_rank += tl.where(is_high, 0, 1)
            high_rank += tl.where(is_high, 1, 0)
    return count
