"""The fixed header that every frame begins with.

======  =====  ==========================================================================
offset  bytes  field (little-endian)
======  =====  ==========================================================================
0       8      magic, ``SPLITZIP``
8       4      format version, 1
12      4      length of the metadata that follows the header
16      8      length of the whole frame
24      16     xxh3-128 of the key that the frame is stored under
40      8      xxh3-64 of the whole frame, computed with these 8 bytes set to zero
48      -      metadata: one msgpack map (see ``metadata.py``)
-       -      dense streams in the metadata's order, each at the next multiple of 64 bytes
======  =====  ==========================================================================

All bytes between streams are zero; the frame ends with the last stream's last byte.
"""

import struct
from dataclasses import dataclass

from ..errors import FrameTruncatedError, FrameVersionError

MAGIC = b"SPLITZIP"
VERSION = 1
ALIGNMENT = 64
CHECKSUM_AT = 40

_LAYOUT = struct.Struct("<8sIIQ16sQ")
SIZE = _LAYOUT.size


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of the fixed header, lengths in bytes."""

    metadata_bytes: int
    frame_bytes: int
    key_digest: bytes
    checksum: int = 0

    def pack(self) -> bytes:
        """The header's 48 bytes."""
        return _LAYOUT.pack(
            MAGIC, VERSION, self.metadata_bytes, self.frame_bytes, self.key_digest, self.checksum
        )


def parse(data: memoryview) -> Header:
    """Read and check the header of a frame that should span all of `data`.

    Raises
    ------
    FrameTruncatedError
        When `data` is not exactly as long as the header says.
    FrameVersionError
        When it is no frame, or one of another format version.
    """
    if len(data) < SIZE:
        raise FrameTruncatedError(f"{len(data)} bytes, but a frame's header alone has {SIZE}")
    magic, version, metadata_bytes, frame_bytes, key_digest, checksum = _LAYOUT.unpack_from(data)
    if magic != MAGIC:
        raise FrameVersionError(f"begins with {magic!r}, but a frame begins with {MAGIC!r}")
    if version != VERSION:
        raise FrameVersionError(f"format version {version}, but this package reads {VERSION}")
    if frame_bytes != len(data):
        raise FrameTruncatedError(f"{len(data)} bytes, but the header says {frame_bytes}")
    if SIZE + metadata_bytes > frame_bytes:
        raise FrameTruncatedError(
            f"metadata of {metadata_bytes} bytes does not fit a frame of {frame_bytes}"
        )
    return Header(metadata_bytes, frame_bytes, key_digest, checksum)


def aligned(offset: int) -> int:
    """The next multiple of the alignment of dense streams."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
