"""Mode `dense` under Triton's interpreter writes the reference's bytes and reads them back.

Run by `test_kernels.py`, which says why. By hand:
TRITON_INTERPRET=1 python -m pytest tests/interpreted/dense.py
"""

from dataclasses import replace
from typing import Any

import numpy as np
import ptx
import pytest
import torch
from caches import (
    LAYOUTS,
    RNG,
    SHAPES,
    a_table,
    assert_same_streams,
    cache,
    contiguous,
    memory,
    misaligned,
    rows_first,
    write,
)
from triton.runtime.interpreter import InterpreterBuilder
from vllm_splitzip.kernels import dense_decode, dense_encode, tiles

from bits import assert_bits_equal
from vllm_splitzip.codec.coded import Coded
from vllm_splitzip.codec.device import dense as device_dense
from vllm_splitzip.codec.device.dense import decode_dense, encode_dense
from vllm_splitzip.codec.device.memory import upload
from vllm_splitzip.codec.formats import FORMATS
from vllm_splitzip.codec.packing import channels
from vllm_splitzip.codec.reference import dense as reference_dense
from vllm_splitzip.codec.scheme import DENSE, FAST
from vllm_splitzip.errors import FrameLayoutError
from windowed import every_pattern, kv_like

SCHEMES = {f"dense-{name}": ("dense", scheme) for name, scheme in DENSE.items()}
SCHEMES |= {f"fast-{name}": ("fast", scheme) for name, scheme in FAST.items()}
BF16 = DENSE["bf16"]


@pytest.fixture(params=SCHEMES.values(), ids=SCHEMES.keys())
def coding(request):
    return request.param


@pytest.fixture
def _never_raw(monkeypatch):
    """Small and difficult inputs are coded all the same."""
    limit = dense_encode.entry_limit
    monkeypatch.setattr(dense_encode, "entry_limit", lambda *a: max(limit(*a), a[0] + 256))
    monkeypatch.setattr(device_dense, "pays", lambda coded, size: True)


def round_trip(layout, shape: tuple[int, int, int], rows: Any, coding=("dense", BF16)) -> Coded:
    """Encode is the reference's, decode changes the run's blocks and nothing else."""
    mode, scheme = coding
    table, item = a_table(len(rows)), rows.dtype.itemsize
    view = cache(layout, len(rows) + 2, shape, item, fill=0xAD)
    write(view, table, rows)
    expected = reference_dense.encode(rows.reshape(-1), scheme, channels("tokens", shape), mode)
    coded = encode_dense(view, table, scheme, mode).result()
    assert coded.mode == mode
    assert_same_streams(coded, expected)

    decoded, wanted = (cache(layout, len(rows) + 2, shape, item, fill=0xBE) for _ in range(2))
    write(wanted, table, rows)
    decode_dense(expected, scheme, decoded, table)
    assert_bits_equal(memory(decoded), memory(wanted))
    return coded


