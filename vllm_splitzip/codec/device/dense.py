"""Mode `dense`, and `fast` for E5M2, on a GPU: from vLLM's paged cache to streams and back.

Used as `fast.py`, whose description of views and tables holds here as well. Channels are those
of packing `tokens`.
"""

# The folder `kernels` becomes a part of the package only when it is installed.
# mypy: disable-error-code="import-not-found"

import numpy as np
import numpy.typing as npt
import torch

from ...errors import FrameLayoutError
from ...kernels import dense_decode, dense_encode
from ...kernels.dense_encode import DenseBuffers
from ..coded import Bytes, Coded
from ..cpu import dense_loops as loops
from ..packing import channels
from ..planes import TILE, tiles_of
from ..reference import dense as reference_dense
from ..reference.dense import ESCAPE_CHUNK
from ..scheme import Scheme
from .fast import encode_raw
from .memory import Pending, after, checked_ids, checked_stream, download, fetcher, on, upload
from .windowed import bases_of, checked_dense, download_dense, low_and_planes, window_rule

__all__ = ["DenseBuffers", "decode_dense", "encode_dense"]

Table = npt.NDArray[np.int64]

_FETCHED = 16
"""For every so many elements, one entry is fetched unasked. Real KV has one in 50 or fewer."""


def encode_dense(
    view: torch.Tensor,
    table: Table,
    scheme: Scheme,
    mode: str = "dense",
    buffers: DenseBuffers | None = None,
) -> Pending:
    """Code a run of blocks. Does not wait for the device.

    Raises
    ------
    IndexError
        When the table names a block that does not exist.
    """
    ids = checked_ids(table, view, 0, IndexError)
    _, heads, states, content = view.shape
    elements, item = table.size * view[0].numel(), scheme.number_format.item
    number = heads * content
    limit = dense_encode.entry_limit(elements, item, scheme.packed, number)
    if limit < 0:
        return encode_raw(view, table)
    expected = min(limit, elements // _FETCHED)
    with on(view.device):
        buffers = buffers or DenseBuffers.allocate(
            elements, number, item, scheme.packed, view.device
        )
        (there,) = upload([ids], view.device)
        rule = window_rule(scheme, table.size, states)
        dense_encode.dense_encode(view, there, rule, limit, buffers)
        dense = download_dense(buffers, scheme, elements)
        windows = download(buffers.windows[:number])
        counts = download(buffers.counts[: -(-elements // ESCAPE_CHUNK)])
        end = download(buffers.ends[tiles_of(elements) - 1 :][:1])
        first = [download(entries[:expected]) for entries in buffers.entries]
        fetch = fetcher(view.device)

    def finish() -> Coded:
        entries = int(end.view(np.int32)[0])
        if entries > limit:
            return Coded("raw", elements, tuple(fetch(buffers.streams[: item * elements])))
        lists = first
        if entries > expected:
            lists = fetch(*(each[:entries] for each in buffers.entries))
        positions, excess = (each[:entries] for each in lists)
        kinds, others = loops.packed_excess(excess, scheme.packed)
        coded = Coded(
            mode=mode,
            elements=elements,
            dense=dense,
            tables={
                "windows": windows,
                "counts": counts,
                "positions": positions,
                "kinds": kinds,
                "others": others,
            },
        )
        if not pays(coded, item * elements):
            known = channels("tokens", (heads, states, content))
            return Coded(
                "raw", elements, (reference_dense.decode(coded, scheme, known).view(np.uint8),)
            )
        return coded

    with on(view.device):
        return after(view.device, finish)


def pays(coded: Coded, size: int) -> bool:
    """Whether what has few entries is smaller: how long they are depends on their kinds."""
    return coded.nbytes < size


def decode_dense(coded: Coded, scheme: Scheme, view: torch.Tensor, table: Table) -> None:
    """Write a coded run into its blocks; those with a negative id are passed over.

    Does not wait for the device. The streams may be let go of as soon as it returns.

    Raises
    ------
    FrameLayoutError
        When the streams contradict each other or the blocks. Nothing has been written then.
    """
    ids = checked_ids(table, view, np.iinfo(np.int64).min, FrameLayoutError)
    elements, number = table.size * view[0].numel(), view.shape[1] * view.shape[3]
    dense = checked_dense(coded, scheme, elements)
    chunks = -(-elements // ESCAPE_CHUNK)
    windows = checked_stream("windows", coded.tables.get("windows"), number)
    counts = checked_stream("counts", coded.tables.get("counts"), chunks)
    # Where each tile's entries begin, and at last how many there are.
    firsts = np.zeros(tiles_of(elements) + 1, np.int64)
    each = np.zeros(tiles_of(elements) * (TILE // ESCAPE_CHUNK), np.int64)
    each[:chunks] = counts + (counts == 255).astype(np.int64)
    np.cumsum(each.reshape(-1, TILE // ESCAPE_CHUNK).sum(axis=1), out=firsts[1:])
    positions = checked_stream("positions", coded.tables.get("positions"), int(firsts[-1]))
    excess = _checked_excess(coded, scheme, positions.size)
    if not elements:
        return
    of_channels = bases_of(windows, scheme)
    with on(view.device):
        there = upload(
            [ids, of_channels, *dense, counts, firsts.astype(np.int32), positions, excess],
            view.device,
        )
        dense_decode.dense_decode(
            view, there[0], scheme.packed, there[1],
            *low_and_planes(there[2:-4], scheme), *there[-4:],
        )  # fmt: skip


def _checked_excess(coded: Coded, scheme: Scheme, entries: int) -> Bytes:
    """The excess of each of the entries."""
    kinds = checked_stream("kinds", coded.tables.get("kinds"), -(-entries // 4))
    others = coded.tables.get("others")
    others = checked_stream("others", others, 0 if others is None else others.nbytes)
    excess = np.empty(entries, np.uint8)
    number = loops.unpack_excess(
        kinds.ctypes.data, entries, scheme.packed, others.ctypes.data, others.size,
        excess.ctypes.data,
    )  # fmt: skip
    if number != others.size:
        raise FrameLayoutError(f"{number} entries are of kind 0, but there are {others.size}")
    return excess
