"""The kernels under Triton's interpreter write the reference's bytes and read them back.

Run by `test_kernels.py`: the interpreter must be chosen before Triton is imported, and must not
reach other tests. By hand: TRITON_INTERPRET=1 python -m pytest tests/interpreted/kernels.py
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import ptx
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder
from vllm_splitzip.kernels import fast_decode, fast_encode, launch, pages

from bits import assert_bits_equal
from vllm_splitzip.codec.codebook import Codebook
from vllm_splitzip.codec.coded import CHUNK, Coded, Words
from vllm_splitzip.codec.device import fast as device
from vllm_splitzip.codec.reference import fast as reference
from vllm_splitzip.errors import FrameLayoutError

Layout = Callable[[int, int, int, int], torch.Tensor]
Table = np.ndarray[tuple[int], np.dtype[np.int64]]

RNG = np.random.default_rng(20260502)

BOOKS = {
    "window": Codebook(bytes(range(115, 131))),
    "zero-window": Codebook(bytes([0, *range(118, 133)])),
    "table": Codebook(bytes(RNG.permutation(256)[:16].astype(np.uint8))),
    "first-window": Codebook(bytes(range(16))),
    "last-window": Codebook(bytes(range(240, 256))),
    "low-zero-window": Codebook(bytes([0, *range(2, 17)])),
    "high-zero-window": Codebook(bytes([0, *range(241, 256)])),
}
"""Windows across all values of the exponent's top bit, and at both ends."""


def contiguous(b: int, h: int, n: int, c: int) -> torch.Tensor:
    """LBHNC: a block is one run of memory."""
    return torch.zeros(b, h, n, c, dtype=torch.bfloat16)


def rows_first(b: int, h: int, n: int, c: int) -> torch.Tensor:
    """LBNHC, what GPU backends use by default."""
    return torch.zeros(b, n, h, c, dtype=torch.bfloat16).transpose(1, 2)


def layers_inside(b: int, h: int, n: int, c: int) -> torch.Tensor:
    """BLNHC: other layers' data between the blocks."""
    return torch.zeros(b, 3, n, h, c, dtype=torch.bfloat16)[:, 1].transpose(1, 2)


def heads_first(b: int, h: int, n: int, c: int) -> torch.Tensor:
    """LHBNC."""
    return torch.zeros(h, b, n, c, dtype=torch.bfloat16).transpose(0, 1)


def misaligned(b: int, h: int, n: int, c: int) -> torch.Tensor:
    """No 128-bit access can be used."""
    return torch.zeros(b, h, n, c + 4, dtype=torch.bfloat16)[..., 4:]


def scattered(b: int, h: int, n: int, c: int) -> torch.Tensor:
    """Not even the columns are contiguous."""
    return torch.zeros(b, h, c, n, dtype=torch.bfloat16).transpose(2, 3)


LAYOUTS = [contiguous, rows_first, layers_inside, heads_first, misaligned, scattered]
SHAPES = {
    "H1-N4-C576": (1, 4, 576),
    "H2-N16-C128": (2, 16, 128),
    "H3-N4-C48": (3, 4, 48),
    "H2-N3-C7": (2, 3, 7),
    "H1-N1-C1": (1, 1, 1),
}


@pytest.fixture(params=BOOKS.values(), ids=BOOKS.keys())
def book(request: pytest.FixtureRequest) -> Codebook:
    return request.param


@pytest.fixture
def _never_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small and difficult inputs are coded all the same."""
    monkeypatch.setattr(fast_encode, "escape_limit", lambda elements: elements)


def kv_like(size: int, book: Codebook, escape_rate: float) -> Words:
    """Words whose exponents are the codebook's, but for some of any kind."""
    exponents = RNG.choice(np.frombuffer(book.exponents, np.uint8), size).astype(np.uint16)
    words = (RNG.integers(0, 1 << 16, size).astype(np.uint16) & 0x807F) | (exponents << 7)
    wild = RNG.random(size) < escape_rate
    words[wild] = RNG.integers(0, 1 << 16, int(wild.sum()))
    return words


def memory(view: torch.Tensor) -> Words:
    """All of the storage behind a view."""
    return torch.empty(0, dtype=torch.int16).set_(view.untyped_storage()).numpy().view(np.uint16)


def cache(
    layout: Layout, blocks: int, shape: tuple[int, int, int], fill: int = 0xDEAD
) -> torch.Tensor:
    view = layout(blocks, *shape)
    memory(view)[:] = fill
    return view