@pytest.mark.usefixtures("_never_raw")
def test_every_pattern(coding):
    """Numbers of about one size at a time, with either sign: few of them are entries."""
    patterns = every_pattern(coding[1].number_format.name).reshape(2, -1)
    for part in np.split(patterns, max(1, patterns.size // 4096), axis=1):
        round_trip(rows_first, (2, 8, 16), RNG.permutation(part.reshape(-1, 256)), coding)


@pytest.mark.usefixtures("_never_raw")
def test_patterns_of_any_size(coding):
    """Most of them are entries: chunks have any number of them, 256 included."""
    patterns = RNG.permutation(every_pattern(coding[1].number_format.name))[:4096]
    for part in (patterns, np.sort(patterns)):
        round_trip(contiguous, (2, 8, 16), part.reshape(-1, 256), coding)


@pytest.mark.usefixtures("_never_raw")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, shape):
    rows = kv_like("bf16", 1 + 3000 // int(np.prod(shape)), shape, wild=0.02)
    round_trip(layout, shape, rows)


@pytest.mark.usefixtures("_never_raw")
@pytest.mark.parametrize("layout", [rows_first, misaligned])
def test_formats(coding, layout):
    name, shape = coding[1].number_format.name, (2, 5, 24)
    round_trip(layout, shape, kv_like(name, 20, shape, wild=0.1), coding)


def test_real_runs_are_coded(coding):
    shape = (2, 16, 128)
    rows = kv_like(coding[1].number_format.name, 4, shape)
    assert round_trip(rows_first, shape, rows, coding).nbytes < rows.nbytes


@pytest.mark.usefixtures("_never_raw")
@pytest.mark.parametrize("elements", [1, 7, 8, 9, 255, 256, 257, 2040, 2047, 2048, 2049, 4104])
def test_sizes(elements):
    round_trip(contiguous, (1, 1, elements), kv_like("bf16", 1, (1, 1, elements), wild=0.05))


@pytest.mark.usefixtures("_never_raw")
@pytest.mark.parametrize("listed", [0, 1, 253, 254, 255, 256])
def test_entries_of_a_chunk(listed):
    """From 255 on a chunk lists all of its elements, and in the last one those that are none."""
    elements = np.zeros(2048 + 700, np.uint16)
    for begin in (0, 1024, 2048 + 512):
        elements[begin : begin + 256][:listed] = 0x7F80
    coded = round_trip(contiguous, (1, 1, elements.size), elements.reshape(1, -1))
    assert coded.tables["counts"][0] == min(listed, 255)


@pytest.mark.usefixtures("_never_raw")
@pytest.mark.parametrize(("rows", "states"), [(1, 300), (3, 64), (40, 16), (70, 16), (20, 40)])
def test_samples(rows, states):
    """Windows are chosen from the blocks and states that the reference looks at."""
    shape = (1, states, 3)
    round_trip(rows_first, shape, kv_like("bf16", rows, shape, wild=0.05))


@pytest.fixture
def _with_ptx(monkeypatch):
    """The form of the kernels that NVIDIA's GPUs run."""
    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", ptx.inline_asm)
    for module in (dense_encode, dense_decode):
        monkeypatch.setattr(module, "has_ptx", lambda device: True)


@pytest.mark.usefixtures("_with_ptx")
@pytest.mark.parametrize("shape", [(2, 16, 128), (3, 16, 40)])
def test_with_ptx(coding, shape):
    round_trip(rows_first, shape, kv_like(coding[1].number_format.name, 2, shape), coding)


@pytest.mark.parametrize("layout", [contiguous, misaligned])
def test_blocks_are_kept_as_they_are_where_coding_does_not_pay(coding, layout):
    """The device has put the bits aside before anything is noticed."""
    rows = RNG.choice(every_pattern(coding[1].number_format.name), (3, 2 * 7 * 48))
    view, table = cache(layout, 5, (2, 7, 48), rows.dtype.itemsize, 0), np.array([4, 0, 2])
    write(view, table, rows)
    pending = encode_dense(view, table, coding[1], coding[0])
    view.zero_()
    coded = pending.result()
    assert coded.mode == "raw"
    assert_bits_equal(coded.dense[0].view(rows.dtype), rows.reshape(-1))


def test_raw_wins_just_where_it_is_no_longer_than_coded():
    """Close to the limit it is the host that notices, and the bits are those of the blocks."""
    shape, modes = (1, 16, 64), set()
    for share in np.linspace(0.2, 0.5, 6):
        # On both sides of the others, so that these keep their windows.
        wild = (RNG.random((2, 1024)) < share) * RNG.choice([-20, 20], (2, 1024))
        rows = (RNG.integers(0x3F00, 0x4000, (2, 1024)) + 128 * wild).astype(np.uint16)
        view = cache(contiguous, 2, shape, 2, 0)
        write(view, np.arange(2), rows)
        coded = encode_dense(view, np.arange(2), BF16).result()
        expected = reference_dense.encode(rows.reshape(-1), BF16, channels("tokens", shape))
        assert (coded.mode == "raw") == (expected.nbytes >= rows.nbytes)
        if coded.mode == "raw":
            assert_bits_equal(coded.dense[0].view(np.uint16), rows.reshape(-1))
        modes.add(coded.mode)
    assert modes == {"raw", "dense"}


def test_runs_that_are_empty_or_tiny_are_left_to_raw():
    view = cache(rows_first, 2, (1, 1, 16), 2, 0xAD)
    for table in (np.empty(0, np.int64), np.array([1])):
        coded = encode_dense(view, table, BF16).result()
        assert (coded.mode, coded.elements) == ("raw", 16 * table.size)
    nothing = reference_dense.encode(np.empty(0, np.uint16), BF16, channels("tokens", (1, 1, 16)))
    decode_dense(nothing, BF16, view, np.empty(0, np.int64))
    assert (memory(view) == 0xAD).all()


def test_buffers_are_used_again():
    shape = (2, 16, 32)
    buffers = device_dense.DenseBuffers.allocate(6 * 1024, 64, 2, 3, torch.device("cpu"))
    view = cache(rows_first, 8, shape, 2, 0)
    for blocks, wild in ((6, 0.1), (3, 0.0), (6, 0.01)):
        table, rows = a_table(blocks), kv_like("bf16", blocks, shape, wild=wild)
        write(view, table, rows)
        coded = encode_dense(view, table, BF16, "dense", buffers).result()
        expected = reference_dense.encode(rows.reshape(-1), BF16, channels("tokens", shape))
        assert_same_streams(coded, expected)
    with pytest.raises(ValueError, match="do not fit"):
        encode_dense(view, np.arange(7), BF16, "dense", buffers)


@pytest.mark.parametrize("layout", [contiguous, rows_first, misaligned])
def test_unwanted_blocks_are_not_touched(layout, coding):
    mode, scheme = coding
    shape, item = (2, 4, 80), scheme.number_format.item
    rows = kv_like(scheme.number_format.name, 6, shape, wild=0.05)
    table = np.array([3, -1, 0, 5, -7, np.iinfo(np.int64).min])
    view, wanted = (cache(layout, 6, shape, item, fill=0xBE) for _ in range(2))
    write(wanted, table[[0, 2, 3]], rows[[0, 2, 3]])
    coded = reference_dense.encode(rows.reshape(-1), scheme, channels("tokens", shape), mode)
    decode_dense(coded, scheme, view, table)
    assert_bits_equal(memory(view), memory(wanted))


def test_unknown_blocks_and_views_are_refused():
    view = cache(contiguous, 4, (1, 16, 64), 2, 0)
    coded = encode_dense(view, np.arange(2), BF16).result()
    for table in (np.array([0, 4]), np.array([-1, 0])):
        with pytest.raises(IndexError, match="the cache has 4"):
            encode_dense(view, table, BF16)
    with pytest.raises(FrameLayoutError, match="the cache has 4"):
        decode_dense(coded, BF16, view, np.array([0, 4]))
    for wrong in (torch.zeros(4, 4096), torch.zeros(4, 2, 16, 64), torch.zeros(4, 2, 0, 64)):
        with pytest.raises(ValueError, match="a cache is"):
            tiles.describe_tiles(wrong, 1)
    with pytest.raises(ValueError, match="too many for one launch"):
        tiles.describe_tiles(view, 1 << 30)


@pytest.mark.parametrize(
    "change",
    [
        {"elements": 1024},
        {"dense": ()},
        {"dense 0": slice(1, None)},
        {"dense 1": slice(None, -1)},
        {"dense 2": slice(0, 0)},
        {"windows": slice(1, None)},
        {"counts": slice(1, None)},
        {"positions": slice(1, None)},
        {"kinds": slice(1, None)},
        {"others": slice(1, None)},
        {"kinds": None},
        {"others": None},
        {"kind": 0xFF},
    ],
    ids=str,
)
def test_contradicting_streams_are_refused(change):
    shape = (1, 16, 64)
    view = cache(contiguous, 2, shape, 2, fill=0xBE)
    rows = kv_like("bf16", 2, shape, wild=0.2)
    coded = reference_dense.encode(rows.reshape(-1), BF16, channels("tokens", shape))
    (what, value), tables, dense = *change.items(), dict(coded.tables), list(coded.dense)
    if what == "kind":
        tables["kinds"] = np.full_like(tables["kinds"], value)
    elif what.startswith("dense "):
        dense[int(what[6:])] = dense[int(what[6:])][value]
    elif what in tables:
        tables[what] = tables[what][value] if value else None
    broken = replace(coded, dense=tuple(dense), tables=tables)
    if what in ("elements", "dense"):
        broken = replace(broken, **change)
    with pytest.raises(FrameLayoutError):
        decode_dense(broken, BF16, view, np.arange(2))
    assert (memory(view) == 0xBE).all()


def test_the_kernel_writes_nowhere_else_whatever_the_entries():
    """The last chunk is cut off: its positions from 128 on are not in the cache."""
    shape = (1, 3, 128)
    view = cache(contiguous, 3, shape, 2, fill=0xBE)
    elements = np.zeros(2 * 384, np.uint16)
    coded = reference_dense.encode(
        elements, BF16, channels("tokens", shape), windows=np.zeros(128, np.uint8)
    )
    coded.tables.update(
        counts=np.array([2, 0, 255], np.uint8),
        positions=np.concatenate([np.array([0, 255]), np.arange(256)]).astype(np.uint8),
        kinds=np.full(65, 0xFF, np.uint8),
        others=np.empty(0, np.uint8),
    )
    coded.tables["kinds"][-1] = 0x0F
    decode_dense(coded, BF16, view, np.array([0, 2]))
    expected = np.zeros(3 * 384, np.uint16)
    expected[384:768] = 0xBE
    expected[[0, 255]] = 0x7C00
    expected[768 + 128 :] = 0x7C00
    assert_bits_equal(memory(view), expected)


def test_there_is_room_for_a_tile_behind_what_is_uploaded():
    """Kernels load low bytes of whole tiles, and the interpreter would not notice."""
    parts = [np.arange(size, dtype=np.uint8) for size in (0, 1, 2047, 5)]
    for part, there in zip(parts, upload(parts, torch.device("cpu")), strict=True):
        assert_bits_equal(there.numpy(), part)
        end = there.storage_offset() + there.numel()
        assert there.untyped_storage().nbytes() - end >= tiles.TILE.value


def test_schemes_are_those_of_the_formats():
    assert {scheme.number_format for _, scheme in SCHEMES.values()} == set(FORMATS.values())
