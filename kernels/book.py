"""Exponents to codes and back, four bytes at a time: by arithmetic, or through a table."""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .bits import HIGH_BITS, LOW_SEVEN, ONES, whole_bytes

TABLE: tl.constexpr = tl.constexpr(0)
"""Any codebook. `base` is not used."""
WINDOW: tl.constexpr = tl.constexpr(1)
"""code = exponent - base."""
ZERO_WINDOW: tl.constexpr = tl.constexpr(2)
"""code 0 is exponent 0, otherwise code = exponent - base."""


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
        Shape: (256,), uint8. Exponent -> code, 255 marks an escape.
    decoding
        Shape: (16,), uint8. Code -> exponent.
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
def look_up(x, table):
    """table[byte] for every byte of x."""
    result = x ^ x
    for lane in tl.static_range(4):
        at = (x >> 8 * lane) & 0xFF
        result |= tl.load(table + at.to(tl.int32)).to(tl.uint32) << 8 * lane
    return result


@triton.jit
def encode_exponents(exponents, base, table, KIND: tl.constexpr, ASM: tl.constexpr):
    """(codes, suspicion): exponents without a code have one of no meaning.

    If none of the four lacks a code, the high nibbles of `suspicion` are 0, otherwise at least one
    is not; which of the bytes it is, only `find_escapes` can tell.
    """
    if KIND == TABLE:
        codes = look_up(exponents, table)
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
def decode_exponents(codes, base, table, KIND: tl.constexpr, ASM: tl.constexpr):
    """The exponents of four codes of at most 15."""
    if KIND == TABLE:
        return look_up(codes, table)
    exponents = codes + base.to(tl.uint32) * ONES
    if KIND == WINDOW:
        return exponents
    # A code of at most 15 plus 0x7F has its top bit set unless it is 0, and carries nothing over.
    return exponents & whole_bytes(codes + LOW_SEVEN, ASM)
