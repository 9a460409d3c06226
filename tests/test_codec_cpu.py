"""The CPU codec writes the reference's bytes, reads them back, and refuses what it must."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bits import assert_bits_equal, assert_same_streams, at_odd_addresses
from vllm_splitzip.codec.codebook import Codebook
from vllm_splitzip.codec.coded import CHUNK, Blocks, Coded, Words
from vllm_splitzip.codec.cpu import fast as cpu
from vllm_splitzip.codec.cpu import pool as cpu_pool
from vllm_splitzip.codec.cpu import raw as cpu_raw
from vllm_splitzip.codec.cpu import threads as cpu_threads
from vllm_splitzip.codec.reference import fast as reference
from vllm_splitzip.errors import FrameLayoutError

RNG = np.random.default_rng(20260501)

BOOKS = {
    "window": Codebook(bytes(range(115, 131))),
    "zero-window": Codebook(bytes([0, *range(118, 133)])),
    "table": Codebook(bytes(RNG.permutation(256)[:16].astype(np.uint8))),
    "top-window": Codebook(bytes(range(240, 256))),
    "zero-one-window": Codebook(bytes(range(16))),
}
SIZES = [0, 1, 2, 511, 512, 513, 1023, 1024, 1025, 2047, 2048, 3000, 5 * CHUNK + 7, 300 * CHUNK]
SPECIAL = np.array(
    [0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7F81, 0xFFFF, 0x7FC0, 0x3F80, 0x7F7F],
    np.uint16,
)
"""Both zeros, denormals, infinities, NaNs with payloads, one, the largest number."""


@pytest.fixture(params=BOOKS.values(), ids=BOOKS.keys())
def book(request: pytest.FixtureRequest) -> Codebook:
    return request.param


@pytest.fixture(scope="module", autouse=True)
def _many_jobs() -> Iterator[None]:
    """Small inputs on several threads, which are meant for large ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "JOB_CHUNKS", 3)
        patch.setattr(cpu_raw, "JOB_BYTES", 4096)
        yield


@pytest.fixture(params=[False, True], ids=["cached", "streamed"])
def _streaming(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small inputs through the stores that are meant for large ones, too."""
    if request.param:
        monkeypatch.setattr(cpu, "STREAM_BYTES", 0)
        monkeypatch.setattr(cpu_raw, "STREAM_BYTES", 0)


def kv_like(size: int, book: Codebook, escape_rate: float = 0.01) -> Words:
    """Words whose exponents are the codebook's, but for some of any kind."""
    exponents = RNG.choice(np.frombuffer(book.exponents, np.uint8), size).astype(np.uint16)
    words = (RNG.integers(0, 1 << 16, size).astype(np.uint16) & 0x807F) | (exponents << 7)
    wild = RNG.random(size) < escape_rate
    words[wild] = RNG.integers(0, 1 << 16, int(wild.sum()))
    return words


def blocks_of(words: Words, row: int | None = None) -> Blocks:
    """The words in blocks that lie in random order, between others, with gaps between rows."""
    row = row or max(1, words.size)
    number = words.size // row
    table = RNG.permutation(number + 3)[:number].astype(np.int64)
    room = np.full((number + 3, row + 64), 0xDEAD, np.uint16)
    pages = room[:, :row]
    pages[table] = words[: number * row].reshape(number, row)
    return Blocks(pages, table)


def flat(blocks: Blocks) -> Words:
    return blocks.pages[blocks.table].reshape(-1)


def empty_like(blocks: Blocks) -> Blocks:
    return Blocks(np.full(blocks.pages.shape, 0xBEEF, blocks.pages.dtype), blocks.table)


def check(words: Words, book: Codebook, row: int | None = None, threads: int = 2) -> Coded:
    """Encode and decode like the reference; returns what the reference says."""
    blocks = blocks_of(words, row)
    words = flat(blocks)
    expected = reference.encode(words, book)
    actual = cpu.encode_fast(blocks, book, threads)
    if expected.nbytes < words.nbytes:
        assert actual is not None
        assert_same_streams(actual, expected)
    else:
        assert actual is None
    back = empty_like(blocks)
    cpu.decode_fast(expected, book, back, threads)
    assert_bits_equal(flat(back), words)
    others = np.setdiff1d(np.arange(len(back.pages)), back.table)
    assert (back.pages[others] == 0xBEEF).all()
    return expected


@pytest.mark.usefixtures("_streaming")
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size: int, book: Codebook) -> None:
    check(kv_like(size, book), book)


