"""A frame to bytes and back. What goes wrong with the bytes ends in one typed FrameError."""

from collections.abc import Sequence

import xxhash

from ..errors import FrameChecksumError, FrameKeyError
from . import header
from .frame import Frame
from .metadata import pack_metadata, unpack_metadata

Part = bytes | memoryview


def pack(frame: Frame, key: bytes) -> tuple[Sequence[Part], int]:
    """The frame as stored under `key`: parts to be laid end to end, and their length in bytes.

    Dense streams are not copied; they must not change until the parts have been written.
    """
    metadata = pack_metadata(frame)
    parts: list[Part] = [metadata]
    end = header.SIZE + len(metadata)
    for layer in frame.layers:
        for stream in layer.coded.dense:
            start = header.aligned(end)
            if start > end:
                parts.append(bytes(start - end))
            parts.append(stream.data)
            end = start + stream.nbytes

    fields = header.Header(len(metadata), end, xxhash.xxh3_128_digest(key))
    checksum = xxhash.xxh3_64(fields.pack())
    for part in parts:
        checksum.update(part)
    signed = header.Header(
        fields.metadata_bytes, fields.frame_bytes, fields.key_digest, checksum.intdigest()
    )
    return [signed.pack(), *parts], end


def unpack(data: memoryview, key: bytes) -> Frame:
    """The frame in `data`, which was fetched by `key`. Its streams are views of `data`.

    Raises
    ------
    FrameTruncatedError, FrameVersionError, FrameChecksumError, FrameKeyError, FrameLayoutError
        Each says what was observed and what was expected. Nothing large has been allocated.
    """
    data = data.cast("B").toreadonly()
    fields = header.parse(data)
    checksum = xxhash.xxh3_64(data[: header.CHECKSUM_AT])
    checksum.update(bytes(header.SIZE - header.CHECKSUM_AT))
    checksum.update(data[header.SIZE :])
    if checksum.intdigest() != fields.checksum:
        raise FrameChecksumError(
            f"checksum {checksum.intdigest():016x}, but the header says {fields.checksum:016x}"
        )
    key_digest = xxhash.xxh3_128_digest(key)
    if key_digest != fields.key_digest:
        raise FrameKeyError(
            f"stored under a key of digest {fields.key_digest.hex()}, "
            f"but fetched by one of digest {key_digest.hex()}"
        )
    metadata_end = header.SIZE + fields.metadata_bytes
    return unpack_metadata(data[header.SIZE : metadata_end], data, metadata_end)
