"""Mode `dense` under Triton's interpreter: its entries, its windows and its limits.

What it shares with `max` is in `both.py`. Run by `test_kernels.py`, which says why. By hand:
TRITON_INTERPRET=1 python -m pytest tests/interpreted/dense.py
"""

import numpy as np
import pytest
import torch
from caches import RNG, cache, contiguous, memory, rows_first, write
from coders import DENSE_BF16, DENSE_CODERS, DeviceCoder
from vllm_splitzip.kernels import tiles

from bits import assert_bits_equal
from vllm_splitzip.codec.device.memory import upload
from vllm_splitzip.codec.formats import FORMATS
from vllm_splitzip.codec.packing import channels
from vllm_splitzip.codec.reference import dense as reference_dense
from windowed import coder_id, every_pattern, kv_like


@pytest.fixture(params=DENSE_CODERS, ids=coder_id)
def coder(request: pytest.FixtureRequest) -> DeviceCoder:
    return request.param


@pytest.mark.usefixtures("_never_raw")
def test_every_pattern(coder):
    """Numbers of about one size at a time, with either sign: few of them are entries."""
    patterns = every_pattern(coder.name).reshape(2, -1)
    for part in np.split(patterns, max(1, patterns.size // 4096), axis=1):
        coder.round_trip(rows_first, (2, 8, 16), RNG.permutation(part.reshape(-1, 256)))


@pytest.mark.usefixtures("_never_raw")
def test_patterns_of_any_size(coder):
    """Most of them are entries: chunks have any number of them, 256 included."""
    patterns = RNG.permutation(every_pattern(coder.name))[:4096]
    for part in (patterns, np.sort(patterns)):
        coder.round_trip(contiguous, (2, 8, 16), part.reshape(-1, 256))


@pytest.mark.usefixtures("_never_raw")
@pytest.mark.parametrize("listed", [0, 1, 253, 254, 255, 256])
def test_entries_of_a_chunk(listed):
    """From 255 on a chunk lists all of its elements, and in the last one those that are none."""
    elements = np.zeros(2048 + 700, np.uint16)
    for begin in (0, 1024, 2048 + 512):
        elements[begin : begin + 256][:listed] = 0x7F80
    coded = DENSE_BF16.round_trip(contiguous, (1, 1, elements.size), elements.reshape(1, -1))
    assert coded.tables["counts"][0] == min(listed, 255)


@pytest.mark.usefixtures("_never_raw")
@pytest.mark.parametrize(("rows", "states"), [(1, 300), (3, 64), (40, 16), (70, 16), (20, 40)])
def test_samples(rows, states):
    """Windows are chosen from the blocks and states that the reference looks at."""
    shape = (1, states, 3)
    DENSE_BF16.round_trip(rows_first, shape, kv_like("bf16", rows, shape, wild=0.05))


def test_raw_wins_just_where_it_is_no_longer_than_coded():
    """Close to the limit it is the host that notices, and the bits are those of the blocks."""
    shape, modes = (1, 16, 64), set()
    for share in np.linspace(0.2, 0.5, 6):
        # On both sides of the others, so that these keep their windows.
        wild = (RNG.random((2, 1024)) < share) * RNG.choice([-20, 20], (2, 1024))
        rows = (RNG.integers(0x3F00, 0x4000, (2, 1024)) + 128 * wild).astype(np.uint16)
        view = cache(contiguous, 2, shape, 2, 0)
        write(view, np.arange(2), rows)
        coded = DENSE_BF16.encode_from(view, np.arange(2)).result()
        expected = DENSE_BF16.expected(rows, shape)
        assert (coded.mode == "raw") == (expected.nbytes >= rows.nbytes)
        if coded.mode == "raw":
            assert_bits_equal(coded.dense[0].view(np.uint16), rows.reshape(-1))
        modes.add(coded.mode)
    assert modes == {"raw", "dense"}


def test_views_that_are_no_cache_are_refused():
    for wrong in (torch.zeros(4, 4096), torch.zeros(4, 2, 16, 64), torch.zeros(4, 2, 0, 64)):
        with pytest.raises(ValueError, match="a cache is"):
            tiles.describe_tiles(wrong, 1)
    with pytest.raises(ValueError, match="too many for one launch"):
        tiles.describe_tiles(cache(contiguous, 4, (1, 16, 64), 2, 0), 1 << 30)


def test_the_kernel_writes_nowhere_else_whatever_the_entries():
    """The last chunk is cut off: its positions from 128 on are not in the cache."""
    shape = (1, 3, 128)
    view = cache(contiguous, 3, shape, 2, fill=0xBE)
    elements = np.zeros(2 * 384, np.uint16)
    coded = reference_dense.encode(
        elements, DENSE_BF16.scheme, channels("tokens", shape), windows=np.zeros(128, np.uint8)
    )
    coded.tables.update(
        counts=np.array([2, 0, 255], np.uint8),
        positions=np.concatenate([np.array([0, 255]), np.arange(256)]).astype(np.uint8),
        kinds=np.full(65, 0xFF, np.uint8),
        others=np.empty(0, np.uint8),
    )
    coded.tables["kinds"][-1] = 0x0F
    DENSE_BF16.decode_into(coded, view, np.array([0, 2]))
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
    assert {coder.scheme.number_format for coder in DENSE_CODERS} == set(FORMATS.values())
