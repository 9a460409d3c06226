"""Mode `max` under Triton's interpreter writes the reference's bytes and reads them back.

Run by `test_kernels.py`, which says why. By hand:
TRITON_INTERPRET=1 python -m pytest tests/interpreted/max.py
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import local
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
from vllm_splitzip.kernels import cascade, max_decode, max_encode

from bits import assert_bits_equal
from vllm_splitzip.codec.coded import Coded
from vllm_splitzip.codec.cpu.max import MaxStreams
from vllm_splitzip.codec.cpu.memory import Stream
from vllm_splitzip.codec.device import max as device_max
from vllm_splitzip.codec.device import memory as device_memory
from vllm_splitzip.codec.device.max import MaxBuffers, decode_max, encode_max
from vllm_splitzip.codec.packing import channels
from vllm_splitzip.codec.reference import max as reference_max
from vllm_splitzip.codec.scheme import MAX, Scheme
from vllm_splitzip.errors import FrameLayoutError
from windowed import every_pattern, kv_like

BF16 = MAX["bf16"]


@pytest.fixture(params=MAX.values(), ids=MAX.keys())
def scheme(request):
    return request.param


@pytest.fixture
def _never_raw(monkeypatch):
    """Small and difficult inputs are coded all the same."""
    monkeypatch.setattr(max_encode, "escape_bytes_limit", lambda elements, *_: 2 * elements + 4096)


def expected_of(rows: Any, scheme: Scheme, shape: tuple[int, int, int]) -> Coded:
    return reference_max.encode(rows.reshape(-1), scheme, channels("tokens", shape))


def round_trip(layout, shape: tuple[int, int, int], rows: Any, scheme: Scheme = BF16) -> Coded:
    """Encode is the reference's, decode changes the run's blocks and nothing else."""
    table, item = a_table(len(rows)), rows.dtype.itemsize
    view = cache(layout, len(rows) + 2, shape, item, fill=0xAD)
    write(view, table, rows)
    expected = expected_of(rows, scheme, shape)
    coded = encode_max(view, table, scheme).result()
    assert_same_streams(coded, expected)

    decoded, wanted = (cache(layout, len(rows) + 2, shape, item, fill=0xBE) for _ in range(2))
    write(wanted, table, rows)
    decode_max(expected, scheme, decoded, table)
    assert_bits_equal(memory(decoded), memory(wanted))
    return coded


@pytest.mark.usefixtures("_never_raw")
@pytest.mark.parametrize("ordered", [False, True], ids=["any order", "ascending"])
def test_every_pattern(scheme, ordered):
    """NaNs, zeros and denormals among them, on all levels; in every layout.

    Of 16 bits, the lowest three are anything: they pass through.
    """
    patterns = every_pattern(scheme.number_format.name)
    if patterns.size > 256:
        patterns = patterns[::8] | RNG.integers(8, size=patterns.size // 8).astype(np.uint16)
    patterns = patterns if ordered else RNG.permutation(patterns)
    for number, part in enumerate(np.array_split(patterns.reshape(-1, 256), 5)):
        if len(part):
            round_trip(LAYOUTS[number], (2, 8, 16), part, scheme)


@pytest.mark.usefixtures("_never_raw")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, shape):
    rows = kv_like("bf16", 1 + 1100 // int(np.prod(shape)), shape, wild=0.02)
    round_trip(layout, shape, rows)


@pytest.mark.usefixtures("_never_raw")
@pytest.mark.parametrize("layout", [rows_first, misaligned])
def test_formats(scheme, layout):
    shape = (2, 5, 24)
    rows = kv_like(scheme.number_format.name, 11, shape, wild=0.1)
    round_trip(layout, shape, rows, scheme)


def test_real_runs_are_coded(scheme):
    shape = (2, 16, 128)
    rows = kv_like(scheme.number_format.name, 2, shape)
    coded = round_trip(rows_first, shape, rows, scheme)
    assert (coded.mode, coded.nbytes < rows.nbytes) == ("max", True)


@pytest.mark.usefixtures("_never_raw")
@pytest.mark.parametrize("elements", [1, 7, 8, 9, 255, 257, 2047, 2048, 2049, 4104])
def test_sizes(elements):
    round_trip(contiguous, (1, 1, elements), kv_like("bf16", 1, (1, 1, elements), wild=0.2))


def of_level(level: int, scheme: Scheme, number: int) -> Any:
    """Elements that the level codes, where the window is the one of zeros."""
    binades = [*reference_max.LEVELS, (5, 6, 7)][level - 2]
    number_format = scheme.number_format
    chosen = RNG.choice(binades, number) % (1 << number_format.exponent)
    return chosen << number_format.mantissa


NUMBERS = [
    *[(1, 0, 0, 0), (0, 0, 0, 1), (1, 1, 1, 1), (127, 1, 126, 2), (5, 127, 4, 128)],
    *[(129, 0, 3, 0), (1, 254, 129, 131), (0, 1023, 0, 1025), (2048, 0, 0, 0)],
    *[(0, 2048, 0, 0), (0, 0, 2048, 0), (0, 0, 0, 2048)],
]
"""Elements on levels 2 to 5 of one tile; levels begin and end inside bytes."""


@pytest.mark.usefixtures("_never_raw")
@pytest.mark.parametrize(
    ("name", "numbers"),
    [*(("bf16", n) for n in NUMBERS), *((n, (2, 3, 2, 3)) for n in MAX), ("e4m3", NUMBERS[-1])],
    ids=str,
)
def test_levels(name, numbers):
    scheme = MAX[name]
    dtype = {1: np.uint8, 2: np.uint16}[scheme.number_format.item]
    elements = np.zeros(2 * 2048 + 256, dtype)
    parts = [of_level(level, scheme, number) for level, number in enumerate(numbers, 2)]
    escapes = RNG.permutation(np.concatenate(parts))
    where = 2048 + np.sort(RNG.permutation(2048)[: escapes.size])
    elements[where] = escapes
    # Few enough per channel for its window to stay that of zeros.
    coded = round_trip(contiguous, (1, 68, 64), elements.reshape(1, -1), scheme)
    assert not coded.tables["windows"].any()
    handed = np.cumsum(numbers[::-1])[::-1]
    size = -(-int(handed[:3].sum()) // 4) + int(handed[3])
    assert coded.tables["sizes"].view(np.uint16).tolist() == [0, size, 0]


@pytest.mark.usefixtures("_with_ptx")
@pytest.mark.parametrize("shape", [(2, 16, 128), (3, 16, 40)])
def test_with_ptx(scheme, shape):
    round_trip(rows_first, shape, kv_like(scheme.number_format.name, 1, shape), scheme)


@pytest.fixture
def _with_ptx(monkeypatch):
    """The form of the kernels that NVIDIA's GPUs run."""
    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", ptx.inline_asm)
    for module in (max_encode, max_decode):
        monkeypatch.setattr(module, "has_ptx", lambda device: True)


