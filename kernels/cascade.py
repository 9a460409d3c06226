"""The levels of mode `max` behind the first: `codec/reference/max.py` says what their digits mean.

A level's elements are bytes in a list, its digits 2 bits each. A lane takes the four digits of one
byte; that a level begins in the middle of a byte only shifts which elements these are.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from .bits import HIGH_BITS, ONES
from .lanes import LANES, columns_of

LEVELS = ((-1, 3, -2), (-3, 4, -4), (-5, -6, -7))
"""The binades that digits 0, 1 and 2 stand for on levels 2 to 4."""
NEXT: tl.constexpr = tl.constexpr(3)
"""The digit of what is handed on to the next level."""

ROUND: tl.constexpr = tl.constexpr(128)
"""Digits that the lanes take together."""
LISTED: tl.constexpr = tl.constexpr(2048)
"""Bytes of a tile's list: every element may be in it."""
DIGITS: tl.constexpr = tl.constexpr(1536)
"""Bytes for digits of levels 2 to 4 of a tile, 2,048 each at most."""


def _digits(level: tuple[int, int, int]) -> int:
    """The digits of binades -8 to 7, 2 bits each."""
    return sum(
        (level.index(binade) if binade in level else NEXT.value) << 2 * (binade + 8)
        for binade in range(-8, 8)
    )


_DIGITS2: tl.constexpr = tl.constexpr(_digits(LEVELS[0]))
_DIGITS3: tl.constexpr = tl.constexpr(_digits(LEVELS[1]))
_DIGITS4: tl.constexpr = tl.constexpr(_digits(LEVELS[2]))


def _binades(level: tuple[int, int, int]) -> int:
    """The binades of digits 0 to 2, a byte each."""
    return sum((binade & 0xFF) << 8 * digit for digit, binade in enumerate(level))


_BINADES2: tl.constexpr = tl.constexpr(_binades(LEVELS[0]))
_BINADES3: tl.constexpr = tl.constexpr(_binades(LEVELS[1]))
_BINADES4: tl.constexpr = tl.constexpr(_binades(LEVELS[2]))


@triton.jit
def digit_of(binade, LEVEL: tl.constexpr, RING: tl.constexpr):
    """A binade's digit on a level. uint32."""
    # What is not one of the 16 binades around 0 has the digit of the last of them: it is NEXT.
    at = tl.minimum((binade + 8) & RING, 15)
    if LEVEL == 2:
        digits = tl.full((LANES,), _DIGITS2, tl.uint32)
    elif LEVEL == 3:
        digits = tl.full((LANES,), _DIGITS3, tl.uint32)
    else:
        digits = tl.full((LANES,), _DIGITS4, tl.uint32)
    return (digits >> (2 * at)) & 3


@triton.jit
def binade_of(digit, LEVEL: tl.constexpr, RING: tl.constexpr):
    """The binade of a digit of at most 2 on a level. uint32."""
    if LEVEL == 2:
        binades = tl.full((LANES,), _BINADES2, tl.uint32)
    elif LEVEL == 3:
        binades = tl.full((LANES,), _BINADES3, tl.uint32)
    else:
        binades = tl.full((LANES,), _BINADES4, tl.uint32)
    return (binades >> (8 * digit)) & RING


@triton.jit
def handed_on(top, BELOW: tl.constexpr):
    """Bit 7 of every byte: whether the first level hands its element on. The others are 0.

    The binade begins at bit BELOW of a byte.
    """
    return (((top & 0x7F7F7F7F) + (0x80 - (NEXT << BELOW)) * ONES) | top) & HIGH_BITS


@triton.jit
def running(flags):
    """For every byte, of its word's bytes that are 1 rather than 0, those up to it. At most 255."""
    return flags * ONES


@triton.jit
def up_to_each(flags):
    """How many flags a lane has in its first word, its first two, three and four; [32, 4]."""
    number0, number1, number2, number3 = columns_of(running(flags >> 7) >> 24)
    number0 = number0.to(tl.int32)
    number1 = number0 + number1.to(tl.int32)
    number2 = number1 + number2.to(tl.int32)
    return number0, number1, number2, number2 + number3.to(tl.int32)


@triton.jit
def append(listed, at, bytes_, ones):
    """Write those of four bytes whose byte in `ones` is 1, from index `at` of each lane on."""
    for i in tl.static_range(4):
        one = (ones >> (8 * i)) & 1
        tl.store(listed + at, (bytes_ >> (8 * i)).to(tl.uint8), mask=one != 0)
        at += one.to(tl.int32)


