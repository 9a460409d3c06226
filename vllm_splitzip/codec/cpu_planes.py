"""Bit planes on a CPU: vectors of numbers to planes and back. `planes.py` says where a bit lies.

Numbers that share a byte of the narrowest plane are 256 apart, so the 8 vectors `a` to `h` are 64
neighbours each, 256 apart as well.
"""

# numba and llvmlite are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from .cpu_compile import compiled
from .cpu_fast import put
from .cpu_lanes import either, field, raised
from .cpu_vector import LANES, load, prefetch, store
from .planes import TILE

APART = TILE // 8


@compiled
def of_fours(a, b):
    """Bits 0 to 4 of two vectors in one."""
    return either(field(a, 0, 15), raised(field(b, 0, 15), 4))


@compiled
def of_twos(a, b, c, d, at):
    """Bits `at` to `at + 2` of four vectors in one."""
    return either(
        either(field(a, at, 3), raised(field(b, at, 3), 2)),
        either(raised(field(c, at, 3), 4), raised(field(d, at, 3), 6)),
    )


@compiled
def of_ones(a, b, c, d, at):
    """Bit `at` of four vectors in the lower half of each byte of one."""
    return either(
        either(field(a, at, 1), raised(field(b, at, 1), 1)),
        either(raised(field(c, at, 1), 2), raised(field(d, at, 1), 3)),
    )


@compiled
def put_planes(a, b, c, d, e, f, g, h, packed, fours, twos, ones, streaming):
    """The lowest `packed` bits of 8 vectors to their planes; others are not touched."""
    at = 0
    if packed & 4:
        put(fours, of_fours(a, e), streaming)
        put(fours + APART, of_fours(b, f), streaming)
        put(fours + 2 * APART, of_fours(c, g), streaming)
        put(fours + 3 * APART, of_fours(d, h), streaming)
        at = 4
    if packed & 2:
        put(twos, of_twos(a, c, e, g, at), streaming)
        put(twos + APART, of_twos(b, d, f, h, at), streaming)
        at += 2
    if packed & 1:
        last = raised(of_ones(e, f, g, h, at), 4)
        put(ones, either(of_ones(a, b, c, d, at), last), streaming)


@compiled
def unpack_plane(numbers, plane, at, width, ahead):
    """A plane into bits `at` to `at + width` of a tile's numbers, which are 0 from there on."""
    size, mask = TILE * width // 8, (1 << width) - 1
    for j in range(0, size, LANES):
        prefetch(plane + j + ahead * size)
        packed = load(plane + j)
        for k in range(8 // width):
            part = field(packed, k * width, mask)
            there = numbers + j + k * size
            if at:
                part = either(load(there), raised(part, at))
            store(there, part)


@compiled
def unpack_planes(numbers, packed, fours, twos, ones, ahead):
    """A tile's planes to its numbers; `ahead` is after how many tiles more will be wanted."""
    at = 0
    if packed & 4:
        unpack_plane(numbers, fours, at, 4, ahead)
        at += 4
    if packed & 2:
        unpack_plane(numbers, twos, at, 2, ahead)
        at += 2
    if packed & 1:
        unpack_plane(numbers, ones, at, 1, ahead)
