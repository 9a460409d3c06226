"""Mode `max` on a CPU: the compiled loops. `reference/max.py` says what the bytes mean.

All arguments are integers (addresses, sizes, strides), see `vector.py` for why. Nothing is
checked here but what `fits` is for: `max.py` checks everything else before it calls, and holds
the arrays alive.
"""

# numba and llvmlite are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from ..planes import TILE
from ..reference.max import LEVELS, NEXT
from .compiling import compiled
from .fast_loops import copy_bytes
from .lanes import (
    at_least,
    bit_count,
    bits_of,
    both,
    constant,
    either,
    equal_to,
    field,
    raised,
    replaced,
)
from .pick import load_chosen, load_pairs, store_chosen, store_pairs
from .planes import APART, unpack_planes
from .tiles import AHEAD, MASK_BYTES, ROOM, ROOM_AND_LOW, read_tile, write_tile
from .vector import (
    LANES,
    fence,
    load,
    pointer8,
    pointer16,
    pointer64,
    prefetch,
    scratch,
    store,
    trailing_zeros,
)

(L2A, L2B, L2C), (L3A, L3B, L3C), (L4A, L4B, L4C) = LEVELS

LIST = TILE + LANES
"""Bytes for one level's elements of a tile, and what a vector may write behind them."""
DIGITS = 3 * TILE + LANES
LARGEST = TILE + 3 * TILE // 4
"""Most bytes that a tile can have in the stream of escapes."""
PART = LARGEST + LANES
TWO_TILES, TWO_MASKS, TWO_LISTS = 2 * TILE, 2 * MASK_BYTES, 2 * LIST


@compiled
def first(number):
    """The lowest `number` bits, or all 64 of them."""
    return (1 << number) - 1 if number < LANES else -1


@compiled
def take(bytes_, bits, target, at, compresses):
    """Write the bytes that the bits name to index `at` of `target`; returns the index after."""
    if compresses:
        store_chosen(target + at, bytes_, bits)
        return at + bit_count(bits)
    near = scratch(LANES)
    store(near, bytes_)
    source, write = pointer8(near), pointer8(target)
    while bits != 0:
        write[at] = source[trailing_zeros(bits)]
        at += 1
        bits &= bits - 1
    return at


@compiled
def give(bytes_, bits, source, at, compresses):
    """The bytes, those that the bits name replaced by what follows index `at` of `source`."""
    if compresses:
        return load_chosen(source + at, bytes_, bits)
    near = scratch(LANES)
    store(near, bytes_)
    read, write = pointer8(source), pointer8(near)
    while bits != 0:
        write[trailing_zeros(bits)] = read[at]
        at += 1
        bits &= bits - 1
    return load(near)


@compiled
def code_level(left, number, digits, a, b, c, ring, compresses):
    """Digits of a level's elements; those of the next remain in front. Returns how many remain."""
    remaining = 0
    for i in range(0, number, LANES):
        binades = load(left + i)
        is_a, is_b = equal_to(binades, a & ring), equal_to(binades, b & ring)
        is_c = equal_to(binades, c & ring)
        plain = replaced(replaced(replaced(constant(NEXT), is_a, 0), is_b, 1), is_c, 2)
        store(digits + i, plain)
        bits = ~(is_a | is_b | is_c) & first(number - i)
        remaining = take(binades, bits, left, remaining, compresses)
    return remaining


