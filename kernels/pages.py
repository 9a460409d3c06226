"""Where an element of a run of blocks lies in vLLM's paged cache.

The cache of a layer is a view [B, H, N, C] with any strides. A run of blocks is one flat sequence
of elements: blocks in the order of the table, each in the order [H, N, C].
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl

GROUP = 32
"""Consecutive elements that two lanes take together, 64 bytes, where the layout allows."""

CHUNK = 1024

_VECTOR = 8
"""Elements in a 128-bit access."""

_LIMIT = (1 << 31) - CHUNK
"""Units of a run are counted in 32 bits; the last chunk goes past its end."""


class Divisor(NamedTuple):
    """A divisor that is known only at run time, as a multiplication: n // d for n < 2^31."""

    value: int
    magic: int
    shift: int

    @classmethod
    def of(cls, value: int) -> "Divisor":
        shift = (value - 1).bit_length()
        magic = (1 << 32) * ((1 << shift) - value) // value + 1
        # Signed, since an argument of 2^31 or more would be compiled as a 64-bit one.
        return cls(value, magic - (magic >> 31 << 32), shift)


class Pages(NamedTuple):
    """Run-time description of a view, in units of one element or of one group.

    Strides count elements, or vectors of 8 elements where units are groups: an address is then a
    multiple of 16 bytes by construction, which is what lets the compiler use 128-bit accesses.
    """

    columns: Divisor
    rows: Divisor
    heads: Divisor
    block_stride: int
    head_stride: int
    row_stride: int
    column_stride: int

    def arguments(self) -> tuple[int, ...]:
        """One by one: Triton would compile a tuple's values of 1 or of multiples of 16 anew."""
        return (*self.columns, *self.rows, *self.heads, *self[3:])


PAGE_ARGUMENTS = (
    *("columns", "columns_magic", "columns_shift", "rows", "rows_magic", "rows_shift"),
    *("heads", "heads_magic", "heads_shift"),
    *("block_stride", "head_stride", "row_stride", "column_stride"),
)
"""What kernels call `Pages.arguments`, none of which is to be compiled for a special value."""


def describe(view: torch.Tensor, blocks: int) -> tuple[Pages, bool]:
    """(description, whether its units are groups) of a view [B, H, N, C], for a run of `blocks`.

    Raises
    ------
    ValueError
        When the view is not one of 2-byte elements in four dimensions, or the run is too long.
    """
    if view.dim() != 4 or view.element_size() != 2 or 0 in view.shape:
        raise ValueError(f"a cache is [B, H, N, C] of 2 bytes, this is {view.dtype} {view.shape}")
    block_stride = view.stride(0)
    merged = _merged(view)
    (heads, head_stride), (rows, row_stride), (columns, column_stride) = merged
    # Offsets within a block are sums of three products, which have to stay below 2^31.
    wide = (
        column_stride == 1
        and columns % GROUP == 0
        and all(s % _VECTOR == 0 for s in (block_stride, head_stride, row_stride))
        and view.data_ptr() % (2 * _VECTOR) == 0
        and max(block_stride, *(n * s for n, s in merged)) // _VECTOR < _LIMIT // 4
    )
    if wide:
        columns, column_stride = columns // GROUP, GROUP // _VECTOR
        block_stride, head_stride, row_stride = (
            stride // _VECTOR for stride in (block_stride, head_stride, row_stride)
        )
    if blocks * heads * rows * columns >= _LIMIT:
        raise ValueError(f"{blocks} blocks are too many for one launch")
    return Pages(
        Divisor.of(columns), Divisor.of(rows), Divisor.of(heads),
        block_stride, head_stride, row_stride, column_stride,
    ), wide  # fmt: skip


def _merged(view: torch.Tensor) -> list[tuple[int, int]]:
    """(size, stride) of heads, rows and columns, with what is contiguous made columns.

    A block that is one run of memory gets a single row, however it is shaped.
    """
    sizes_strides = [
        (size, stride)
        for size, stride in zip(view.shape[1:], view.stride()[1:], strict=True)
        if size > 1
    ] or [(1, 1)]
    merged = [sizes_strides.pop()]
    while sizes_strides:
        size, stride = sizes_strides.pop()
        inner, inner_stride = merged[0]
        if stride == inner * inner_stride:
            merged[0] = (size * inner, inner_stride)
        else:
            merged.insert(0, (size, stride))
    return [(1, 0)] * (3 - len(merged)) + merged


@triton.jit
def divide(n, divisor):
    """n // divisor for 0 <= n < 2^31, uint32."""
    high = tl.umulhi(n, divisor.magic.to(tl.uint32, bitcast=True))
    return (high + n) >> divisor.shift.to(tl.uint32)


@triton.jit
def locate(unit, pages, WIDE: tl.constexpr):
    """(index into the block table, offset within the block) of a unit, in strides' units.

    Offsets within a block have 32 bits where units are groups.
    """
    unit = unit.to(tl.uint32)
    row = divide(unit, pages.columns)
    head = divide(row, pages.rows)
    index = divide(head, pages.heads)
    column = (unit - row * pages.columns.value).to(tl.int32)
    row = (row - head * pages.rows.value).to(tl.int32)
    head = (head - index * pages.heads.value).to(tl.int32)
    if not WIDE:
        column, row, head = column.to(tl.int64), row.to(tl.int64), head.to(tl.int64)
    offset = head * pages.head_stride + row * pages.row_stride + column * pages.column_stride
    return index.to(tl.int32), offset


@triton.jit
def place(block, offset, pages, WIDE: tl.constexpr, ASM: tl.constexpr):
    """The offset from the start of the cache, 64 bits."""
    if WIDE and ASM:
        # One instruction. The compiler would use four, as it moves half of it out of the loop.
        return tl.inline_asm_elementwise(
            "mad.wide.s32 $0, $1, $2, $3;", "=l,r,r,l",
            [block, pages.block_stride, offset.to(tl.int64)], tl.int64, is_pure=True, pack=1,
        )  # fmt: skip
    return block.to(tl.int64) * pages.block_stride + offset