@pytest.mark.usefixtures("_streaming")
@pytest.mark.parametrize("row", [1, 16, 24, 576, 1000, 1024, 1536, 2048, 3072, 5120])
def test_rows(row: int, book: Codebook) -> None:
    check(kv_like(40 * row + 8 * CHUNK, book), book, row)


@pytest.mark.usefixtures("_streaming")
def test_every_pattern(book: Codebook) -> None:
    """All patterns, each among others, at every position modulo 64 of a vector."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    for shift in range(0, 64, 7):
        check(np.roll(patterns, shift), book)
    for quarter in np.array_split(patterns, 32):
        common = kv_like(16 * quarter.size, book, 0)
        common[RNG.permutation(common.size)[: quarter.size]] = quarter
        assert check(common, book).nbytes < common.nbytes


def test_every_pattern_at_every_position() -> None:
    """Chunks full of one pattern, which is nearly always an escape, so this is about decoding."""
    book = BOOKS["zero-window"]
    for patterns in np.arange(1 << 16, dtype=np.uint16).reshape(32, -1):
        check(np.repeat(patterns, CHUNK), book, CHUNK)


def test_a_pattern_alone(book: Codebook) -> None:
    for pattern in range(0, 1 << 16, 97):
        check(np.array([pattern], np.uint16), book, threads=1)


@pytest.mark.parametrize("position", [0, 1, 63, 64, 511, 512, 513, 1022, 1023])
def test_special_values_everywhere(position: int, book: Codebook) -> None:
    for value in SPECIAL:
        words = kv_like(3 * CHUNK, book, 0)
        words[position::CHUNK] = value
        check(words, book)


def test_no_escapes(book: Codebook) -> None:
    assert check(kv_like(9 * CHUNK, book, 0), book).tables["positions"].size == 0


def test_all_escapes(book: Codebook) -> None:
    other = next(e for e in range(256) if e not in book.exponents)
    words = np.full(600 * CHUNK + 5, other << 7, np.uint16)
    assert check(words, book).tables["exponents"].size == words.size


def test_the_last_byte_that_pays() -> None:
    """None exactly from the escape on that makes the streams as large as the words."""
    book = BOOKS["window"]
    words = np.full(60 * CHUNK, 120 << 7, np.uint16)
    limit = (words.size - 514 * 60 - 1) // 3
    for escapes in (limit, limit + 1):
        words[RNG.permutation(words.size)[:escapes]] = 0
        words[: 8 * CHUNK] = 120 << 7
        missing = escapes - int((words == 0).sum())
        words[:missing] = 0
        coded = cpu.encode_fast(blocks_of(words), book)
        assert (coded is None) == (escapes > limit)
        words[:] = 120 << 7


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_like_the_reference(data: st.DataObject) -> None:
    exponents = data.draw(
        st.one_of(
            st.integers(0, 240).map(lambda base: list(range(base, base + 16))),
            st.integers(2, 241).map(lambda base: [0, *range(base, base + 15)]),
            st.lists(st.integers(0, 255), min_size=16, max_size=16, unique=True),
        )
    )
    book = Codebook(bytes(exponents))
    row = data.draw(st.one_of(st.integers(1, 3000), st.sampled_from([512, 1024, 2048])))
    rate = data.draw(st.floats(0, 1))
    number = data.draw(st.integers(0, 12))
    words = kv_like(number * row, book, rate)
    check(words, book, row, threads=data.draw(st.integers(1, 3)))


@pytest.mark.usefixtures("_streaming")
@pytest.mark.parametrize("row", [1000, 2048])
def test_unwanted_blocks_are_passed_over(row: int, book: Codebook) -> None:
    blocks = blocks_of(kv_like(50 * row, book, 0.05), row)
    coded = reference.encode(flat(blocks), book)
    wanted = RNG.random(blocks.table.size) < 0.5
    back = empty_like(blocks)
    cpu.decode_fast(coded, book, Blocks(back.pages, np.where(wanted, blocks.table, -1)))
    expected = np.full_like(back.pages, 0xBEEF)
    expected[blocks.table[wanted]] = blocks.pages[blocks.table[wanted]]
    assert_bits_equal(back.pages, expected)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("row", [1, 100, 1024, 4096])
@pytest.mark.usefixtures("_streaming")
def test_raw(dtype: Any, row: int) -> None:
    pages = RNG.integers(0, 256, (70, row)).astype(dtype)
    blocks = Blocks(pages, RNG.permutation(70)[:50].astype(np.int64))
    coded = cpu.encode_raw(blocks)
    assert_bits_equal(coded.dense[0], flat(blocks).view(np.uint8))
    back = empty_like(blocks) if dtype is np.uint16 else Blocks(np.zeros_like(pages), blocks.table)
    cpu.decode_raw(coded, back)
    assert_bits_equal(flat(back), flat(blocks))

    wanted = np.where(np.arange(50) % 3 == 0, -1, blocks.table)
    partly = Blocks(np.zeros_like(pages), wanted)
    cpu.decode_raw(coded, partly)
    kept = wanted[wanted >= 0]
    assert_bits_equal(partly.pages[kept], pages[kept])
    assert not partly.pages[np.setdiff1d(np.arange(70), kept)].any()
    with pytest.raises(FrameLayoutError, match="expected"):
        cpu.decode_raw(replace(coded, dense=(coded.dense[0][1:],)), back)
    with pytest.raises(FrameLayoutError, match="expected"):
        cpu.decode_raw(replace(coded, dense=()), back)


def test_raw_of_nothing() -> None:
    blocks = Blocks(np.zeros((3, 8), np.uint16), np.zeros(0, np.int64))
    coded = cpu.encode_raw(blocks)
    assert coded.nbytes == coded.elements == 0
    cpu.decode_raw(coded, blocks)


def test_streams_need_no_alignment(book: Codebook) -> None:
    """Streams as a frame holds them: read-only, at odd addresses."""
    blocks = blocks_of(kv_like(6 * CHUNK, book), 512)
    coded = reference.encode(flat(blocks), book)

    moved = at_odd_addresses(coded)
    back = empty_like(blocks)
    cpu.decode_fast(moved, book, back)
    assert_bits_equal(flat(back), flat(blocks))


def _words(stream: np.ndarray, index: int, value: int) -> np.ndarray:
    changed = stream.copy()
    changed.view(np.uint16)[index] = value
    return changed


MALFORMED = {
    "codes-short": lambda c: replace(c, dense=(c.dense[0][:-1], c.dense[1])),
    "codes-long": lambda c: replace(c, dense=(np.append(c.dense[0], c.dense[0]), c.dense[1])),
    "rest-short": lambda c: replace(c, dense=(c.dense[0], c.dense[1][:-1])),
    "one-dense": lambda c: replace(c, dense=c.dense[:1]),
    "no-dense": lambda c: replace(c, dense=()),
    "more-elements": lambda c: replace(c, elements=c.elements + 1),
    "negative-elements": lambda c: replace(c, elements=-1),
    "dtype": lambda c: replace(c, dense=(c.dense[0].view(np.int8), c.dense[1])),
}
MALFORMED_TABLES = {
    "counts-missing": lambda t: {k: v for k, v in t.items() if k != "counts"},
    "positions-missing": lambda t: {k: v for k, v in t.items() if k != "positions"},
    "exponents-missing": lambda t: {k: v for k, v in t.items() if k != "exponents"},
    "counts-short": lambda t: t | {"counts": t["counts"][:-2]},
    "counts-odd": lambda t: t | {"counts": t["counts"][:-1]},
    "counts-more": lambda t: t | {"counts": _words(t["counts"], 0, 65535)},
    "counts-fewer": lambda t: t | {"counts": _words(t["counts"], 0, 0)},
    "positions-odd": lambda t: t | {"positions": t["positions"][:-1]},
    "positions-short": lambda t: t | {"positions": t["positions"][:-2]},
    "positions-beyond-chunk": lambda t: t | {"positions": _words(t["positions"], 0, CHUNK)},
    "positions-huge": lambda t: t | {"positions": _words(t["positions"], 3, 65535)},
    "positions-beyond-last": lambda t: t | {"positions": _words(t["positions"], -1, 100)},
    "exponents-short": lambda t: t | {"exponents": t["exponents"][:-1]},
    "exponents-long": lambda t: t | {"exponents": np.append(t["exponents"], t["exponents"])},
    "two-dimensions": lambda t: t | {"exponents": t["exponents"][None]},
}


@pytest.mark.parametrize("name", [*MALFORMED, *MALFORMED_TABLES])
def test_malformed_streams_write_nothing(name: str) -> None:
    book = BOOKS["window"]
    words = kv_like(4 * CHUNK + 100, book, 0.02)
    words[[5, 9, -1]] = 0
    coded = reference.encode(words, book)
    if name in MALFORMED:
        coded = MALFORMED[name](coded)
    else:
        coded = replace(coded, tables=MALFORMED_TABLES[name](coded.tables))
    back = empty_like(blocks_of(words, 4))
    with pytest.raises(FrameLayoutError, match=r"expected|missing|multiple"):
        cpu.decode_fast(coded, book, back)
    assert (back.pages == 0xBEEF).all()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=12), st.binary(max_size=40), st.binary(max_size=20))
def test_any_tables_are_safe(counts: bytes, positions: bytes, exponents: bytes) -> None:
    """Whatever the tables hold, a decode either refuses or stays within its blocks."""
    book = BOOKS["window"]
    coded = reference.encode(np.zeros(3 * CHUNK, np.uint16), book)
    streams = {"counts": counts, "positions": positions, "exponents": exponents}
    tables = {name: np.frombuffer(stream, np.uint8) for name, stream in streams.items()}
    room = np.full((5, CHUNK), 0xBEEF, np.uint16)
    try:
        cpu.decode_fast(replace(coded, tables=tables), book, Blocks(room, np.array([1, 2, 3])))
    except FrameLayoutError:
        assert (room == 0xBEEF).all()
    assert (room[[0, 4]] == 0xBEEF).all()


def test_blocks_that_do_not_exist() -> None:
    book = BOOKS["window"]
    pages = np.zeros((4, CHUNK), np.uint16)
    coded = reference.encode(pages[:2].reshape(-1), book)
    with pytest.raises(FrameLayoutError, match="block id 4"):
        cpu.decode_fast(coded, book, Blocks(pages, np.array([0, 4])))
    for table in ([0, 4], [-1, 0]):
        with pytest.raises(IndexError, match="block ids"):
            cpu.encode_fast(Blocks(pages, np.array(table)), book)


@pytest.mark.parametrize(
    "pages",
    [np.zeros((4, 8), np.float32), np.zeros((4, 8), np.uint16)[:, ::2], np.zeros(8, np.uint16)],
    ids=["dtype", "strided-row", "one-dimension"],
)
def test_pages_that_are_no_pages(pages: Any) -> None:
    with pytest.raises(ValueError, match="pages"):
        cpu.encode_raw(Blocks(pages, np.array([0])))


def test_one_column_of_a_wider_array() -> None:
    words = kv_like(3 * CHUNK, BOOKS["window"])
    pages = np.repeat(words, 8).reshape(-1, 8)[:, 3:4]
    coded = cpu.encode_fast(Blocks(pages, np.arange(words.size)), BOOKS["window"])
    assert coded is not None
    assert_same_streams(coded, reference.encode(words, BOOKS["window"]))


def test_read_only_pages() -> None:
    book = BOOKS["window"]
    blocks = blocks_of(kv_like(2 * CHUNK, book))
    blocks.pages.setflags(write=False)
    coded = cpu.encode_fast(blocks, book)
    assert coded is not None
    with pytest.raises(ValueError, match="read-only"):
        cpu.decode_fast(coded, book, blocks)


def test_many_callers_at_once(book: Codebook) -> None:
    runs = [kv_like(300 * CHUNK, book) for _ in range(8)]
    with ThreadPoolExecutor(8) as callers:
        assert len(list(callers.map(lambda words: check_quietly(words, book), runs))) == 8


def check_quietly(words: Words, book: Codebook) -> None:
    blocks = Blocks(words.reshape(-1, CHUNK), np.arange(words.size // CHUNK))
    coded = cpu.encode_fast(blocks, book)
    assert coded is not None
    back = Blocks(np.zeros_like(blocks.pages), blocks.table)
    cpu.decode_fast(coded, book, back)
    assert_bits_equal(back.pages, blocks.pages)


FORK = """
import os
import numpy as np
from vllm_splitzip.codec.cpu import fast as cpu
from vllm_splitzip.codec.codebook import Codebook
from vllm_splitzip.codec.coded import Blocks

