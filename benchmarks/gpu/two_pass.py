"""The algorithm of the paper's public artifact, as the measure for ours: written anew from its
description, and kept as it is where that costs time.

Encode goes over the input twice: once for the dense streams and the number of escapes in each
chunk, then, after a prefix sum and a wait for its last value, once more for the escapes. Exponents
are looked up one by one, four elements share a 64-bit word, an escape takes 7 bytes: its chunk
(int32), its position there, and the exponent. Input and output are contiguous.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_splitzip.codec.codebook import Codebook

CHUNK = 1024
CHUNKS: tl.constexpr = tl.constexpr(2)
"""Chunks in a program of the dense passes."""
QUADS: tl.constexpr = tl.constexpr(512)
ESCAPES: tl.constexpr = tl.constexpr(256)


@dataclass
class Streams:
    """What is stored of a run of elements."""

    codes: torch.Tensor
    rests: torch.Tensor
    chunks: torch.Tensor
    positions: torch.Tensor
    exponents: torch.Tensor


def tables(book: Codebook, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(exponent -> code or 255, code -> exponent)."""
    return (
        torch.tensor(book.encoding_table(), device=device),
        torch.tensor(book.decoding_table(), device=device),
    )


def encode(words: torch.Tensor, table: torch.Tensor) -> Streams:
    """Code a multiple of 1,024 BF16 bit patterns (int16). Waits for the device."""
    chunks, device = words.numel() // CHUNK, words.device
    codes = torch.empty(words.numel() // 4, dtype=torch.int16, device=device)
    rests = torch.empty(words.numel() // 4, dtype=torch.int32, device=device)
    counts = torch.zeros(chunks, dtype=torch.int32, device=device)
    encode_dense[(triton.cdiv(chunks, 2),)](words, table, codes, rests, counts, chunks)
    ends = torch.cumsum(counts, 0)
    number = int(ends[-1].item())
    escapes = Streams(
        codes,
        rests,
        chunks=torch.empty(number, dtype=torch.int32, device=device),
        positions=torch.empty(number, dtype=torch.int16, device=device),
        exponents=torch.empty(number, dtype=torch.uint8, device=device),
    )
    if number:
        encode_escapes[(chunks,)](
            words, table, ends - counts, escapes.chunks, escapes.positions, escapes.exponents
        )
    return escapes


def decode(streams: Streams, table: torch.Tensor, words: torch.Tensor) -> None:
    """Write the bit patterns back."""
    chunks, number = words.numel() // CHUNK, streams.chunks.numel()
    decode_dense[(triton.cdiv(chunks, 2),)](streams.codes, streams.rests, table, words, chunks)
    if number:
        decode_escapes[(triton.cdiv(number, ESCAPES.value),)](
            streams.chunks, streams.positions, streams.exponents, words, number
        )


@triton.jit(do_not_specialize=["chunks"])
def encode_dense(words, table, codes, rests, counts, chunks):
    quad = tl.program_id(0).to(tl.int64) * QUADS + tl.arange(0, QUADS)
    live = quad < chunks.to(tl.int64) * 256
    quads = tl.load(words.to(tl.pointer_type(tl.int64), bitcast=True) + quad, mask=live, other=0)
    code, rest = tl.zeros((QUADS,), tl.int32), tl.zeros((QUADS,), tl.int32)
    escapes = tl.zeros((QUADS,), tl.int32)
    for i in tl.static_range(4):
        element = (quads >> 16 * i).to(tl.int32)
        found = tl.load(table + (element >> 7 & 0xFF)).to(tl.int32)
        escaped = found == 255
        escapes += escaped.to(tl.int32)
        code |= tl.where(escaped, 0, found) << 4 * i
        rest |= (element & 0x7F | element >> 8 & 0x80) << 8 * i
    tl.store(codes + quad, code.to(tl.int16), mask=live)
    tl.store(rests + quad, rest, mask=live)
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    count = tl.sum(tl.reshape(tl.where(live, escapes, 0), (CHUNKS, QUADS // CHUNKS)), axis=1)
    tl.store(counts + chunk, count, mask=chunk < chunks)


@triton.jit
def encode_escapes(words, table, firsts, chunks, positions, exponents):
    chunk = tl.program_id(0)
    position = tl.arange(0, 1024)
    element = tl.load(words + chunk.to(tl.int64) * 1024 + position).to(tl.int32)
    exponent = element >> 7 & 0xFF
    escaped = tl.load(table + exponent) == 255
    rank = tl.cumsum(escaped.to(tl.int32), 0) - 1
    at = tl.load(firsts + chunk) + rank
    tl.store(chunks + at, tl.zeros((1024,), tl.int32) + chunk, mask=escaped)
    tl.store(positions + at, position.to(tl.int16), mask=escaped)
    tl.store(exponents + at, exponent.to(tl.uint8), mask=escaped)


@triton.jit(do_not_specialize=["chunks"])
def decode_dense(codes, rests, table, words, chunks):
    quad = tl.program_id(0).to(tl.int64) * QUADS + tl.arange(0, QUADS)
    live = quad < chunks.to(tl.int64) * 256
    code = tl.load(codes + quad, mask=live, other=0).to(tl.int32)
    rest = tl.load(rests + quad, mask=live, other=0)
    quads = tl.zeros((QUADS,), tl.int64)
    for i in tl.static_range(4):
        exponent = tl.load(table + (code >> 4 * i & 15)).to(tl.int32)
        byte = rest >> 8 * i
        element = exponent << 7 | byte & 0x7F | (byte & 0x80) << 8
        quads |= element.to(tl.int64) << 16 * i
    tl.store(words.to(tl.pointer_type(tl.int64), bitcast=True) + quad, quads, mask=live)


@triton.jit(do_not_specialize=["number"])
def decode_escapes(chunks, positions, exponents, words, number):
    at = tl.program_id(0) * ESCAPES + tl.arange(0, ESCAPES)
    live = at < number
    chunk = tl.load(chunks + at, mask=live, other=0).to(tl.int64)
    word = words + chunk * 1024 + tl.load(positions + at, mask=live, other=0)
    exponent = tl.load(exponents + at, mask=live, other=0).to(tl.int32)
    kept = tl.load(word, mask=live, other=0).to(tl.int32) & 0x807F
    tl.store(word, (exponent << 7 | kept).to(tl.int16), mask=live)
