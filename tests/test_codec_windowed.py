"""Modes with windows: reference and CPU agree, refuse alike, and keep every bit."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bits import assert_bits_equal, at_odd_addresses
from vllm_splitzip.codec import host
from vllm_splitzip.codec.packing import PACKINGS
from vllm_splitzip.errors import FrameLayoutError
from windowed import (
    DENSE_CODERS,
    MAX_CODERS,
    SHAPE,
    Coder,
    blocks_of,
    coder_id,
    empty_like,
    every_pattern,
    flat,
    kv_like,
    with_one,
)

CODERS = [*DENSE_CODERS, *MAX_CODERS]
SHAPES = [SHAPE, (1, 16, 24), (3, 5, 7), (1, 1, 1), (1, 16, 512), (1, 64, 576), (3, 16, 128)]


@pytest.fixture(params=CODERS, ids=coder_id)
def coder(request: pytest.FixtureRequest) -> Coder:
    return request.param


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 13, 40])
def test_shapes(coder: Coder, shape: tuple[int, int, int], rows: int) -> None:
    coder.check(blocks_of(kv_like(coder.name, rows, shape, wild=0.01), coder.name, shape))


@pytest.mark.parametrize("packing", sorted(PACKINGS))
@pytest.mark.parametrize("rows", [3, 16, 150])
def test_packings(coder: Coder, packing: str, rows: int) -> None:
    rows_of = kv_like(coder.name, rows, SHAPE, packing, wild=0.01)
    coder.check(blocks_of(rows_of, coder.name, SHAPE, packing))


@pytest.mark.usefixtures("_way")
def test_every_pattern_among_others(coder: Coder) -> None:
    rows = kv_like(coder.name, 64, SHAPE)
    patterns = every_pattern(coder.name)
    for seed, part in enumerate(np.array_split(patterns, max(1, patterns.size // 8192))):
        changed = rows.copy()
        where = np.random.default_rng(seed).permutation(changed.size)[: part.size]
        changed.reshape(-1)[where] = part
        coder.check(blocks_of(changed, coder.name, SHAPE))


def test_nothing_but_every_pattern(coder: Coder) -> None:
    patterns = np.resize(every_pattern(coder.name), 1 << 16).reshape(-1, 4096)
    coder.check(blocks_of(patterns, coder.name, SHAPE))


@settings(max_examples=240, deadline=None)
@given(st.data())
def test_like_the_reference(data: st.DataObject) -> None:
    coder = data.draw(st.sampled_from(CODERS))
    packing = data.draw(st.sampled_from(sorted(PACKINGS)))
    shape = data.draw(
        st.sampled_from([(1, 16, 64), (2, 16, 64), (1, 32, 128), (4, 16, 128)])
        if packing == "cpu-amx"
        else st.tuples(
            st.integers(1, 3), st.integers(1, 40), st.integers(1, 40).map(lambda c: 2 * c)
        )
    )
    seed = data.draw(st.integers(0, 1000))
    wild = data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    rows = kv_like(coder.name, data.draw(st.integers(0, 20)), shape, packing, seed, wild)
    coder.check(blocks_of(rows, coder.name, shape, packing, seed), data.draw(st.integers(1, 3)))


def test_ratio(coder: Coder) -> None:
    """Sizes are deterministic: normal variates are coded as well as they should be."""
    shape = (2, 32, 256)
    blocks = blocks_of(kv_like(coder.name, 8, shape), coder.name, shape)  # 256 tokens
    bar = {
        "dense": {"bf16": 1.42, "fp16": 1.12, "e5m2": 1.27, "e4m3": 1.10},
        "fast": {"e5m2": 1.13},
        "max": {"bf16": 1.49, "fp16": 1.165, "e5m2": 1.38, "e4m3": 1.18},
    }[coder.mode][coder.name]
    assert flat(blocks).nbytes / coder.reference(blocks).nbytes > bar


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("shape", [SHAPE, (1, 5, 200)], ids=str)
def test_unwanted_blocks_are_passed_over(coder: Coder, shape: tuple[int, int, int]) -> None:
    blocks = blocks_of(kv_like(coder.name, 50, shape, wild=0.05), coder.name, shape)
    coded = coder.reference(blocks)
    wanted = np.random.default_rng(1).random(blocks.table.size) < 0.5
    back = empty_like(blocks)
    coder.decode(coded, replace(back, table=np.where(wanted, blocks.table, -1)))
    expected = np.full_like(back.pages, 0xBE)
    expected[blocks.table[wanted]] = blocks.pages[blocks.table[wanted]]
    assert_bits_equal(back.pages, expected)


@pytest.mark.usefixtures("_way")
def test_the_last_byte_that_pays(coder: Coder) -> None:
    """None exactly from the escape on that makes the streams as large as the elements."""
    rows = kv_like(coder.name, 16, SHAPE)
    # Far away from 1: on a line of magnitudes, or in a ring of them.
    escape = coder.scheme.number_format.magnitudes - 1 if coder.mode == "max" else 1
    # The windows are not to change: they are chosen from every fourth state.
    state = np.arange(rows.size) // 64 % 32
    order = np.random.default_rng(7).permutation(np.flatnonzero(state % 4))
    sizes, low, high = [], 0, order.size
    while low < high:
        middle = (low + high + 1) // 2
        rows[:] = coder.one
        rows.reshape(-1)[order[:middle]] = escape
        expected = coder.check(blocks_of(rows, coder.name, SHAPE))
        sizes.append(expected.nbytes - rows.nbytes)
        low, high = (middle, high) if sizes[-1] < 0 else (low, middle - 1)
    assert max(size for size in sizes if size < 0) > -400
    assert min(size for size in sizes if size >= 0) < 400


def test_streams_need_no_alignment(coder: Coder) -> None:
    """Streams as a frame holds them: read-only, at odd addresses."""
    blocks = coder.some_blocks(wild=0.01)
    coded = coder.reference(blocks)
    moved = at_odd_addresses(coded)
    back = empty_like(blocks)
    coder.decode(moved, back)
    assert_bits_equal(flat(back), flat(blocks))


def test_blocks_that_do_not_exist(coder: Coder) -> None:
    blocks = coder.some_blocks()
    coded = coder.reference(blocks)
    missing = replace(blocks, table=with_one(blocks.table, 3, len(blocks.pages)))
    with pytest.raises(FrameLayoutError, match="block id"):
        coder.decode(coded, missing)
    for table in (missing.table, with_one(blocks.table, 3, -1)):
        with pytest.raises(IndexError, match="block ids"):
            coder.encode(replace(blocks, table=table))


def test_many_callers_at_once(coder: Coder) -> None:
    runs = [coder.some_blocks(rows=40, seed=seed, wild=0.01) for seed in range(8)]
    with ThreadPoolExecutor(8) as callers:
        assert len(list(callers.map(coder.check, runs))) == 8


def test_by_name(coder: Coder) -> None:
    """What the connector calls, for real KV and for what does not get smaller."""
    for wild, expected in ((0.0, coder.mode), (1.0, "raw")):
        blocks = coder.some_blocks(rows=16, wild=wild)
        coded = host.encode(blocks, coder.mode, None)
        assert coded.mode == expected
        back = empty_like(blocks)
        host.decode(coded, None, back)
        assert_bits_equal(flat(back), flat(blocks))
