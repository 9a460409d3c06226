"""Mode `dense`, written to be read: the bytes that every other implementation must reproduce.

Elements are rotated as `windows.py` describes. Of the top byte the lowest bits are packed, enough
for 8 binades of magnitudes from the base on; if there is anything above them, the element is also
listed as an escape, with that excess. Code and format decide how many bits are packed (P):

======================  ==========  ===  =====================
mode, format            binades     P    bits per element
======================  ==========  ===  =====================
dense bf16              8           3    8 + 2 + 1
dense fp16              8           6    8 + 4 + 2
dense e5m2              8           6    4 + 2
dense e4m3              8           7    4 + 2 + 1
fast e5m2               16          7    4 + 2 + 1
======================  ==========  ===  =====================

==============  ===================  ========================================================
stream          bytes                content
==============  ===================  ========================================================
dense[0] low    1 per element        the low byte of each element; 2-byte formats only
dense[..]       see `planes.py`      top byte modulo 2**P
windows         1 per channel        see `windows.py`
counts          1 per chunk          entries of the chunk; 255 means 256
positions       1 per entry          the element's position within its chunk
kinds           2 bits per entry     excess: 3 the largest possible, 2 the one before, 1 one,
                                     0 any other; entry i stands in byte i // 4, bit 2 (i % 4)
others          1 per other entry    excess of the entries of kind 0, in their order
==============  ===================  ========================================================

A chunk is 256 consecutive elements. Entries are ordered by chunk, then by position. A chunk with
255 escapes or more lists all of its 256 positions, those that are no elements as well.
"""

import numpy as np

from ..coded import Bytes, Coded
from ..packing import Channels
from ..planes import TILE, pack, pack_pairs, tiles_of, unpack, unpack_pairs
from ..scheme import Scheme
from .windows import Elements, choose_windows, join_streams, rotate, split_streams, unrotate

ESCAPE_CHUNK = 256


def encode(
    elements: Elements,
    scheme: Scheme,
    channels: Channels,
    mode: str = "dense",
    windows: Bytes | None = None,
) -> Coded:
    """Code bit patterns of whole rows. Shape: (elements,), uint16 or uint8.

    `windows` are chosen from the elements unless they are given; any will do.
    """
    if windows is None:
        windows = choose_windows(elements, scheme.number_format, channels, scheme.placement)
    top, low = rotate(elements, scheme.number_format, channels, windows)
    chunks = -(-top.size // ESCAPE_CHUNK)
    excess = np.zeros((chunks, ESCAPE_CHUNK), np.uint8)
    excess.reshape(-1)[: top.size] = top >> scheme.packed

    listed = excess > 0
    listed[listed.sum(axis=1) >= 255] = True
    counts = np.minimum(listed.sum(axis=1), 255).astype(np.uint8)
    _, positions = np.nonzero(listed)
    kinds, others = pack_excess(excess[listed], scheme)
    packed = top & np.uint8((1 << scheme.packed) - 1)
    return Coded(
        mode=mode,
        elements=top.size,
        dense=join_streams(low, pack(packed, scheme.packed), scheme),
        tables={
            "windows": windows,
            "counts": counts,
            "positions": positions.astype(np.uint8),
            "kinds": kinds,
            "others": others,
        },
    )


def decode(coded: Coded, scheme: Scheme, channels: Channels) -> Elements:
    """The bit patterns back. Returns shape: (elements,), uint16 or uint8."""
    low, planes = split_streams(coded, scheme)
    top = unpack(planes, scheme.packed, tiles_of(coded.elements) * TILE)

    tables = coded.tables
    counts = tables["counts"] + (tables["counts"] == 255).astype(np.int64)
    chunk = np.repeat(np.arange(counts.size), counts)
    excess = unpack_excess(tables["kinds"], tables["others"], chunk.size, scheme)
    top[chunk * ESCAPE_CHUNK + tables["positions"]] |= excess << np.uint8(scheme.packed)
    top = top[: coded.elements]
    return unrotate(top, low, scheme.number_format, channels, tables["windows"])


def pack_excess(excess: Bytes, scheme: Scheme) -> tuple[Bytes, Bytes]:
    """(kinds, others) of all entries' excess."""
    largest = (1 << (8 - scheme.packed)) - 1
    kind = np.select([excess == largest, excess == largest - 1, excess == 1], [3, 2, 1], 0)
    kind[excess == 0] = 0
    return pack_pairs(kind.astype(np.uint8)), excess[kind == 0]


def unpack_excess(kinds: Bytes, others: Bytes, entries: int, scheme: Scheme) -> Bytes:
    """The excess of each of the entries."""
    kind = unpack_pairs(kinds)[:entries]
    largest = (1 << (8 - scheme.packed)) - 1
    excess = np.array([0, 1, largest - 1, largest], np.uint8)[kind]
    excess[kind == 0] = others
    return excess
