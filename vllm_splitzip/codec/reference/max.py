"""Mode `max`, written to be read: the bytes that every other implementation must reproduce.

Elements are rotated as `windows.py` describes. Their binade (the top bits of the top byte, a
number modulo 2**exponent bits) is coded in steps of 2 bits: 0, 1 and 2 stand for the first three
binades of the window, and 3 for all others, which are handed on to the next level. There a digit
stands for one of three further binades, or is 3 again:

======  ==========================  ============================================================
level   digits 0, 1, 2              where
======  ==========================  ============================================================
1       0, 1, 2                     packed with what lies below the binade, see `planes.py`
2       -1, 3, -2                   digits of the chunk, after each other, in element order
3       -3, 4, -4                   the same, after level 2's
4       -5, -6, -7                  the same, after level 3's
5       any                         bytes of the chunk, in element order
======  ==========================  ============================================================

===============  ===================  =======================================================
stream           bytes                content
===============  ===================  =======================================================
dense[0] low     1 per element        the low byte of each element; 2-byte formats only
dense[..]        see `planes.py`      level 1's digit << B | top byte modulo 2**B, where B is
                                      8 - exponent bits: 2 bits in BF16, 5 in FP16 and E5M2,
                                      6 in E4M3
windows          1 per channel        see `windows.py`
sizes            2 per chunk          bytes of the chunk in `escapes` (uint16, little-endian)
escapes          as `sizes` says      per chunk: digits of levels 2 to 4, digit i in byte i // 4
                                      at bit 2 (i % 4), then the bytes of level 5
===============  ===================  =======================================================

A chunk is 2,048 consecutive elements. Elements that the last chunk lacks count as zeros.
"""

from collections.abc import Iterator

import numpy as np

from ..coded import Bytes, Coded
from ..packing import Channels
from ..planes import TILE, pack, pack_pairs, tiles_of, unpack, unpack_pairs
from ..scheme import Scheme
from .windows import Elements, choose_windows, join_streams, rotate, split_streams, unrotate

LEVELS = ((-1, 3, -2), (-3, 4, -4), (-5, -6, -7))
NEXT = 3


def encode(
    elements: Elements, scheme: Scheme, channels: Channels, windows: Bytes | None = None
) -> Coded:
    """Code bit patterns of whole rows. Shape: (elements,), uint16 or uint8.

    `windows` are chosen from the elements unless they are given; any will do.
    """
    if windows is None:
        windows = choose_windows(elements, scheme.number_format, channels, scheme.placement)
    top, low = rotate(elements, scheme.number_format, channels, windows)
    binade, rest = _divide(top, scheme)
    plain = (np.minimum(binade, np.uint8(NEXT)) << np.uint8(scheme.below)) | rest
    escapes = [
        _encode_chunk(chunk[chunk >= NEXT], scheme)
        for chunk in (binade[at : at + TILE] for at in range(0, binade.size, TILE))
    ]
    return Coded(
        mode="max",
        elements=top.size,
        dense=join_streams(low, pack(plain, scheme.packed), scheme),
        tables={
            "windows": windows,
            "sizes": np.array([part.size for part in escapes], np.uint16).view(np.uint8),
            "escapes": np.concatenate([np.zeros(0, np.uint8), *escapes]),
        },
    )


def _encode_chunk(left: Bytes, scheme: Scheme) -> Bytes:
    """Levels 2 to 5 of a chunk, whose escaped binades are `left`."""
    digits: list[Bytes] = []
    for level in _levels(scheme):
        digit = np.select([left == binade for binade in level], [0, 1, 2], NEXT)
        digits.append(digit.astype(np.uint8))
        left = left[digit == NEXT]
    return np.append(pack_pairs(np.concatenate(digits)), left)


def decode(coded: Coded, scheme: Scheme, channels: Channels) -> Elements:
    """The bit patterns back. Returns shape: (elements,), uint16 or uint8."""
    low, planes = split_streams(coded, scheme)
    packed = unpack(planes, scheme.packed, tiles_of(coded.elements) * TILE)
    binade, rest = _divide(packed, scheme)
    ends = np.cumsum(coded.tables["sizes"].view(np.uint16), dtype=np.int64)
    parts = np.split(coded.tables["escapes"], ends)[:-1]
    for chunk, escapes in zip(binade.reshape(-1, TILE), parts, strict=True):
        chunk[chunk == NEXT] = _decode_chunk(escapes, int((chunk == NEXT).sum()), scheme)
    top = ((binade << np.uint8(scheme.below)) | rest)[: coded.elements]
    return unrotate(top, low, scheme.number_format, channels, coded.tables["windows"])


def _decode_chunk(escapes: Bytes, number: int, scheme: Scheme) -> Bytes:
    """The `number` escaped binades of a chunk."""
    digits = unpack_pairs(escapes)
    levels, at = [], 0
    for _ in LEVELS:
        levels.append(digits[at : at + number])
        at += number
        number = int((levels[-1] == NEXT).sum())
    binades = escapes[-(-at // 4) :]
    for level, digit in zip(reversed([*_levels(scheme)]), reversed(levels), strict=True):
        plain = np.append(level, 0).astype(np.uint8)[digit]
        plain[digit == NEXT] = binades
        binades = plain
    return binades


def _divide(top: Bytes, scheme: Scheme) -> tuple[Bytes, Bytes]:
    """(binade, what lies below it)."""
    return top >> np.uint8(scheme.below), top & np.uint8((1 << scheme.below) - 1)


def _levels(scheme: Scheme) -> Iterator[Bytes]:
    """The binades that levels 2 to 4 have digits for."""
    for level in LEVELS:
        yield (np.array(level) % (1 << scheme.number_format.exponent)).astype(np.uint8)
