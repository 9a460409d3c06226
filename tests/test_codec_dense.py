"""What is particular to `dense` (and `fast` for E5M2); see test_codec_windowed.py for the rest."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bits import assert_bits_equal
from vllm_splitzip.codec.coded import Blocks, Coded
from vllm_splitzip.codec.cpu import dense as cpu_dense
from vllm_splitzip.codec.cpu import work as cpu_work
from vllm_splitzip.codec.formats import FORMATS
from vllm_splitzip.codec.packing import channels
from vllm_splitzip.codec.reference import dense as reference_dense
from vllm_splitzip.codec.scheme import DENSE
from vllm_splitzip.errors import FrameLayoutError
from windowed import (
    DENSE_CODERS,
    SHAPE,
    UNSIGNED,
    Coder,
    blocks_of,
    coder_id,
    empty_like,
    kv_like,
    with_one,
)


@pytest.fixture(params=DENSE_CODERS, ids=coder_id)
def coder(request: pytest.FixtureRequest) -> Coder:
    return request.param


@pytest.mark.parametrize("escapes", [0, 1, 2, 254, 255, 256])
@pytest.mark.usefixtures("_way")
def test_chunks_with_many_entries(coder: Coder, escapes: int) -> None:
    """Up to 254 entries are counted; a chunk with more lists all of its positions."""
    name = coder.name
    rows = np.full_like(kv_like(name, 16, SHAPE), coder.one)
    for at in (0, 256, 3 * 4096 + 1024):
        rows.reshape(-1)[at : at + escapes] = FORMATS[name].magnitudes - 1
    coded = coder.check(blocks_of(rows, name, SHAPE))
    counts, positions = coded.tables["counts"], coded.tables["positions"]
    entries = 0 if not escapes else 256 if escapes >= 255 else escapes
    assert counts[0] == counts[1] == counts[52] == min(entries, 255)
    assert positions.size == 3 * entries
    assert_bits_equal(positions[:entries], np.arange(entries).astype(np.uint8))


@pytest.mark.parametrize("size", [254, 255, 256, 2047, 2049])
def test_last_chunk_of_nothing_but_escapes(coder: Coder, size: int) -> None:
    """The last chunk may lack elements; all of those that it has may be entries."""
    name = coder.name
    rows = kv_like(name, 40, (1, 1, size))
    rows[-1] = FORMATS[name].magnitudes - 1
    coder.check(blocks_of(rows, name, (1, 1, size)))


@pytest.mark.parametrize(
    "value", ["zeros", "negative-zeros", "ones", "nan", "infinity", "denormal"]
)
def test_one_value_everywhere(coder: Coder, value: str) -> None:
    magnitudes = coder.scheme.number_format.magnitudes
    exponent = coder.scheme.number_format.mantissa
    bits = {
        "zeros": 0,
        "negative-zeros": magnitudes,
        "ones": coder.one,
        "nan": 2 * magnitudes - 1,
        "infinity": magnitudes - (1 << exponent),
        "denormal": 1,
    }[value]
    name = coder.name
    rows = np.full((9, 4096), bits).astype(UNSIGNED[coder.scheme.number_format.item])
    coded = coder.check(blocks_of(rows, name, SHAPE))
    assert coded.tables["positions"].size <= rows.size


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
    "counts-more": lambda t: t | {"counts": with_one(t["counts"], 0, 255)},
    "counts-fewer": lambda t: t | {"counts": with_one(t["counts"], 0, 0)},
    "kinds-fewer-others": lambda t: t | {"kinds": with_one(t["kinds"], 0, 255)},
    "kinds-more-others": lambda t: t | {"kinds": with_one(t["kinds"] * 0, 0, 0)},
    "two-dimensions": lambda t: t | {"positions": t["positions"][None]},
}


@pytest.mark.parametrize("change", [*MALFORMED, *MALFORMED_TABLES])
def test_malformed_streams_write_nothing(change: str) -> None:
    coder = DENSE_CODERS[0]
    blocks = coder.some_blocks(wild=0.02)
    blocks.pages[blocks.table[0], :7] = 0x7FFF
    coded = coder.reference(blocks)
    if change in MALFORMED:
        coded = MALFORMED[change](coded)
    else:
        coded = replace(coded, tables=MALFORMED_TABLES[change](coded.tables))
    back = empty_like(blocks)
    with pytest.raises(FrameLayoutError, match=r"expected|missing|but there are"):
        coder.decode(coded, back)
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


def test_carved_memory_is_aligned() -> None:
    arrays, addresses = cpu_work.carve(1, 100, 0, 64)
    assert [array.size for array in arrays] == [1, 100, 0, 64]
    assert all(address % 64 == 0 for address in addresses)
    assert [a.ctypes.data for a in arrays if a.size] == [addresses[0], addresses[1], addresses[3]]
