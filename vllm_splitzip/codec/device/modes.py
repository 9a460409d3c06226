"""Codec modes by name for KV cache on a GPU: as `host.py` has them for host memory.

Used as `fast.py`, whose description of views and tables holds here as well.
"""

import numpy as np
import numpy.typing as npt
import torch

from ..codebook import Codebook
from ..coded import Coded
from ..modes import mode_for
from ..scheme import SCHEMES
from .dense import decode_dense, encode_dense
from .fast import decode_fast, decode_raw, encode_fast, encode_raw
from .max import decode_max, encode_max
from .memory import Pending

Table = npt.NDArray[np.int64]


def encode(
    view: torch.Tensor, table: Table, number_format: str, mode: str, book: Codebook | None
) -> Pending:
    """Code a run of blocks in `mode`, or in `raw` where the mode would not make them smaller.

    Does not wait for the device.

    Raises
    ------
    IndexError
        When the table names a block that does not exist.
    """
    mode = mode_for(mode, number_format)
    if mode == "raw":
        return encode_raw(view, table)
    scheme = SCHEMES[mode].get(number_format)
    if scheme is None:
        assert book is not None
        return encode_fast(view, table, book)
    if mode == "max":
        return encode_max(view, table, scheme)
    return encode_dense(view, table, scheme, mode)


def decode(
    coded: Coded, number_format: str, book: Codebook | None, view: torch.Tensor, table: Table
) -> None:
    """Write a coded run into its blocks; those with a negative id are passed over.

    Does not wait for the device. The streams may be let go of as soon as it returns.

    Raises
    ------
    FrameLayoutError
        When the streams contradict each other or the blocks. Nothing has been written then.
    """
    if coded.mode == "raw":
        decode_raw(coded, view, table)
        return
    scheme = SCHEMES[coded.mode].get(number_format)
    if scheme is None:
        assert book is not None
        decode_fast(coded, book, view, table)
    elif coded.mode == "max":
        decode_max(coded, scheme, view, table)
    else:
        decode_dense(coded, scheme, view, table)
