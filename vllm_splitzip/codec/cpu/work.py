"""What the windowed modes on a CPU do around their loops: memory, and the streams of a scheme."""

import threading
from functools import lru_cache

from ...errors import FrameLayoutError
from ..coded import Bytes, Coded
from ..scheme import Scheme
from .memory import Stream
from .pool import ALIGNMENT, aligned_bytes

JOB_TILES = 256
"""Least work for a thread, 1 MiB of words: below it the hand-over costs more than it saves."""

KEPT_BYTES = 4 << 20
"""Most that a thread keeps of each kind of working memory."""

_local = threading.local()


def carve(*sizes: int) -> tuple[list[Bytes], list[int]]:
    """(arrays of these sizes in one piece of memory, each aligned, their addresses)."""
    begins, end = [], 0
    for size in sizes:
        begins.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    memory = aligned_bytes(end)
    address = memory.ctypes.data
    arrays = [memory[at : at + size] for at, size in zip(begins, sizes, strict=True)]
    return arrays, [address + at for at in begins]


def workspace(kind: str, size: int) -> tuple[Bytes, int]:
    """(this thread's working memory of a kind, its address); the next call may return it again."""
    memory, address = getattr(_local, kind, (None, 0))
    if memory is None or memory.size < size:
        memory = aligned_bytes(size)
        address = memory.ctypes.data
        if size <= KEPT_BYTES:
            setattr(_local, kind, (memory, address))
    return memory, address


@lru_cache(maxsize=256)
def dense_bytes(scheme: Scheme, elements: int) -> tuple[int, ...]:
    """Length in bytes of each dense stream."""
    return scheme.dense_bytes(elements)


def received(coded: Coded, scheme: Scheme, elements: int) -> list[Stream]:
    """The dense streams. Raises FrameLayoutError where they are not those of so many elements."""
    sizes = dense_bytes(scheme, elements)
    if coded.elements != elements or len(coded.dense) != len(sizes):
        raise FrameLayoutError(
            f"{coded.elements} elements in {len(coded.dense)} dense streams, "
            f"expected {elements} in {len(sizes)}"
        )
    return [
        Stream(f"dense[{index}]", stream, size)
        for index, (stream, size) in enumerate(zip(coded.dense, sizes, strict=True))
    ]


def by_width(addresses: list[int], scheme: Scheme) -> tuple[int, int, int, int]:
    """Of the dense streams' addresses, those of low bytes and planes of 4, 2, 1 bits; else 0."""
    rest, packed = iter(addresses), scheme.packed
    return (
        next(rest) if scheme.number_format.item == 2 else 0,
        next(rest) if packed & 4 else 0,
        next(rest) if packed & 2 else 0,
        next(rest) if packed & 1 else 0,
    )
