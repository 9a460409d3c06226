"""Modes `fast` and `raw` on a GPU: from vLLM's paged cache to streams in host memory and back.

>>> pending = encode_fast(view, table, book)  # only enqueues work on the current stream
>>> coded = pending.result()  # waits for the device; in mode `raw` where `fast` does not pay
>>> decode_fast(coded, book, view, table)

A view is a layer's cache [B, H, N, C] with any strides, a table the ids of a run's blocks in host
memory. Under Triton's interpreter all of it works on the CPU, slowly.
"""

# The folder `kernels` becomes a part of the package only when it is installed.
# mypy: disable-error-code="import-not-found"

from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from ...errors import FrameLayoutError
from ...kernels import book as kernel_book
from ...kernels import fast_decode, fast_encode, keep_raw
from ...kernels.book import DeviceBook
from ...kernels.fast_encode import EncodeBuffers
from ..codebook import Codebook
from ..coded import CHUNK, Bytes, Coded, Words, chunks_of
from ..reference import fast as reference
from .memory import Pending, after, checked_ids, checked_stream, download, fetcher, on, upload

__all__ = ["EncodeBuffers", "Pending", "decode_fast", "decode_raw", "encode_fast", "encode_raw"]

Table = npt.NDArray[np.int64]

_FETCHED = 128
"""For every so many elements, one entry of the escapes' workspace is fetched unasked.

That is what programs reserve at once. Real KV has one escape in 500 elements or fewer.
"""


