"""Bit planes on a CPU: vectors of numbers to planes and back. `planes.py` says where a bit lies.

Numbers that share a byte of the narrowest plane are 256 apart, so the 8 vectors `a` to `h` are 64
neighbours each, 256 apart as well.
"""

# numba and llvmlite are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from ..planes import TILE
from .compiling import compiled
from .fast_loops import put
from .lanes import constant, either, field, raised
from .vector import LANES, load, prefetch, store

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
def spread(number, packed, k, fours, twos, ones):
    """The `packed` bits of vector `k` of 8 (`number` is 0) from vectors of their planes."""
    at = 0
    if packed & 4:
        number = field(fours, 4 * (k // 4), 15)
        at = 4
    if packed & 2:
        number = either(number, raised(field(twos, 2 * (k // 2), 3), at))
        at += 2
    if packed & 1:
        number = either(number, raised(field(ones, k, 1), at))
    return number


@compiled
def unpack_planes(numbers, packed, fours, twos, ones, ahead):
    """A tile's planes to its numbers; `ahead` is after how many tiles more will be wanted."""
    none = constant(0)
    four0 = four1 = four2 = four3 = two0 = two1 = one = none
    for j in range(0, APART, LANES):
        if packed & 4:
            at = fours + j
            four0, four1 = load(at), load(at + APART)
            four2, four3 = load(at + 2 * APART), load(at + 3 * APART)
            for k in range(4):
                prefetch(at + k * APART + ahead * 4 * APART)
        if packed & 2:
            at = twos + j
            two0, two1 = load(at), load(at + APART)
            prefetch(at + ahead * 2 * APART)
            prefetch(at + APART + ahead * 2 * APART)
        if packed & 1:
            one = load(ones + j)
            prefetch(ones + j + ahead * APART)
        at = numbers + j
        store(at, spread(none, packed, 0, four0, two0, one))
        store(at + APART, spread(none, packed, 1, four1, two1, one))
        store(at + 2 * APART, spread(none, packed, 2, four2, two0, one))
        store(at + 3 * APART, spread(none, packed, 3, four3, two1, one))
        store(at + 4 * APART, spread(none, packed, 4, four0, two0, one))
        store(at + 5 * APART, spread(none, packed, 5, four1, two1, one))
        store(at + 6 * APART, spread(none, packed, 6, four2, two0, one))
        store(at + 7 * APART, spread(none, packed, 7, four3, two1, one))
