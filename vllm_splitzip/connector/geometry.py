"""How a model's KV cache is cut into frames: pure arithmetic that both halves share.

Tokens are counted in *units*, the scheduler's block size, since a hit can only end on a unit. A
*chunk* is a run of units that one frame covers. The layers of a rank are sorted into *parts* by
how long their KV cache is needed: all layers with full attention are one part, all with a sliding
window of one width another. A model whose layers are all alike has one part, and then a frame
holds all of a rank's layers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import SettingError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

DEFAULT_CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Part:
    """Layers that need the same stretch of tokens.

    Attributes
    ----------
    index
        Position in `Geometry.parts`; part of the key that frames are stored under.
    window
        Width of the sliding window in tokens; None for full attention.
    groups
        KV cache groups whose layers these are.
    """

    index: int
    window: int | None
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Units, chunks and parts of one model in one engine.

    Attributes
    ----------
    unit_tokens
        Tokens per unit.
    hash_tokens
        Tokens per entry of `Request.block_hashes`; divides `unit_tokens`.
    chunk_units
        Units per chunk.
    group_blocks
        Blocks per unit, by KV cache group.
    parts
        Ordered: full attention first, then by window.
    """

    unit_tokens: int
    hash_tokens: int
    chunk_units: int
    group_blocks: tuple[int, ...]
    parts: tuple[Part, ...]

    def chunk_start(self, unit: int) -> int:
        """First unit of the chunk that `unit` lies in."""
        return unit // self.chunk_units * self.chunk_units

    def first_needed(self, part: Part, end: int) -> int:
        """First unit whose KV cache `part` needs when the next token is the first of unit `end`."""
        if part.window is None:
            return 0
        skipped_tokens = max(0, end * self.unit_tokens - part.window + 1)
        return skipped_tokens // self.unit_tokens


def geometry_of(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", chunk_tokens: int | None
) -> Geometry:
    """The geometry of an engine. `chunk_tokens` is the setting of that name.

    Raises
    ------
    SettingError
        When `chunk_tokens` is not a multiple of the engine's block size.
    """
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    unit, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    if chunk_tokens is None:
        chunk_tokens = -(-DEFAULT_CHUNK_TOKENS // unit) * unit
    if chunk_tokens % unit:
        raise SettingError(
            f"kv_connector_extra_config['chunk_tokens'] is {chunk_tokens}; "
            f"allowed: a multiple of the block size, {unit}"
        )

    groups_by_window: dict[int | None, list[int]] = {}
    group_blocks = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        spec = getattr(spec, "first_spec", spec)
        window = _window(spec)
        groups_by_window.setdefault(window, []).append(index)
        group_blocks.append(unit // spec.block_size)
    ordered = sorted(groups_by_window.items(), key=lambda item: item[0] or 0)
    return Geometry(
        unit_tokens=unit,
        hash_tokens=hash_tokens,
        chunk_units=chunk_tokens // unit,
        group_blocks=tuple(group_blocks),
        parts=tuple(
            Part(index, window, tuple(groups)) for index, (window, groups) in enumerate(ordered)
        ),
    )


def _window(spec: object) -> int | None:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    if isinstance(spec, SlidingWindowSpec):
        return spec.sliding_window + spec.extra_retained_tokens
    return None