@pytest.mark.parametrize("layout", [contiguous, misaligned])
def test_blocks_are_kept_as_they_are_where_coding_does_not_pay(scheme, layout):
    """The device has put the bits aside before anything is noticed."""
    rows = RNG.choice(every_pattern(scheme.number_format.name), (3, 2 * 7 * 48))
    view, table = cache(layout, 5, (2, 7, 48), rows.dtype.itemsize, 0), np.array([4, 0, 2])
    write(view, table, rows)
    pending = encode_max(view, table, scheme)
    view.zero_()
    coded = pending.result()
    assert coded.mode == "raw"
    assert_bits_equal(coded.dense[0].view(rows.dtype), rows.reshape(-1))


def test_the_last_byte_that_pays():
    """Raw exactly from the escape on that makes the streams as large as the elements."""
    shape, low, high, modes = (1, 32, 64), 0, 1024, set()
    order = RNG.permutation(2048)
    while low < high:
        middle = (low + high + 1) // 2
        rows = np.zeros((1, 2048), np.uint16)
        rows[0, order[:middle]] = 9 << 7  # A byte and three digits each.
        view = cache(contiguous, 1, shape, 2, 0)
        write(view, np.arange(1), rows)
        coded = encode_max(view, np.arange(1), BF16).result()
        expected = expected_of(rows, BF16, shape)
        assert (coded.mode == "raw") == (expected.nbytes >= rows.nbytes)
        if coded.mode == "raw":
            assert_bits_equal(coded.dense[0].view(np.uint16), rows.reshape(-1))
        modes.add(coded.mode)
        low, high = (low, middle - 1) if coded.mode == "raw" else (middle, high)
    assert modes == {"raw", "max"}