def write(view: torch.Tensor, table: Table, words: Words) -> None:
    """Put the words of a run into their blocks."""
    bits = torch.from_numpy(words.view(np.int16)).reshape(table.size, *view.shape[1:])
    view.view(torch.int16)[torch.from_numpy(table)] = bits


def a_table(blocks: int) -> Table:
    """Blocks in any order, among two others."""
    return RNG.permutation(blocks + 2)[:blocks].astype(np.int64)


def round_trip(layout: Layout, shape: tuple[int, int, int], words: Words, book: Codebook) -> None:
    """Encode is the reference's, decode changes the run's blocks and nothing else."""
    blocks = words.size // int(np.prod(shape))
    table = a_table(blocks)
    view = cache(layout, blocks + 2, shape)
    write(view, table, words)
    expected = reference.encode(words, book)
    coded = device.encode_fast(view, table, book).result()
    assert coded.mode == "fast"
    assert_same_streams(coded, expected)

    decoded = cache(layout, blocks + 2, shape, fill=0xBEEF)
    wanted = cache(layout, blocks + 2, shape, fill=0xBEEF)
    write(wanted, table, words)
    device.decode_fast(expected, book, decoded, table)
    assert_bits_equal(memory(decoded), memory(wanted))


def assert_same_streams(actual: Coded, expected: Coded) -> None:
    assert (actual.mode, actual.elements) == (expected.mode, expected.elements)
    for ours, theirs in zip(actual.dense, expected.dense, strict=True):
        assert_bits_equal(ours, theirs)
    assert actual.tables.keys() == expected.tables.keys()
    for name, ours in actual.tables.items():
        assert_bits_equal(ours, expected.tables[name])


def test_every_pattern():
    """Each has a code in one of sixteen codebooks; all of them at once would mostly escape."""
    for first in range(0, 256, 16):
        words = RNG.permutation(np.arange(first << 7, first + 16 << 7)).astype(np.uint16)
        words = np.concatenate([words, words | 0x8000])
        round_trip(contiguous, (1, 32, 128), words, Codebook(bytes(range(first, first + 16))))


@pytest.mark.usefixtures("_never_raw")
def test_every_exponent(book):
    """Most of them escape."""
    words = (np.arange(1 << 11) << 5 | RNG.integers(0, 32, 1 << 11)).astype(np.uint16)
    round_trip(contiguous, (1, 8, 16), words, book)


@pytest.mark.usefixtures("_never_raw")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, shape):
    blocks = 1 + 3 * CHUNK // 2 // int(np.prod(shape))
    words = kv_like(blocks * int(np.prod(shape)), BOOKS["zero-window"], 0.01)
    round_trip(layout, shape, words, BOOKS["zero-window"])


@pytest.mark.parametrize("layout", [rows_first, scattered])
def test_codebooks(book, layout):
    round_trip(layout, (2, 16, 128), kv_like(4 * CHUNK, book, 0.02), book)


