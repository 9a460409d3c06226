"""What is particular to mode `max`; see test_codec_windowed.py for the rest."""

import os
import subprocess
import sys
from collections.abc import Callable
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
from vllm_splitzip.codec.packing import channels
from vllm_splitzip.codec.planes import TILE
from vllm_splitzip.codec.reference import max as reference_max
from vllm_splitzip.codec.reference.windows import rotate
from vllm_splitzip.codec.scheme import MAX
from vllm_splitzip.errors import FrameLayoutError
from windowed import (
    MAX_CODERS,
    SHAPE,
    Coder,
    blocks_of,
    coder_id,
    empty_like,
    kv_like,
    with_one,
)


@pytest.fixture(params=MAX_CODERS, ids=coder_id)
def coder(request: pytest.FixtureRequest) -> Coder:
    return request.param


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
def test_all_of_a_tile_on_one_level(coder: Coder, level: int) -> None:
    """One tile in the middle has all of its elements coded on the same level."""
    name, scheme = coder.name, coder.scheme
    number_format = scheme.number_format
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
    coded = coder.check(blocks_of(rows, name, SHAPE))
    assert_bits_equal(coded.tables["windows"], windows)
    top, _ = rotate(rows.reshape(-1), number_format, known, windows)
    binades = (top >> scheme.below).reshape(rows.shape)[chosen]
    assert (binades == binade % (1 << number_format.exponent)).all()


@pytest.mark.parametrize("magnitude", ["zero", "least", "largest"])
def test_one_value_everywhere(coder: Coder, magnitude: str) -> None:
    """Also the largest number of escapes that a tile can have."""
    name, number_format = coder.name, coder.scheme.number_format
    rows = kv_like(name, 12, SHAPE)
    rows[6:] = {"zero": 0, "least": 1, "largest": number_format.magnitudes - 1}[magnitude]
    coder.check(blocks_of(rows, name, SHAPE))
    rows[:] = rows[-1]
    coder.check(blocks_of(rows, name, SHAPE))


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
    "sizes-huge": lambda t: t | {"sizes": with_one(t["sizes"], 1, 255)},
    "sizes-zero": lambda t: t | {"sizes": t["sizes"] * 0},
    "digits": lambda t: t | {"escapes": t["escapes"] | 255},
    "two-dimensions": lambda t: t | {"escapes": t["escapes"][None]},
}


@pytest.mark.parametrize("change", [*MALFORMED, *MALFORMED_TABLES])
def test_malformed_streams_write_nothing(change: str) -> None:
    coder = MAX_CODERS[0]
    blocks = coder.some_blocks(wild=0.02)
    coded = coder.reference(blocks)
    if change in MALFORMED:
        coded = MALFORMED[change](coded)
    else:
        coded = replace(coded, tables=MALFORMED_TABLES[change](coded.tables))
    back = empty_like(blocks)
    with pytest.raises(FrameLayoutError, match=r"expected|missing"):
        coder.decode(coded, back)
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
