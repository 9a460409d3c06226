"""Mode `dense` (and `fast` for E5M2): reference and CPU agree, refuse alike, and keep every bit."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bits import assert_bits_equal
from vllm_splitzip.codec import host
from vllm_splitzip.codec.coded import Blocks, Coded
from vllm_splitzip.codec.cpu import dense as cpu_dense
from vllm_splitzip.codec.cpu import work as cpu_work
from vllm_splitzip.codec.formats import FORMATS
from vllm_splitzip.codec.packing import PACKINGS, channels
from vllm_splitzip.codec.reference import dense as reference_dense
from vllm_splitzip.codec.scheme import DENSE, FAST, Scheme
from vllm_splitzip.errors import FrameLayoutError
from windowed import UNSIGNED, blocks_of, empty_like, every_pattern, flat, kv_like

SCHEMES = [("dense", scheme) for scheme in DENSE.values()]
SCHEMES += [("fast", scheme) for scheme in FAST.values()]
IDS = [f"{mode}-{scheme.number_format.name}" for mode, scheme in SCHEMES]
SHAPE = (2, 32, 64)  # 2 tiles a row
SHAPES = [SHAPE, (1, 16, 24), (3, 5, 7), (1, 1, 1), (1, 16, 512), (1, 64, 576), (3, 16, 128)]

Names = tuple[str, Scheme]


@pytest.fixture(params=SCHEMES, ids=IDS)
def mode_scheme(request: pytest.FixtureRequest) -> Names:
    return request.param


@pytest.fixture(params=["cached", "streamed", "no-compress"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small inputs through the stores for large ones, and as on lesser processors."""
    monkeypatch.setattr(cpu_dense, "JOB_TILES", 3)
    if request.param == "streamed":
        monkeypatch.setattr(cpu_dense, "STREAM_BYTES", 0)
    if request.param == "no-compress":
        monkeypatch.setattr(cpu_dense, "COMPRESSES", False)


def check(blocks: Blocks, names: Names, threads: int = 2) -> Coded:
    """Encode and decode like the reference; returns what the reference says."""
    mode, scheme = names
    assert blocks.channels is not None
    elements = flat(blocks)
    expected = reference_dense.encode(elements, scheme, blocks.channels, mode)
    assert_bits_equal(reference_dense.decode(expected, scheme, blocks.channels), elements)
    actual = cpu_dense.encode_dense(blocks, scheme, mode, threads)
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
    cpu_dense.decode_dense(expected, scheme, back, threads)
    assert_bits_equal(flat(back), elements)
    others = np.setdiff1d(np.arange(len(back.pages)), back.table)
    assert (back.pages[others] == 0xBE).all()
    return expected


def one(scheme: Scheme) -> int:
    """The bit pattern of the number 1."""
    return (scheme.number_format.magnitudes >> 1) - (1 << scheme.number_format.mantissa)


def some_blocks(names: Names, rows: int = 9, **how: Any) -> Blocks:
    name = names[1].number_format.name
    return blocks_of(kv_like(name, rows, SHAPE, **how), name, SHAPE)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 13, 40])
def test_shapes(mode_scheme: Names, shape: tuple[int, int, int], rows: int) -> None:
    name = mode_scheme[1].number_format.name
    check(blocks_of(kv_like(name, rows, shape, wild=0.01), name, shape), mode_scheme)


@pytest.mark.parametrize("packing", sorted(PACKINGS))
@pytest.mark.parametrize("rows", [3, 16, 150])
def test_packings(mode_scheme: Names, packing: str, rows: int) -> None:
    name = mode_scheme[1].number_format.name
    rows_of = kv_like(name, rows, SHAPE, packing, wild=0.01)
    check(blocks_of(rows_of, name, SHAPE, packing), mode_scheme)


