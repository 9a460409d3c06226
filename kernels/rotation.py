"""Elements of windowed modes without their window: rotated, and back, four of them in a word.

What is stored of an element is its magnitude's distance from the window's base, above its sign, see
`codec/windows.py`. A base is as wide as an element and has no sign.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from .bits import HIGH_BITS, LOW_SEVEN, ONES, permute


@triton.jit
def rotate(words, base, BITS: tl.constexpr, ASM: tl.constexpr):
    """(top bytes, low bytes) of rotated elements, four in a word. uint32; low ones of 16 bits only.

    Elements and bases are uint64 of four, or uint32.
    """
    if BITS == 16:
        first = rotate_pair(words.to(tl.uint32), base.to(tl.uint32))
        second = rotate_pair((words >> 32).to(tl.uint32), (base >> 32).to(tl.uint32))
        top, low = permute(first, second, 0x7531, ASM), permute(first, second, 0x6420, ASM)
    else:
        # A one in the place of the sign keeps borrows from the next element.
        distance = (words | HIGH_BITS) - base
        top = ((distance << 1) & 0xFEFEFEFE) | ((words >> 7) & ONES)
        low = top
    return top, low


@triton.jit
def rotate_pair(words, base):
    """Two elements of 16 bits, rotated."""
    distance = (words | 0x80008000) - base
    return ((distance << 1) & 0xFFFEFFFE) | ((words >> 15) & 0x00010001)


@triton.jit
def unrotate(top, low, base, BITS: tl.constexpr, ASM: tl.constexpr):
    """The inverse of `rotate`."""
    if BITS == 16:
        first = unrotate_pair(permute(low, top, 0x5140, ASM), base.to(tl.uint32))
        second = unrotate_pair(permute(low, top, 0x7362, ASM), (base >> 32).to(tl.uint32))
        words = (second.to(tl.uint64) << 32) | first.to(tl.uint64)
    else:
        magnitude = ((top >> 1) & LOW_SEVEN) + base
        words = (magnitude & LOW_SEVEN) | ((top << 7) & HIGH_BITS)
    return words


@triton.jit
def unrotate_pair(rotated, base):
    """The inverse of `rotate_pair`."""
    magnitude = ((rotated >> 1) & 0x7FFF7FFF) + base
    return (magnitude & 0x7FFF7FFF) | ((rotated << 15) & 0x80008000)


@triton.jit
def unrotate_one(rotated, base, BITS: tl.constexpr):
    """One element of so many bits back. uint32."""
    magnitude = ((rotated >> 1) + base.to(tl.uint32)) & ((1 << (BITS - 1)) - 1)
    return magnitude | ((rotated & 1) << (BITS - 1))
