"""Four bytes at a time in 32-bit words: taking BF16 apart, putting it together, marking bytes.

`ASM` says whether PTX may be used. The plain form beside it computes the same, and is what the
interpreter and other compilers than NVIDIA's get.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

HIGH_BITS: tl.constexpr = tl.constexpr(0x80808080)
HIGH_NIBBLES: tl.constexpr = tl.constexpr(0xF0F0F0F0)
LOW_NIBBLES: tl.constexpr = tl.constexpr(0x0F0F0F0F)
LOW_SEVEN: tl.constexpr = tl.constexpr(0x7F7F7F7F)
ONES: tl.constexpr = tl.constexpr(0x01010101)


@triton.jit
def permute(a, b, SELECTOR: tl.constexpr, ASM: tl.constexpr):
    """PTX `prmt`: byte i of the result is byte `SELECTOR >> 4 * i & 7` of b:a.

    With bit 3 of that nibble set it is the byte's top bit instead, eight times.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            f"prmt.b32 $0, $1, $2, {SELECTOR};", "=r,r,r", [a, b], tl.uint32, is_pure=True, pack=1
        )
    result = pick_byte(a, b, SELECTOR & 15)
    result |= pick_byte(a, b, SELECTOR >> 4 & 15) << 8
    result |= pick_byte(a, b, SELECTOR >> 8 & 15) << 16
    return result | pick_byte(a, b, SELECTOR >> 12) << 24


@triton.jit
def permute_by(a, b, selectors, ASM: tl.constexpr):
    """`permute` by the low four nibbles of each of `selectors`, none of which is above 7."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, selectors], tl.uint32,
            is_pure=True, pack=1,
        )  # fmt: skip
    result = selectors ^ selectors
    for i in tl.static_range(4):
        nibble = selectors >> 4 * i
        word = tl.where(nibble & 4 == 0, a, b)
        result |= ((word >> 8 * (nibble & 3)) & 0xFF) << 8 * i
    return result


@triton.jit
def pick_byte(a, b, NIBBLE: tl.constexpr):
    """One byte of `permute`."""
    word = a if NIBBLE & 4 == 0 else b
    byte = (word >> (8 * (NIBBLE & 3))) & 0xFF
    return byte if NIBBLE & 8 == 0 else (byte >> 7) * 0xFF


@triton.jit
def lowest_bits_from(x, y, ASM: tl.constexpr):
    """x with the lowest bit of every byte taken from y."""
    if ASM:
        # One instruction; the compiler makes it two, with the mask and its complement.
        return tl.inline_asm_elementwise(
            f"lop3.b32 $0, $1, $2, {ONES}, 0xD8;", "=r,r,r", [x, y], tl.uint32, is_pure=True, pack=1
        )
    return x ^ ((x ^ y) & ONES)


@triton.jit
def split(words, ASM: tl.constexpr):
    """(exponents, rests) of the four BF16 elements in each 64-bit word."""
    low, high = words.to(tl.uint32), (words >> 32).to(tl.uint32)
    # Rotating two elements together puts each exponent in a byte of its own and each mantissa
    # above its neighbour's sign. So the signs are taken from the bytes in swapped order.
    low, high = (low << 1) | (low >> 31), (high << 1) | (high >> 31)
    exponents = permute(low, high, 0x7531, ASM)
    mantissas = permute(low, high, 0x6420, ASM)
    signs = permute(low, high, 0x4602, ASM)
    return exponents, lowest_bits_from(mantissas, signs, ASM)


@triton.jit
def join(exponents, rests, ASM: tl.constexpr):
    """The inverse of `split`."""
    return join_pairs(exponents, exponents, 0x10, 0x32, rests, ASM)


@triton.jit
def join_pairs(near, far, NEAR: tl.constexpr, FAR: tl.constexpr, rests, ASM: tl.constexpr):
    """`join`, with the exponents of the first two elements in two bytes of `near`, of the others
    in two of `far`: which ones say the nibbles of NEAR and FAR."""
    swapped = permute(rests, rests, 0x2301, ASM)
    rests = lowest_bits_from(rests, swapped, ASM)
    low = permute(rests, near, 0x4140 | (NEAR & 0xF) << 4 | (NEAR & 0xF0) << 8, ASM)
    high = permute(rests, far, 0x4342 | (FAR & 0xF) << 4 | (FAR & 0xF0) << 8, ASM)
    low, high = (low >> 1) | (low << 31), (high >> 1) | (high << 31)
    return (high.to(tl.uint64) << 32) | low.to(tl.uint64)


@triton.jit
def whole_bytes(flags, ASM: tl.constexpr):
    """0xFF for every byte whose top bit is set, 0 for the others."""
    return permute(flags, flags, 0xBA98, ASM)


@triton.jit
def count_bits(x):
    """Bits set. Written as compilers recognise it: one instruction on a GPU."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return (((x + (x >> 4)) & LOW_NIBBLES) * ONES) >> 24


@triton.jit
def gather_top_bits(flags):
    """The four bytes' top bits as bits 0 to 3."""
    # The factor brings bits 7, 15, 23 and 31 to bits 28 to 31; nothing else gets there.
    return ((flags & HIGH_BITS) * 0x00204081) >> 28
