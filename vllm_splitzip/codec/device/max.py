"""Mode `max` on a GPU: from vLLM's paged cache to streams and back.

Used as `fast.py`, whose description of views and tables holds here as well. Channels are those
of packing `tokens`.
"""

# The folder `kernels` becomes a part of the package only when it is installed.
# mypy: disable-error-code="import-not-found"

import numpy as np
import numpy.typing as npt
import torch

from ...errors import FrameLayoutError
from ...kernels import max_decode, max_encode
from ...kernels.max_encode import MaxBuffers
from ..coded import Coded
from ..cpu.max import received_max
from ..planes import tiles_of
from ..scheme import Scheme
from .fast import encode_raw
from .memory import Pending, after, checked_ids, download, fetcher, on, scratch, upload
from .windowed import bases_of, download_dense, low_and_planes, window_rule

__all__ = ["MaxBuffers", "decode_max", "encode_max"]

Table = npt.NDArray[np.int64]

_FETCHED = 6
"""For every so many elements, one byte of escapes is fetched unasked. Real KV has one in 10."""


def encode_max(
    view: torch.Tensor, table: Table, scheme: Scheme, buffers: MaxBuffers | None = None
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
    number, tiles = heads * content, tiles_of(elements)
    limit = max_encode.escape_bytes_limit(elements, item, scheme.packed, number)
    if limit < 0:
        return encode_raw(view, table)
    expected = min(limit, elements // _FETCHED)
    with on(view.device):
        buffers = buffers or MaxBuffers.allocate(elements, number, item, scheme.packed, view.device)
        (there,) = upload([ids], view.device)
        rule = window_rule(scheme, table.size, states)
        max_encode.max_encode(view, there, rule, limit, buffers)
        dense = download_dense(buffers, scheme, elements)
        windows, sizes = download(buffers.windows[:number]), download(buffers.sizes[:tiles])
        end, first = download(buffers.ends[tiles - 1 :][:1]), download(buffers.escapes[:expected])
        fetch = fetcher(view.device)

    def finish() -> Coded:
        size = int(end.view(np.int64)[0])
        if size > limit:
            return Coded("raw", elements, tuple(fetch(buffers.streams[: item * elements])))
        (escapes,) = [first[:size]] if size <= expected else fetch(buffers.escapes[:size])
        return Coded(
            mode="max",
            elements=elements,
            dense=dense,
            tables={"windows": windows, "sizes": sizes, "escapes": escapes},
        )

    with on(view.device):
        return after(view.device, finish)


def decode_max(coded: Coded, scheme: Scheme, view: torch.Tensor, table: Table) -> None:
    """Write a coded run into its blocks; those with a negative id are passed over.

    Does not wait for the device. The streams may be let go of as soon as it returns.

    Raises
    ------
    FrameLayoutError
        When the streams contradict each other or the blocks. Nothing has been written then.
    """
    ids = checked_ids(table, view, np.iinfo(np.int64).min, FrameLayoutError)
    elements, number = table.size * view[0].numel(), view.shape[1] * view.shape[3]
    streams = received_max(coded, scheme, elements, number)
    if not elements:
        return
    firsts = np.zeros(tiles_of(elements) + 1, np.int64)
    np.cumsum(streams.sizes.held.view(np.uint16), out=firsts[1:])
    dense = [stream.held for stream in streams.dense]
    parts = [ids, bases_of(streams.windows.held, scheme), *dense, firsts, streams.escapes.held]
    with on(view.device):
        there = upload(parts, view.device)
        max_decode.max_decode(
            view, there[0], scheme.packed, there[1],
            *low_and_planes(there[2:-2], scheme), *there[-2:],
            scratch(max_decode.lists_bytes(elements), view.device),
        )  # fmt: skip
