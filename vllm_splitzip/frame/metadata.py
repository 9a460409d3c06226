"""A frame's metadata: one msgpack map that says what the dense streams are.

==========  =================================================================================
key         value
==========  =================================================================================
tokens      tokens that the frame's blocks span
codebooks   list of 16-byte codebooks
layers      list of layers, each the list
            [name, format, [blocks, heads, states, content], mode, codebook index or nil,
            [each of the mode's tables], packing]
==========  =================================================================================

`content` counts elements of the number format. Nothing read here is trusted: every size is
checked against what the mode and the shape demand before a stream is looked at.
"""

import math
from typing import Any

import msgpack
import numpy as np

from ..codec.codebook import Codebook
from ..codec.coded import Coded
from ..codec.modes import mode_named
from ..codec.packing import PACKINGS
from ..errors import CodebookError, FrameLayoutError, UnknownModeError
from .frame import Frame, Layer
from .header import aligned

MAX_ELEMENTS = 1 << 40


def pack_metadata(frame: Frame) -> bytes:
    """The msgpack map of `frame`."""
    books: dict[Codebook, int] = {}
    layers = []
    for layer in frame.layers:
        book = None if layer.codebook is None else books.setdefault(layer.codebook, len(books))
        order = mode_named(layer.coded.mode).streams[layer.format].tables
        tables = [layer.coded.tables[name].tobytes() for name in order]
        layers.append(
            [layer.name, layer.format, layer.shape, layer.coded.mode, book, tables, layer.packing]
        )
    packed: bytes = msgpack.packb(
        {"tokens": frame.tokens, "codebooks": [b.exponents for b in books], "layers": layers}
    )
    return packed


def unpack_metadata(metadata: memoryview, data: memoryview, offset: int) -> Frame:
    """The frame whose dense streams lie in `data` from the first aligned byte after `offset`.

    Streams are views of `data`; nothing is copied.

    Raises
    ------
    FrameLayoutError
        When the metadata is not of the form above, or does not account for every byte of `data`.
    """
    try:
        content = msgpack.unpackb(metadata)
        books = [_book(book) for book in content["codebooks"]]
        layers = []
        for entry in content["layers"]:
            layer, offset = _layer(entry, books, data, offset)
            layers.append(layer)
        tokens = _count(content["tokens"])
    except FrameLayoutError:
        raise
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        RecursionError,
        msgpack.UnpackException,
        CodebookError,
        UnknownModeError,
    ) as error:
        raise FrameLayoutError(f"metadata is malformed: {type(error).__name__}: {error}") from None
    if offset != len(data):
        raise FrameLayoutError(f"streams end at byte {offset} of a frame of {len(data)} bytes")
    return Frame(tokens=tokens, layers=tuple(layers))


def _layer(entry: Any, books: list[Codebook], data: memoryview, offset: int) -> tuple[Layer, int]:
    name, format_name, shape, mode_name, book, tables, packing = entry
    mode = mode_named(mode_name)
    if not isinstance(name, str) or format_name not in mode.streams:
        raise FrameLayoutError(f"layer {name!r}: mode {mode_name} has no format {format_name!r}")
    streams = mode.streams[format_name]
    if packing not in PACKINGS:
        raise FrameLayoutError(f"layer {name}: packing {packing!r}, known: {sorted(PACKINGS)}")
    if len(shape) != 4:
        raise FrameLayoutError(f"layer {name}: shape {shape} has not 4 dimensions")
    dims = (_count(shape[0]), _count(shape[1]), _count(shape[2]), _count(shape[3]))
    elements = math.prod(dims)
    if elements > MAX_ELEMENTS:
        raise FrameLayoutError(f"layer {name}: {elements} elements, at most {MAX_ELEMENTS}")
    if type(tables) is not list or len(tables) != len(streams.tables):
        raise FrameLayoutError(f"layer {name}: mode {mode_name} has tables {streams.tables}")
    if (book is None) == streams.needs_codebook:
        raise FrameLayoutError(f"layer {name}: codebook {book!r} in mode {mode_name}")

    dense = []
    for nbytes in streams.dense_bytes(elements):
        padding, start = offset, aligned(offset)
        offset = start + nbytes
        if offset > len(data):
            raise FrameLayoutError(
                f"layer {name}: a stream ends at byte {offset} of a frame of {len(data)} bytes"
            )
        if any(data[padding:start]):
            raise FrameLayoutError(f"layer {name}: bytes {padding} to {start} are not padding")
        dense.append(np.frombuffer(data[start:offset], np.uint8))
    coded = Coded(
        mode=mode_name,
        elements=elements,
        dense=tuple(dense),
        tables={
            key: np.frombuffer(value, np.uint8)
            for key, value in zip(streams.tables, tables, strict=True)
        },
    )
    codebook = None if book is None else books[_count(book)]
    return Layer(name, format_name, dims, coded, codebook, packing), offset


def _book(value: Any) -> Codebook:
    if type(value) is not bytes:  # bytes(7) would be 7 zeros, and bytes(1 << 40) a terabyte.
        raise FrameLayoutError(f"a codebook is {type(value).__name__}, expected bytes")
    return Codebook(value)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise FrameLayoutError(f"{value!r} where a count belongs")
    return value
