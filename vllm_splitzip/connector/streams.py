"""In what order the codec's work and the model's reach a KV cache.

On a GPU both are queued: coding must read a block after the model has written it and before vLLM
gives the block to another request, and decoding must write it after whatever vLLM did to it
before. In host memory everything has happened when the call returns.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

Fence = Any
"""A point in the model's queue of work."""


class Streams(Protocol):
    """How saves and loads are ordered with the model's work."""

    def saving(self) -> Any:
        """Context: what is queued in it comes after all of the model's work so far."""

    def end_of_step(self) -> None:
        """All of the model's work from now on comes after what was queued in `saving`."""

    def fence(self) -> Fence:
        """The model's work so far. Called by the model runner's thread."""

    def loading(self, after: Fence) -> Any:
        """Context: what is queued in it comes after `after`, and is done when it is left."""


class HostStreams:
    """For a KV cache in host memory: nothing is queued."""

    @contextmanager
    def saving(self) -> Iterator[None]:
        yield

    def end_of_step(self) -> None:
        pass

    def fence(self) -> Fence:
        return None

    @contextmanager
    def loading(self, after: Fence) -> Iterator[None]:
        yield


class DeviceStreams:
    """For a KV cache on a CUDA device: one stream beside the model's for saves, one for loads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._saves = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._loads = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def saving(self) -> Iterator[None]:
        self._saves.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._saves):
            yield

    def end_of_step(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._saves)

    def fence(self) -> Fence:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def loading(self, after: Fence) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._loads):
            self._loads.wait_event(after)
            try:
                yield
            finally:  # After an error too: what was queued before it must not come later.
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record(self._loads)
                done.synchronize()


class Backlog:
    """Bounds the memory of coding that is queued and not yet fetched from the device.

    Parameters
    ----------
    limit_bytes
        Input bytes whose streams may be on the device at once; beyond that `add` waits.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: deque[tuple[Callable[[], Any], int]] = deque()
        self._bytes = 0

    def add(self, finish: Callable[[], Any], nbytes: int) -> None:
        """Count one piece of coding in, after enough earlier ones have been fetched."""
        while self._waiting and self._bytes + nbytes > self._limit_bytes:
            earlier, earlier_bytes = self._waiting.popleft()
            earlier()
            self._bytes -= earlier_bytes
        self._waiting.append((finish, nbytes))
        self._bytes += nbytes
