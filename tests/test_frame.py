"""The frame: what goes in comes out, and whatever is wrong with its bytes is a typed error."""

import msgpack
import numpy as np
import pytest
import xxhash

from bits import assert_bits_equal
from vllm_splitzip.codec import host
from vllm_splitzip.codec.codebook import Codebook
from vllm_splitzip.codec.coded import Coded
from vllm_splitzip.codec.formats import FORMATS
from vllm_splitzip.codec.modes import MODES
from vllm_splitzip.codec.reference import fast as reference
from vllm_splitzip.errors import (
    FrameChecksumError,
    FrameError,
    FrameKeyError,
    FrameLayoutError,
    FrameTruncatedError,
    FrameVersionError,
)
from vllm_splitzip.frame import Frame, Layer, header, pack, unpack
from windowed import blocks_of, empty_like, flat, kv_like

KEY = b"sz1-0123456789abcdef/0/0/1/" + bytes(32)
BOOK = Codebook(bytes(range(115, 131)))


def small_frame(seed: int = 0) -> Frame:
    """Three layers: one coded with a few escapes, one raw, one empty."""
    random = np.random.default_rng(seed)
    values = random.normal(size=2 * 1 * 4 * 160).astype(np.float32)
    words = (values.view(np.uint32) >> 16).astype(np.uint16)
    words[::97] = 0
    raw = random.integers(0, 256, 60, np.uint8)
    empty = reference.encode(words[:0], BOOK)
    return Frame(
        tokens=64,
        layers=(
            Layer("model.layers.0", "bf16", (2, 1, 4, 160), reference.encode(words, BOOK), BOOK),
            Layer("model.layers.1", "bytes", (2, 3, 5, 2), Coded("raw", 60, (raw,))),
            Layer("model.layers.2", "bf16", (0, 1, 4, 160), empty, BOOK),
        ),
    )


def as_bytes(frame: Frame, key: bytes = KEY) -> bytearray:
    parts, nbytes = pack(frame, key)
    data = bytearray(b"".join(parts))
    assert len(data) == nbytes
    return data


def signed(data: bytearray) -> bytearray:
    """The frame with its length and checksum made right again, so that a change gets past them."""
    data[16:24] = len(data).to_bytes(8, "little")
    data[40:48] = bytes(8)
    data[40:48] = xxhash.xxh3_64(bytes(data)).intdigest().to_bytes(8, "little")
    return data


def with_metadata(change) -> bytearray:
    """A well-signed frame whose metadata was changed by `change(map)`, or replaced by bytes."""
    data = as_bytes(small_frame())
    length = int.from_bytes(data[12:16], "little")
    content = msgpack.unpackb(bytes(data[48 : 48 + length]))
    replaced = change(content)
    packed = replaced if isinstance(replaced, bytes) else msgpack.packb(content)
    streams = data[header.aligned(48 + length) :]
    begin = bytes(data[:48]) + packed
    data = bytearray(begin + bytes(header.aligned(len(begin)) - len(begin)) + streams)
    data[12:16] = len(packed).to_bytes(4, "little")
    return signed(data)


def assert_same(actual: Frame, expected: Frame) -> None:
    assert actual.tokens == expected.tokens
    for a, e in zip(actual.layers, expected.layers, strict=True):
        assert (a.name, a.format, a.shape) == (e.name, e.format, e.shape)
        assert (a.codebook, a.packing) == (e.codebook, e.packing)
        assert (a.coded.mode, a.coded.elements) == (e.coded.mode, e.coded.elements)
        for stream, other in zip(a.coded.dense, e.coded.dense, strict=True):
            assert stream.tobytes() == other.tobytes()
        assert {k: v.tobytes() for k, v in a.coded.tables.items()} == {
            k: v.tobytes() for k, v in e.coded.tables.items()
        }


def test_what_goes_in_comes_out():
    assert_same(unpack(memoryview(as_bytes(small_frame())), KEY), small_frame())


@pytest.mark.parametrize(
    ("mode", "name"),
    [(mode, name) for mode in MODES for name in FORMATS if name in MODES[mode].streams],
)
def test_every_mode_and_format(mode: str, name: str) -> None:
    """What the codec makes of a layer goes through a frame, and is decoded from its views."""
    shape = (2, 32, 64)
    blocks = blocks_of(kv_like(name, 8, shape, "cpu-vec"), name, shape, "cpu-vec")
    book = BOOK if MODES[mode].streams[name].needs_codebook else None
    coded = host.encode(blocks, mode, book)
    assert coded.mode == mode
    frame = Frame(256, (Layer("model.layers.0", name, (8, *shape), coded, book, "cpu-vec"),))
    (layer,) = unpack(memoryview(as_bytes(frame)), KEY).layers
    assert layer.packing == "cpu-vec"
    back = empty_like(blocks)
    host.decode(layer.coded, layer.codebook, back)
    assert_bits_equal(flat(back), flat(blocks))


