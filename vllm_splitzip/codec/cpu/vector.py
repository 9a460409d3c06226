"""64-byte vectors for numba loops: what its vectoriser would not find by itself.

Three things decide the speed of the codec on a CPU and cannot be said in plain Python: a compare
whose 64 outcomes become the bits of one integer (escapes are found by counting zeros), splitting
64 words into two byte vectors in registers, and stores that bypass the cache. Each function here
becomes a few portable LLVM vector instructions, which LLVM turns into AVX-512, AVX2 or NEON.
Addresses are plain integers: an array argument would make numba compile every function anew for
each combination of layout, alignment and writability that callers happen to hold.
"""

# numba and llvmlite are untyped, and so is what numba calls back.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 64

_BYTES = ir.VectorType(ir.IntType(8), LANES)
_WORDS = ir.VectorType(ir.IntType(16), LANES)
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


class _VectorType(types.Type):
    """The numba type of 64 bytes in a register."""

    def __init__(self) -> None:
        super().__init__(name="Bytes64")


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _BYTES)


vector = _VectorType()
pair = types.UniTuple(vector, 2)


def _constant(vector_type: Any, value: int) -> Any:
    return ir.Constant(vector_type, [value] * vector_type.count)


def _splat(builder: Any, byte: Any) -> Any:
    one = builder.insert_element(ir.Constant(_BYTES, ir.Undefined), byte, ir.Constant(_I32, 0))
    lanes = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(_BYTES, ir.Undefined), lanes)


def _load(builder: Any, address: Any, vector_type: Any, align: int = 1) -> Any:
    loaded = builder.load(builder.inttoptr(address, vector_type.as_pointer()))
    loaded.align = align
    return loaded


@intrinsic
def pointer8(typing, address):
    """The address as a pointer to uint8 that can be indexed."""
    return _pointer(types.uint8, address)


@intrinsic
def pointer16(typing, address):
    """The address as a pointer to uint16 that can be indexed."""
    return _pointer(types.uint16, address)


@intrinsic
def pointer64(typing, address):
    """The address as a pointer to int64 that can be indexed."""
    return _pointer(types.int64, address)


def _pointer(item: Any, address: Any) -> Any:
    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(item)(address), generate


@intrinsic(prefer_literal=True)
def scratch(typing, size):
    """Address of `size` (a constant) bytes of stack, 64-byte aligned, for the whole call."""
    if not isinstance(size, types.IntegerLiteral):
        return None
    count = size.literal_value

    def generate(context, builder, signature, args):
        with builder.goto_entry_block():
            space = builder.alloca(ir.ArrayType(_I8, count))
        space.align = LANES
        return builder.ptrtoint(space, _I64)

    return types.int64(size), generate


@intrinsic
def load(typing, address):
    """64 bytes from any address."""

    def generate(context, builder, signature, args):
        return _load(builder, args[0], _BYTES)

    return vector(types.int64), generate


@intrinsic
def store(typing, address, value):
    """64 bytes to any address."""

    def generate(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], _BYTES.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, vector), generate


@intrinsic
def stream(typing, address, value):
    """64 bytes to a 64-byte aligned address, past the cache."""

    def generate(context, builder, signature, args):
        stored = builder.store(args[1], builder.inttoptr(args[0], _BYTES.as_pointer()), align=LANES)
        one = builder.module.add_metadata([ir.Constant(_I32, 1)])
        stored.set_metadata("nontemporal", one)
        return context.get_dummy_value()

    return types.void(types.int64, vector), generate


