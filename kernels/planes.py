"""Numbers of 1 to 7 bits of a tile, to planes of bits and back. `codec/planes.py` draws them.

A lane's part of a plane is WIDTH times two words of four bytes: a tensor [WIDTH, 32, 2]. Of a
chunk, its numbers are four in a word: [32, 2].
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from .bits import ONES
from .tiles import CHUNK, LANES, TILE


@triton.jit
def no_plane(WIDTH: tl.constexpr):
    """A tile's part of a plane, nothing in it yet."""
    return tl.zeros((WIDTH, LANES, 2), tl.uint32)


@triton.jit
def to_planes(words4, words2, words1, numbers, chunk, BITS: tl.constexpr):
    """The tile's parts of all planes with the lowest bits of a chunk's numbers added."""
    if BITS & 4:
        words4 = to_plane(words4, numbers, chunk, 4)
    if BITS & 2:
        words2 = to_plane(words2, numbers >> (BITS & 4), chunk, 2)
    if BITS & 1:
        words1 = to_plane(words1, numbers >> (BITS & 6), chunk, 1)
    return words4, words2, words1


@triton.jit
def to_plane(words, numbers, chunk, WIDTH: tl.constexpr):
    """With the lowest bits of a chunk's numbers added.

    Number i of the tile has its bits in byte i % (256 WIDTH), so the chunks that share a word are
    WIDTH apart.
    """
    part = (numbers & (((1 << WIDTH) - 1) * ONES)) << (chunk // WIDTH * WIDTH)
    here = tl.arange(0, WIDTH)[:, None, None] == chunk % WIDTH
    return words | tl.where(here, part[None, :, :], 0)


@triton.jit
def from_planes(words4, words2, words1, chunk, BITS: tl.constexpr):
    """A chunk's numbers."""
    numbers = tl.zeros((LANES, 2), tl.uint32)
    if BITS & 4:
        numbers |= from_plane(words4, chunk, 4)
    if BITS & 2:
        numbers |= from_plane(words2, chunk, 2) << (BITS & 4)
    if BITS & 1:
        numbers |= from_plane(words1, chunk, 1) << (BITS & 6)
    return numbers


@triton.jit
def from_plane(words, chunk, WIDTH: tl.constexpr):
    """The plane's bits of a chunk's numbers."""
    here = tl.arange(0, WIDTH)[:, None, None] == chunk % WIDTH
    part = tl.sum(tl.where(here, words, 0), axis=0)
    shift = tl.zeros((LANES, 2), tl.int32) + chunk // WIDTH * WIDTH
    return (part >> shift.to(tl.uint32)) & (((1 << WIDTH) - 1) * ONES)


@triton.jit
def store_planes(plane4, plane2, plane1, tile, words4, words2, words1, BITS: tl.constexpr):
    """Write a tile's parts of the planes that numbers of so many bits have."""
    if BITS & 4:
        tl.store(in_plane(plane4, tile, 4), words4)
    if BITS & 2:
        tl.store(in_plane(plane2, tile, 2), words2)
    if BITS & 1:
        tl.store(in_plane(plane1, tile, 1), words1)


@triton.jit
def load_planes(plane4, plane2, plane1, tile, BITS: tl.constexpr):
    """A tile's parts of the planes; nothing for those that there are not."""
    words4, words2, words1 = no_plane(4), no_plane(2), no_plane(1)
    if BITS & 4:
        words4 = tl.load(in_plane(plane4, tile, 4))
    if BITS & 2:
        words2 = tl.load(in_plane(plane2, tile, 2))
    if BITS & 1:
        words1 = tl.load(in_plane(plane1, tile, 1))
    return words4, words2, words1


@triton.jit
def in_plane(plane, tile, WIDTH: tl.constexpr):
    """Where a tile's words are in a plane."""
    within = tl.arange(0, LANES)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    within += tl.arange(0, WIDTH)[:, None, None] * (CHUNK // 4)
    plane = plane.to(tl.pointer_type(tl.uint32), bitcast=True)
    return plane + tile.to(tl.int64) * (CHUNK // 4 * WIDTH) + within


@triton.jit
def unpack_one(plane, at, WIDTH: tl.constexpr):
    """The plane's bits of the numbers at `at`, where the tile is part of `at`."""
    tile, within = at // TILE, at % TILE
    byte = tile.to(tl.int64) * (CHUNK * WIDTH) + within % (CHUNK * WIDTH)
    shift = (WIDTH * (within // (CHUNK * WIDTH))).to(tl.uint32)
    return (tl.load(plane + byte).to(tl.uint32) >> shift) & ((1 << WIDTH) - 1)


@triton.jit
def unpack_some(plane4, plane2, plane1, at, BITS: tl.constexpr):
    """The numbers at `at`, read one by one. uint32."""
    numbers = (at ^ at).to(tl.uint32)
    if BITS & 4:
        numbers = unpack_one(plane4, at, 4)
    if BITS & 2:
        numbers |= unpack_one(plane2, at, 2) << (BITS & 4)
    if BITS & 1:
        numbers |= unpack_one(plane1, at, 1) << (BITS & 6)
    return numbers