@pytest.fixture
def _with_ptx(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of the kernels that NVIDIA's GPUs run."""
    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", ptx.inline_asm)
    for module in (fast_encode, fast_decode):
        monkeypatch.setattr(module, "has_ptx", lambda device: True)


@pytest.mark.usefixtures("_with_ptx")
def test_codebooks_with_ptx(book):
    round_trip(rows_first, (2, 16, 128), kv_like(4 * CHUNK, book, 0.02), book)


@pytest.mark.usefixtures("_with_ptx", "_never_raw")
def test_every_exponent_with_ptx(book):
    words = (np.arange(1 << 10) << 6 | RNG.integers(0, 64, 1 << 10)).astype(np.uint16)
    round_trip(contiguous, (1, 8, 16), words, book)


def test_no_escape(book):
    round_trip(rows_first, (2, 16, 128), kv_like(4 * CHUNK, book, 0), book)


@pytest.mark.usefixtures("_never_raw")
@pytest.mark.parametrize("elements", [1, 31, 32, 33, 480, 512, 544, 1023, 1024, 1025, 2080])
def test_sizes(elements):
    words = kv_like(elements, BOOKS["zero-window"], 0.05)
    round_trip(contiguous, (1, 1, elements), words, BOOKS["zero-window"])


def test_several_chunks_per_program(monkeypatch):
    monkeypatch.setattr(launch, "_WARPS_WANTED", 1)
    round_trip(contiguous, (1, 16, 64), kv_like(7 * CHUNK, BOOKS["window"], 0.01), BOOKS["window"])


def test_all_escape_is_left_to_raw(book):
    view = cache(contiguous, 4, (1, 16, 64), fill=0x7FC0 if 255 not in book.exponents else 0x1000)
    table = np.arange(4)
    assert_same_streams(
        device.encode_fast(view, table, book).result(), device.encode_raw(view, table).result()
    )


@pytest.mark.parametrize("elements", [4 * CHUNK, 3 * CHUNK + 700], ids=["whole", "cut-off"])
@pytest.mark.parametrize("layout", [contiguous, misaligned])
def test_blocks_are_kept_as_they_are_where_their_escapes_do_not_fit(layout, elements):
    """Whatever the workspace lost, the device has put the bits aside before it is noticed."""
    words = RNG.integers(0, 1 << 16, 3 * elements, np.uint16)
    view, table = cache(layout, 5, (1, 1, elements)), np.array([4, 0, 2])
    write(view, table, words)
    pending = device.encode_fast(view, table, BOOKS["window"])
    view.zero_()
    coded = pending.result()
    assert coded.mode == "raw"
    assert_bits_equal(coded.dense[0].view(np.uint16), words)


def test_raw_wins_just_where_it_is_no_longer_than_coded():
    book, elements = BOOKS["window"], 2 * CHUNK
    limit = fast_encode.escape_limit(elements)
    words = kv_like(elements, book, 0)
    view = cache(contiguous, 2, (1, 16, 64))
    for escapes in (limit, limit + 1):
        words[RNG.permutation(elements)[:escapes]] = 0
        words[:] = np.where(np.cumsum(words == 0) > escapes, words | 0x3F80, words)
        while np.count_nonzero(words == 0) < escapes:
            words[RNG.integers(elements)] = 0
        write(view, np.arange(2), words)
        coded = device.encode_fast(view, np.arange(2), book).result()
        assert (coded.mode == "raw") == (escapes > limit)
        assert (reference.encode(words, book).nbytes < 2 * elements) == (coded.mode == "fast")
        if coded.mode == "raw":
            assert_bits_equal(coded.dense[0].view(np.uint16), words)


def test_an_empty_run():
    view, table = cache(rows_first, 2, (2, 4, 8)), np.empty(0, np.int64)
    coded = device.encode_fast(view, table, BOOKS["window"]).result()
    assert coded.mode == "raw"
    assert (coded.elements, coded.nbytes) == (0, 0)
    device.decode_raw(coded, view, table)
    device.decode_fast(
        reference.encode(np.empty(0, np.uint16), BOOKS["window"]), BOOKS["window"], view, table
    )
    assert (memory(view) == 0xDEAD).all()


def test_unknown_views_are_refused():
    for view in (torch.zeros(4, 4096), torch.zeros(4, 2, 16, 64), torch.zeros(4, 2, 0, 64)):
        with pytest.raises(ValueError, match="a cache is"):
            pages.describe(view, 1)
    with pytest.raises(ValueError, match="too many for one launch"):
        pages.describe(cache(contiguous, 1, (1, 1, 3)), 1 << 30)


def test_tiny_runs_are_left_to_raw():
    for elements in (0, 1, 500):
        view = cache(contiguous, 1, (1, 1, elements or 1), fill=0x3F80)
        table = np.arange(1 if elements else 0)
        assert device.encode_fast(view, table, BOOKS["window"]).result().mode == "raw"


def test_buffers_are_used_again():
    book = BOOKS["zero-window"]
    buffers = device.EncodeBuffers.allocate(6 * CHUNK, torch.device("cpu"))
    view = cache(rows_first, 8, (2, 16, 32))
    results = []
    for blocks, rate in ((6, 0.1), (3, 0.0), (6, 0.01)):
        table, words = a_table(blocks), kv_like(blocks * CHUNK, book, rate)
        write(view, table, words)
        pending = device.encode_fast(view, table, book, buffers)
        assert pending.done()
        results.append((pending.result(), reference.encode(words, book)))
    for coded, expected in results:
        assert_same_streams(coded, expected)
    with pytest.raises(ValueError, match="do not fit"):
        device.encode_fast(view, np.arange(7), book, buffers)


@pytest.mark.parametrize("layout", [contiguous, rows_first, misaligned])
def test_unwanted_blocks_are_not_touched(layout):
    book, shape = BOOKS["zero-window"], (2, 4, 80)
    words = kv_like(6 * 640, book, 0.05)
    table = np.array([3, -1, 0, 5, -7, np.iinfo(np.int64).min])
    for mode in ("fast", "raw"):
        view = cache(layout, 6, shape, fill=0xBEEF)
        wanted = cache(layout, 6, shape, fill=0xBEEF)
        write(wanted, table[[0, 2, 3]], words.reshape(6, 640)[[0, 2, 3]].reshape(-1))
        if mode == "fast":
            device.decode_fast(reference.encode(words, book), book, view, table)
        else:
            coded = Coded("raw", words.size, (words.view(np.uint8),))
            device.decode_raw(coded, view, table)
        assert_bits_equal(memory(view), memory(wanted))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8, torch.float8_e5m2])