@pytest.mark.usefixtures("_way")
def test_every_pattern_among_others(mode_scheme: Names) -> None:
    name = mode_scheme[1].number_format.name
    rows = kv_like(name, 64, SHAPE)
    patterns = every_pattern(name)
    for seed, part in enumerate(np.array_split(patterns, max(1, patterns.size // 8192))):
        changed = rows.copy()
        where = np.random.default_rng(seed).permutation(changed.size)[: part.size]
        changed.reshape(-1)[where] = part
        check(blocks_of(changed, name, SHAPE), mode_scheme)


def test_nothing_but_every_pattern(mode_scheme: Names) -> None:
    name = mode_scheme[1].number_format.name
    patterns = np.resize(every_pattern(name), 1 << 16).reshape(-1, 4096)
    check(blocks_of(patterns, name, SHAPE), mode_scheme)


@pytest.mark.parametrize("escapes", [0, 1, 2, 254, 255, 256])
@pytest.mark.usefixtures("_way")
def test_chunks_with_many_entries(mode_scheme: Names, escapes: int) -> None:
    """Up to 254 entries are counted; a chunk with more lists all of its positions."""
    name = mode_scheme[1].number_format.name
    rows = np.full_like(kv_like(name, 16, SHAPE), one(mode_scheme[1]))
    for at in (0, 256, 3 * 4096 + 1024):
        rows.reshape(-1)[at : at + escapes] = FORMATS[name].magnitudes - 1
    coded = check(blocks_of(rows, name, SHAPE), mode_scheme)
    counts, positions = coded.tables["counts"], coded.tables["positions"]
    entries = 0 if not escapes else 256 if escapes >= 255 else escapes
    assert counts[0] == counts[1] == counts[52] == min(entries, 255)
    assert positions.size == 3 * entries
    assert_bits_equal(positions[:entries], np.arange(entries).astype(np.uint8))


@pytest.mark.parametrize("size", [254, 255, 256, 2047, 2049])
def test_last_chunk_of_nothing_but_escapes(mode_scheme: Names, size: int) -> None:
    """The last chunk may lack elements; all of those that it has may be entries."""
    name = mode_scheme[1].number_format.name
    rows = kv_like(name, 40, (1, 1, size))
    rows[-1] = FORMATS[name].magnitudes - 1
    check(blocks_of(rows, name, (1, 1, size)), mode_scheme)


@pytest.mark.parametrize(
    "value", ["zeros", "negative-zeros", "ones", "nan", "infinity", "denormal"]
)
def test_one_value_everywhere(mode_scheme: Names, value: str) -> None:
    magnitudes = mode_scheme[1].number_format.magnitudes
    exponent = mode_scheme[1].number_format.mantissa
    bits = {
        "zeros": 0,
        "negative-zeros": magnitudes,
        "ones": one(mode_scheme[1]),
        "nan": 2 * magnitudes - 1,
        "infinity": magnitudes - (1 << exponent),
        "denormal": 1,
    }[value]
    name = mode_scheme[1].number_format.name
    rows = np.full((9, 4096), bits).astype(UNSIGNED[mode_scheme[1].number_format.item])
    coded = check(blocks_of(rows, name, SHAPE), mode_scheme)
    assert coded.tables["positions"].size <= rows.size


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_like_the_reference(data: st.DataObject) -> None:
    names = data.draw(st.sampled_from(SCHEMES))
    name = names[1].number_format.name
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
    check(blocks_of(rows, name, shape, packing, seed), names, data.draw(st.integers(1, 3)))


def test_ratio(mode_scheme: Names) -> None:
    """Sizes are deterministic: normal variates are coded as well as they should be."""
    mode, scheme = mode_scheme
    name = scheme.number_format.name
    rows = kv_like(name, 8, (2, 32, 256))  # 256 tokens
    known = channels("tokens", (2, 32, 256))
    coded = reference_dense.encode(rows.reshape(-1), scheme, known, mode)
    bar = {"dense-bf16": 1.42, "dense-fp16": 1.12, "dense-e5m2": 1.27, "dense-e4m3": 1.10}
    assert rows.nbytes / coded.nbytes > bar.get(f"{mode}-{name}", 1.13)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("shape", [SHAPE, (1, 5, 200)], ids=str)
def test_unwanted_blocks_are_passed_over(mode_scheme: Names, shape: tuple[int, int, int]) -> None:
    scheme = mode_scheme[1]
    name = scheme.number_format.name
    blocks = blocks_of(kv_like(name, 50, shape, wild=0.05), name, shape)
    assert blocks.channels is not None
    coded = reference_dense.encode(flat(blocks), scheme, blocks.channels)
    wanted = np.random.default_rng(1).random(blocks.table.size) < 0.5
    back = empty_like(blocks)
    cpu_dense.decode_dense(coded, scheme, replace(back, table=np.where(wanted, blocks.table, -1)))
    expected = np.full_like(back.pages, 0xBE)
    expected[blocks.table[wanted]] = blocks.pages[blocks.table[wanted]]
    assert_bits_equal(back.pages, expected)


@pytest.mark.usefixtures("_way")
def test_the_last_byte_that_pays(mode_scheme: Names) -> None:
    """None exactly from the entry on that makes the streams as large as the elements."""
    name = mode_scheme[1].number_format.name
    rows = kv_like(name, 16, SHAPE)
    plain = one(mode_scheme[1])
    # The windows are not to change: they are chosen from every fourth state.
    state = np.arange(rows.size) // 64 % 32
    order = np.random.default_rng(7).permutation(np.flatnonzero(state % 4))
    sizes, low, high = [], 0, order.size
    while low < high:
        middle = (low + high + 1) // 2
        rows[:] = plain
        rows.reshape(-1)[order[:middle]] = 1
        expected = check(blocks_of(rows, name, SHAPE), mode_scheme)
        sizes.append(expected.nbytes - rows.nbytes)
        low, high = (middle, high) if sizes[-1] < 0 else (low, middle - 1)
    assert max(size for size in sizes if size < 0) > -400
    assert min(size for size in sizes if size >= 0) < 400


def test_streams_need_no_alignment(mode_scheme: Names) -> None:
    """Streams as a frame holds them: read-only, at odd addresses."""
    scheme = mode_scheme[1]
    blocks = some_blocks(mode_scheme, wild=0.01)
    assert blocks.channels is not None
    coded = reference_dense.encode(flat(blocks), scheme, blocks.channels)

    def at_odd_address(stream: npt.NDArray[Any]) -> npt.NDArray[Any]:
        held = np.frombuffer(b"\0" + stream.tobytes(), np.uint8)
        return held[1:] if held.ctypes.data % 2 == 0 else held[1:].copy()

    moved = replace(
        coded,
        dense=tuple(at_odd_address(s) for s in coded.dense),
        tables={name: at_odd_address(s) for name, s in coded.tables.items()},
    )
    back = empty_like(blocks)
    cpu_dense.decode_dense(moved, scheme, back)
    assert_bits_equal(flat(back), flat(blocks))


def _set(stream: npt.NDArray[Any], index: int, value: int) -> npt.NDArray[Any]:
    changed = stream.copy()
    changed[index] = value
    return changed


Change = Callable[[Coded], Coded]
MALFORMED: dict[str, Change] = {
    "low-short": lambda c: replace(c, dense=(c.dense[0][:-1], *c.dense[1:])),
    "plane-short": lambda c: replace(c, dense=(*c.dense[:-1], c.dense[-1][:-1])),
    "plane-long": lambda c: replace(c, dense=(*c.dense[:-1], np.append(c.dense[-1], c.dense[-1]))),
    "one-dense-less": lambda c: replace(c, dense=c.dense[:-1]),
    "one-dense-more": lambda c: replace(c, dense=(*c.dense, c.dense[0])),
    "more-elements": lambda c: replace(c, elements=c.elements + 1),
    "negative-elements": lambda c: replace(c, elements=-1),
    "dtype": lambda c: replace(c, dense=(c.dense[0].view(np.int8), *c.dense[1:])),
}
Tables = dict[str, npt.NDArray[Any]]
MALFORMED_TABLES: dict[str, Callable[[Tables], Tables]] = {
    **{
        f"{name}-missing": lambda t, name=name: {k: v for k, v in t.items() if k != name}
        for name in ("windows", "counts", "positions", "kinds", "others")
    },
    **{
        f"{name}-short": lambda t, name=name: t | {name: t[name][:-1]}
        for name in ("windows", "counts", "positions", "kinds", "others")
    },
    **{
        f"{name}-long": lambda t, name=name: t | {name: np.append(t[name], t[name][:1])}
        for name in ("windows", "counts", "positions", "kinds", "others")
    },
    "counts-more": lambda t: t | {"counts": _set(t["counts"], 0, 255)},
    "counts-fewer": lambda t: t | {"counts": _set(t["counts"], 0, 0)},
    "kinds-fewer-others": lambda t: t | {"kinds": _set(t["kinds"], 0, 255)},
    "kinds-more-others": lambda t: t | {"kinds": _set(t["kinds"] * 0, 0, 0)},
    "two-dimensions": lambda t: t | {"positions": t["positions"][None]},
}


@pytest.mark.parametrize("change", [*MALFORMED, *MALFORMED_TABLES])
def test_malformed_streams_write_nothing(change: str) -> None:
    names = SCHEMES[0]
    blocks = some_blocks(names, wild=0.02)
    assert blocks.channels is not None
    rows = flat(blocks)
    rows[:7] = 0x7FFF
    coded = reference_dense.encode(rows, names[1], blocks.channels)
    if change in MALFORMED:
        coded = MALFORMED[change](coded)
    else:
        coded = replace(coded, tables=MALFORMED_TABLES[change](coded.tables))
    back = empty_like(blocks)
    with pytest.raises(FrameLayoutError, match=r"expected|missing|but there are"):
        cpu_dense.decode_dense(coded, names[1], back)
    assert (back.pages == 0xBE).all()


@settings(max_examples=200, deadline=None)
@given(
    st.binary(min_size=16, max_size=17),
    st.binary(max_size=40),
    st.binary(max_size=12),
    st.binary(max_size=20),
)
def test_any_tables_are_safe(counts: bytes, positions: bytes, kinds: bytes, others: bytes) -> None:
    """Whatever the tables hold, a decode either refuses or stays within its blocks."""
    scheme = DENSE["bf16"]
    known = channels("tokens", (2, 16, 32))
    coded = reference_dense.encode(np.zeros(4 * 1024, np.uint16), scheme, known)
    streams = {"counts": counts, "positions": positions, "kinds": kinds, "others": others}
    tables = coded.tables | {key: np.frombuffer(part, np.uint8) for key, part in streams.items()}
    room = np.full((6, 1024), 0xBE, np.uint16)
    target = Blocks(room, np.array([1, 2, 3, 4]), "bf16", known)
    try:
        cpu_dense.decode_dense(replace(coded, tables=tables), scheme, target)
    except FrameLayoutError:
        assert (room == 0xBE).all()
    assert (room[[0, 5]] == 0xBE).all()


def test_blocks_that_do_not_exist(mode_scheme: Names) -> None:
    mode, scheme = mode_scheme
    blocks = some_blocks(mode_scheme)
    assert blocks.channels is not None
    coded = reference_dense.encode(flat(blocks), scheme, blocks.channels)
    missing = replace(blocks, table=_set(blocks.table, 3, len(blocks.pages)))
    with pytest.raises(FrameLayoutError, match="block id"):
        cpu_dense.decode_dense(coded, scheme, missing)
    for table in (missing.table, _set(blocks.table, 3, -1)):
        with pytest.raises(IndexError, match="block ids"):
            cpu_dense.encode_dense(replace(blocks, table=table), scheme, mode)


def test_many_callers_at_once(mode_scheme: Names) -> None:
    runs = [some_blocks(mode_scheme, rows=40, seed=seed, wild=0.01) for seed in range(8)]
    with ThreadPoolExecutor(8) as callers:
        assert len(list(callers.map(lambda blocks: check(blocks, mode_scheme), runs))) == 8


def test_by_name(mode_scheme: Names) -> None:
    """What the connector calls, for real KV and for what does not get smaller."""
    mode, _ = mode_scheme
    for wild, expected in ((0.0, mode), (1.0, "raw")):
        blocks = some_blocks(mode_scheme, rows=16, wild=wild)
        coded = host.encode(blocks, mode, None)
        assert coded.mode == expected
        back = empty_like(blocks)
        host.decode(coded, None, back)
        assert_bits_equal(flat(back), flat(blocks))


def test_carved_memory_is_aligned() -> None:
    arrays, addresses = cpu_work.carve(1, 100, 0, 64)
    assert [array.size for array in arrays] == [1, 100, 0, 64]
    assert all(address % 64 == 0 for address in addresses)
    assert [a.ctypes.data for a in arrays if a.size] == [addresses[0], addresses[1], addresses[3]]
