"""What modes `dense` and `max` have in common: planes, channels, windows, rotation."""

import itertools

import numpy as np
import pytest

from bits import assert_bits_equal
from vllm_splitzip.codec.formats import FORMATS, number_format
from vllm_splitzip.codec.modes import mode_for
from vllm_splitzip.codec.packing import PACKINGS, channels, packing_of
from vllm_splitzip.codec.planes import (
    TILE,
    pack,
    pack_pairs,
    plane_bytes,
    unpack,
    unpack_pairs,
    widths,
)
from vllm_splitzip.codec.reference.windows import choose_windows, rotate, unrotate
from vllm_splitzip.codec.scheme import DENSE, MAX
from vllm_splitzip.codec.windows import bases
from vllm_splitzip.errors import UnknownModeError
from windowed import UNSIGNED, every_pattern, kv_like

RNG = np.random.default_rng(3)
SHAPE = (2, 32, 64)


@pytest.mark.parametrize("bits", range(1, 8))
@pytest.mark.parametrize("size", [0, 1, 7, 2047, 2048, 2049, 10_000])
def test_planes(bits: int, size: int) -> None:
    numbers = RNG.integers(0, 1 << bits, size).astype(np.uint8)
    planes = pack(numbers, bits)
    assert tuple(plane.nbytes for plane in planes) == plane_bytes(size, bits)
    assert sum(widths(bits)) == bits
    assert_bits_equal(unpack(planes, bits, size), numbers)