def test_runs_that_are_empty_or_tiny_are_left_to_raw():
    view = cache(rows_first, 2, (1, 1, 16), 2, 0xAD)
    for table in (np.empty(0, np.int64), np.array([1])):
        coded = encode_max(view, table, BF16).result()
        assert (coded.mode, coded.elements) == ("raw", 16 * table.size)
    nothing = expected_of(np.empty(0, np.uint16), BF16, (1, 1, 16))
    decode_max(nothing, BF16, view, np.empty(0, np.int64))
    assert (memory(view) == 0xAD).all()


def test_buffers_are_used_again():
    shape = (2, 16, 32)
    buffers = MaxBuffers.allocate(4 * 1024, 64, 2, 2, torch.device("cpu"))
    view = cache(rows_first, 6, shape, 2, 0)
    for blocks, wild in ((4, 0.1), (3, 0.0), (4, 0.01)):
        table, rows = a_table(blocks), kv_like("bf16", blocks, shape, wild=wild)
        write(view, table, rows)
        coded = encode_max(view, table, BF16, buffers).result()
        assert_same_streams(coded, expected_of(rows, BF16, shape))
    with pytest.raises(ValueError, match="do not fit"):
        encode_max(view, np.arange(5), BF16, buffers)


def test_decoding_allocates_its_lists_only_once(monkeypatch):
    """Beside the memory that streams are brought to, and again only for a longer run."""
    shape, made, empty = (2, 16, 32), [], torch.empty

    def counted(size, **options):
        made.append(size)
        return empty(size, **options)

    monkeypatch.setattr(device_memory, "_scratch", local())
    monkeypatch.setattr(torch, "empty", counted)
    lists = []
    for blocks in (3, 3, 2, 5, 5):
        rows = kv_like("bf16", blocks, shape, wild=0.1)
        table, view = np.arange(blocks), cache(rows_first, blocks, shape, 2, 0)
        coded = expected_of(rows, BF16, shape)
        made.clear()
        decode_max(coded, BF16, view, table)
        lists.append(made.count(max_decode.lists_bytes(rows.size)))
        assert len(made) == 1 + lists[-1]
        assert_bits_equal(view.numpy().view(np.uint16).reshape(rows.shape), rows)
    assert lists == [1, 0, 0, 1, 0]


def test_threads_have_their_own_lists():
    device = torch.device("cpu")
    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(device_memory.scratch, 100, device).result()
    assert device_memory.scratch(100, device).data_ptr() != theirs.data_ptr()


def test_lists_that_are_too_short_are_refused():
    shape = (2, 16, 64)
    view, lists = cache(rows_first, 2, shape, 2, 0xAD), torch.zeros(8191, dtype=torch.uint8)
    ids, some = torch.arange(2, dtype=torch.int32), torch.zeros(4096, dtype=torch.uint8)
    bases, firsts = torch.zeros(128, dtype=torch.int16), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="4096 elements do not fit into lists of 8191 bytes"):
        max_decode.max_decode(view, ids, 2, bases, some, (some, some, some), firsts, some, lists)
    assert (memory(view) == 0xAD).all()


