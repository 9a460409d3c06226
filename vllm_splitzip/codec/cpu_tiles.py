"""Tiles of a run on a CPU: elements to rotated bytes and back, wherever their rows lie."""

# numba and llvmlite are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import threading
from functools import lru_cache

from ..errors import FrameLayoutError
from .coded import Bytes, Coded
from .cpu_compile import compiled
from .cpu_fast import copy_bytes, put
from .cpu_lanes import (
    at_least,
    rotate_bytes,
    rotate_words,
    unrotate_bytes,
    unrotate_words,
)
from .cpu_memory import Stream
from .cpu_pool import ALIGNMENT, aligned_bytes
from .cpu_vector import LANES, load, pointer8, pointer64, prefetch, store
from .planes import TILE
from .scheme import Scheme

MASK_BYTES = TILE // 8
ROOM = 2 * TILE
"""Bytes that hold a tile's elements of any format."""
ROOM_AND_LOW = 3 * TILE
"""The same, and their low bytes."""

AHEAD = 3
"""How many tiles ahead memory is asked for."""

JOB_TILES = 512
"""Least work for a thread, 2 MiB of words: below it the hand-over costs more than it saves."""


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


_local = threading.local()

KEPT_BYTES = 4 << 20
"""Most that a thread keeps of each kind of working memory."""


def workspace(kind: str, size: int) -> tuple[Bytes, int]:
    """(this thread's working memory of a kind, its address); the next call may return it again."""
    memory, address = getattr(_local, kind, (None, 0))
    if memory is None or memory.size < size:
        memory = aligned_bytes(size)
        address = memory.ctypes.data
        if size <= KEPT_BYTES:
            setattr(_local, kind, (memory, address))
    return memory, address


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


@lru_cache(maxsize=256)
def dense_bytes(scheme: Scheme, elements: int) -> tuple[int, ...]:
    """Length in bytes of each dense stream."""
    return scheme.dense_bytes(elements)


def by_width(addresses: list[int], scheme: Scheme) -> tuple[int, int, int, int]:
    """Of the dense streams' addresses, those of low bytes and planes of 4, 2, 1 bits; else 0."""
    rest = iter(addresses)
    packed = scheme.packed
    low = next(rest) if scheme.number_format.item == 2 else 0
    return (
        low,
        next(rest) if packed & 4 else 0,
        next(rest) if packed & 2 else 0,
        next(rest) if packed & 1 else 0,
    )


@compiled
def gather(pages, stride, table, size, begin, count, target):
    """Copy `count` bytes from byte `begin` of a run, whose rows have `size`, to `target`."""
    ids = pointer64(table)
    done = 0
    while done < count:
        index, column = (begin + done) // size, (begin + done) % size
        piece = min(count - done, size - column)
        copy_bytes(pages + ids[index] * stride + column, target + done, piece)
        done += piece


@compiled
def scatter(pages, stride, table, size, begin, count, source):
    """Copy `count` bytes from `source` to byte `begin` of a run, but for unwanted blocks."""
    ids = pointer64(table)
    done = 0
    while done < count:
        index, column = (begin + done) // size, (begin + done) % size
        piece = min(count - done, size - column)
        if ids[index] >= 0:
            copy_bytes(source + done, pages + ids[index] * stride + column, piece)
        done += piece


@compiled
def repeat(row, size, begin, count, target):
    """Copy `count` bytes from byte `begin` of endless repetitions of a row."""
    done = 0
    while done < count:
        column = (begin + done) % size
        piece = min(count - done, size - column)
        copy_bytes(row + column, target + done, piece)
        done += piece


@compiled
def clear(address, begin, end):
    """Zeros from byte `begin` to byte `end`."""
    write = pointer8(address)
    for i in range(begin, end):
        write[i] = 0


@compiled
def rotate_tile(elements, bases, item, low, top, masks, least, ahead, streaming):
    """A full tile to top and low bytes; bit i of masks[j] says that top[64 j + i] >= `least`.

    `ahead` is the address of a tile that will be wanted soon. Returns whether any bit is set.
    """
    found = pointer64(masks)
    any_ = 0
    for i in range(0, TILE, LANES):
        if item == 2:
            prefetch(ahead + 2 * i)
            prefetch(ahead + 2 * i + LANES)
            top_bytes, low_bytes = rotate_words(elements + 2 * i, bases + 2 * i)
            put(low + i, low_bytes, streaming)
        else:
            prefetch(ahead + i)
            top_bytes = rotate_bytes(elements + i, bases + i)
        store(top + i, top_bytes)
        bits = at_least(top_bytes, least)
        found[i // LANES] = bits
        any_ |= bits
    return any_ != 0


@compiled
def unrotate_tile(elements, bases, item, low, top, streaming):
    """The elements of a full tile."""
    for i in range(0, TILE, LANES):
        if item == 2:
            prefetch(low + i + AHEAD * TILE)
            first, second = unrotate_words(bases + 2 * i, load(top + i), load(low + i))
            put(elements + 2 * i, first, streaming)
            put(elements + 2 * i + LANES, second, streaming)
        else:
            put(elements + i, unrotate_bytes(bases + i, load(top + i)), streaming)


@compiled
def read_tile(
    pages, stride, table, row, elements, tile, last, row_bases, item, near, near_bases, low, top,
    masks, least, streaming,
):  # fmt: skip
    """Rotate tile `tile` of a run, its low bytes to stream `low`. What it lacks is 0.

    `last` is the last tile that will be wanted. Returns like `rotate_tile`.
    """
    ids = pointer64(table)
    element = tile * TILE
    count = min(TILE, elements - element)
    soon = min(tile + AHEAD, last) * TILE
    ahead = pages + ids[soon // row] * stride + item * (soon % row)
    if row % TILE == 0:
        source = pages + ids[element // row] * stride + item * (element % row)
        return rotate_tile(
            source, row_bases + item * (element % row), item, low + element, top, masks, least,
            ahead, streaming,
        )  # fmt: skip
    begin, size = item * element, item * row
    gather(pages, stride, table, size, begin, item * count, near)
    repeat(row_bases, size, begin, item * count, near_bases)
    if count == TILE:
        return rotate_tile(
            near, near_bases, item, low + element, top, masks, least, ahead, streaming
        )
    clear(near, item * count, item * TILE)
    clear(near_bases, item * count, item * TILE)
    # The elements are in `near` until their low bytes are, which are half as many.
    found = rotate_tile(near, near_bases, item, near, top, masks, least, ahead, False)
    if item == 2:
        copy_bytes(near, low + element, count)
    return found


@compiled
def write_tile(
    pages,
    stride,
    table,
    row,
    elements,
    tile,
    row_bases,
    item,
    near,
    near_bases,
    low,
    top,
    streaming,
):
    """Undo `read_tile`, but for unwanted blocks."""
    element = tile * TILE
    count = min(TILE, elements - element)
    if row % TILE == 0:
        target = pages + pointer64(table)[element // row] * stride + item * (element % row)
        bases = row_bases + item * (element % row)
        unrotate_tile(target, bases, item, low + element, top, streaming)
        return
    begin, size = item * element, item * row
    repeat(row_bases, size, begin, item * count, near_bases)
    source = low + element
    if count < TILE:
        clear(near_bases, item * count, item * TILE)
        if item == 2:
            # Behind the elements' room, as these are written while the low bytes are read.
            source = near + ROOM
            copy_bytes(low + element, source, count)
    unrotate_tile(near, near_bases, item, source, top, False)
    scatter(pages, stride, table, size, begin, item * count, near)
