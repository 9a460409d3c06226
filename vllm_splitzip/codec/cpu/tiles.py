"""Tiles of a run on a CPU: elements to rotated bytes and back, wherever their rows lie."""

# numba and llvmlite are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from ..planes import TILE
from .compiling import compiled
from .fast_loops import copy_bytes, put
from .lanes import (
    at_least,
    chosen,
    constant,
    either,
    field,
    rotate_bytes,
    rotate_words,
    unrotate_bytes,
    unrotate_words,
)
from .planes import APART, put_planes
from .vector import LANES, load, pointer8, pointer64, prefetch, store

MASK_BYTES = TILE // 8
ROOM = 2 * TILE
"""Bytes that hold a tile's elements of any format."""
ROOM_AND_LOW = 3 * TILE
"""The same, and their low bytes."""

AHEAD = 3
"""How many tiles ahead a decode asks for streams."""


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
def rotate(elements, bases, item, low, top, masks, least, rest, ahead, at, streaming):
    """64 elements from `at` on: (what is to be packed of their top bytes, see `rotate_tile`)."""
    if item == 2:
        prefetch(ahead + 2 * at)
        prefetch(ahead + 2 * at + LANES)
        top_bytes, low_bytes = rotate_words(elements + 2 * at, bases + 2 * at)
        put(low + at, low_bytes, streaming)
    else:
        prefetch(ahead + at)
        top_bytes = rotate_bytes(elements + at, bases + at)
    bits = at_least(top_bytes, least)
    pointer64(masks)[at // LANES] = bits
    store(top + at, top_bytes)
    if rest >= 0:
        return chosen(bits, either(field(top_bytes, 0, rest), constant(least)), top_bytes)
    return top_bytes


@compiled
def rotate_tile(
    elements, bases, item, low, top, masks, least, rest, ahead, packed, fours, twos, ones, streaming
):
    """A full tile to low bytes, planes, and for what is left to do, top bytes.

    Bit i of masks[j] says that top[64 j + i] >= `least`. If `rest` is not negative, the planes
    hold `least` and those bits of such a byte that are in `rest`. `ahead` is the address of a tile
    that will be wanted soon.
    """
    for j in range(0, APART, LANES):
        a = rotate(elements, bases, item, low, top, masks, least, rest, ahead, j, streaming)
        b = rotate(elements, bases, item, low, top, masks, least, rest, ahead, j + APART, streaming)
        c = rotate(
            elements, bases, item, low, top, masks, least, rest, ahead, j + 2 * APART, streaming
        )
        d = rotate(
            elements, bases, item, low, top, masks, least, rest, ahead, j + 3 * APART, streaming
        )
        e = rotate(
            elements, bases, item, low, top, masks, least, rest, ahead, j + 4 * APART, streaming
        )
        f = rotate(
            elements, bases, item, low, top, masks, least, rest, ahead, j + 5 * APART, streaming
        )
        g = rotate(
            elements, bases, item, low, top, masks, least, rest, ahead, j + 6 * APART, streaming
        )
        h = rotate(
            elements, bases, item, low, top, masks, least, rest, ahead, j + 7 * APART, streaming
        )
        put_planes(a, b, c, d, e, f, g, h, packed, fours + j, twos + j, ones + j, streaming)


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
    pages, stride, table, row, elements, tile, last, row_bases, item, near, near_bases,
    low, top, masks, least, rest, packed, fours, twos, ones, streaming,
):  # fmt: skip
    """Rotate tile `tile` of a run, its low bytes and planes to their streams. What it lacks is 0.

    `last` is the last tile that will be wanted. The rest is as in `rotate_tile`.
    """
    ids = pointer64(table)
    element, plane = tile * TILE, tile * APART
    count = min(TILE, elements - element)
    soon = min(tile + 1, last) * TILE
    ahead = pages + ids[soon // row] * stride + item * (soon % row)
    whole = row % TILE == 0
    if whole:
        source = pages + ids[element // row] * stride + item * (element % row)
        bases, low_target = row_bases + item * (element % row), low + element
    else:
        source, bases, low_target = near, near_bases, low + element
        begin, size = item * element, item * row
        gather(pages, stride, table, size, begin, item * count, near)
        repeat(row_bases, size, begin, item * count, near_bases)
        if count < TILE:
            clear(near, item * count, item * TILE)
            clear(near_bases, item * count, item * TILE)
            low_target = near + ROOM
    rotate_tile(
        source, bases, item, low_target, top, masks, least, rest, ahead,
        packed, fours + 4 * plane, twos + 2 * plane, ones + plane,
        streaming and low_target != near + ROOM,
    )  # fmt: skip
    if count < TILE and item == 2:
        copy_bytes(near + ROOM, low + element, count)


@compiled
def write_tile(
    pages, stride, table, row, elements, tile, row_bases, item, near, near_bases, low, top,
    streaming,
):  # fmt: skip
    """Undo `read_tile` given the top bytes, but for unwanted blocks."""
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
            source = near + ROOM
            copy_bytes(low + element, source, count)
    unrotate_tile(near, near_bases, item, source, top, False)
    scatter(pages, stride, table, size, begin, item * count, near)
