"""What the worker half counts, as plain numbers that add up over steps and ranks."""

import threading
from dataclasses import dataclass, field

from ..codec.modes import MODES

NAMES = (
    "frames_saved",
    "raw_bytes_saved",
    "stored_bytes_saved",
    "frames_dropped",
    "frames_loaded",
    "stored_bytes_loaded",
    "frames_failed",
    "encode_seconds",
    "put_seconds",
    "get_seconds",
    "decode_seconds",
    "codec_switches",
)

CODEC_IN_USE = {f"codec_{mode}": mode for mode in MODES}
"""Counts up and down: ranks that store in this mode now."""

HELD = ("requests_open", "lookups_open", "loads_open", "frames_waiting")
"""Counts up and down: what the halves hold on to now. All are 0 when an engine is idle."""

GAUGES = (*CODEC_IN_USE, *HELD)


def _zeros() -> dict[str, float]:
    return dict.fromkeys((*NAMES, *GAUGES), 0.0)


@dataclass(slots=True)
class Counters:
    """Thread-safe counts since they were last taken."""

    _values: dict[str, float] = field(default_factory=_zeros)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, **amounts: float) -> None:
        """Add to some counts."""
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount

    def take(self) -> dict[str, float] | None:
        """The counts since the last call, or None if nothing was counted."""
        with self._lock:
            if not any(self._values.values()):
                return None
            taken, self._values = self._values, _zeros()
            return taken
