"""Both modes with windows under Triton's interpreter: the reference's bytes, written and read.

What only one of them has to show is in `dense.py` and `max.py`. Run by `test_kernels.py`, which
says why. By hand: TRITON_INTERPRET=1 python -m pytest tests/interpreted/both.py
"""

from dataclasses import replace

import numpy as np
import pytest
from caches import (
    LAYOUTS,
    RNG,
    SHAPES,
    a_table,
    cache,
    contiguous,
    memory,
    misaligned,
    rows_first,
    write,
)
from coders import DENSE_BF16, DENSE_CODERS, MAX_BF16, MAX_CODERS, DeviceCoder

from bits import assert_bits_equal, assert_same_streams
from vllm_splitzip.errors import FrameLayoutError
from windowed import coder_id, every_pattern, kv_like

ELEMENTS = {"dense": 3000, "max": 1100}
"""More than a tile of `dense`; `max` takes the interpreter three times as long."""


@pytest.fixture(params=[*DENSE_CODERS, *MAX_CODERS], ids=coder_id)
def coder(request: pytest.FixtureRequest) -> DeviceCoder:
    return request.param


@pytest.fixture(params=[DENSE_BF16, MAX_BF16], ids=coder_id)
def bf16(request: pytest.FixtureRequest) -> DeviceCoder:
    return request.param


@pytest.mark.usefixtures("_never_raw")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, shape, bf16):
    rows = 1 + ELEMENTS[bf16.mode] // int(np.prod(shape))
    bf16.round_trip(layout, shape, kv_like("bf16", rows, shape, wild=0.02))


@pytest.mark.usefixtures("_never_raw")
@pytest.mark.parametrize("layout", [rows_first, misaligned])
def test_formats(coder, layout):
    shape = (2, 5, 24)
    coder.round_trip(layout, shape, kv_like(coder.name, 20, shape, wild=0.1))


def test_real_runs_are_coded(coder):
    shape = (2, 16, 128)
    rows = kv_like(coder.name, 4, shape)
    assert coder.round_trip(rows_first, shape, rows).nbytes < rows.nbytes


@pytest.mark.usefixtures("_never_raw")
@pytest.mark.parametrize("elements", [1, 7, 8, 9, 255, 256, 257, 2040, 2047, 2048, 2049, 4104])
def test_sizes(elements, bf16):
    shape = (1, 1, elements)
    bf16.round_trip(contiguous, shape, kv_like("bf16", 1, shape, wild=0.1))


@pytest.mark.usefixtures("_with_ptx")
@pytest.mark.parametrize("shape", [(2, 16, 128), (3, 16, 40)])
def test_with_ptx(coder, shape):
    coder.round_trip(rows_first, shape, kv_like(coder.name, 2, shape))


@pytest.mark.parametrize("layout", [contiguous, misaligned])
def test_blocks_are_kept_as_they_are_where_coding_does_not_pay(coder, layout):
    """The device has put the bits aside before anything is noticed."""
    rows = RNG.choice(every_pattern(coder.name), (3, 2 * 7 * 48))
    view, table = cache(layout, 5, (2, 7, 48), rows.dtype.itemsize, 0), np.array([4, 0, 2])
    write(view, table, rows)
    pending = coder.encode_from(view, table)
    view.zero_()
    coded = pending.result()
    assert coded.mode == "raw"
    assert_bits_equal(coded.dense[0].view(rows.dtype), rows.reshape(-1))


def test_runs_that_are_empty_or_tiny_are_left_to_raw(bf16):
    shape = (1, 1, 16)
    view = cache(rows_first, 2, shape, 2, 0xAD)
    for table in (np.empty(0, np.int64), np.array([1])):
        coded = bf16.encode_from(view, table).result()
        assert (coded.mode, coded.elements) == ("raw", 16 * table.size)
    nothing = bf16.expected(np.empty(0, np.uint16), shape)
    bf16.decode_into(nothing, view, np.empty(0, np.int64))
    assert (memory(view) == 0xAD).all()


