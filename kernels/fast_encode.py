"""Mode `fast`, encode: from the paged cache to coded streams, in one pass over the input.

A program is one warp, and takes one chunk of 1,024 elements at a time. Lane t holds elements 16 t
to 16 t + 15 of both halves of the chunk, so that it can pair their codes by itself and every dense
access is one of 128 bits. Only chunks with escapes go through the branch that writes them.

Escapes of a chunk are a run in a workspace, in order of position. Programs reserve space there
from an atomic counter, for several chunks at once, as millions of chunks a second would queue up
for it. So where the runs are is not determined, and there are gaps between them; `starts` tells.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from .bits import HIGH_NIBBLES, count_bits, gather_top_bits, split, whole_bytes
from .book import TABLE_BYTES, DeviceBook, encode_exponents, find_escapes
from .launch import MOST_PER_PROGRAM, chunks_per_program, has_ptx
from .pages import CHUNK, GROUP, PAGE_ARGUMENTS, Divisor, Pages, describe, locate, place

LANES: tl.constexpr = tl.constexpr(32)

RESERVED: tl.constexpr = tl.constexpr(8)
"""Escapes for which a program reserves space, times its number of chunks."""


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
    streams
        Room for the run as it is. uint8.
    codes, rests
        The dense streams, of whole chunks, as parts of `streams`. uint8.
    counts
        Escapes of each chunk. int16.
    starts
        Where the escapes of a chunk start; means nothing for a chunk without any. int32.
    positions, exponents
        Workspace for as many escapes as pay, and for gaps between them. int16, uint8.
    reserved
        Shape: (1,), int64. How much of the workspace is in use. If it is more than there is, or
        there are more escapes than `escape_limit`, the streams are incomplete.
    """

    elements: int
    streams: torch.Tensor
    codes: torch.Tensor
    rests: torch.Tensor
    counts: torch.Tensor
    starts: torch.Tensor
    positions: torch.Tensor
    exponents: torch.Tensor
    reserved: torch.Tensor

    @classmethod
    def allocate(cls, elements: int, device: torch.device) -> Self:
        chunks = triton.cdiv(elements, CHUNK)
        # Each chunk may leave a gap of less than what is reserved at once.
        room = max(escape_limit(elements), 0) + chunks * RESERVED.value * MOST_PER_PROGRAM
        if room >= 1 << 31:
            raise ValueError(f"{elements} elements are too many for one launch")

        def empty(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        streams = empty(chunks * CHUNK * 2, torch.uint8)
        codes, rests, _ = streams.split([chunks * CHUNK // 2, chunks * CHUNK, chunks * CHUNK // 2])
        return cls(
            elements=elements,
            streams=streams,
            codes=codes,
            rests=rests,
            counts=empty(chunks, torch.int16),
            starts=empty(chunks, torch.int32),
            positions=empty(room, torch.int16),
            exponents=empty(room, torch.uint8),
            reserved=empty(1, torch.int64),
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
    if book.encoding.data_ptr() % TABLE_BYTES:
        raise ValueError(f"the codebook's table is not aligned to its {TABLE_BYTES} bytes")
    chunks = triton.cdiv(elements, CHUNK)
    per_program = chunks_per_program(chunks)
    buffers.reserved.zero_()
    fast_encode_kernel[(triton.cdiv(chunks, per_program),)](
        view.view(torch.int16), ids, book.encoding,
        buffers.codes, buffers.rests, buffers.counts, buffers.starts,
        buffers.positions, buffers.exponents, buffers.reserved,
        elements // GROUP if wide else elements, chunks, per_program, buffers.positions.numel(),
        book.base, book.pad, *pages.arguments(),
        KIND=book.kind, WIDE=wide, ASM=has_ptx(view.device), num_warps=1,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "units", "chunks", "chunks_per_program", "room", "base", "pad", *PAGE_ARGUMENTS
    ]
)  # fmt: skip
def fast_encode_kernel(
    cache, ids, table,
    codes, rests, counts, starts, positions, exponents, reserved,
    units, chunks, chunks_per_program, room, base, pad,
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

    # The part of the workspace that this program has reserved and not used yet.
    free, left = tl.full((), 0, tl.int64), tl.full((), 0, tl.int32)
    first = tl.program_id(0) * chunks_per_program
    for step in range(tl.minimum(chunks_per_program, chunks - first)):
        chunk = first + step
        low, high = load_chunk(cache, ids, pages, chunk, units, pad, WIDE, ASM)
        low_exponents, low_rests = split(low, ASM)
        high_exponents, high_rests = split(high, ASM)
        rest = rests + chunk.to(tl.int64) * 256 + word
        tl.store(rest, low_rests)
        tl.store(rest + 128, high_rests)

        low_codes, suspicion = encode_exponents(low_exponents, base, table, KIND, ASM)
        high_codes, high_suspicion = encode_exponents(high_exponents, base, table, KIND, ASM)
        suspicion = tl.reduce(suspicion | high_suspicion, 1, either) & HIGH_NIBBLES
        count = tl.full((), 0, tl.int32)
        if tl.max(suspicion, axis=0) != 0:
            low_flags = find_escapes(low_exponents, low_codes, KIND)
            high_flags = find_escapes(high_exponents, high_codes, KIND)
            low_codes &= ~whole_bytes(low_flags, ASM)
            high_codes &= ~whole_bytes(high_flags, ASM)
            shift = 4 * column.to(tl.uint32)
            bits = tl.sum(gather_top_bits(low_flags) << shift, axis=1)
            bits |= tl.sum(gather_top_bits(high_flags) << shift, axis=1) << 16
            # Both halves are counted in one; a half has at most 512 escapes.
            numbers = (count_bits(bits & 0xFFFF) | (count_bits(bits >> 16) << 16)).to(tl.int32)
            total = tl.sum(numbers, 0)
            count = (total & 0xFFFF) + (total >> 16)
            if count > left:
                left = tl.maximum(count, RESERVED * chunks_per_program)
                free = tl.atomic_add(reserved, left.to(tl.int64), sem="relaxed")
            tl.store(starts + chunk, tl.minimum(free, room).to(tl.int32))
            if free + count <= room:
                write_escapes(
                    bits, numbers, total & 0xFFFF, low_exponents, high_exponents,
                    positions + free, exponents + free,
                )  # fmt: skip
            free += count
            left -= count
        tl.store(codes + chunk.to(tl.int64) * 128 + word, low_codes + high_codes * 16)
        tl.store(counts + chunk, count.to(tl.int16))


@triton.jit
def either(one, other):
    """Bits set in one of two words."""
    return one | other


@triton.jit
def load_chunk(cache, ids, pages, chunk, units, pad, WIDE: tl.constexpr, ASM: tl.constexpr):
    """A chunk's halves as words of four elements; `pad` where the run has ended.

    Shapes: (32, 4).
    """
    # The masked form costs a move for every register, and only the last chunk needs it.
    if WIDE and (chunk + 1) * LANES <= units:
        low = load_half(cache, ids, pages, 2 * chunk, units, pad, True, True, ASM)
        high = load_half(cache, ids, pages, 2 * chunk + 1, units, pad, True, True, ASM)
    else:
        low = load_half(cache, ids, pages, 2 * chunk, units, pad, False, WIDE, ASM)
        high = load_half(cache, ids, pages, 2 * chunk + 1, units, pad, False, WIDE, ASM)
    return low, high


@triton.jit
def load_half(
    cache, ids, pages, half, units, pad, WHOLE: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Half a chunk; `WHOLE` says that the run does not end in it."""
    lane = tl.arange(0, LANES)
    column = tl.arange(0, 4)
    if WIDE:
        unit = half * (LANES // 2) + lane // 2
        index, offset = locate(unit, pages, WIDE)
        offset += lane % 2 * 2
        cache = cache.to(tl.pointer_type(tl.uint64), bitcast=True)
        if WHOLE:
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
def write_escapes(bits, numbers, in_low, low_exponents, high_exponents, positions, exponents):
    """Write a chunk's escapes in order of position.

    Bit j of a lane's `bits` is its j-th element of the low half, bit 16 + j of the high half;
    `numbers` has how many there are of either in its own halves, `in_low` those of all lanes.
    """
    lane = tl.arange(0, LANES)
    column = tl.arange(0, 4)[None, :]
    before = tl.cumsum(numbers, 0) - numbers
    low_rank = before & 0xFFFF
    high_rank = in_low + (before >> 16)
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
