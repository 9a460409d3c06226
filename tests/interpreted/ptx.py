"""The three PTX instructions that the kernels use, for Triton's interpreter.

Written from the PTX ISA's description, so that what a GPU will execute is executed here too.
"""

import re
from types import SimpleNamespace

import numpy as np
from triton.runtime.interpreter import TensorHandle

INSTRUCTION = re.compile(r"(\S+) (\$\d(?:, (?:\$?\w+))+);")


def inline_asm(_builder, asm, constraints, values, types, is_pure, pack):
    """Replaces `InterpreterBuilder.create_inline_asm`."""
    assert is_pure
    assert pack == 1
    # The interpreter prints a constant's type along with it.
    asm = re.sub(r"constexpr\[(\d+)\]", r"\1", asm)
    name, operands = INSTRUCTION.fullmatch(asm).groups()
    target, *sources = operands.split(", ")
    assert target == "$0"
    inputs = [values[int(s[1:]) - 1].data if s[0] == "$" else int(s, 0) for s in sources]
    assert constraints.count(",") == len(values)
    result = {"prmt.b32": prmt, "lop3.b32": lop3, "mad.wide.s32": mad_wide}[name](*inputs)
    handle = TensorHandle(result, types[0].scalar)
    return SimpleNamespace(get_result=lambda _: handle)


def prmt(a, b, selector):
    assert a.dtype == b.dtype == np.uint32
    pool = (b.astype(np.uint64) << np.uint64(32)) | a
    selector = np.asarray(selector, np.uint64)
    result = np.uint32(0)
    for i in range(4):
        nibble = selector >> np.uint64(4 * i) & np.uint64(15)
        byte = (pool >> np.uint64(8) * (nibble & np.uint64(7))).astype(np.uint32) & np.uint32(0xFF)
        signs = np.where(byte & 0x80, np.uint32(0xFF), np.uint32(0))
        result |= np.where(nibble & np.uint64(8), signs, byte) << np.uint32(8 * i)
    return result


def lop3(a, b, c, table):
    """Bit by bit, bit (a, b, c) of the table."""
    assert a.dtype == b.dtype == np.uint32
    result = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            picked = (a if i & 4 else ~a) & (b if i & 2 else ~b)
            result |= picked & np.uint32(c if i & 1 else ~c & 0xFFFFFFFF)
    return result


def mad_wide(a, b, c):
    assert (a.dtype, b.dtype, c.dtype) == (np.int32, np.int32, np.int64)
    return a.astype(np.int64) * b.astype(np.int64) + c
