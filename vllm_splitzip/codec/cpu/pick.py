"""Vectors for numba loops whose bytes are picked out, put back, or packed by four.

Picking is what makes lists of escapes without a branch for each: whether a byte is one cannot be
predicted, and a wrong guess costs more than all else that is done for the 64 bytes around it.
"""

# numba and llvmlite are untyped, and so is what numba calls back.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from .lanes import _BITS
from .vector import _BYTES, _I8, _I32, LANES, _constant, _load, vector

COMPRESSES = "+avx512vbmi2" in cpu_target.target_context.codegen().magic_tuple()[2]
"""Whether this processor picks bytes out of a vector, or puts them back, in one instruction."""

_QUADS = ir.VectorType(_I32, LANES // 4)
_FOURTHS = ir.VectorType(_I8, LANES // 4)


@intrinsic
def store_pairs(typing, address, numbers):
    """64 numbers of 2 bits to 16 bytes, four after each other in each."""

    def generate(context, builder, signature, args):
        quads = builder.bitcast(args[1], _QUADS)
        joined = quads
        for shift in (6, 12, 18):
            joined = builder.or_(joined, builder.lshr(quads, _constant(_QUADS, shift)))
        packed = builder.trunc(joined, _FOURTHS)
        builder.store(packed, builder.inttoptr(args[0], _FOURTHS.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, vector), generate


@intrinsic
def load_pairs(typing, address):
    """The 64 numbers of 2 bits in 16 bytes."""

    def generate(context, builder, signature, args):
        quads = builder.zext(_load(builder, args[0], _FOURTHS), _QUADS)
        spread = quads
        for shift in (6, 12, 18):
            spread = builder.or_(spread, builder.shl(quads, _constant(_QUADS, shift)))
        return builder.bitcast(builder.and_(spread, _constant(_QUADS, 0x03030303)), _BYTES)

    return vector(types.int64), generate


@intrinsic
def store_chosen(typing, address, bytes_, bits):
    """The bytes that the bits name, one after the other, to any address; 64 are written there."""

    def generate(context, builder, signature, args):
        target = builder.inttoptr(args[0], _BYTES.as_pointer())
        mask = builder.bitcast(args[2], _BITS)
        if COMPRESSES:
            kind = ir.FunctionType(_BYTES, [_BYTES, _BYTES, _BITS])
            chosen = _call(
                builder, kind, "llvm.x86.avx512.mask.compress.v64i8", args[1], args[1], mask
            )
            builder.store(chosen, target, align=1)
        else:
            kind = ir.FunctionType(ir.VoidType(), [_BYTES, target.type, _BITS])
            _call(builder, kind, "llvm.masked.compressstore.v64i8", args[1], target, mask)
        return context.get_dummy_value()

    return types.void(types.int64, vector, types.int64), generate


@intrinsic
def load_chosen(typing, address, bytes_, bits):
    """`bytes_`, with those that the bits name replaced by what lies at the address, in order."""

    def generate(context, builder, signature, args):
        source = builder.inttoptr(args[0], _BYTES.as_pointer())
        mask = builder.bitcast(args[2], _BITS)
        if COMPRESSES:
            kind = ir.FunctionType(_BYTES, [_BYTES, _BYTES, _BITS])
            loaded = _load(builder, args[0], _BYTES)
            return _call(builder, kind, "llvm.x86.avx512.mask.expand.v64i8", loaded, args[1], mask)
        kind = ir.FunctionType(_BYTES, [source.type, _BITS, _BYTES])
        return _call(builder, kind, "llvm.masked.expandload.v64i8", source, mask, args[1])

    return vector(types.int64, vector, types.int64), generate


def _call(builder: Any, kind: Any, name: str, *args: Any) -> Any:
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)
