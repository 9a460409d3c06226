"""KV-like elements in every number format, and the blocks that hold them."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_splitzip.codec.coded import Blocks
from vllm_splitzip.codec.formats import FORMATS
from vllm_splitzip.codec.packing import channels

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