@pytest.mark.parametrize("layout", [rows_first, misaligned])
def test_unwanted_blocks_are_not_touched(layout, scheme):
    shape, item = (2, 4, 80), scheme.number_format.item
    rows = kv_like(scheme.number_format.name, 6, shape, wild=0.05)
    table = np.array([3, -1, 0, 5, -7, np.iinfo(np.int64).min])
    view, wanted = (cache(layout, 6, shape, item, fill=0xBE) for _ in range(2))
    write(wanted, table[[0, 2, 3]], rows[[0, 2, 3]])
    decode_max(expected_of(rows, scheme, shape), scheme, view, table)
    assert_bits_equal(memory(view), memory(wanted))


def test_unknown_blocks_are_refused():
    view = cache(contiguous, 4, (1, 16, 64), 2, 0)
    coded = encode_max(view, np.arange(2), BF16).result()
    for table in (np.array([0, 4]), np.array([-1, 0])):
        with pytest.raises(IndexError, match="the cache has 4"):
            encode_max(view, table, BF16)
    with pytest.raises(FrameLayoutError, match="the cache has 4"):
        decode_max(coded, BF16, view, np.array([0, 4]))


@pytest.mark.parametrize(
    "change",
    [
        {"elements": 1024},
        {"dense": ()},
        {"dense 0": slice(1, None)},
        {"dense 1": slice(None, -1)},
        {"windows": slice(1, None)},
        {"sizes": slice(1, None)},
        {"escapes": slice(1, None)},
        {"sizes": None},
        {"escapes": None},
        {"digits": 0xFF},
    ],
    ids=str,
)
def test_contradicting_streams_are_refused(change):
    shape = (1, 16, 64)
    view = cache(contiguous, 2, shape, 2, fill=0xBE)
    coded = expected_of(kv_like("bf16", 2, shape, wild=0.2), BF16, shape)
    (what, value), tables, dense = *change.items(), dict(coded.tables), list(coded.dense)
    if what == "digits":
        tables["escapes"] = tables["escapes"] | np.uint8(value)
    elif what.startswith("dense "):
        dense[int(what[6:])] = dense[int(what[6:])][value]
    elif what in tables:
        tables[what] = tables[what][value] if value else None
    broken = replace(coded, dense=tuple(dense), tables=tables)
    if what in ("elements", "dense"):
        broken = replace(broken, **change)
    with pytest.raises(FrameLayoutError):
        decode_max(broken, BF16, view, np.arange(2))
    assert (memory(view) == 0xBE).all()


def test_the_kernel_writes_nowhere_else_whatever_the_escapes(monkeypatch):
    """Also where the host has not noticed that they contradict each other."""
    shape = (1, 16, 64)
    coded = expected_of(kv_like("bf16", 4, shape, wild=0.2), BF16, shape)

    def unchecked(coded, *_):
        named = {name: Stream(name, stream) for name, stream in coded.tables.items()}
        return MaxStreams([Stream("dense", stream) for stream in coded.dense], **named)

    monkeypatch.setattr(device_max, "received_max", unchecked)
    for sizes in ([0, 0], [1, 2], [300, 1]):
        for escapes in (np.full(303, 0xFF, np.uint8), np.zeros(303, np.uint8)):
            broken = coded.tables | {
                "sizes": np.array(sizes, np.uint16).view(np.uint8),
                "escapes": escapes[: sum(sizes)],
            }
            view = cache(rows_first, 6, shape, 2, fill=0xBE)
            decode_max(replace(coded, tables=broken), BF16, view, np.array([4, 1, 2, 5]))
            assert (view[torch.tensor([0, 3])] == 0xBE).all()


def test_levels_are_those_of_the_reference():
    assert (cascade.LEVELS, cascade.NEXT) == (reference_max.LEVELS, reference_max.NEXT)
