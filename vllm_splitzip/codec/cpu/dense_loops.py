"""Mode `dense` on a CPU: the compiled loops. `reference/dense.py` says what the bytes mean.

All arguments are integers (addresses, sizes, strides), see `vector.py` for why. Nothing is
checked here: `dense.py` checks everything before it calls, and holds the arrays alive.
"""

# numba and llvmlite are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import numpy as np

from ..coded import Bytes
from ..planes import TILE
from ..reference.dense import ESCAPE_CHUNK
from .compiling import compiled
from .lanes import bit_count, constant, counting, equal_to, field, replaced
from .pick import load_pairs, store_chosen, store_pairs
from .planes import APART, unpack_planes
from .tiles import AHEAD, MASK_BYTES, ROOM, ROOM_AND_LOW, read_tile, write_tile
from .vector import LANES, fence, load, pointer8, pointer64, scratch, store, trailing_zeros

CHUNKS = TILE // ESCAPE_CHUNK
MASKS = ESCAPE_CHUNK // LANES
TWO_TILES = 2 * TILE


@compiled
def list_chunk(top, masks, packed, positions, excess, at, compresses):
    """Append a chunk's entries at index `at` of both lists; returns its count, 0 to 255."""
    bytes_, found = pointer8(top), pointer64(masks)
    position, above = pointer8(positions), pointer8(excess)
    count = 0
    for j in range(MASKS):
        count += bit_count(found[j])
    if count >= 255:
        for i in range(ESCAPE_CHUNK):
            position[at + i] = i
            above[at + i] = bytes_[i] >> packed
        return 255
    for j in range(MASKS):
        bits = found[j]
        if compresses:
            store_chosen(positions + at, counting(LANES * j), bits)
            store_chosen(excess + at, field(load(top + LANES * j), packed, 0xFF >> packed), bits)
            at += bit_count(bits)
        else:
            while bits != 0:
                i = j * LANES + trailing_zeros(bits)
                position[at] = i
                above[at] = bytes_[i] >> packed
                at += 1
                bits &= bits - 1
    return count