def test_buffers_are_used_again(bf16):
    shape = (2, 16, 32)
    buffers = bf16.buffers(4 * 1024, 64)
    view = cache(rows_first, 6, shape, 2, 0)
    for blocks, wild in ((4, 0.1), (3, 0.0), (4, 0.01)):
        table, rows = a_table(blocks), kv_like("bf16", blocks, shape, wild=wild)
        write(view, table, rows)
        coded = bf16.encode_from(view, table, buffers).result()
        assert_same_streams(coded, bf16.expected(rows, shape))
    with pytest.raises(ValueError, match="do not fit"):
        bf16.encode_from(view, np.arange(5), buffers)


@pytest.mark.parametrize("layout", [contiguous, rows_first, misaligned])
def test_unwanted_blocks_are_not_touched(layout, coder):
    shape, item = (2, 4, 80), coder.scheme.number_format.item
    rows = kv_like(coder.name, 6, shape, wild=0.05)
    table = np.array([3, -1, 0, 5, -7, np.iinfo(np.int64).min])
    view, wanted = (cache(layout, 6, shape, item, fill=0xBE) for _ in range(2))
    write(wanted, table[[0, 2, 3]], rows[[0, 2, 3]])
    coder.decode_into(coder.expected(rows, shape), view, table)
    assert_bits_equal(memory(view), memory(wanted))


def test_unknown_blocks_are_refused(bf16):
    view = cache(contiguous, 4, (1, 16, 64), 2, 0)
    coded = bf16.encode_from(view, np.arange(2)).result()
    for table in (np.array([0, 4]), np.array([-1, 0])):
        with pytest.raises(IndexError, match="the cache has 4"):
            bf16.encode_from(view, table)
    with pytest.raises(FrameLayoutError, match="the cache has 4"):
        bf16.decode_into(coded, view, np.array([0, 4]))


COMMON = [
    {"elements": 1024},
    {"dense": ()},
    {"dense 0": slice(1, None)},
    {"dense 1": slice(None, -1)},
    {"windows": slice(1, None)},
]
OF_DENSE = [
    {"dense 2": slice(0, 0)},
    {"counts": slice(1, None)},
    {"positions": slice(1, None)},
    {"kinds": slice(1, None)},
    {"others": slice(1, None)},
    {"kinds": None},
    {"others": None},
    {"kinds": 0xFF},
]
OF_MAX = [
    {"sizes": slice(1, None)},
    {"escapes": slice(1, None)},
    {"sizes": None},
    {"escapes": None},
    {"escapes": 0xFF},
]


@pytest.mark.parametrize(
    ("coder", "change"),
    [
        *((DENSE_BF16, change) for change in COMMON + OF_DENSE),
        *((MAX_BF16, change) for change in COMMON + OF_MAX),
    ],
    ids=str,
)
def test_contradicting_streams_are_refused(coder, change):
    """A stream that is shorter, missing, or all ones."""
    shape = (1, 16, 64)
    view = cache(contiguous, 2, shape, 2, fill=0xBE)
    coded = coder.expected(kv_like("bf16", 2, shape, wild=0.2), shape)
    (what, value), tables, dense = *change.items(), dict(coded.tables), list(coded.dense)
    if what in ("elements", "dense"):
        broken = replace(coded, **change)
    else:
        if what.startswith("dense "):
            dense[int(what[6:])] = dense[int(what[6:])][value]
        elif isinstance(value, int):
            tables[what] = np.full_like(tables[what], value)
        else:
            tables[what] = tables[what][value] if value else None
        broken = replace(coded, dense=tuple(dense), tables=tables)
    with pytest.raises(FrameLayoutError):
        coder.decode_into(broken, view, np.arange(2))
    assert (memory(view) == 0xBE).all()
