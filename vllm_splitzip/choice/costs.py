"""What KV cache costs on its way from one paged cache to another, by codec mode.

The model follows the connector. On the save side the model runner's thread codes a step's frames
and then hands them to the writer, so that coding and link add up. On the load side several frames
are under way at once, and while one is decoded the next is fetched: the larger of the two stages
counts, and one frame's share of the smaller, which fills the pipeline.

    seconds = encode + put + max(get, decode) + min(get, decode) / frames

A mode pays where this is less than for `raw`, whose "coding" is a copy.
"""

from collections.abc import Mapping
from dataclasses import dataclass

FRAMES = 4
"""Frames of the request that modes are compared on: as many as the loader has under way at once."""

SLOWEST, FASTEST = 1.0, 1e15
"""Bytes per second between which a break-even rate is looked for."""


@dataclass(frozen=True, slots=True)
class Link:
    """A way to or from a store: seconds before the first byte, and bytes per second after it."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, nbytes: float) -> float:
        """Seconds that an object of `nbytes` bytes takes alone."""
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Codec:
    """One mode on one machine. Speeds are bytes of KV cache, not of frames, per second."""

    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Path:
    """The way of one request's KV cache: `frames` frames of `frame_bytes` bytes before coding."""

    put: Link
    get: Link
    frame_bytes: float
    frames: int


@dataclass(frozen=True, slots=True)
class Seconds:
    """Where the time of one request goes; `total` has loads overlapped."""

    encode: float
    put: float
    get: float
    decode: float
    total: float

    @property
    def load(self) -> float:
        """Seconds from the first byte asked for to the last block decoded."""
        return self.total - self.encode - self.put


def overlapped(first_s: float, second_s: float, frames: int) -> float:
    """Two stages of a pipeline over `frames` frames; with one frame, their sum."""
    return max(first_s, second_s) + min(first_s, second_s) / frames


def cost(codec: Codec, path: Path) -> Seconds:
    """Seconds for one request's KV cache to be stored and loaded."""
    nbytes, stored = path.frame_bytes, path.frame_bytes / codec.ratio
    encode = path.frames * nbytes / codec.encode_bytes_per_s
    put = path.frames * path.put.seconds(stored)
    get = path.frames * path.get.seconds(stored)
    decode = path.frames * nbytes / codec.decode_bytes_per_s
    return Seconds(encode, put, get, decode, encode + put + overlapped(get, decode, path.frames))


def costs(codecs: Mapping[str, Codec], path: Path) -> dict[str, float]:
    """Total seconds by mode."""
    return {mode: cost(codec, path).total for mode, codec in codecs.items()}


def cheapest(totals: Mapping[str, float]) -> str:
    """The mode with the least seconds; of equals the first."""
    return min(totals, key=lambda mode: totals[mode])


def break_even(codec: Codec, raw: Codec, frame_bytes: float, frames: int) -> float:
    """Bytes per second of a link, the same in both directions, below which `codec` pays.

    0 where it pays on none, infinity where it pays on every one. Latency is the same for both.
    """

    def pays(rate: float) -> bool:
        link = Link(0.0, rate)
        path = Path(link, link, frame_bytes, frames)
        return cost(codec, path).total < cost(raw, path).total

    low, high = SLOWEST, FASTEST
    if not pays(low):
        return 0.0
    if pays(high):
        return float("inf")
    while high / low > 1 + 1e-9:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low