def test_raw(dtype):
    item = dtype.itemsize
    bits = torch.from_numpy(RNG.integers(0, 256, (5, 8, 3, 16 * item), dtype=np.uint8))
    view = bits.view(dtype).transpose(1, 2)
    coded = device.encode_raw(view, np.array([4, 0, 2])).result()
    assert coded.elements == 3 * 3 * 8 * 16
    assert_bits_equal(coded.dense[0], bits.transpose(1, 2)[[4, 0, 2]].numpy().reshape(-1))

    target = torch.zeros(5, 8, 3, 16 * item, dtype=torch.uint8)
    device.decode_raw(coded, target.view(dtype).transpose(1, 2), np.array([4, 0, 2]))
    bits[[1, 3]] = 0
    assert_bits_equal(target.numpy(), bits.numpy())


def test_unknown_blocks_are_refused():
    book, view = BOOKS["window"], cache(contiguous, 4, (1, 16, 64))
    coded = reference.encode(kv_like(2 * CHUNK, book, 0), book)
    for table in (np.array([0, 4]), np.array([-1, 0])):
        with pytest.raises(IndexError, match="the cache has 4"):
            device.encode_fast(view, table, book)
        with pytest.raises(IndexError, match="the cache has 4"):
            device.encode_raw(view, table)
    with pytest.raises(FrameLayoutError, match="the cache has 4"):
        device.decode_fast(coded, book, view, np.array([0, 4]))


@pytest.mark.parametrize(
    "change",
    [
        {"elements": 1024},
        {"dense": ()},
        {"codes": slice(1, None)},
        {"rest": slice(None, -1)},
        {"counts": slice(2, None)},
        {"positions": slice(2, None)},
        {"exponents": slice(1, None)},
        {"exponents": None},
        {"position": 1024},
        {"position": 65535},
    ],
    ids=str,
)
def test_contradicting_streams_are_refused(change):
    book, view = BOOKS["window"], cache(contiguous, 2, (1, 16, 64), fill=0xBEEF)
    coded = reference.encode(kv_like(2 * CHUNK, book, 0.1), book)
    (what, value), streams = *change.items(), {"codes": 0, "rest": 1}
    tables, dense = dict(coded.tables), list(coded.dense)
    if what == "position":
        tables["positions"] = tables["positions"].copy()
        tables["positions"].view(np.uint16)[-1] = value
    elif what in streams:
        dense[streams[what]] = dense[streams[what]][value]
    elif what in tables:
        tables[what] = tables[what][value] if value else None
    broken = replace(coded, dense=tuple(dense), tables=tables)
    if what in ("elements", "dense"):
        broken = replace(broken, **change)
    with pytest.raises(FrameLayoutError):
        device.decode_fast(broken, book, view, np.arange(2))
    assert (memory(view) == 0xBEEF).all()


def test_the_kernel_writes_nowhere_else_whatever_the_positions():
    book, view = BOOKS["window"], cache(contiguous, 3, (1, 16, 32), fill=0xBEEF)
    codes, rests = torch.zeros(1024, dtype=torch.uint8), torch.zeros(2048, dtype=torch.uint8)
    positions = torch.tensor([1024, 600, -1, 512, 1023], dtype=torch.int16)
    exponents = torch.full((5,), 7, dtype=torch.uint8)
    firsts = torch.tensor([0, 0, 5], dtype=torch.int32)
    ids = torch.tensor([0, 2, 1], dtype=torch.int32)
    device_book = device.device_book(book, view.device)
    fast_decode.fast_decode(view, ids, device_book, codes, rests, firsts, positions, exponents)
    # The second chunk is only half full: its positions from 512 on are not in the cache.
    assert (memory(view) == 115 << 7).all()
