"""Numbers of 1 to 7 bits, packed into planes of 4, 2 and 1 bits.

A number's bits are dealt out from the lowest to one plane of each width that its size, written in
binary, has a 1 for: 7 bits to planes of 4, 2 and 1, 3 bits to planes of 2 and 1. In a plane of
width w, the 2,048 numbers of a tile fill 256 w bytes, and number i of the tile stands in byte
i % (256 w), at bit w (i // (256 w)). Neighbours are thus packed alike, which suits vectors on a CPU
and the registers of a GPU's threads: one that has 16 neighbours of each 512 packs them alone, but
for the plane of 1 bit, of which two have the same bytes.
"""

import numpy as np

from .coded import Bytes

TILE = 2048


def tiles_of(elements: int) -> int:
    """Number of tiles that `elements` numbers occupy; the last one is filled up with zeros."""
    return -(-elements // TILE)


def widths(bits: int) -> tuple[int, ...]:
    """Widths of the planes for numbers of `bits` bits, in their order."""
    return tuple(width for width in (4, 2, 1) if bits & width)


def plane_bytes(elements: int, bits: int) -> tuple[int, ...]:
    """Length in bytes of each plane."""
    return tuple(tiles_of(elements) * TILE * width // 8 for width in widths(bits))


def pack(numbers: Bytes, bits: int) -> tuple[Bytes, ...]:
    """Shape: (elements,). The planes."""
    padded = np.zeros(tiles_of(numbers.size) * TILE, np.uint8)
    padded[: numbers.size] = numbers
    planes = []
    for width in widths(bits):
        each = 8 // width
        part = (padded & ((1 << width) - 1)).reshape(-1, each, TILE // each)
        shifts = np.arange(0, 8, width, np.uint8).reshape(-1, 1)
        planes.append(np.bitwise_or.reduce(part << shifts, axis=1).reshape(-1))
        padded >>= width
    return tuple(planes)


def unpack(planes: tuple[Bytes, ...], bits: int, elements: int) -> Bytes:
    """The numbers back. Returns shape: (elements,)."""
    numbers: Bytes = np.zeros(tiles_of(elements) * TILE, np.uint8)
    at = 0
    for plane, width in zip(planes, widths(bits), strict=True):
        each = 8 // width
        shifts = np.arange(0, 8, width, np.uint8).reshape(-1, 1)
        part = (plane.reshape(-1, 1, TILE // each) >> shifts) & np.uint8((1 << width) - 1)
        numbers |= part.reshape(-1) << np.uint8(at)
        at += width
    return numbers[:elements]


def pack_pairs(numbers: Bytes) -> Bytes:
    """Numbers of 2 bits as they come: number i in byte i // 4, at bit 2 (i % 4)."""
    fours = np.zeros((-(-numbers.size // 4), 4), np.uint8)
    fours.reshape(-1)[: numbers.size] = numbers
    return np.bitwise_or.reduce(fours << np.arange(0, 8, 2, np.uint8), axis=1)


def unpack_pairs(packed: Bytes) -> Bytes:
    """The numbers back, and zeros for what fills the last byte."""
    fours = packed.reshape(-1, 1) >> np.arange(0, 8, 2, np.uint8)
    return (fours & np.uint8(3)).reshape(-1)