@compiled
def encode_tiles(
    pages, stride, table, row, elements, begin, end, bases, item, packed,
    low, fours, twos, ones, counts, positions, excess, limit, streaming, compresses,
):  # fmt: skip
    """Code tiles `begin` to `end` of the run, entries to the front of the two lists.

    Returns the number of entries, and stops early when it is more than `limit`. The lists have
    room for `limit` + TILE.
    """
    number = pointer8(counts)
    near, near_bases = scratch(ROOM_AND_LOW), scratch(ROOM)
    top, masks = scratch(TILE), scratch(MASK_BYTES)
    total = 0
    for tile in range(begin, end):
        read_tile(
            pages, stride, table, row, elements, tile, end - 1, bases, item, near, near_bases,
            low, top, masks, 1 << packed, -1, packed, fours, twos, ones, streaming,
        )  # fmt: skip
        chunks = min(CHUNKS, -(-(elements - tile * TILE) // ESCAPE_CHUNK))
        for chunk in range(chunks):
            count = list_chunk(
                top + chunk * ESCAPE_CHUNK, masks + 8 * MASKS * chunk, packed,
                positions, excess, total, compresses,
            )  # fmt: skip
            number[tile * CHUNKS + chunk] = count
            total += count + (count == 255)
        if total > limit:
            break
    if streaming:
        fence()
    return total


@compiled
def decode_tiles(
    pages, stride, table, row, elements, begin, end, bases, item, packed,
    low, fours, twos, ones, counts, positions, excess, streaming,
):  # fmt: skip
    """Decode tiles `begin` to `end` of the run; the streams are known to fit."""
    ids, number = pointer64(table), pointer8(counts)
    position, above = pointer8(positions), pointer8(excess)
    near, near_bases = scratch(ROOM_AND_LOW), scratch(ROOM)
    tops = scratch(TWO_TILES)
    entry = total(counts, 0, begin * CHUNKS)
    # A tile's elements are made of its top bytes while those of the next are got ready: what was
    # just written byte by byte cannot be read in vectors without a wait.
    for tile in range(begin, end + 1):
        if tile < end:
            top, plane = tops + tile % 2 * TILE, tile * APART
            unpack_planes(top, packed, fours + 4 * plane, twos + 2 * plane, ones + plane, AHEAD)
            bytes_ = pointer8(top)
            for chunk in range(min(CHUNKS, -(-(elements - tile * TILE) // ESCAPE_CHUNK))):
                count = number[tile * CHUNKS + chunk]
                last = entry + count + (count == 255)
                for k in range(entry, last):
                    bytes_[chunk * ESCAPE_CHUNK + position[k]] |= above[k] << packed
                entry = last
        if tile > begin and (row % TILE or ids[(tile - 1) * TILE // row] >= 0):
            write_tile(
                pages, stride, table, row, elements, tile - 1, bases, item, near, near_bases,
                low, tops + (tile - 1) % 2 * TILE, streaming,
            )  # fmt: skip
    if streaming:
        fence()


@compiled
def total(counts, begin, end):
    """Entries of chunks `begin` to `end`."""
    number = pointer8(counts)
    added = 0
    for i in range(begin, end):
        added += number[i] + (number[i] == 255)
    return added


def packed_excess(excess: Bytes, packed: int) -> tuple[Bytes, Bytes]:
    """(kinds, others) of the entries' excess."""
    kinds, others = np.empty(-(-excess.size // 4), np.uint8), np.empty(excess.size, np.uint8)
    number = pack_excess(
        excess.ctypes.data, excess.size, packed, kinds.ctypes.data, others.ctypes.data
    )
    return kinds, others[:number].copy()


@compiled
def pack_excess(excess, entries, packed, kinds, others):
    """The entries' excess to kinds and others; returns how many others there are."""
    largest = (1 << (8 - packed)) - 1
    last = entries % LANES
    rest, rest_kinds = scratch(LANES), scratch(16)
    spare, spare_kinds, kind = pointer8(rest), pointer8(rest_kinds), pointer8(kinds)
    source, other = pointer8(excess), pointer8(others)
    for k in range(last):
        spare[k] = source[entries - last + k]
    for k in range(last, LANES):
        spare[k] = 0
    number = 0
    for i in range(0, entries, LANES):
        whole = i + LANES <= entries
        values = load(excess + i if whole else rest)
        ones = equal_to(values, 1)
        before = equal_to(values, largest - 1) & ~ones
        largests = equal_to(values, largest)
        if largest == 1:
            before, ones = 0, 0
        numbers = replaced(constant(0), ones, 1)
        numbers = replaced(replaced(numbers, before, 2), largests, 3)
        bits = ~(ones | before | largests) | equal_to(values, 0)
        if whole:
            store_pairs(kinds + i // 4, numbers)
        else:
            store_pairs(rest_kinds, numbers)
            for k in range((last + 3) // 4):
                kind[i // 4 + k] = spare_kinds[k]
            bits &= (1 << last) - 1
        while bits != 0:
            other[number] = source[i + trailing_zeros(bits)]
            number += 1
            bits &= bits - 1
    return number


@compiled
def unpack_excess(kinds, entries, packed, others, most, excess):
    """What `pack_excess` packed. Returns how many others that takes; uses no more than `most`."""
    largest = (1 << (8 - packed)) - 1
    rest, rest_kinds = scratch(LANES), scratch(16)
    target, other = pointer8(excess), pointer8(others)
    spare, spare_kinds, kind = pointer8(rest), pointer8(rest_kinds), pointer8(kinds)
    number = 0
    for i in range(0, entries, LANES):
        left = min(LANES, entries - i)
        if left == LANES:
            numbers = load_pairs(kinds + i // 4)
        else:
            for k in range(16):
                spare_kinds[k] = kind[i // 4 + k] if 4 * k < left else 0
            numbers = load_pairs(rest_kinds)
        values = replaced(numbers, equal_to(numbers, 2), largest - 1)
        values = replaced(values, equal_to(numbers, 3), largest)
        if left == LANES:
            store(excess + i, values)
        else:
            store(rest, values)
            for k in range(left):
                target[i + k] = spare[k]
        bits = equal_to(numbers, 0)
        if left < LANES:
            bits &= (1 << left) - 1
        while bits != 0:
            if number < most:
                target[i + trailing_zeros(bits)] = other[number]
            number += 1
            bits &= bits - 1
    return number
