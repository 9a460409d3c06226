"""Between host and device: pinned staging memory, checked block ids, work that is under way."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import local
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...errors import FrameLayoutError
from ..coded import Bytes, Coded
from ..planes import TILE

_ALIGNMENT = 64

_DTYPES = {
    "uint8": torch.uint8, "uint16": torch.int16, "int32": torch.int32, "int64": torch.int64
}  # fmt: skip
"""What arrays become on the device."""

_KEPT = 1 << 28
"""Bytes of working memory that are kept; more, for unusually long runs, go back at once."""

_scratch = local()


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current one, if it is one that has this notion."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def checked_ids(
    table: npt.NDArray[np.int64], view: torch.Tensor, least: int, error: type[Exception]
) -> npt.NDArray[np.int32]:
    """The table, if all ids are `least` or more and name blocks of the view.

    Raises
    ------
    error
        When one does not.
    """
    blocks = view.shape[0]
    if table.size and (table.min() < least or table.max() >= blocks):
        raise error(f"block ids from {table.min()} to {table.max()}, the cache has {blocks}")
    return np.maximum(table, -1).astype(np.int32)


def checked_stream(
    name: str, stream: Bytes | None, size: int, dtype: type[Any] = np.uint8
) -> npt.NDArray[Any]:
    """A received stream as numbers of `dtype`, if it has `size` bytes.

    Raises
    ------
    FrameLayoutError
        When it is missing or has another length.
    """
    if stream is None or stream.dtype != np.uint8 or stream.nbytes != size:
        found = "missing" if stream is None else f"{stream.nbytes} bytes of {stream.dtype}"
        raise FrameLayoutError(f"stream {name} is {found}, expected {size} bytes")
    return np.frombuffer(stream, dtype)


def upload(parts: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Arrays on the device, flat, by one copy. Nothing waits for it.

    Behind each there is room for the rest of a tile, which kernels read but do not use.
    """
    begins, size = [], 0
    for part in parts:
        begins.append(size)
        size += -(-(part.nbytes + TILE) // _ALIGNMENT) * _ALIGNMENT
    staging = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for begin, part in zip(begins, parts, strict=True):
        staging.numpy()[begin : begin + part.nbytes] = part.reshape(-1).view(np.uint8)
    there = staging.to(device, non_blocking=True)
    return [
        there[begin : begin + part.nbytes].view(_DTYPES[part.dtype.name])
        for begin, part in zip(begins, parts, strict=True)
    ]


def scratch(size: int, device: torch.device) -> torch.Tensor:
    """At least `size` bytes of working memory on the device, with anything in it. uint8.

    It is the same memory each time, and grows: on one stream kernels run one after the other. A
    stream has its own, and a thread, as without a GPU threads run kernels side by side.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    kept: dict[tuple[torch.device, int], torch.Tensor] = vars(_scratch).setdefault("kept", {})
    there = kept.get((device, stream))
    if there is None or there.numel() < size:
        there = torch.empty(size, dtype=torch.uint8, device=device)
        if size <= _KEPT:
            kept[device, stream] = there
    return there


def download(tensor: torch.Tensor) -> Bytes:
    """A contiguous tensor's bytes in host memory, once the current stream has got there."""
    source = tensor.reshape(-1).view(torch.uint8)
    target = torch.empty(source.shape, dtype=torch.uint8, pin_memory=source.is_cuda)
    target.copy_(source, non_blocking=True)
    return target.numpy()


def fetcher(device: torch.device) -> Callable[..., list[Bytes]]:
    """What brings tensors to host memory later, on the stream that is current now, and waits.

    For what is not fetched unasked, since it is rarely wanted.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def fetch(*tensors: torch.Tensor) -> list[Bytes]:
        with torch.cuda.stream(stream):
            fetched = [download(tensor) for tensor in tensors]
        if stream is not None:
            stream.synchronize()
        return fetched

    return fetch


@dataclass(frozen=True, slots=True)
class Pending:
    """Coding that is under way on a device.

    Attributes
    ----------
    finish
        What is left to be done on the host, after `event`.
    event
        None where nothing has to be waited for.
    """

    finish: Callable[[], Coded]
    event: torch.cuda.Event | None

    def done(self) -> bool:
        """Whether `result` will return without waiting."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def result(self) -> Coded:
        """The streams in host memory, in mode `raw` where coding does not make them smaller.

        Until it has returned, neither the blocks nor the buffers may be used again, unless on the
        stream that was current when the coding began.
        """
        if self.event is not None:
            self.event.synchronize()
        return self.finish()


def after(device: torch.device, finish: Callable[[], Coded]) -> Pending:
    """`finish`, to be called when all that is on the current stream is done."""
    event = None
    if device.type == "cuda":
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    return Pending(finish, event)