cpu.JOB_CHUNKS = 1
blocks = Blocks(np.full((64, 1024), 120 << 7, np.uint16), np.arange(64))
book = Codebook(bytes(range(115, 131)))
expected = cpu.encode_fast(blocks, book, threads=2)
child = os.fork()
actual = cpu.encode_fast(blocks, book, threads=2)
assert (actual.dense[0] == expected.dense[0]).all()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_has_threads_of_its_own() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], check=True, timeout=120)


def test_errors_in_threads_arrive() -> None:
    def fail() -> None:
        raise OSError("from a thread")

    with pytest.raises(OSError, match="from a thread"):
        cpu_threads.run([fail] * 8, 3)


def test_warm_up_notices_wrong_code(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu.warm_up()
    monkeypatch.setattr(cpu.loops, "decode_chunks", lambda *_: None)
    with pytest.raises(RuntimeError, match="clear numba's cache"):
        cpu.warm_up()


PROBE = """
from vllm_splitzip.codec.cpu import fast, fast_loops
fast.warm_up()
print(sum(fast_loops.encode_chunks.stats.cache_hits.values()))
"""
NO_PLACE = "from numba.core.caching import CacheImpl; CacheImpl._locator_classes = []\n"


@pytest.mark.parametrize(
    ("before", "hits"), [("", [0, 1]), (NO_PLACE, [0, 0])], ids=["kept", "no-place-to-keep-it"]
)
def test_second_process_loads_compiled_code(
    before: str, hits: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    for expected in hits:
        probe = [sys.executable, "-c", before + PROBE]
        assert int(subprocess.run(probe, capture_output=True, check=True).stdout) == expected


def test_memory_is_aligned_and_used_again() -> None:
    for size in range(1, 9999, 777):
        assert cpu_pool.aligned_bytes(size).ctypes.data % 64 == 0
    held = cpu_pool.aligned_bytes(123_456)
    view, address = held[1000:], held.ctypes.data
    del held
    assert cpu_pool.aligned_bytes(123_456).ctypes.data != address, "a view still looks at it"
    del view
    assert cpu_pool.aligned_bytes(123_456).ctypes.data == address
