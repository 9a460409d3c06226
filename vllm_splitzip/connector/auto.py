"""`codec: auto`: the mode that the link and this machine's codec are worth, now.

Measured are all real puts, gets, encodes and decodes, and how small frames become. A put is timed
over all tiers of the store, a get over the one that answered. Gets of other engines count too, as
`reports.py` hands them on, and of both the slower; while nothing has been loaded anywhere, gets are
taken to be as puts.

What modes that are not in use would cost is known from start-up, where each coded made-up KV cache;
how much slower than there this machine codes under load is taken to be the same for all. How small
a mode would make this model's frames shows in one layer of a frame now and then, which is coded in
it instead.

Modes do not enter keys, and each layer of a frame says how it was coded. So any reader takes what
is stored here, whatever its own setting.
"""

import contextlib
import logging
import random
import threading
from collections.abc import Iterator, Mapping, Sequence

from ..choice.clock import BusyClock
from ..choice.costs import FRAMES, Codec, Link, Path, costs
from ..choice.decider import START, Decider
from ..choice.estimates import WINDOW, LinkEstimate, Quotient
from ..choice.units import rate_text
from ..codec.modes import ITEM_BYTES
from ..frame import Frame, Layer
from .counters import Counters
from .speeds import Speed

logger = logging.getLogger(__name__)

ENOUGH = 3
"""Puts that a first decision needs."""

LAYERS = 64
"""Layers coded last, whose seconds tell how much slower than alone this machine is now."""

PROBE_SHARE = 1 / 64
"""Share of all layers of frames that are coded in a mode that is not in use."""


