"""Mode `max` under Triton's interpreter: its levels, its lists and its limits.

What it shares with `dense` is in `both.py`. Run by `test_kernels.py`, which says why. By hand:
TRITON_INTERPRET=1 python -m pytest tests/interpreted/max.py
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import local
from typing import Any

import numpy as np
import pytest
import torch
from caches import LAYOUTS, RNG, cache, contiguous, memory, rows_first, write
from coders import MAX_BF16, MAX_CODERS, DeviceCoder
from vllm_splitzip.kernels import cascade, max_decode

from bits import assert_bits_equal
from vllm_splitzip.codec.cpu.max import MaxStreams
from vllm_splitzip.codec.cpu.memory import Stream
from vllm_splitzip.codec.device import max as device_max
from vllm_splitzip.codec.device import memory as device_memory
from vllm_splitzip.codec.reference import max as reference_max
from vllm_splitzip.codec.scheme import MAX, Scheme
from windowed import coder_id, every_pattern, kv_like


@pytest.mark.usefixtures("_never_raw")
@pytest.mark.parametrize("coder", MAX_CODERS, ids=coder_id)
@pytest.mark.parametrize("ordered", [False, True], ids=["any order", "ascending"])
def test_every_pattern(coder, ordered):
    """NaNs, zeros and denormals among them, on all levels; in every layout.

    Of 16 bits, the lowest three are anything: they pass through.
    """
    patterns = every_pattern(coder.name)
    if patterns.size > 256:
        patterns = patterns[::8] | RNG.integers(8, size=patterns.size // 8).astype(np.uint16)
    patterns = patterns if ordered else RNG.permutation(patterns)
    for number, part in enumerate(np.array_split(patterns.reshape(-1, 256), 5)):
        if len(part):
            coder.round_trip(LAYOUTS[number], (2, 8, 16), part)


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
    coder = DeviceCoder("max", scheme)
    coded = coder.round_trip(contiguous, (1, 68, 64), elements.reshape(1, -1))
    assert not coded.tables["windows"].any()
    handed = np.cumsum(numbers[::-1])[::-1]
    size = -(-int(handed[:3].sum()) // 4) + int(handed[3])
    assert coded.tables["sizes"].view(np.uint16).tolist() == [0, size, 0]


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
        coded = MAX_BF16.encode_from(view, np.arange(1)).result()
        expected = MAX_BF16.expected(rows, shape)
        assert (coded.mode == "raw") == (expected.nbytes >= rows.nbytes)
        if coded.mode == "raw":
            assert_bits_equal(coded.dense[0].view(np.uint16), rows.reshape(-1))
        modes.add(coded.mode)
        low, high = (low, middle - 1) if coded.mode == "raw" else (middle, high)
    assert modes == {"raw", "max"}


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
        coded = MAX_BF16.expected(rows, shape)
        made.clear()
        MAX_BF16.decode_into(coded, view, table)
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


def test_the_kernel_writes_nowhere_else_whatever_the_escapes(monkeypatch):
    """Also where the host has not noticed that they contradict each other."""
    shape = (1, 16, 64)
    coded = MAX_BF16.expected(kv_like("bf16", 4, shape, wild=0.2), shape)

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
            MAX_BF16.decode_into(replace(coded, tables=broken), view, np.array([4, 1, 2, 5]))
            assert (view[torch.tensor([0, 3])] == 0xBE).all()


def test_levels_are_those_of_the_reference():
    assert (cascade.LEVELS, cascade.NEXT) == (reference_max.LEVELS, reference_max.NEXT)