@triton.jit
def code_level(listed, number, digits, at, LEVEL: tl.constexpr, RING: tl.constexpr):
    """Write the digits of a level's `number` elements, from digit `at` on.

    Those of the next level remain in the list, at its front; returns how many.
    """
    lane = tl.arange(0, LANES)
    ahead = at % 4
    remaining = number ^ number
    for first in range(0, number + ahead, ROUND):
        byte = tl.zeros((LANES,), tl.uint32)
        binades, ones = byte, byte
        if LEVEL == 2:
            # The first of the levels begins with a byte: four elements are one load.
            words = listed.to(tl.pointer_type(tl.uint32), bitcast=True)
            binades = tl.load(words + first // 4 + lane)
        for i in tl.static_range(4):
            element = first - ahead + 4 * lane + i
            live = (element >= 0) & (element < number)
            if LEVEL == 2:
                binade = (binades >> (8 * i)) & 0xFF
            else:
                binade = tl.load(listed + element, mask=live, other=0).to(tl.uint32)
                binades |= binade << (8 * i)
            digit = tl.where(live, digit_of(binade, LEVEL, RING), 0)
            byte |= digit << (2 * i)
            ones |= (digit == NEXT).to(tl.uint32) << (8 * i)
        spot = digits + at // 4 + first // 4 + lane
        # The level before has begun the first byte.
        begun = first + 4 * lane < ahead
        byte |= tl.load(spot, mask=begun, other=0).to(tl.uint32)
        tl.store(spot, byte.to(tl.uint8), mask=first + 4 * lane < number + ahead)
        own = (running(ones) >> 24).to(tl.int32)
        # All lanes have read what any of them writes over: the sums needed it.
        append(listed, remaining + tl.cumsum(own, axis=0) - own, binades, ones)
        remaining += tl.sum(own, axis=0)
    return remaining


@triton.jit
def count_handed_on(part, size, at, number):
    """Of `number` digits, from digit `at` of a tile's part of the escapes on, those that are NEXT.

    Nothing behind the part's `size` bytes is read.
    """
    lane = tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.int32)
    ahead = at % 4
    for first in range(0, number + ahead, ROUND):
        byte = at // 4 + first // 4 + lane
        four = tl.load(part + byte, mask=byte < size, other=0).to(tl.int32)
        for i in tl.static_range(4):
            element = first - ahead + 4 * lane + i
            live = (element >= 0) & (element < number)
            total += (live & (((four >> (2 * i)) & 3) == NEXT)).to(tl.int32)
    return tl.sum(total, axis=0)


@triton.jit
def restore_level(
    part, size, at, number, following, room, listed, LEVEL: tl.constexpr, RING: tl.constexpr
):
    """Write the binades of a level's `number` elements to a list; their digits begin at `at`.

    `following` has those of the next level; nothing behind its `room` bytes is read.
    """
    lane = tl.arange(0, LANES)
    ahead = at % 4
    passed = number ^ number
    for first in range(0, number + ahead, ROUND):
        byte = at // 4 + first // 4 + lane
        four = tl.load(part + byte, mask=byte < size, other=0).to(tl.uint32)
        ones = tl.zeros((LANES,), tl.uint32)
        for i in tl.static_range(4):
            element = first - ahead + 4 * lane + i
            live = (element >= 0) & (element < number)
            is_next = live & (((four >> (2 * i)) & 3) == NEXT)
            ones |= is_next.to(tl.uint32) << (8 * i)
        own = (running(ones) >> 24).to(tl.int32)
        rank = passed + tl.cumsum(own, axis=0) - own
        for i in tl.static_range(4):
            element = first - ahead + 4 * lane + i
            live = (element >= 0) & (element < number)
            one = (ones >> (8 * i)) & 1
            digit = (four >> (2 * i)) & 3
            binade = tl.load(following + rank, mask=(one != 0) & (rank < room), other=0)
            plain = binade_of(tl.minimum(digit, 2), LEVEL, RING)
            binade = tl.where(one != 0, binade.to(tl.uint32), plain)
            tl.store(listed + element, binade.to(tl.uint8), mask=live)
            rank += one.to(tl.int32)
        passed += tl.sum(own, axis=0)
    return passed
