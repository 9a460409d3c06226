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
def subtract_bytes(x, base):
    """Every byte of x minus base, without borrows from one byte to the next."""
    bases = base.to(tl.uint32) * ONES
    # The top bits are kept out of the subtraction, and then put where they belong.
    difference = (x | HIGH_BITS) - (bases & LOW_SEVEN)
    return difference ^ (x & HIGH_BITS) ^ (~bases & HIGH_BITS)


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
    """(codes, bad): an exponent has no code where the high nibble of its byte of `bad` is not 0.

    Its byte of `codes` means nothing then.
    """
    if KIND == TABLE:
        codes = look_up(exponents, table)
        return codes, codes
    codes = subtract_bytes(exponents, base)
    if KIND == WINDOW:
        return codes, codes
    present = not_zero(exponents)
    codes &= whole_bytes(present, ASM)
    # A code of 0 that does not come from an exponent of 0 is an exponent just below the window.
    coded = (codes & LOW_SEVEN) + LOW_SEVEN
    return codes, codes | ((coded ^ present) & HIGH_BITS)


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