def encode_fast(
    view: torch.Tensor, table: Table, book: Codebook, buffers: EncodeBuffers | None = None
) -> Pending:
    """Code a run of BF16 blocks. Does not wait for the device.

    Raises
    ------
    IndexError
        When the table names a block that does not exist.
    """
    ids = checked_ids(table, view, 0, IndexError)
    elements = table.size * view[0].numel()
    limit = fast_encode.escape_limit(elements)
    if limit < 0:
        return encode_raw(view, table)
    chunks, expected = chunks_of(elements), chunks_of(elements) * CHUNK // _FETCHED
    with on(view.device):
        buffers = buffers or EncodeBuffers.allocate(elements, view.device)
        (there,) = upload([ids], view.device)
        fast_encode.fast_encode(view, there, device_book(book, view.device), buffers)
        keep_raw.keep_raw(view, there, buffers)
        codes = download(buffers.codes[: chunks * CHUNK // 2])
        rests = download(buffers.rests[:elements])
        counts = download(buffers.counts[:chunks])
        starts = download(buffers.starts[:chunks])
        reserved = download(buffers.reserved)
        first = download(buffers.positions[:expected]), download(buffers.exponents[:expected])
        fetch = fetcher(view.device)

    def finish() -> Coded:
        used = int(reserved.view(np.int64)[0])
        if used > buffers.positions.numel():
            return Coded("raw", elements, tuple(fetch(buffers.streams[: 2 * elements])))
        positions, exponents = first
        if used > expected:
            positions, exponents = fetch(buffers.positions[:used], buffers.exponents[:used])
        order = escape_order(counts.view(np.uint16), starts.view(np.int32))
        coded = Coded(
            mode="fast",
            elements=elements,
            dense=(codes, rests),
            tables={
                "counts": counts,
                "positions": positions.view(np.uint16)[order].view(np.uint8),
                "exponents": exponents[order],
            },
        )
        if order.size > limit:  # All there, and yet longer than what it was made from.
            return Coded("raw", elements, (reference.decode(coded, book).view(np.uint8),))
        return coded

    with on(view.device):
        return after(view.device, finish)


def escape_order(
    counts: npt.NDArray[np.uint16], starts: npt.NDArray[np.int32]
) -> npt.NDArray[np.int64]:
    """Where in the workspace each escape is, in the order of the stream: chunk by chunk."""
    numbers = counts.astype(np.int64)
    ends = np.cumsum(numbers)
    return np.repeat(starts - (ends - numbers), numbers) + np.arange(numbers.sum())


def decode_fast(coded: Coded, book: Codebook, view: torch.Tensor, table: Table) -> None:
    """Write a coded run into its blocks; those with a negative id are passed over.

    Does not wait for the device. The streams may be let go of as soon as it returns.

    Raises
    ------
    FrameLayoutError
        When the streams contradict each other or the blocks. Nothing has been written then.
    """
    ids = checked_ids(table, view, np.iinfo(np.int64).min, FrameLayoutError)
    elements = table.size * view[0].numel()
    codes, rests, counts, positions, exponents = _checked(coded, elements)
    if not elements:
        return
    firsts = np.zeros(counts.size + 1, np.int32)
    np.cumsum(counts, out=firsts[1:])
    with on(view.device):
        there = upload([ids, codes, rests, firsts, positions, exponents], view.device)
        fast_decode.fast_decode(view, there[0], device_book(book, view.device), *there[1:])


def _checked(coded: Coded, elements: int) -> tuple[Bytes, Bytes, Words, Words, Bytes]:
    """(codes, rests, counts, positions, exponents), as long as they have to be."""
    if coded.elements != elements or len(coded.dense) != 2:
        raise FrameLayoutError(
            f"{coded.elements} elements in {len(coded.dense)} dense streams, "
            f"expected {elements} in 2"
        )
    chunks, tables = chunks_of(elements), coded.tables
    codes = checked_stream("codes", coded.dense[0], chunks * CHUNK // 2)
    rests = checked_stream("rest", coded.dense[1], elements)
    counts = checked_stream("counts", tables.get("counts"), 2 * chunks, np.uint16)
    number = int(counts.sum(dtype=np.int64))
    positions = checked_stream("positions", tables.get("positions"), 2 * number, np.uint16)
    exponents = checked_stream("exponents", tables.get("exponents"), number)
    in_last = positions[number - int(counts[-1]) :] if chunks else positions
    last = elements - (chunks - 1) * CHUNK
    if number and (positions.max() >= CHUNK or (in_last.size and in_last.max() >= last)):
        raise FrameLayoutError(
            f"an escape at position {positions.max()} of its chunk, expected less than {CHUNK}, "
            f"and less than {last} in the last one"
        )
    return codes, rests, counts, positions, exponents


@cache
def device_book(book: Codebook, device: torch.device) -> DeviceBook:
    """The codebook as the kernels take it; uploaded once."""
    kind, base = kernel_book.TABLE.value, 0
    if book.window is not None:
        base, zero = book.window
        kind = kernel_book.ZERO_WINDOW.value if zero else kernel_book.WINDOW.value
        base -= zero
    return DeviceBook(
        kind=kind,
        base=base,
        encoding=_aligned(book.encoding_table(), device),
        decoding=torch.tensor(book.decoding_table(), device=device),
        pad=book.exponents[0] << 7,
    )


def _aligned(table: Bytes, device: torch.device) -> torch.Tensor:
    """A copy of a table on the device, at an address that is a multiple of its size."""
    room = torch.empty(2 * table.size, dtype=torch.uint8, device=device)
    first = -room.data_ptr() % table.size
    copy = room[first : first + table.size]
    copy.copy_(torch.from_numpy(table))
    return copy


def encode_raw(view: torch.Tensor, table: Table) -> Pending:
    """Gather a run of blocks as they are. Does not wait for the device.

    Raises
    ------
    IndexError
        When the table names a block that does not exist.
    """
    ids = checked_ids(table, view, 0, IndexError)
    elements = table.size * view[0].numel()
    with on(view.device):
        (there,) = upload([ids], view.device)
        flat = download(_bits(view).index_select(0, there))
        return after(view.device, lambda: Coded(mode="raw", elements=elements, dense=(flat,)))


def decode_raw(coded: Coded, view: torch.Tensor, table: Table) -> None:
    """Scatter a run of blocks; those with a negative id are passed over.

    Raises
    ------
    FrameLayoutError
        When there are more or fewer bytes than the blocks have. Nothing has been written then.
    """
    ids = checked_ids(table, view, np.iinfo(np.int64).min, FrameLayoutError)
    row = view[0].numel() * view.element_size()
    flat = checked_stream("raw", coded.dense[0], table.size * row)
    wanted = np.flatnonzero(ids >= 0)
    with on(view.device):
        there, blocks = upload([ids[wanted], flat.reshape(-1, row)[wanted]], view.device)
        bits = _bits(view)
        bits.index_copy_(0, there.long(), blocks.view(bits.dtype).view(-1, *view.shape[1:]))


def _bits(view: torch.Tensor) -> torch.Tensor:
    """The same elements as integers, which every operation takes."""
    return view.view(torch.int16 if view.element_size() == 2 else torch.uint8)
