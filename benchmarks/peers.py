"""Other lossless compressors, each as a pair of functions on a layer's contiguous BF16 bytes."""

from collections.abc import Callable
from dataclasses import dataclass

import blosc2
import lz4.frame
import numpy as np
import zstandard
from zipnn import ZipNN

Encode = Callable[[bytes], bytes]
Decode = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Peer:
    """A compressor; `make` gives its two functions for a number of threads."""

    name: str
    make: Callable[[int], tuple[Encode, Decode]]


def _zipnn(threads: int) -> tuple[Encode, Decode]:
    codec = ZipNN(method="HUFFMAN", bytearray_dtype="bfloat16", threads=threads)
    # It writes to what it is given.
    return lambda data: bytes(codec.compress(bytearray(data))), lambda data: bytes(
        codec.decompress(bytearray(data))
    )


def _zstd(level: int) -> Callable[[int], tuple[Encode, Decode]]:
    def make(threads: int) -> tuple[Encode, Decode]:
        encoder = zstandard.ZstdCompressor(level=level, threads=threads if threads > 1 else 0)
        return encoder.compress, zstandard.ZstdDecompressor().decompress

    return make


def _zstd_split(level: int) -> Callable[[int], tuple[Encode, Decode]]:
    """Exponents alone through zstd, the other byte as it is: what a plain split achieves."""
    whole = _zstd(level)

    def make(threads: int) -> tuple[Encode, Decode]:
        squeeze, expand = whole(threads)

        def encode(data: bytes) -> bytes:
            words = np.frombuffer(data, np.uint16)
            rotated = (words << 1) | (words >> 15)
            exponents = squeeze((rotated >> 8).astype(np.uint8).tobytes())
            return exponents + (rotated & 0xFF).astype(np.uint8).tobytes()

        def decode(data: bytes) -> bytes:
            exponents = np.frombuffer(expand(data), np.uint8)
            rest = np.frombuffer(data, np.uint8)[-exponents.size :]
            rotated = (exponents.astype(np.uint16) << 8) | rest
            return ((rotated >> 1) | (rotated << 15)).tobytes()

        return encode, decode

    return make


def _lz4(_: int) -> tuple[Encode, Decode]:
    return lz4.frame.compress, lz4.frame.decompress


def _blosc(filters: blosc2.Filter, codec: blosc2.Codec) -> Callable[[int], tuple[Encode, Decode]]:
    def make(threads: int) -> tuple[Encode, Decode]:
        blosc2.set_nthreads(threads)
        return lambda data: blosc2.compress2(
            data, typesize=2, clevel=1, codec=codec, filters=[filters], nthreads=threads
        ), lambda data: blosc2.decompress2(data, nthreads=threads)

    return make


PEERS = (
    Peer("zipnn", _zipnn),
    Peer("zstd -1", _zstd(1)),
    Peer("zstd -3", _zstd(3)),
    Peer("zstd -1, exponents", _zstd_split(1)),
    Peer("lz4", _lz4),
    Peer("blosc2 bitshuffle zstd", _blosc(blosc2.Filter.BITSHUFFLE, blosc2.Codec.ZSTD)),
    Peer("blosc2 shuffle zstd", _blosc(blosc2.Filter.SHUFFLE, blosc2.Codec.ZSTD)),
    Peer("blosc2 bitshuffle lz4", _blosc(blosc2.Filter.BITSHUFFLE, blosc2.Codec.LZ4)),
)
