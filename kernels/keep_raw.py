"""Mode `raw` decided on the device: blocks as they are, where coding them ran out of workspace.

Launched behind every `fast_encode`. As long as the workspace was enough, which real KV never comes
near, a program reads one number and ends. Otherwise the blocks' own bits take the place of the
streams, before the blocks can be used for anything else.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl

from .fast_encode import LANES, EncodeBuffers, load_chunk
from .launch import has_ptx
from .pages import CHUNK, GROUP, PAGE_ARGUMENTS, Divisor, Pages, describe


def keep_raw(view: torch.Tensor, ids: torch.Tensor, buffers: EncodeBuffers) -> None:
    """Write the blocks `ids` of a cache into `buffers.streams` if their coding is incomplete."""
    pages, wide = describe(view, ids.numel())
    elements = ids.numel() * view[0].numel()
    keep_raw_kernel[(triton.cdiv(elements, CHUNK),)](
        view.view(torch.int16), ids, buffers.streams, buffers.reserved,
        elements // GROUP if wide else elements, buffers.positions.numel(), *pages.arguments(),
        WIDE=wide, ASM=has_ptx(view.device), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["units", "room", *PAGE_ARGUMENTS])
def keep_raw_kernel(
    cache, ids, raw, reserved, units, room,
    columns, columns_magic, columns_shift, rows, rows_magic, rows_shift,
    heads, heads_magic, heads_shift, block_stride, head_stride, row_stride, column_stride,
    WIDE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    if tl.load(reserved) > room:
        pages = Pages(
            Divisor(columns, columns_magic, columns_shift),
            Divisor(rows, rows_magic, rows_shift),
            Divisor(heads, heads_magic, heads_shift),
            block_stride, head_stride, row_stride, column_stride,
        )  # fmt: skip
        chunk = tl.program_id(0)
        word = tl.arange(0, LANES)[:, None] * 4 + tl.arange(0, 4)[None, :]
        raw = raw.to(tl.pointer_type(tl.uint64), bitcast=True) + chunk.to(tl.int64) * 256
        pad = tl.full((), 0, tl.int16)
        low, high = load_chunk(cache, ids, pages, chunk, units, pad, WIDE, ASM)
        tl.store(raw + word, low)
        tl.store(raw + 128 + word, high)