class AutoCodec:
    """Decides for one rank. All methods may be called from any thread.

    Parameters
    ----------
    speeds
        Of each mode that may be chosen, alone on this machine.
    ratios
        What modes are expected to make of this model's KV cache.
    frame_bytes
        KV cache in a frame.
    latency_s
        Seconds of an empty round trip to the store.
    is_host
        Whether coding is over when `encode` returns. What a GPU takes is known from start-up.
    """

    def __init__(
        self,
        speeds: Mapping[str, Speed],
        ratios: Mapping[str, float],
        frame_bytes: int,
        latency_s: float,
        counters: Counters,
        *,
        is_host: bool,
    ) -> None:
        self._speeds = dict(speeds)
        self._frame_bytes = frame_bytes
        self._counters = counters
        self._is_host = is_host
        self._lock = threading.Lock()
        self._ratios = {
            mode: Quotient(ratios.get(mode, 1.0)) for mode in self._speeds if mode != "raw"
        }
        self._encoding, self._decoding = Quotient(window=LAYERS), Quotient()
        self._put, self._get = LinkEstimate(latency_s), LinkEstimate(latency_s)
        self._heard: Link | None = None
        self._explained = False
        self._seen: tuple[int, Link | None] = 0, None
        self._frames = 0
        self._probes_due = 0.0
        self._random = random.Random(0)
        self._decider = Decider(START if START in self._speeds else "raw")
        self.puts, self.gets = BusyClock(self._add_put), BusyClock(self._add_get)
        self._decodes = BusyClock(self._add_decode)
        counters.add(**{f"codec_{self.mode}": 1})
        logger.info(
            "codec 'auto' begins with %r. KV cache that this machine encodes and decodes: %s; the "
            "store answers in %.1f ms",
            self.mode,
            ", ".join(
                f"{mode} {rate_text(speed.encode)} and {rate_text(speed.decode)}"
                for mode, speed in self._speeds.items()
            ),
            1e3 * latency_s,
        )

    @property
    def mode(self) -> str:
        """The mode in use."""
        return self._decider.mode

    def next_step(self, frames: int, layers: int) -> tuple[str, int | None, str]:
        """Decide for a step of `frames` frames of `layers` layers each.

        Returns
        -------
        The mode; the layer of the step's first frame to be coded in another, if any; that other.
        """
        with self._lock:
            self._decide()
            self._frames += frames
            others = [mode for mode in self._ratios if mode != self.mode]
            self._probes_due += frames * layers * PROBE_SHARE
            unknown = [mode for mode in others if not self._ratios[mode].is_measured]
            if not others or not (unknown or self._probes_due >= 1):
                return self.mode, None, self.mode
            self._probes_due = max(0.0, self._probes_due - 1)
            mode = self._random.choice(unknown or others)
            return self.mode, self._random.randrange(layers), mode

    @property
    def get_link(self) -> Link | None:
        """How fast loads go here; None until there have been a few."""
        with self._lock:
            return self._get.link() if self._get.seen >= ENOUGH else None

    def heard(self, get: Link | None) -> None:
        """Take in how fast loads go in an engine that shares the store; None where none says."""
        with self._lock:
            self._heard = get

    def encoded(self, nbytes_by_mode: Mapping[str, int], seconds: float) -> None:
        """A layer has been coded: bytes of KV cache by mode, and seconds in all."""
        if self._is_host:
            expected_s = sum(
                nbytes / self._speeds[mode].encode
                for mode, nbytes in nbytes_by_mode.items()
                if mode in self._speeds
            )
            with self._lock:
                self._encoding.add(seconds, expected_s)

    def became(self, modes: Sequence[str], layers: Sequence[Layer]) -> None:
        """A frame's layers are there, each asked to be coded in the mode of the same place."""
        sizes = {mode: [0, 0] for mode in self._ratios}
        for mode, layer in zip(modes, layers, strict=True):
            if mode in sizes:
                sizes[mode][0] += _kv_bytes(layer)
                sizes[mode][1] += layer.coded.nbytes
        with self._lock:
            for mode, (nbytes, coded_bytes) in sizes.items():
                self._ratios[mode].add(nbytes, coded_bytes)

    @contextlib.contextmanager
    def decoding(self, frame: Frame) -> Iterator[None]:
        """Context in which a frame is decoded."""
        self._decodes.enter()
        expected_s = 0.0
        try:
            yield
            expected_s = sum(
                _kv_bytes(layer) / self._speeds[layer.coded.mode].decode
                for layer in frame.layers
                if layer.coded.mode in self._speeds
            )
        finally:
            self._decodes.leave(expected_s)

    def _decide(self) -> None:
        seen = self._put.seen + self._get.seen, self._heard
        put = self._put.link()
        if put is None or self._put.seen < ENOUGH or seen == self._seen:
            return
        self._seen = seen
        gets = [get for get in (self._get.link(), self._heard) if get is not None]
        get = max(gets, key=lambda link: link.seconds(self._frame_bytes), default=None)
        path = Path(put, get or put, self._frame_bytes, FRAMES)
        codecs = {mode: self._codec(mode) for mode in self._speeds}
        totals = costs(codecs, path)
        left = self.mode
        evidence = min(1.0, self._put.seen / WINDOW)
        if self._decider.decide(totals, self._frames, evidence):
            self._counters.add(codec_switches=1, **{f"codec_{left}": -1, f"codec_{self.mode}": 1})
            decided = f"now stores KV cache as {self.mode!r}, no longer as {left!r}"
        elif evidence == 1.0 and not self._explained:
            decided = f"goes on to store KV cache as {self.mode!r}"
        else:
            return
        self._explained = True
        logger.info(
            "SplitZip %s: storing and loading %d frames of %.1f MB takes %s; puts at %s, gets %s",
            decided,
            FRAMES,
            self._frame_bytes / 1e6,
            ", ".join(
                f"{totals[mode]:.4g} s as {mode} ({_codec_text(codecs[mode])})"
                for mode in sorted(totals, key=lambda mode: totals[mode])
            ),
            _link_text(put),
            f"at {_link_text(get)}" if get else "taken to be alike",
        )

    def _codec(self, mode: str) -> Codec:
        speed = self._speeds[mode]
        return Codec(
            self._ratios[mode].value if mode in self._ratios else 1.0,
            speed.encode / self._encoding.value,
            speed.decode / self._decoding.value,
        )

    def _add_put(self, nbytes: float, seconds: float) -> None:
        with self._lock:
            self._put.add(nbytes, seconds)

    def _add_get(self, nbytes: float, seconds: float) -> None:
        with self._lock:
            self._get.add(nbytes, seconds)

    def _add_decode(self, expected_s: float, seconds: float) -> None:
        with self._lock:
            self._decoding.add(seconds, expected_s)


def _kv_bytes(layer: Layer) -> int:
    return layer.coded.elements * ITEM_BYTES[layer.format]


def _link_text(link: Link) -> str:
    return f"{rate_text(link.bytes_per_s)} after {1e3 * link.latency_s:.1f} ms"


def _codec_text(codec: Codec) -> str:
    return (
        f"ratio {codec.ratio:.3f}, encode {rate_text(codec.encode_bytes_per_s)}, "
        f"decode {rate_text(codec.decode_bytes_per_s)}"
    )
