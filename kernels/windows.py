"""Windows chosen on the device, from a sample of the very blocks that are then coded."""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .tiles import INTEGERS

SAMPLES: tl.constexpr = tl.constexpr(64)
COLUMNS: tl.constexpr = tl.constexpr(32)
"""What a program looks at together: so many elements of so many channels."""


@dataclass(frozen=True, slots=True)
class WindowRule:
    """How windows are chosen; `codec/windows.py` says what it means.

    Attributes
    ----------
    every, skip
        Distance of the blocks that are looked at, and of a block's states.
    origin, shift
        What a window's byte names.
    weight, most, below
        Where a window lies, in magnitudes.
    """

    every: int
    skip: int
    origin: int
    shift: int
    weight: int
    most: int
    below: int


def choose_windows(
    view: torch.Tensor,
    ids: torch.Tensor,
    rule: WindowRule,
    windows: torch.Tensor,
    bases: torch.Tensor,
) -> None:
    """Write each channel's window (uint8) and its base, as wide as elements. Waits for nothing."""
    _, heads, states, columns = view.shape
    per_row = triton.cdiv(states, rule.skip)
    choose_windows_kernel[(heads, triton.cdiv(columns, COLUMNS.value))](
        view.view(INTEGERS[view.element_size()]), ids, windows, bases,
        triton.cdiv(ids.numel(), rule.every) * per_row, per_row, rule.every, rule.skip, columns,
        *view.stride(), rule.origin, rule.shift, rule.weight, rule.most, rule.below,
        num_warps=4,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "sample", "per_row", "every", "skip", "columns",
        "block_stride", "head_stride", "row_stride", "column_stride",
        "origin", "shift", "weight", "most", "below",
    ]
)  # fmt: skip
def choose_windows_kernel(
    cache, ids, windows, bases,
    sample, per_row, every, skip, columns,
    block_stride, head_stride, row_stride, column_stride,
    origin, shift, weight, most, below,
):  # fmt: skip
    head = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    BITS: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth
    cache += head.to(tl.int64) * head_stride
    # At most 8,192 elements of a channel are looked at: 32 bits hold any sum of them.
    total = tl.zeros((COLUMNS,), tl.int32)
    number = tl.zeros((COLUMNS,), tl.int32)
    maximum = tl.zeros((COLUMNS,), tl.int32)
    for first in range(0, sample, SAMPLES):
        at = first + tl.arange(0, SAMPLES)
        index, state = at // per_row * every, at % per_row * skip
        block = tl.load(ids + index, mask=at < sample, other=0)
        row = block.to(tl.int64) * block_stride + state.to(tl.int64) * row_stride
        offset = row[:, None] + column[None, :].to(tl.int64) * column_stride
        live = (at < sample)[:, None] & (column < columns)[None, :]
        magnitude = tl.load(cache + offset, mask=live, other=0).to(tl.int32)
        magnitude &= (1 << (BITS - 1)) - 1
        total += tl.sum(magnitude, axis=0)
        number += tl.sum((magnitude != 0).to(tl.int32), axis=0)
        maximum = tl.maximum(maximum, tl.max(magnitude, axis=0))

    mean = total // tl.maximum(number, 1)
    base = mean + (tl.minimum(maximum - mean, most) * weight >> 3) - below
    byte = tl.minimum(tl.maximum((base - origin) >> shift, 0), 255)
    byte = tl.where(2 * number >= sample, byte, 0)
    base = tl.where(byte > 0, (byte << shift) + origin, 0) & ((1 << (BITS - 1)) - 1)
    channel = head * columns + column
    tl.store(windows + channel, byte.to(tl.uint8), mask=column < columns)
    tl.store(bases + channel, base.to(bases.dtype.element_ty), mask=column < columns)
