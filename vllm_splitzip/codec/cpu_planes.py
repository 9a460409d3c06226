"""Bit planes on a CPU: one tile's numbers to planes and back. `planes.py` says where a bit lies."""

# numba and llvmlite are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from .cpu_compile import compiled
from .cpu_fast import put
from .cpu_lanes import either, field, raised
from .cpu_vector import LANES, load, prefetch, store
from .planes import TILE


@compiled
def pack_plane(numbers, plane, at, width, streaming):
    """Bits `at` to `at + width` of a tile's numbers to a plane."""
    size, mask = TILE * width // 8, (1 << width) - 1
    for j in range(0, size, LANES):
        packed = field(load(numbers + j), at, mask)
        for k in range(1, 8 // width):
            part = field(load(numbers + j + k * size), at, mask)
            packed = either(packed, raised(part, k * width))
        put(plane + j, packed, streaming)


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
def pack_planes(numbers, bits, fours, twos, ones, streaming):
    """A tile's numbers of `bits` bits to their planes; those of other widths are not touched."""
    at = 0
    if bits & 4:
        pack_plane(numbers, fours, at, 4, streaming)
        at += 4
    if bits & 2:
        pack_plane(numbers, twos, at, 2, streaming)
        at += 2
    if bits & 1:
        pack_plane(numbers, ones, at, 1, streaming)


@compiled
def unpack_planes(numbers, bits, fours, twos, ones, ahead):
    """A tile's planes to its numbers; `ahead` is after how many tiles more will be wanted."""
    at = 0
    if bits & 4:
        unpack_plane(numbers, fours, at, 4, ahead)
        at += 4
    if bits & 2:
        unpack_plane(numbers, twos, at, 2, ahead)
        at += 2
    if bits & 1:
        unpack_plane(numbers, ones, at, 1, ahead)
