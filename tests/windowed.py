"""KV-like elements in every number format, the blocks that hold them, and what codes them."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bits import assert_bits_equal, assert_same_streams
from vllm_splitzip.codec.coded import Blocks, Coded
from vllm_splitzip.codec.cpu import dense as cpu_dense
from vllm_splitzip.codec.cpu import max as cpu_max
from vllm_splitzip.codec.formats import FORMATS
from vllm_splitzip.codec.packing import Channels, channels
from vllm_splitzip.codec.reference import dense as reference_dense
from vllm_splitzip.codec.reference import max as reference_max
from vllm_splitzip.codec.scheme import DENSE, FAST, MAX, Scheme

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e5m2": torch.float8_e5m2,
    "e4m3": torch.float8_e4m3fn,
}
UNSIGNED: dict[int, type[Any]] = {1: np.uint8, 2: np.uint16}


def every_pattern(name: str) -> npt.NDArray[Any]:
    """All bit patterns of a format."""
    return np.arange(2 * FORMATS[name].magnitudes).astype(UNSIGNED[FORMATS[name].item])


def kv_like(
    name: str,
    rows: int,
    shape: tuple[int, int, int],
    packing: str = "tokens",
    seed: int = 0,
    wild: float = 0.0,
) -> npt.NDArray[Any]:
    """Shape: (rows, row). Channels of different size; a share `wild` of elements may be anything.

    Normal variates times a scale per channel have the exponents of real KV, a channel of zeros and
    a first token that is much smaller than the others included.
    """
    rng = np.random.default_rng(seed)
    known = channels(packing, shape)
    scale = np.exp2(rng.normal(0, 1.2, known.number))
    if known.number > 4:
        scale[known.number // 3] = 0
    values = rng.normal(size=(rows, known.of_position.size)) * scale[known.of_position]
    if rows:
        values[0, known.positions()[:, 0]] /= 64
    tensor = torch.from_numpy(values.astype(np.float32)).to(DTYPES[name])
    item = FORMATS[name].item
    bits = tensor.view({1: torch.uint8, 2: torch.int16}[item]).numpy().view(UNSIGNED[item])
    anything = rng.random(bits.shape) < wild
    bits[anything] = rng.choice(every_pattern(name), int(anything.sum()))
    return bits


def blocks_of(
    rows: npt.NDArray[Any],
    name: str,
    shape: tuple[int, int, int],
    packing: str = "tokens",
    seed: int = 0,
) -> Blocks:
    """The rows as blocks that lie in random order, between others, with gaps between rows."""
    rng = np.random.default_rng(seed)
    number, row = rows.shape
    table = rng.permutation(number + 3)[:number].astype(np.int64)
    room = np.full((number + 3, row + 64), 0xAD, rows.dtype)
    pages = room[:, :row]
    pages[table] = rows
    return Blocks(pages, table, name, channels(packing, shape))


def flat(blocks: Blocks) -> npt.NDArray[Any]:
    """The elements of a run, in order."""
    return blocks.pages[blocks.table].reshape(-1)


def empty_like(blocks: Blocks) -> Blocks:
    """The same blocks, to be decoded into."""
    pages = np.full((len(blocks.pages), blocks.row + 64), 0xBE, blocks.pages.dtype)
    return Blocks(pages[:, : blocks.row], blocks.table, blocks.format, blocks.channels)


SHAPE = (2, 32, 64)
"""Of a block: 4,096 elements."""


@dataclass(frozen=True)
class Coder:
    """A mode with windows in one number format, on the CPU and in the reference."""

    mode: str
    scheme: Scheme

    @property
    def name(self) -> str:
        """Of the number format."""
        return self.scheme.number_format.name

    @property
    def cpu(self) -> ModuleType:
        """Where the mode is coded."""
        return cpu_max if self.mode == "max" else cpu_dense

    @property
    def one(self) -> int:
        """The bit pattern of the number 1."""
        number_format = self.scheme.number_format
        return (number_format.magnitudes >> 1) - (1 << number_format.mantissa)

    def reference(self, blocks: Blocks) -> Coded:
        """What the reference makes of a run."""
        assert blocks.channels is not None
        if self.mode == "max":
            return reference_max.encode(flat(blocks), self.scheme, blocks.channels)
        return reference_dense.encode(flat(blocks), self.scheme, blocks.channels, self.mode)

    def reference_elements(self, coded: Coded, known: Channels) -> npt.NDArray[Any]:
        """What the reference decodes."""
        decode = reference_max.decode if self.mode == "max" else reference_dense.decode
        return decode(coded, self.scheme, known)

    def encode(self, blocks: Blocks, threads: int = 2) -> Coded | None:
        """On the CPU; None where coding does not pay."""
        if self.mode == "max":
            return cpu_max.encode_max(blocks, self.scheme, threads)
        return cpu_dense.encode_dense(blocks, self.scheme, self.mode, threads)

    def decode(self, coded: Coded, blocks: Blocks, threads: int = 2) -> None:
        """On the CPU, into the blocks."""
        decode = cpu_max.decode_max if self.mode == "max" else cpu_dense.decode_dense
        decode(coded, self.scheme, blocks, threads)

    def some_blocks(self, rows: int = 9, **how: Any) -> Blocks:
        """Of `SHAPE`."""
        return blocks_of(kv_like(self.name, rows, SHAPE, **how), self.name, SHAPE)

    def check(self, blocks: Blocks, threads: int = 2) -> Coded:
        """Encode and decode like the reference; returns what the reference says."""
        assert blocks.channels is not None
        elements = flat(blocks)
        expected = self.reference(blocks)
        assert_bits_equal(self.reference_elements(expected, blocks.channels), elements)
        actual = self.encode(blocks, threads)
        if expected.nbytes < elements.nbytes:
            assert actual is not None
            assert_same_streams(actual, expected)
        else:
            assert actual is None
        back = empty_like(blocks)
        self.decode(expected, back, threads)
        assert_bits_equal(flat(back), elements)
        others = np.setdiff1d(np.arange(len(back.pages)), back.table)
        assert (back.pages[others] == 0xBE).all()
        return expected


DENSE_CODERS = [
    *(Coder("dense", scheme) for scheme in DENSE.values()),
    *(Coder("fast", scheme) for scheme in FAST.values()),
]
MAX_CODERS = [Coder("max", scheme) for scheme in MAX.values()]


def coder_id(coder: Coder) -> str:
    """For the names of tests."""
    return f"{coder.mode}-{coder.name}"


def with_one(stream: npt.NDArray[Any], index: int, value: int) -> npt.NDArray[Any]:
    """A copy of a stream with another value in one place."""
    changed = stream.copy()
    changed[index] = value
    return changed
