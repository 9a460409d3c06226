"""Numbers of 1 to 7 bits of a tile, to planes of bits and back. `codec/planes.py` draws them.

Of a pair of chunks, a tile's numbers are four in a word: [32, 4]. A lane's part of a plane are four
words as well, 128 bits. In the plane of 4 bits it has twice as many: there [32, 4] is uint64, of
both words that are 512 bytes apart. In the plane of 1 bit lanes t and t + 16 share their words; the
bits of the latter are one further up.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from .bits import ONES
from .lanes import LANES, from_lane
from .tiles import CHUNK, TILE


@triton.jit
def no_plane(WIDTH: tl.constexpr):
    """A tile's part of a plane, nothing in it yet."""
    return tl.zeros((LANES, 4), tl.uint64 if WIDTH == 4 else tl.uint32)


@triton.jit
def to_planes(words4, words2, words1, numbers, pair, BITS: tl.constexpr):
    """The tile's parts of all planes with the lowest bits of a pair's numbers added."""
    if BITS & 4:
        words4 = to_plane(words4, numbers, pair, 4)
    if BITS & 2:
        words2 = to_plane(words2, numbers >> (BITS & 4), pair, 2)
    if BITS & 1:
        words1 = to_plane(words1, numbers >> (BITS & 6), pair, 1)
    return words4, words2, words1


@triton.jit
def to_plane(words, numbers, pair, WIDTH: tl.constexpr):
    """With the lowest bits of a pair's numbers added.

    Number i of the tile has its bits in byte i % (256 WIDTH), so the pairs that share a word of the
    plane of 4 bits are two apart.
    """
    part = numbers & (((1 << WIDTH) - 1) * ONES)
    return words | (part.to(words.dtype) << shift_of(words, pair, WIDTH))


@triton.jit
def shift_of(words, pair, WIDTH: tl.constexpr):
    """Where in a lane's words a pair's bits begin; of 1 bit, those of its first chunk."""
    shift = pair % 2 * 32 + pair // 2 * 4 if WIDTH == 4 else pair * 2
    return (tl.zeros((LANES, 4), tl.int32) + shift).to(words.dtype)


@triton.jit
def from_planes(words4, words2, words1, pair, BITS: tl.constexpr):
    """A pair's numbers."""
    numbers = tl.zeros((LANES, 4), tl.uint32)
    if BITS & 4:
        numbers |= from_plane(words4, pair, 4)
    if BITS & 2:
        numbers |= from_plane(words2, pair, 2) << (BITS & 4)
    if BITS & 1:
        numbers |= from_plane(words1, pair, 1) << (BITS & 6)
    return numbers


@triton.jit
def from_plane(words, pair, WIDTH: tl.constexpr):
    """The plane's bits of a pair's numbers."""
    return (words >> shift_of(words, pair, WIDTH)).to(tl.uint32) & (((1 << WIDTH) - 1) * ONES)


@triton.jit
def store_planes(plane4, plane2, plane1, tile, words4, words2, words1, BITS: tl.constexpr):
    """Write a tile's parts of the planes that numbers of so many bits have."""
    if BITS & 4:
        at = in_plane(plane4, tile, 4)
        tl.store(at, words4.to(tl.uint32))
        tl.store(at + LANES * 4, (words4 >> 32).to(tl.uint32))
    if BITS & 2:
        tl.store(in_plane(plane2, tile, 2), words2)
    if BITS & 1:
        lane = tl.arange(0, LANES)
        words1 = words1 << second_half()
        words1 |= from_lane(words1, lane ^ (LANES // 2))
        # All lanes have them now; half of them write 128 bits each.
        tl.store(in_plane(plane1, tile, 1), words1, mask=(lane < LANES // 2)[:, None])


@triton.jit
def second_half():
    """0 for lanes of a pair's first chunk, 1 for those of its second. Shape: (32, 1), uint32."""
    return (tl.arange(0, LANES) // (LANES // 2)).to(tl.uint32)[:, None]


@triton.jit
def load_planes(plane4, plane2, plane1, tile, BITS: tl.constexpr):
    """A tile's parts of the planes; nothing for those that there are not."""
    words4, words2, words1 = no_plane(4), no_plane(2), no_plane(1)
    if BITS & 4:
        at = in_plane(plane4, tile, 4)
        words4 = tl.load(at).to(tl.uint64) | (tl.load(at + LANES * 4).to(tl.uint64) << 32)
    if BITS & 2:
        words2 = tl.load(in_plane(plane2, tile, 2))
    if BITS & 1:
        words1 = tl.load(in_plane(plane1, tile, 1)) >> second_half()
    return words4, words2, words1


@triton.jit
def in_plane(plane, tile, WIDTH: tl.constexpr):
    """Where a lane's first four words are in a plane."""
    # Behind those that a plane of 1 bit has words for, lanes begin again.
    lane = tl.arange(0, LANES) % (LANES // 2 if WIDTH == 1 else LANES)
    plane = plane.to(tl.pointer_type(tl.uint32), bitcast=True)
    plane += tile.to(tl.int64) * (CHUNK // 4 * WIDTH)
    return plane + lane[:, None] * 4 + tl.arange(0, 4)[None, :]


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
