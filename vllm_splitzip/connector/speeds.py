"""How fast each codec mode is on this machine, measured at start-up on KV cache made up for it.

What is coded looks like KV cache to the codec: every channel has a size of its own, and its
elements are normally distributed. It lies in memory of its own.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from ..codec.codebook import Codebook
from ..codec.modes import MODES
from .pages import Pages
from .streams import Streams

SAMPLE_BYTES = 8 << 20
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes of KV cache per second, before coding and after decoding."""

    encode: float
    decode: float


def sample_like(cache: torch.Tensor, blocks: int, cache_dtype: str) -> torch.Tensor:
    """Made-up KV cache for a layer. Shape: (blocks, heads, states, content), contiguous.

    Parameters
    ----------
    cache
        The layer's cache, of the same shape but for the number of blocks; nothing of it is read.
    cache_dtype
        What the layer says its cache holds.
    """
    _, heads, states, content = cache.shape
    random = torch.Generator().manual_seed(1)
    sizes = torch.exp2(torch.randn(heads, 1, content, generator=random))
    values = torch.randn(blocks, heads, states, content, generator=random) * sizes
    if cache.dtype == torch.uint8:
        kind = torch.float8_e5m2 if "e5m2" in cache_dtype else torch.float8_e4m3fn
        return values.to(kind).view(torch.uint8).to(cache.device)
    return values.to(cache.dtype).to(cache.device)


def measure_like(
    cache: torch.Tensor,
    cache_dtype: str,
    split: int,
    frame_blocks: int,
    pages_of: Callable[[torch.Tensor, int], Pages],
    book: Codebook,
    streams: Streams,
) -> dict[str, Speed]:
    """Speed of each mode on made-up frames of a layer, a few MB of them.

    Parameters
    ----------
    cache, cache_dtype
        As of `sample_like`.
    split
        Kernel blocks per block of the block table.
    frame_blocks
        Blocks in a frame.
    pages_of
        Called with a cache and its number of blocks.
    """
    most = max(1, SAMPLE_BYTES // (cache[0].numel() * cache.element_size() * split))
    blocks = min(frame_blocks, most)
    runs = most // blocks
    sample = sample_like(cache, runs * blocks * split, cache_dtype)
    tables = [list(range(run * blocks, (run + 1) * blocks)) for run in range(runs)]
    return measure(pages_of(sample, runs * blocks), tables, MODES, book, streams)


def measure(
    pages: Pages,
    tables: Sequence[list[int]],
    modes: Iterable[str],
    book: Codebook,
    streams: Streams,
) -> dict[str, Speed]:
    """Speed of each mode that codes the layer's number format: the best of a few rounds.

    Parameters
    ----------
    pages
        A layer of made-up KV cache.
    tables
        Block tables, each as long as a frame's.
    """
    by_mode = {mode: MODES[mode].streams.get(pages.format) for mode in modes}
    known = [mode for mode, has in by_mode.items() if has is not None]
    best = {mode: (float("inf"), float("inf")) for mode in known}
    for _ in range(ROUNDS):
        for mode in known:  # In turn, so that what else the machine does hits all alike.
            has = by_mode[mode]
            needed = book if has is not None and has.needs_codebook else None
            begin = time.perf_counter()
            with streams.saving():
                pending = [pages.encode(table, mode, needed) for table in tables]
            coded = [finish() for finish in pending]
            middle = time.perf_counter()
            with streams.loading(after=streams.fence()):
                for table, each in zip(tables, coded, strict=True):
                    pages.decode(each, needed, table)
            seconds = middle - begin, time.perf_counter() - middle
            best[mode] = min(best[mode][0], seconds[0]), min(best[mode][1], seconds[1])
    nbytes = sum(pages.block_bytes * len(table) for table in tables)
    return {
        mode: Speed(nbytes / encode, nbytes / decode) for mode, (encode, decode) in best.items()
    }
