"""Mode `max`: reference and CPU agree, refuse alike, and keep every bit."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bits import assert_bits_equal
from vllm_splitzip.codec import host
from vllm_splitzip.codec.coded import Blocks, Coded
from vllm_splitzip.codec.cpu import max as cpu_max
from vllm_splitzip.codec.packing import PACKINGS, channels
from vllm_splitzip.codec.planes import TILE
from vllm_splitzip.codec.reference import max as reference_max
from vllm_splitzip.codec.reference.windows import rotate
from vllm_splitzip.codec.scheme import MAX, Scheme
from vllm_splitzip.errors import FrameLayoutError
from windowed import blocks_of, empty_like, every_pattern, flat, kv_like

SHAPE = (2, 32, 64)  # 2 tiles a row
SHAPES = [SHAPE, (1, 16, 24), (3, 5, 7), (1, 1, 1), (1, 16, 512), (1, 64, 576), (3, 16, 128)]


@pytest.fixture(params=MAX.values(), ids=MAX.keys())
def scheme(request: pytest.FixtureRequest) -> Scheme:
    return request.param


@pytest.fixture(params=["cached", "streamed", "no-compress"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small inputs through the stores for large ones, and as on lesser processors."""
    monkeypatch.setattr(cpu_max, "JOB_TILES", 3)
    if request.param == "streamed":
        monkeypatch.setattr(cpu_max, "STREAM_BYTES", 0)
    if request.param == "no-compress":
        monkeypatch.setattr(cpu_max, "COMPRESSES", False)


def check(blocks: Blocks, scheme: Scheme, threads: int = 2) -> Coded:
    """Encode and decode like the reference; returns what the reference says."""
    assert blocks.channels is not None
    elements = flat(blocks)
    expected = reference_max.encode(elements, scheme, blocks.channels)
    assert_bits_equal(reference_max.decode(expected, scheme, blocks.channels), elements)
    actual = cpu_max.encode_max(blocks, scheme, threads)
    if expected.nbytes < elements.nbytes:
        assert actual is not None
        assert (actual.mode, actual.elements) == (expected.mode, expected.elements)
        assert list(actual.tables) == list(expected.tables)
        for ours, theirs in zip(actual.dense, expected.dense, strict=True):
            assert_bits_equal(ours, theirs)
        for name, theirs in expected.tables.items():
            assert_bits_equal(actual.tables[name], theirs)
    else:
        assert actual is None
    back = empty_like(blocks)
    cpu_max.decode_max(expected, scheme, back, threads)
    assert_bits_equal(flat(back), elements)
    others = np.setdiff1d(np.arange(len(back.pages)), back.table)
    assert (back.pages[others] == 0xBE).all()
    return expected


def some_blocks(scheme: Scheme, rows: int = 9, **how: Any) -> Blocks:
    name = scheme.number_format.name
    return blocks_of(kv_like(name, rows, SHAPE, **how), name, SHAPE)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 13, 40])
def test_shapes(scheme: Scheme, shape: tuple[int, int, int], rows: int) -> None:
    name = scheme.number_format.name
    check(blocks_of(kv_like(name, rows, shape, wild=0.01), name, shape), scheme)


@pytest.mark.parametrize("packing", sorted(PACKINGS))
@pytest.mark.parametrize("rows", [3, 16, 150])
def test_packings(scheme: Scheme, packing: str, rows: int) -> None:
    name = scheme.number_format.name
    check(blocks_of(kv_like(name, rows, SHAPE, packing, wild=0.01), name, SHAPE, packing), scheme)


