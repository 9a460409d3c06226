"""More 64-byte vectors for numba loops: what the windowed modes need. See `vector.py`."""

# numba and llvmlite are untyped, and so is what numba calls back.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from collections.abc import Iterable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .vector import _BYTES, _I8, _I32, _I64, LANES, _constant, _load, _pointer, _splat, pair, vector

_BITS = ir.VectorType(ir.IntType(1), LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES // 2)


def _every(builder: Any, number: Any) -> Any:
    """64 copies of an integer's lowest byte."""
    return _splat(builder, builder.trunc(number, _I8))


def _after(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, ir.Constant(_I64, offset))


def _indices(lanes: Iterable[int]) -> Any:
    return ir.Constant(ir.VectorType(_I32, LANES), list(lanes))


def _shift(builder: Any, bytes_: Any, number: Any, left: bool) -> Any:
    """Shift pairs of bytes, which processors can; what crosses over, the caller has masked."""
    amount = builder.trunc(number, ir.IntType(16))
    one = builder.insert_element(ir.Constant(_SHORTS, ir.Undefined), amount, ir.Constant(_I32, 0))
    lanes = ir.Constant(ir.VectorType(_I32, LANES // 2), [0] * (LANES // 2))
    amounts = builder.shuffle_vector(one, ir.Constant(_SHORTS, ir.Undefined), lanes)
    shorts = builder.bitcast(bytes_, _SHORTS)
    shifted = builder.shl(shorts, amounts) if left else builder.lshr(shorts, amounts)
    return builder.bitcast(shifted, _BYTES)


@intrinsic
def pointer32(typing, address):
    """The address as a pointer to uint32 that can be indexed."""
    return _pointer(types.uint32, address)


@intrinsic
def prefetch_again(typing, address):
    """Ask for the cache line at any address, valid or not, that will be used more than once."""

    def generate(context, builder, signature, args):
        line = builder.inttoptr(args[0], _I8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [line.type, _I32, _I32, _I32])
        declared = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(declared, [line, *(ir.Constant(_I32, n) for n in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def rotate_words(typing, elements, bases):
    """(top bytes, low bytes) of 64 elements of 2 bytes, rotated from the bases at an address."""

    def generate(context, builder, signature, args):
        halves = []
        for offset in (0, LANES):
            words = _load(builder, _after(builder, args[0], offset), _SHORTS)
            base = _load(builder, _after(builder, args[1], offset), _SHORTS)
            # The subtraction may borrow from the sign, which the shift drops.
            distance = builder.sub(words, base)
            rotated = builder.or_(
                builder.shl(distance, _constant(_SHORTS, 1)),
                builder.lshr(words, _constant(_SHORTS, 15)),
            )
            halves.append(builder.bitcast(rotated, _BYTES))
        every_second = [_indices(range(first, 2 * LANES, 2)) for first in (1, 0)]
        split = [builder.shuffle_vector(*halves, indices) for indices in every_second]
        return context.make_tuple(builder, signature.return_type, split)

    return pair(types.int64, types.int64), generate


@intrinsic
def unrotate_words(typing, bases, top, low):
    """The 64 elements of 2 bytes, as two vectors."""

    def generate(context, builder, signature, args):
        elements = []
        for offset in (0, LANES):
            first = range(offset // 2, offset // 2 + LANES // 2)
            indices = _indices(index for k in first for index in (k, k + LANES))
            joined = builder.shuffle_vector(args[2], args[1], indices)
            rotated = builder.bitcast(joined, _SHORTS)
            back = builder.or_(
                builder.lshr(rotated, _constant(_SHORTS, 1)),
                builder.shl(rotated, _constant(_SHORTS, 15)),
            )
            # The addition may carry into the sign, which is therefore taken from before it.
            base = _load(builder, _after(builder, args[0], offset), _SHORTS)
            magnitude = builder.and_(builder.add(back, base), _constant(_SHORTS, 0x7FFF))
            sign = builder.and_(back, _constant(_SHORTS, 0x8000))
            elements.append(builder.bitcast(builder.or_(magnitude, sign), _BYTES))
        return context.make_tuple(builder, signature.return_type, elements)

    return pair(types.int64, vector, vector), generate


@intrinsic
def rotate_bytes(typing, elements, bases):
    """64 elements of 1 byte, rotated from the bases at an address."""

    def generate(context, builder, signature, args):
        elements = _load(builder, args[0], _BYTES)
        distance = builder.sub(elements, _load(builder, args[1], _BYTES))
        return builder.or_(
            builder.shl(distance, _constant(_BYTES, 1)),
            builder.lshr(elements, _constant(_BYTES, 7)),
        )

    return vector(types.int64, types.int64), generate


@intrinsic
def unrotate_bytes(typing, bases, top):
    """The 64 elements of 1 byte."""

    def generate(context, builder, signature, args):
        distance = builder.lshr(args[1], _constant(_BYTES, 1))
        magnitude = builder.and_(
            builder.add(distance, _load(builder, args[0], _BYTES)), _constant(_BYTES, 0x7F)
        )
        return builder.or_(magnitude, builder.shl(args[1], _constant(_BYTES, 7)))

    return vector(types.int64, vector), generate


@intrinsic
def at_least(typing, bytes_, number):
    """The bytes that are `number` or more, as bits."""

    def generate(context, builder, signature, args):
        compared = builder.icmp_unsigned(">=", args[0], _every(builder, args[1]))
        return builder.bitcast(compared, _I64)

    return types.int64(vector, types.int64), generate


@intrinsic
def equal_to(typing, bytes_, number):
    """The bytes that are `number`, as bits."""

    def generate(context, builder, signature, args):
        compared = builder.icmp_unsigned("==", args[0], _every(builder, args[1]))
        return builder.bitcast(compared, _I64)

    return types.int64(vector, types.int64), generate


@intrinsic
def field(typing, bytes_, at, mask):
    """(byte >> at) & mask of each."""

    def generate(context, builder, signature, args):
        shifted = _shift(builder, args[0], args[1], left=False)
        return builder.and_(shifted, _every(builder, args[2]))

    return vector(vector, types.int64, types.int64), generate


@intrinsic
def raised(typing, bytes_, at):
    """byte << at of each, none of which has bits that leave it."""

    def generate(context, builder, signature, args):
        return _shift(builder, args[0], args[1], left=True)

    return vector(vector, types.int64), generate


@intrinsic
def either(typing, one, other):
    """Bits of one or the other."""

    def generate(context, builder, signature, args):
        return builder.or_(args[0], args[1])

    return vector(vector, vector), generate


@intrinsic
def both(typing, one, other):
    """Bits of one and the other."""

    def generate(context, builder, signature, args):
        return builder.and_(args[0], args[1])

    return vector(vector, vector), generate


@intrinsic
def constant(typing, number):
    """64 times the same byte."""

    def generate(context, builder, signature, args):
        return _every(builder, args[0])

    return vector(types.int64), generate


@intrinsic
def replaced(typing, bytes_, bits, number):
    """`number` in place of the bytes that the bits name."""

    def generate(context, builder, signature, args):
        where = builder.bitcast(args[1], _BITS)
        return builder.select(where, _every(builder, args[2]), args[0])

    return vector(vector, types.int64, types.int64), generate


@intrinsic
def chosen(typing, bits, one, other):
    """Bytes of `one` where the bits are set, else of `other`."""

    def generate(context, builder, signature, args):
        return builder.select(builder.bitcast(args[0], _BITS), args[1], args[2])

    return vector(types.int64, vector, vector), generate


@intrinsic
def bit_count(typing, bits):
    """How many bits are set."""

    def generate(context, builder, signature, args):
        return builder.ctpop(args[0])

    return types.int64(types.int64), generate


@intrinsic
def bits_of(typing, bytes_):
    """How many bits are set in all bytes together."""

    def generate(context, builder, signature, args):
        longs = ir.VectorType(_I64, LANES // 8)
        number = builder.bitcast(args[0], longs)
        for kind, name in ((longs, "llvm.ctpop.v8i64"), (_I64, "llvm.vector.reduce.add.v8i64")):
            function = ir.FunctionType(kind, [longs])
            declared = cgutils.get_or_insert_function(builder.module, function, name)
            number = builder.call(declared, [number])
        return number

    return types.int64(vector), generate


@intrinsic
def counting(typing, start):
    """64 bytes that count up from `start`."""

    def generate(context, builder, signature, args):
        return builder.add(_every(builder, args[0]), ir.Constant(_BYTES, list(range(LANES))))

    return vector(types.int64), generate