def test_streams_are_aligned_views_of_the_frame():
    data = np.zeros(1 << 16, np.uint8)
    packed = np.frombuffer(as_bytes(small_frame()), np.uint8)
    start = -data.ctypes.data % header.ALIGNMENT
    data[start : start + packed.size] = packed
    frame = unpack(memoryview(data[start : start + packed.size]), KEY)
    for layer in frame.layers:
        for stream in layer.coded.dense:
            assert stream.size == 0 or stream.ctypes.data % header.ALIGNMENT == 0
            assert stream.size == 0 or np.shares_memory(stream, data)


def test_every_flipped_bit_is_found():
    data = as_bytes(small_frame())
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(FrameError):
            unpack(memoryview(data), KEY)
        data[bit // 8] ^= 1 << (bit % 8)
    unpack(memoryview(data), KEY)


def test_every_truncation_is_found():
    data = as_bytes(small_frame())
    for length in range(len(data)):
        with pytest.raises(FrameTruncatedError):
            unpack(memoryview(data)[:length], KEY)
    with pytest.raises(FrameTruncatedError, match=f"{len(data) + 1} bytes"):
        unpack(memoryview(data + b"\0"), KEY)


def test_a_frame_is_bound_to_its_key():
    with pytest.raises(FrameKeyError):
        unpack(memoryview(as_bytes(small_frame())), KEY[:-1] + b"\1")


def test_other_versions_and_other_files_are_refused():
    data = as_bytes(small_frame())
    data[8] = 2
    with pytest.raises(FrameVersionError, match="format version 2"):
        unpack(memoryview(signed(data)), KEY)
    with pytest.raises(FrameVersionError, match="begins with"):
        unpack(memoryview(b"PK\3\4" + bytes(100)), KEY)


def test_a_wrong_checksum_is_named():
    data = as_bytes(small_frame())
    data[-1] ^= 1
    with pytest.raises(FrameChecksumError, match="the header says"):
        unpack(memoryview(data), KEY)


def _set(index, field, value):
    def change(content):
        content["layers"][index][field] = value

    return change


MALFORMED = {
    "no map": lambda _: msgpack.packb([1, 2]),
    "no msgpack": lambda _: b"\xc1\xc1\xc1",
    "trailing bytes": lambda content: msgpack.packb(content) + b"\0",
    "empty": lambda _: b"",
    "nested too deeply": lambda _: b"\x91" * 5000 + b"\xc0",
    "huge array": lambda _: b"\xdd\xff\xff\xff\xff",
    "huge binary": lambda _: b"\xc6\xff\xff\xff\xff",
    "no layers": lambda content: content.pop("layers") and None,
    "no tokens": lambda content: content.pop("tokens") and None,
    "tokens below zero": lambda content: content.update(tokens=-1),
    "tokens of the wrong type": lambda content: content.update(tokens=True),
    "a layer too few": lambda content: content["layers"].pop() and content["layers"].pop() and None,
    "a layer too many": lambda content: content["layers"].append(content["layers"][1]),
    "codebook too short": lambda content: content.update(codebooks=[b"abc"]),
    "codebook that is a number": lambda content: content.update(codebooks=[1 << 62]),
    "codebook that is a list": lambda content: content.update(codebooks=[list(range(16))]),
    "codebook with a repeated entry": lambda content: content.update(codebooks=[bytes(16)]),
    "codebook that is not there": _set(0, 4, 7),
    "codebook below zero": _set(0, 4, -1),
    "no codebook": _set(0, 4, None),
    "a codebook in mode raw": _set(1, 4, 0),
    "unknown mode": _set(0, 3, "zip"),
    "mode of the wrong type": _set(0, 3, {}),
    "unknown format": _set(0, 1, "int3"),
    "format that the mode does not code": _set(0, 1, "fp16"),
    "name of the wrong type": _set(0, 0, 5),
    "shape with a dimension too few": _set(0, 2, [2, 1, 4]),
    "shape below zero": _set(0, 2, [-2, 1, 4, 160]),
    "shape too large for the frame": _set(0, 2, [2, 1, 4, 161]),
    "shape too small for the frame": _set(1, 2, [2, 3, 5, 1]),
    "shape of an exabyte": _set(0, 2, [1 << 30, 1 << 15, 1 << 15, 1 << 30]),
    "shape that overflows": _set(0, 2, [1 << 62, 1 << 62, 1, 1]),
    "a table too few": lambda content: content["layers"][0][5].pop() and None,
    "a table too many": lambda content: content["layers"][0][5].append(b""),
    "no packing": lambda content: content["layers"][0].pop() and None,
    "unknown packing": _set(0, 6, "zigzag"),
    "packing of the wrong type": _set(0, 6, []),
    "mode whose tables are others": _set(0, 3, "dense"),
    "a table of the wrong type": lambda content: content["layers"][0][5].insert(
        0, content["layers"][0][5].pop() and 5
    ),
    "tables by name": _set(0, 5, {"counts": b"", "positions": b"", "exponents": b""}),
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED)
def test_malformed_metadata_with_a_good_checksum_is_refused(change):
    with pytest.raises(FrameLayoutError):
        unpack(memoryview(with_metadata(change)), KEY)


def test_metadata_may_not_reach_beyond_the_frame():
    data = as_bytes(small_frame())
    data[12:16] = (1 << 31).to_bytes(4, "little")
    with pytest.raises(FrameTruncatedError, match="does not fit"):
        unpack(memoryview(signed(data)), KEY)
