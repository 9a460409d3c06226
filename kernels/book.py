"""Exponents to codes and back, four bytes at a time: by arithmetic, or through a table."""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .bits import HIGH_BITS, LOW_SEVEN, ONES, permute, permute_by, whole_bytes

TABLE: tl.constexpr = tl.constexpr(0)
"""Any codebook. `base` is not used."""
WINDOW: tl.constexpr = tl.constexpr(1)
"""code = exponent - base."""
ZERO_WINDOW: tl.constexpr = tl.constexpr(2)
"""code 0 is exponent 0, otherwise code = exponent - base."""

TABLE_BYTES = 256
"""Of the table to encode with, and what it must be aligned to."""


@dataclass(frozen=True, slots=True)
class DeviceBook:
    """A codebook as the kernels take it.

    Attributes
    ----------
    kind
        TABLE, WINDOW or ZERO_WINDOW: which code is compiled.
    base
        What is subtracted from an exponent where `kind` is a window.
    encoding
        Shape: (256,), uint8, aligned to 256 bytes. Exponent -> code, 255 marks an escape.
    decoding
        Shape: (16,), uint8, aligned to 4 bytes. Code -> exponent.
    pad
        The bit pattern that fills up the last chunk: code 0, no escape.
    """

    kind: int
    base: int
    encoding: torch.Tensor
    decoding: torch.Tensor
    pad: int


@triton.jit
def add_bytes(x, y):
    """Every byte of x plus the byte y, without carries from one byte to the next."""
    addend = (y & 0xFF).to(tl.uint32) * ONES
    # The top bits are kept out of the addition, and then added without their carries.
    return ((x & LOW_SEVEN) + (addend & LOW_SEVEN)) ^ (x & HIGH_BITS) ^ (addend & HIGH_BITS)


@triton.jit
def not_zero(x):
    """Bit 7 of every byte: whether the byte is not 0. The other bits mean nothing."""
    return ((x & LOW_SEVEN) + LOW_SEVEN) | x


@triton.jit
def look_up(x, table, ASM: tl.constexpr):
    """table[byte] for every byte of x. The table must be aligned to its 256 bytes."""
    result = x ^ x
    for lane in tl.static_range(4):
        if ASM:
            # The byte becomes the address's lowest: one instruction, not an addition of 64 bits.
            base = table.to(tl.uint64, bitcast=True)
            low = permute(x, base.to(tl.uint32), 0x7650 | lane, ASM)
            address = base & 0xFFFFFFFF00000000 | low.to(tl.uint64)
            at = address.to(tl.pointer_type(tl.uint8), bitcast=True)
        else:
            at = table + ((x >> 8 * lane) & 0xFF).to(tl.int32)
        result |= tl.load(at).to(tl.uint32) << 8 * lane
    return result


@triton.jit
def encode_exponents(exponents, base, table, KIND: tl.constexpr, ASM: tl.constexpr):
    """(codes, suspicion): exponents without a code have one of no meaning.

    If none of the four lacks a code, the high nibbles of `suspicion` are 0, otherwise at least one
    is not; which of the bytes it is, only `find_escapes` can tell.
    """
    if KIND == TABLE:
        codes = look_up(exponents, table, ASM)
        return codes, codes
    codes = add_bytes(exponents, -base)
    if KIND == WINDOW:
        return codes, codes
    present = not_zero(exponents)
    codes &= whole_bytes(present, ASM)
    # A code of 0 that does not come from exponent 0 is that of the exponent just below the window.
    # The sum has a carry only where another byte is suspicious by itself.
    return codes, codes | (((codes + LOW_SEVEN) ^ present) & HIGH_BITS)


@triton.jit
def find_escapes(exponents, codes, KIND: tl.constexpr):
    """Bit 7 of every byte: whether the exponent has no code. The other bits mean nothing."""
    too_large = ((codes & 0x70707070) + 0x70707070) | codes
    if KIND == ZERO_WINDOW:
        too_large |= not_zero(codes) ^ not_zero(exponents)
    return too_large


@triton.jit
def decode_exponents(codes, base, KIND: tl.constexpr, ASM: tl.constexpr):
    """The exponents of four codes of at most 15, of a window."""
    exponents = codes + base.to(tl.uint32) * ONES
    if KIND == WINDOW:
        return exponents
    # A code of at most 15 plus 0x7F has its top bit set unless it is 0, and carries nothing over.
    return exponents & whole_bytes(codes + LOW_SEVEN, ASM)


@triton.jit
def look_up_nibbles(both, table, ASM: tl.constexpr):
    """table[nibble] for all nibbles, those of the low and of the high two bytes of `both`.

    The nibbles are selectors of table bytes as they stand, but for their top bits, which choose
    between what the two halves of the table have. The table is 16 bytes, aligned.
    """
    words = table.to(tl.pointer_type(tl.uint32), bitcast=True)
    first, second, third, fourth = (
        tl.load(words), tl.load(words + 1), tl.load(words + 2), tl.load(words + 3)
    )  # fmt: skip
    within = both & 0x77777777
    half = ((both >> 1) & 0x44444444) | 0x32103210
    near = permute_by(
        permute_by(first, second, within, ASM), permute_by(third, fourth, within, ASM), half, ASM
    )
    within, half = within >> 16, half >> 16
    far = permute_by(
        permute_by(first, second, within, ASM), permute_by(third, fourth, within, ASM), half, ASM
    )
    return near, far
