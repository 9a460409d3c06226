"""Mode `fast`, written to be read: the bytes that every other implementation must reproduce.

One BF16 element is rotated left by one bit, so that its high byte is the exponent and its low
byte holds mantissa and sign. The low byte is kept as it is. The exponent becomes its 4-bit index
in the codebook; an exponent that is not in the codebook gets code 0 and an entry in the escape
stream.

==============  ==================  =========================================================
stream          bytes               content
==============  ==================  =========================================================
dense[0] codes  512 per chunk       byte i = code of element i | code of element i + 512 << 4
dense[1] rest   1 per element       mantissa << 1 | sign
counts          2 per chunk         escapes in the chunk (uint16, little-endian)
positions       2 per escape        element's position within its chunk (uint16)
exponents       1 per escape        the exponent itself
==============  ==================  =========================================================

A chunk is 1,024 consecutive elements; the last one is filled up with code 0. Escapes are ordered
by chunk, then by position. (SplitZip, arXiv 2605.01708, section 3.)
"""

import numpy as np

from ..codebook import Codebook
from ..coded import CHUNK, Coded, Words, chunks_of

HALF = CHUNK // 2
ESCAPE = 255


def encode(words: Words, book: Codebook) -> Coded:
    """Code BF16 bit patterns. Shape: (elements,), uint16."""
    rotated = (words << 1) | (words >> 15)
    exponent = (rotated >> 8).astype(np.uint8)
    rest = (rotated & 0xFF).astype(np.uint8)

    code = book.encoding_table()[exponent]
    escaped = np.flatnonzero(code == ESCAPE)
    code[escaped] = 0

    chunks = chunks_of(words.size)
    padded = np.zeros(chunks * CHUNK, np.uint8)
    padded[: words.size] = code
    low, high = padded.reshape(chunks, 2, HALF).transpose(1, 0, 2)
    counts = np.bincount(escaped // CHUNK, minlength=chunks).astype(np.uint16)
    return Coded(
        mode="fast",
        elements=words.size,
        dense=((low | (high << 4)).reshape(-1).astype(np.uint8), rest),
        tables={
            "counts": counts.view(np.uint8),
            "positions": (escaped % CHUNK).astype(np.uint16).view(np.uint8),
            "exponents": exponent[escaped],
        },
    )


def decode(coded: Coded, book: Codebook) -> Words:
    """The bit patterns back. Returns shape: (elements,), uint16."""
    codes, rest = coded.dense
    low, high = codes & 0xF, codes >> 4
    code = np.stack([low.reshape(-1, HALF), high.reshape(-1, HALF)], axis=1).reshape(-1)
    exponent = book.decoding_table()[code[: coded.elements]]

    counts = coded.tables["counts"].view(np.uint16)
    chunk_of_escape = np.repeat(np.arange(counts.size), counts)
    positions = coded.tables["positions"].view(np.uint16)
    exponent[chunk_of_escape * CHUNK + positions] = coded.tables["exponents"]

    rotated = (exponent.astype(np.uint16) << 8) | rest
    return ((rotated >> 1) | (rotated << 15)).astype(np.uint16)