def test_where_a_number_stands() -> None:
    """The rule of the module's docstring, number by number."""
    numbers = RNG.integers(0, 128, 2 * TILE).astype(np.uint8)
    below = 0
    for plane, width in zip(pack(numbers, 7), (4, 2, 1), strict=True):
        for i in range(0, 2 * TILE, 13):
            byte = plane[i // TILE * 256 * width + i % TILE % (256 * width)]
            field = byte >> (width * (i % TILE // (256 * width))) & ((1 << width) - 1)
            assert field == (numbers[i] >> below) & ((1 << width) - 1)
        below += width


@pytest.mark.parametrize("size", [0, 1, 4, 5, 1000])
def test_pairs(size: int) -> None:
    numbers = RNG.integers(0, 4, size).astype(np.uint8)
    packed = pack_pairs(numbers)
    assert packed.size == -(-size // 4)
    assert_bits_equal(unpack_pairs(packed)[:size], numbers)
    assert all(packed[i // 4] >> 2 * (i % 4) & 3 == numbers[i] for i in range(size))


@pytest.mark.parametrize("packing", sorted(PACKINGS))
@pytest.mark.parametrize("shape", [(1, 16, 64), (3, 32, 128), (2, 64, 192), (2, 32, 512)])
def test_channels_are_evenly_spread(packing: str, shape: tuple[int, int, int]) -> None:
    known = channels(packing, shape)
    heads, states, content = shape
    assert known.of_position.size == heads * states * content
    assert known.number == heads * (2 if packing == "halves" else content)
    assert (np.bincount(known.of_position) == known.states).all()
    assert (known.of_position[known.positions()] == np.arange(known.number)[:, None]).all()


def test_packings_fit_or_are_refused() -> None:
    assert packing_of(None, (1, 64, 576)) == "tokens"
    assert packing_of("vec", SHAPE) == packing_of("vec16", SHAPE) == "cpu-vec"
    assert packing_of("amx", SHAPE) == "cpu-amx"
    assert packing_of("amx", (2, 24, 64)) == packing_of("amx", (2, 32, 80)) == "halves"
    assert packing_of("neon", SHAPE) == "halves"
    assert packing_of("neon", (1, 4, 7)) == "tokens"
    for packing, shape in [("cpu-amx", (2, 24, 64)), ("cpu-vec", (1, 4, 7)), ("halves", (1, 4, 7))]:
        with pytest.raises(ValueError, match="cannot be packed"):
            channels(packing, shape)
    with pytest.raises(KeyError):
        channels("other", SHAPE)


@pytest.mark.parametrize(
    ("isa", "name"),
    [
        *itertools.product(["vec", "vec16", "amx"], ["bf16", "fp16"]),
        *itertools.product(["vec", "amx"], ["e4m3", "e5m2"]),  # vLLM has no FP8 cache for vec16.
    ],
)
@pytest.mark.parametrize("shape", [(2, 32, 128), (1, 64, 512), (3, 96, 64)])
def test_packings_are_those_of_vllm(isa: str, name: str, shape: tuple[int, int, int]) -> None:
    """vLLM's own kernel packs a number that names each element, one bit of it at a time."""
    import torch
    import vllm._C  # noqa: F401  registers the kernel

    heads, states, content = shape
    dtype = torch.float16 if name == "fp16" else torch.bfloat16
    cache_dtype = {"e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}.get(name, "auto")
    channel = torch.arange(heads * content).view(1, heads, 2, content // 2)
    channel = channel.expand(states, -1, -1, -1)
    found = np.zeros(heads * states * content, np.uint32)
    for bit in range(int(channel.max()).bit_length()):
        key, value = ((channel >> bit) & 1).to(dtype).unbind(2)
        cache = torch.zeros(
            (1, heads, 2 * states, content // 2),
            dtype=dtype if cache_dtype == "auto" else torch.uint8,
        )
        keys, values = cache.chunk(2, dim=2)
        torch.ops._C.cpu_attn_reshape_and_cache(
            key.contiguous(), value.contiguous(), keys, values, torch.arange(states), isa,
            1.0, 1.0, cache_dtype,
        )  # fmt: skip
        bits = cache.view(torch.uint8).reshape(found.size, -1).numpy().any(axis=1)
        found |= bits.astype(np.uint32) << bit
    assert_bits_equal(found, channels(packing_of(isa, shape), shape).of_position)


@pytest.mark.parametrize("name", FORMATS)
def test_rotation_is_undone_for_every_pattern_and_window(name: str) -> None:
    """Each pattern at each of a few bases; top and low byte alone hold all of it."""
    elements = every_pattern(name)
    known = channels("tokens", (1, elements.size // 16, 16))
    for first in range(0, 256, 16):
        windows = np.arange(first, first + 16).astype(np.uint8)
        top, low = rotate(elements, FORMATS[name], known, windows)
        assert low.size == (elements.size if FORMATS[name].item == 2 else 0)
        assert_bits_equal(unrotate(top, low, FORMATS[name], known, windows), elements)


@pytest.mark.parametrize("name", FORMATS)
def test_windows_are_where_the_elements_are(name: str) -> None:
    """Nearly all of what real KV looks like lies within 8 binades of the base."""
    rows = kv_like(name, 8, SHAPE)
    known = channels("tokens", SHAPE)
    for schemes, share in ((DENSE, 0.97), (MAX, 0.65)):
        scheme = schemes[name]
        windows = choose_windows(rows.reshape(-1), scheme.number_format, known, scheme.placement)
        top, _ = rotate(rows.reshape(-1), scheme.number_format, known, windows)
        binades = (1 << scheme.code) - (scheme.code == 2)
        assert (top >> scheme.below < binades).mean() > share
        zeros = windows[known.number // 3]
        assert zeros == 0, "a channel of zeros gets the base 0"
        assert bases(np.zeros(1, np.uint8), scheme.number_format) == 0


def test_no_rows_no_elements() -> None:
    scheme = DENSE["bf16"]
    known = channels("tokens", SHAPE)
    nothing = np.zeros(0, np.uint16)
    windows = choose_windows(nothing, scheme.number_format, known, scheme.placement)
    assert windows.size == known.number
    assert not windows.any()
    assert rotate(nothing, scheme.number_format, known, windows)[0].size == 0


def test_extreme_channels_keep_their_base_in_range() -> None:
    """Denormals, huge numbers and NaNs: any window is right, but it has to exist."""
    for name in FORMATS:
        scheme = DENSE[name]
        known = channels("tokens", (1, 4, 16))
        item = UNSIGNED[scheme.number_format.item]
        for magnitude in (0, 1, scheme.number_format.magnitudes - 1):
            rows = np.full((4, 64), magnitude).astype(item)
            windows = choose_windows(
                rows.reshape(-1), scheme.number_format, known, scheme.placement
            )
            top, low = rotate(rows.reshape(-1), scheme.number_format, known, windows)
            back = unrotate(top, low, scheme.number_format, known, windows)
            assert_bits_equal(back, rows.reshape(-1))


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "name"),
    [
        ("bfloat16", "auto", "bf16"),
        ("bfloat16", "bfloat16", "bf16"),
        ("float16", "auto", "fp16"),
        ("uint8", "fp8", "e4m3"),
        ("uint8", "fp8_e4m3", "e4m3"),
        ("uint8", "fp8_e5m2", "e5m2"),
        ("float8_e4m3fn", "fp8_inc", "e4m3"),
        ("uint8", "auto", "bytes"),
        ("uint8", "nvfp4", "bytes"),
        ("uint8", "fp8_ds_mla", "bytes"),
        ("uint8", "fp8_per_token_head", "bytes"),
        ("uint8", "turboquant_4bit_nc", "bytes"),
        ("int8", "int8_per_token_head", "bytes"),
        ("float32", "auto", "bytes"),
        ("bfloat16", "fp8", "bytes"),
    ],
)
def test_format_follows_from_the_cache_dtype(dtype: str, cache_dtype: str, name: str) -> None:
    torch = pytest.importorskip("torch")
    assert number_format(getattr(torch, dtype), cache_dtype) == name


def test_a_format_that_a_mode_does_not_code_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mode_for.cache_clear()
    assert [mode_for("fast", "fp16") for _ in range(3)] == ["raw"] * 3
    assert [mode_for("max", "bytes") for _ in range(3)] == ["raw"] * 3
    assert [mode_for("dense", "fp16"), mode_for("raw", "bytes")] == ["dense", "raw"]
    assert [record.args for record in caplog.records] == [("fast", "fp16"), ("max", "bytes")]
    with pytest.raises(UnknownModeError, match="known: dense, fast, max, raw"):
        mode_for("zip", "bf16")