@compiled
def code_escapes(left, number, escapes, ring, compresses):
    """A tile's levels 2 to 5 from its `number` escaped binades; returns their size in bytes."""
    digits = scratch(DIGITS)
    at = number
    number = code_level(left, number, digits, L2A, L2B, L2C, ring, compresses)
    if number:
        third = number
        number = code_level(left, number, digits + at, L3A, L3B, L3C, ring, compresses)
        at += third
        if number:
            fourth = number
            number = code_level(left, number, digits + at, L4A, L4B, L4C, ring, compresses)
            at += fourth
    store(digits + at, constant(0))
    for i in range(0, at, LANES):
        store_pairs(escapes + i // 4, load(digits + i))
    size = (at + 3) // 4
    copy_bytes(left, escapes + size, number)
    return size + number


@compiled
def encode_tiles(
    pages, stride, table, row, elements, begin, end, bases, item, packed, below,
    low, fours, twos, ones, sizes, escapes, limit, streaming, compresses,
):  # fmt: skip
    """Code tiles `begin` to `end` of the run, escapes to the front of their memory.

    Returns the bytes of the escapes, and stops early when they are more than `limit`. There is
    room for `limit` + PART.
    """
    size = pointer16(sizes)
    near, near_bases = scratch(ROOM_AND_LOW), scratch(ROOM)
    top, masks, left = scratch(TILE), scratch(MASK_BYTES), scratch(LIST)
    found = pointer64(masks)
    least, rest, ring = NEXT << below, (1 << below) - 1, 0xFF >> below
    total = 0
    for tile in range(begin, end):
        read_tile(
            pages, stride, table, row, elements, tile, end - 1, bases, item, near, near_bases,
            low, top, masks, least, rest, packed, fours, twos, ones, streaming,
        )  # fmt: skip
        number = 0
        for j in range(TILE // LANES):
            binades = field(load(top + LANES * j), below, ring)
            number = take(binades, found[j], left, number, compresses)
        part = code_escapes(left, number, escapes + total, ring, compresses)
        size[tile] = part
        total += part
        if total > limit:
            break
    if streaming:
        fence()
    return total


@compiled
def count_next(bytes_, begin, end):
    """How many of bytes `begin` to `end` are digits that stand for the next level."""
    found = 0
    for i in range(begin, end, LANES):
        found += bit_count(equal_to(load(bytes_ + i), NEXT) & first(end - i))
    return found


@compiled
def spread_digits(part, digits, begin, end):
    """Digits `begin` to `end` (at least) of a tile's part; `begin` is a multiple of 64."""
    for i in range(begin, end, LANES):
        store(digits + i, load_pairs(part + i // 4))
    return (end + LANES - 1) // LANES * LANES


@compiled
def measure_levels(part, digits, second):
    """(elements of levels 3, 4, 5), with all digits spread; `second` are those of level 2."""
    there = spread_digits(part, digits, 0, second)
    third = count_next(digits, 0, second)
    there = spread_digits(part, digits, there, second + third)
    fourth = count_next(digits, second, second + third)
    spread_digits(part, digits, there, second + third + fourth)
    return third, fourth, count_next(digits, second + third, second + third + fourth)


@compiled
def count_handed_on(top, packed, below, fours, twos, ones):
    """How many of a tile's elements the first level hands on to the second."""
    number = 0
    if below % 4 == 0:
        # The first level's digits are the plane of 2 bits, and both bits are set.
        for j in range(0, 2 * APART, LANES):
            digits = load(twos + j)
            prefetch(twos + j + AHEAD * 2 * APART)
            number += bits_of(both(field(digits, 0, 0x55), field(digits, 1, 0x55)))
        return number
    unpack_planes(top, packed, fours, twos, ones, AHEAD)
    for i in range(0, TILE, LANES):
        number += bit_count(at_least(load(top + i), NEXT << below))
    return number


@compiled
def fits(begin, end, packed, below, fours, twos, ones, sizes, escapes):
    """Whether each of tiles `begin` to `end` has as many escapes as its first level hands on."""
    size = pointer16(sizes)
    top, digits, part = scratch(TILE), scratch(DIGITS), scratch(PART)
    at = offset(sizes, begin)
    for tile in range(begin, end):
        plane = tile * APART
        second = count_handed_on(
            top, packed, below, fours + 4 * plane, twos + 2 * plane, ones + plane
        )
        if size[tile] > LARGEST:
            return False
        copy_bytes(escapes + at, part, size[tile])
        third, fourth, fifth = measure_levels(part, digits, second)
        if (second + third + fourth + 3) // 4 + fifth != size[tile]:
            return False
        at += size[tile]
    return True


@compiled
def offset(sizes, tile):
    """Where a tile's part of the escapes begins."""
    size = pointer16(sizes)
    at = 0
    for i in range(tile):
        at += size[i]
    return at


@compiled
def restore_level(digits, number, a, b, c, ring, following, restored, compresses):
    """The binades of a level's digits; `following` are those of the next level."""
    at = 0
    for i in range(0, number, LANES):
        numbers = load(digits + i)
        binades = replaced(constant(a & ring), equal_to(numbers, 1), b & ring)
        binades = replaced(binades, equal_to(numbers, 2), c & ring)
        bits = equal_to(numbers, NEXT) & first(number - i)
        store(restored + i, give(binades, bits, following, at, compresses))
        at += bit_count(bits)


@compiled
def restore_escapes(part, second, digits, ring, restored, spare, compresses):
    """The `second` escaped binades of a tile from its part of the escapes, to `restored`."""
    third, fourth, _ = measure_levels(part, digits, second)
    bytes_ = part + (second + third + fourth + 3) // 4
    restore_level(
        digits + second + third, fourth, L4A, L4B, L4C, ring, bytes_, restored, compresses
    )
    restore_level(digits + second, third, L3A, L3B, L3C, ring, restored, spare, compresses)
    restore_level(digits, second, L2A, L2B, L2C, ring, spare, restored, compresses)


@compiled
def put_back(top, masks, restored, below, compresses):
    """The binades that the first level handed on, into a tile's top bytes."""
    found = pointer64(masks)
    at, rest = 0, (1 << below) - 1
    for j in range(TILE // LANES):
        bytes_, bits = load(top + LANES * j), found[j]
        binades = give(field(bytes_, below, NEXT), bits, restored, at, compresses)
        at += bit_count(bits)
        store(top + LANES * j, either(raised(binades, below), field(bytes_, 0, rest)))


@compiled
def decode_tiles(
    pages, stride, table, row, elements, begin, end, bases, item, packed, below,
    low, fours, twos, ones, sizes, escapes, streaming, compresses,
):  # fmt: skip
    """Decode tiles `begin` to `end` of the run; the streams are known to fit."""
    ids, size = pointer64(table), pointer16(sizes)
    near, near_bases = scratch(ROOM_AND_LOW), scratch(ROOM)
    tops, both_masks, digits = scratch(TWO_TILES), scratch(TWO_MASKS), scratch(DIGITS)
    part, lists, spare = scratch(PART), scratch(TWO_LISTS), scratch(LIST)
    ring = 0xFF >> below
    source = escapes + offset(sizes, begin)
    # A tile is put together while the escapes of the next are restored: vectors that were just
    # written cannot be read from other offsets without a wait.
    for tile in range(begin, end + 1):
        if tile < end:
            plane, turn = tile * APART, tile % 2
            top, masks, restored = tops + turn * TILE, both_masks + turn * MASK_BYTES, lists
            restored += turn * LIST
            unpack_planes(top, packed, fours + 4 * plane, twos + 2 * plane, ones + plane, AHEAD)
            second, found = 0, pointer64(masks)
            for j in range(TILE // LANES):
                bits = at_least(load(top + LANES * j), NEXT << below)
                found[j] = bits
                second += bit_count(bits)
            copy_bytes(source, part, size[tile])
            restore_escapes(part, second, digits, ring, restored, spare, compresses)
            source += size[tile]
        if tile > begin and (row % TILE or ids[(tile - 1) * TILE // row] >= 0):
            turn = (tile - 1) % 2
            top, masks = tops + turn * TILE, both_masks + turn * MASK_BYTES
            put_back(top, masks, lists + turn * LIST, below, compresses)
            write_tile(
                pages, stride, table, row, elements, tile - 1, bases, item, near, near_bases,
                low, top, streaming,
            )  # fmt: skip
    if streaming:
        fence()