@pytest.mark.usefixtures("_way")
def test_every_pattern_among_others(scheme: Scheme) -> None:
    name = scheme.number_format.name
    rows = kv_like(name, 64, SHAPE)
    patterns = every_pattern(name)
    for seed, part in enumerate(np.array_split(patterns, max(1, patterns.size // 8192))):
        changed = rows.copy()
        where = np.random.default_rng(seed).permutation(changed.size)[: part.size]
        changed.reshape(-1)[where] = part
        check(blocks_of(changed, name, SHAPE), scheme)


def test_nothing_but_every_pattern(scheme: Scheme) -> None:
    name = scheme.number_format.name
    patterns = np.resize(every_pattern(name), 1 << 16).reshape(-1, 4096)
    check(blocks_of(patterns, name, SHAPE), scheme)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
def test_all_of_a_tile_on_one_level(scheme: Scheme, level: int) -> None:
    """One tile in the middle has all of its elements coded on the same level."""
    name, number_format = scheme.number_format.name, scheme.number_format
    binade = [*zip(*((0, 1, 2), *reference_max.LEVELS, (5, 6, 7)), strict=True)][1][level - 1]
    rows = kv_like(name, 64, SHAPE)
    known = channels("tokens", SHAPE)
    before = reference_max.encode(rows.reshape(-1), scheme, known)
    # The magnitudes that lie in that binade of each channel's window; no state that is sampled.
    windows = before.tables["windows"]
    bases = reference_max.unrotate(
        np.full(rows.size, (binade << scheme.below) & 0xFF).astype(np.uint8),
        np.zeros(rows.size if number_format.item == 2 else 0, np.uint8),
        number_format, known, windows,
    ).reshape(rows.shape)  # fmt: skip
    state = np.arange(rows.shape[1]) // 64 % 32
    chosen = np.broadcast_to(state % 4 > 0, rows.shape).copy()
    chosen[:30] = chosen[32:] = False
    rows[chosen] = bases[chosen]
    coded = check(blocks_of(rows, name, SHAPE), scheme)
    assert_bits_equal(coded.tables["windows"], windows)
    top, _ = rotate(rows.reshape(-1), number_format, known, windows)
    binades = (top >> scheme.below).reshape(rows.shape)[chosen]
    assert (binades == binade % (1 << number_format.exponent)).all()


@pytest.mark.parametrize("magnitude", ["zero", "least", "largest"])
def test_one_value_everywhere(scheme: Scheme, magnitude: str) -> None:
    """Also the largest number of escapes that a tile can have."""
    name, number_format = scheme.number_format.name, scheme.number_format
    rows = kv_like(name, 12, SHAPE)
    rows[6:] = {"zero": 0, "least": 1, "largest": number_format.magnitudes - 1}[magnitude]
    check(blocks_of(rows, name, SHAPE), scheme)
    rows[:] = rows[-1]
    check(blocks_of(rows, name, SHAPE), scheme)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_like_the_reference(data: st.DataObject) -> None:
    scheme = data.draw(st.sampled_from([*MAX.values()]))
    name = scheme.number_format.name
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
    rows = kv_like(name, data.draw(st.integers(0, 20)), shape, packing, seed, wild)
    check(blocks_of(rows, name, shape, packing, seed), scheme, data.draw(st.integers(1, 3)))


def test_ratio(scheme: Scheme) -> None:
    """Sizes are deterministic: normal variates are coded as well as they should be."""
    name = scheme.number_format.name
    rows = kv_like(name, 8, (2, 32, 256))  # 256 tokens
    coded = reference_max.encode(rows.reshape(-1), scheme, channels("tokens", (2, 32, 256)))
    bar = {"bf16": 1.49, "fp16": 1.165, "e5m2": 1.38, "e4m3": 1.18}
    assert rows.nbytes / coded.nbytes > bar[name]


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("shape", [SHAPE, (1, 5, 200)], ids=str)
def test_unwanted_blocks_are_passed_over(scheme: Scheme, shape: tuple[int, int, int]) -> None:
    name = scheme.number_format.name
    blocks = blocks_of(kv_like(name, 50, shape, wild=0.05), name, shape)
    assert blocks.channels is not None
    coded = reference_max.encode(flat(blocks), scheme, blocks.channels)
    wanted = np.random.default_rng(1).random(blocks.table.size) < 0.5
    back = empty_like(blocks)
    cpu_max.decode_max(coded, scheme, replace(back, table=np.where(wanted, blocks.table, -1)))
    expected = np.full_like(back.pages, 0xBE)
    expected[blocks.table[wanted]] = blocks.pages[blocks.table[wanted]]
    assert_bits_equal(back.pages, expected)


@pytest.mark.usefixtures("_way")
def test_the_last_byte_that_pays(scheme: Scheme) -> None:
    """None exactly from the escape on that makes the streams as large as the elements."""
    name, number_format = scheme.number_format.name, scheme.number_format
    one = (number_format.magnitudes >> 1) - (1 << number_format.mantissa)
    rows = kv_like(name, 16, SHAPE)
    # The windows are not to change: they are chosen from every fourth state.
    state = np.arange(rows.size) // 64 % 32
    order = np.random.default_rng(7).permutation(np.flatnonzero(state % 4))
    sizes, low, high = [], 0, order.size
    while low < high:
        middle = (low + high + 1) // 2
        rows[:] = one
        # Far away from 1 in a ring of magnitudes.
        rows.reshape(-1)[order[:middle]] = number_format.magnitudes - 1
        expected = check(blocks_of(rows, name, SHAPE), scheme)
        sizes.append(expected.nbytes - rows.nbytes)
        low, high = (middle, high) if sizes[-1] < 0 else (low, middle - 1)
    assert max(size for size in sizes if size < 0) > -400
    assert min(size for size in sizes if size >= 0) < 400


def test_streams_need_no_alignment(scheme: Scheme) -> None:
    """Streams as a frame holds them: read-only, at odd addresses."""
    blocks = some_blocks(scheme, wild=0.01)
    assert blocks.channels is not None
    coded = reference_max.encode(flat(blocks), scheme, blocks.channels)

    def at_odd_address(stream: npt.NDArray[Any]) -> npt.NDArray[Any]:
        held = np.frombuffer(b"\0" + stream.tobytes(), np.uint8)
        return held[1:] if held.ctypes.data % 2 == 0 else held[1:].copy()

    moved = replace(
        coded,
        dense=tuple(at_odd_address(s) for s in coded.dense),
        tables={name: at_odd_address(s) for name, s in coded.tables.items()},
    )
    back = empty_like(blocks)
    cpu_max.decode_max(moved, scheme, back)
    assert_bits_equal(flat(back), flat(blocks))


def _set(stream: npt.NDArray[Any], index: int, value: int) -> npt.NDArray[Any]:
    changed = stream.copy()
    changed[index] = value
    return changed


def _moved(sizes: npt.NDArray[Any], by: int) -> npt.NDArray[Any]:
    """The same sum of sizes, but a chunk has more and another less."""
    changed = sizes.copy()
    changed.view(np.uint16)[:2] += np.array([by, -by]).astype(np.uint16)
    return changed


Change = Callable[[Coded], Coded]
Tables = dict[str, npt.NDArray[Any]]
MALFORMED: dict[str, Change] = {
    "low-short": lambda c: replace(c, dense=(c.dense[0][:-1], *c.dense[1:])),
    "plane-short": lambda c: replace(c, dense=(*c.dense[:-1], c.dense[-1][:-1])),
    "one-dense-less": lambda c: replace(c, dense=c.dense[:-1]),
    "one-dense-more": lambda c: replace(c, dense=(*c.dense, c.dense[0])),
    "more-elements": lambda c: replace(c, elements=c.elements + 1),
    "another-first-level": lambda c: replace(c, dense=(*c.dense[:-1], c.dense[-1] ^ 3)),
    "all-handed-on": lambda c: replace(c, dense=(*c.dense[:-1], c.dense[-1] | 255)),
    "none-handed-on": lambda c: replace(c, dense=(*c.dense[:-1], c.dense[-1] & 0)),
}
MALFORMED_TABLES: dict[str, Callable[[Tables], Tables]] = {
    **{
        f"{name}-missing": lambda t, name=name: {k: v for k, v in t.items() if k != name}
        for name in ("windows", "sizes", "escapes")
    },
    **{
        f"{name}-short": lambda t, name=name: t | {name: t[name][:-1]}
        for name in ("windows", "sizes", "escapes")
    },
    **{
        f"{name}-long": lambda t, name=name: t | {name: np.append(t[name], t[name][:1])}
        for name in ("windows", "sizes", "escapes")
    },
    "one-size-less": lambda t: t | {"sizes": t["sizes"][:-2]},
    "sizes-moved": lambda t: t | {"sizes": _moved(t["sizes"], 1)},
    "sizes-huge": lambda t: t | {"sizes": _set(t["sizes"], 1, 255)},
    "sizes-zero": lambda t: t | {"sizes": t["sizes"] * 0},
    "digits": lambda t: t | {"escapes": t["escapes"] | 255},
    "two-dimensions": lambda t: t | {"escapes": t["escapes"][None]},
}


@pytest.mark.parametrize("change", [*MALFORMED, *MALFORMED_TABLES])
def test_malformed_streams_write_nothing(change: str) -> None:
    scheme = MAX["bf16"]
    blocks = some_blocks(scheme, wild=0.02)
    assert blocks.channels is not None
    coded = reference_max.encode(flat(blocks), scheme, blocks.channels)
    if change in MALFORMED:
        coded = MALFORMED[change](coded)
    else:
        coded = replace(coded, tables=MALFORMED_TABLES[change](coded.tables))
    back = empty_like(blocks)
    with pytest.raises(FrameLayoutError, match=r"expected|missing"):
        cpu_max.decode_max(coded, scheme, back)
    assert (back.pages == 0xBE).all()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 60), st.binary(max_size=40), st.integers(0, 1000))
def test_any_tables_are_safe(escapes: bytes, split: int, plane: bytes, at: int) -> None:
    """Whatever the streams hold, a decode either refuses or stays within its blocks."""
    scheme = MAX["bf16"]
    known = channels("tokens", (2, 16, 32))
    coded = reference_max.encode(np.zeros(4 * 1024, np.uint16), scheme, known)
    split = min(split, len(escapes))
    sizes = np.array([split, len(escapes) - split], np.uint16).view(np.uint8)
    changed = coded.dense[1].copy()
    changed[at : at + len(plane)] = np.frombuffer(plane, np.uint8)[: max(0, changed.size - at)]
    tables = coded.tables | {"sizes": sizes, "escapes": np.frombuffer(escapes, np.uint8)}
    room = np.full((6, 1024), 0xBE, np.uint16)
    target = Blocks(room, np.array([1, 2, 3, 4]), "bf16", known)
    moved = replace(coded, dense=(coded.dense[0], changed), tables=tables)
    try:
        cpu_max.decode_max(moved, scheme, target)
    except FrameLayoutError:
        assert (room == 0xBE).all()
    else:
        assert_bits_equal(room[1:5].reshape(-1), reference_max.decode(moved, scheme, known))
    assert (room[[0, 5]] == 0xBE).all()


def test_blocks_that_do_not_exist(scheme: Scheme) -> None:
    blocks = some_blocks(scheme)
    assert blocks.channels is not None
    coded = reference_max.encode(flat(blocks), scheme, blocks.channels)
    missing = replace(blocks, table=_set(blocks.table, 3, len(blocks.pages)))
    with pytest.raises(FrameLayoutError, match="block id"):
        cpu_max.decode_max(coded, scheme, missing)
    for table in (missing.table, _set(blocks.table, 3, -1)):
        with pytest.raises(IndexError, match="block ids"):
            cpu_max.encode_max(replace(blocks, table=table), scheme)


def test_many_callers_at_once(scheme: Scheme) -> None:
    runs = [some_blocks(scheme, rows=40, seed=seed, wild=0.01) for seed in range(8)]
    with ThreadPoolExecutor(8) as callers:
        assert len(list(callers.map(lambda blocks: check(blocks, scheme), runs))) == 8


def test_by_name(scheme: Scheme) -> None:
    """What the connector calls, for real KV and for what does not get smaller."""
    for wild, expected in ((0.0, "max"), (1.0, "raw")):
        blocks = some_blocks(scheme, rows=16, wild=wild)
        coded = host.encode(blocks, "max", None)
        assert coded.mode == expected
        back = empty_like(blocks)
        host.decode(coded, None, back)
        assert_bits_equal(flat(back), flat(blocks))


def test_where_a_digit_stands() -> None:
    """The rules of the module's docstring, on a tile made by hand."""
    scheme = MAX["bf16"]
    known = channels("tokens", (1, 2 * TILE // 16, 16))
    elements = np.zeros(2 * TILE, np.uint16)  # every channel's window begins at 0
    binades = np.array([3, -1, -2, -3, 4, -5, 5, 0, 1, 2]) % 256
    elements[100:110] = binades << 7
    coded = reference_max.encode(elements, scheme, known)
    assert not coded.tables["windows"].any()
    second, third, fourth = [1, 0, 2, 3, 3, 3, 3], [0, 1, 3, 3], [0, 3]
    digits = [*second, *third, *fourth, 0, 0, 0]
    packed = [sum(d << 2 * k for k, d in enumerate(digits[i : i + 4])) for i in range(0, 16, 4)]
    assert coded.tables["escapes"].tolist() == [*packed, 5]
    assert coded.tables["sizes"].view(np.uint16).tolist() == [5, 0]
    plane = coded.dense[1]
    for i in range(TILE):
        digit = plane[i % 512] >> 2 * (i // 512) & 3
        assert digit == (min(binades[i - 100], 3) if 100 <= i < 110 else 0)


def test_warm_up_notices_wrong_code(monkeypatch: pytest.MonkeyPatch) -> None:
    host.warm_up()
    monkeypatch.setattr(cpu_max.loops, "decode_tiles", lambda *_: None)
    with pytest.raises(RuntimeError, match="compiled mode max is not"):
        host.warm_up()


def test_other_processors(tmp_path: Path) -> None:
    """Every mode compiles for one without any vector extension, and does what references do."""
    probe = (
        "from vllm_splitzip.codec import host; from vllm_splitzip.codec.cpu import pick; "
        "host.warm_up(); print(pick.COMPRESSES)"
    )
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(tmp_path),
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", probe], env=environment, capture_output=True, check=True, text=True
    )
    assert done.stdout.strip() == "False"