@intrinsic
def prefetch(typing, address):
    """Ask for the cache line at any address, valid or not, that will be used once."""

    def generate(context, builder, signature, args):
        line = builder.inttoptr(args[0], _I8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [line.type, _I32, _I32, _I32])
        declared = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(declared, [line, *(ir.Constant(_I32, n) for n in (0, 0, 1))])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def fence(typing):
    """Makes streamed stores visible before anything that follows."""

    def generate(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def split(typing, address):
    """(exponents, rest) of the 64 BF16 words at the address."""

    def generate(context, builder, signature, args):
        words = _load(builder, args[0], _WORDS)
        left = builder.shl(words, _constant(_WORDS, 1))
        rotated = builder.or_(left, builder.lshr(words, _constant(_WORDS, 15)))
        high = builder.trunc(builder.lshr(rotated, _constant(_WORDS, 8)), _BYTES)
        low = builder.trunc(rotated, _BYTES)
        return context.make_tuple(builder, signature.return_type, (high, low))

    return pair(types.int64), generate


@intrinsic
def join(typing, exponents, rest):
    """The 64 BF16 words made of exponents and rest, as two vectors."""

    def generate(context, builder, signature, args):
        high = builder.shl(builder.zext(args[0], _WORDS), _constant(_WORDS, 8))
        rotated = builder.or_(high, builder.zext(args[1], _WORDS))
        right = builder.lshr(rotated, _constant(_WORDS, 1))
        words = builder.or_(right, builder.shl(rotated, _constant(_WORDS, 15)))
        every = builder.bitcast(words, ir.VectorType(_I8, 2 * LANES))
        halves = [
            builder.shuffle_vector(
                every,
                every,
                ir.Constant(ir.VectorType(_I32, LANES), list(range(start, start + LANES))),
            )
            for start in (0, LANES)
        ]
        return context.make_tuple(builder, signature.return_type, halves)

    return pair(vector, vector), generate


@intrinsic
def join_nibbles(typing, low, high):
    """low | high << 4 of two vectors of codes."""

    def generate(context, builder, signature, args):
        return builder.or_(args[0], builder.shl(args[1], _constant(_BYTES, 4)))

    return vector(vector, vector), generate


@intrinsic
def split_nibbles(typing, codes):
    """(low, high) nibbles."""

    def generate(context, builder, signature, args):
        low = builder.and_(args[0], _constant(_BYTES, 15))
        high = builder.lshr(args[0], _constant(_BYTES, 4))
        return context.make_tuple(builder, signature.return_type, (low, high))

    return pair(vector), generate


@intrinsic
def window_codes(typing, exponents, first, base):
    """(codes, escapes as bits): code 0 is `first`, codes 1 to 15 are `base` and what follows."""

    def generate(context, builder, signature, args):
        offset = builder.sub(args[0], _splat(builder, args[2]))
        inside = builder.icmp_unsigned("<", offset, _constant(_BYTES, 15))
        codes = builder.select(
            inside, builder.add(offset, _constant(_BYTES, 1)), _constant(_BYTES, 0)
        )
        other = builder.icmp_unsigned("!=", args[0], _splat(builder, args[1]))
        escaped = builder.and_(builder.not_(inside), other)
        bits = builder.bitcast(escaped, _I64)
        return context.make_tuple(builder, signature.return_type, (codes, bits))

    returned = types.Tuple((vector, types.int64))
    return returned(vector, types.uint8, types.uint8), generate


@intrinsic
def table_codes(typing, exponents, book):
    """(codes, escapes as bits) by comparing with each of the 16 exponents at address `book`."""

    def generate(context, builder, signature, args):
        entries = builder.inttoptr(args[1], _I8.as_pointer())
        codes, found = _constant(_BYTES, 0), ir.Constant(ir.VectorType(ir.IntType(1), LANES), None)
        for code in range(16):
            entry = builder.load(builder.gep(entries, [ir.Constant(_I32, code)]))
            equal = builder.icmp_unsigned("==", args[0], _splat(builder, entry))
            codes = builder.select(equal, _constant(_BYTES, code), codes)
            found = builder.or_(found, equal)
        bits = builder.bitcast(builder.not_(found), _I64)
        return context.make_tuple(builder, signature.return_type, (codes, bits))

    returned = types.Tuple((vector, types.int64))
    return returned(vector, types.int64), generate


@intrinsic
def window_exponents(typing, codes, first, base):
    """What `window_codes` coded."""

    def generate(context, builder, signature, args):
        before = builder.sub(args[2], ir.Constant(_I8, 1))
        others = builder.add(args[0], _splat(builder, before))
        is_first = builder.icmp_unsigned("==", args[0], _constant(_BYTES, 0))
        return builder.select(is_first, _splat(builder, args[1]), others)

    return vector(vector, types.uint8, types.uint8), generate


@intrinsic
def table_exponents(typing, codes, book):
    """What `table_codes` coded."""

    def generate(context, builder, signature, args):
        entries = builder.inttoptr(args[1], _I8.as_pointer())
        exponents = _constant(_BYTES, 0)
        for code in range(16):
            entry = builder.load(builder.gep(entries, [ir.Constant(_I32, code)]))
            equal = builder.icmp_unsigned("==", args[0], _constant(_BYTES, code))
            exponents = builder.select(equal, _splat(builder, entry), exponents)
        return exponents

    return vector(vector, types.int64), generate


@intrinsic
def trailing_zeros(typing, bits):
    """Index of the lowest set bit; the argument is not zero."""

    def generate(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), generate
