"""The connector's own settings: keys of `kv_connector_extra_config`, checked at start-up.

Keys that begin with ``lmcache.`` are LMCache's and are passed on as they are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from .codec.modes import MODES
from .errors import SettingError

LMCACHE_PREFIX = "lmcache."

AUTO = "auto"
"""Value of `codec` for whichever mode the measured link is worth."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user may set.

    Attributes
    ----------
    codec
        Codec mode that KV cache is stored in, or "auto": the one that the store's link, as
        measured, is worth.
    chunk_tokens
        Tokens per frame; a multiple of the block size. None: the smallest multiple that is at
        least 256.
    codebook
        Name of a codebook that the package ships, or path of a codebook file; "auto" picks the
        shipped one for the model.
    verify
        Share of frames (0 to 1) that are decoded again and compared before they are stored.
    load_timeout_s
        Seconds after which a load that has not arrived is given up and recomputed.
    max_store_gib
        GiB that an `fs://` store may fill; what was not used for longest is let go of. None: 10
        for the default store, no limit for one that the user configured.
    trace_dir
        Directory for a timeline of saves and loads, one file per process. None: none is kept.
    """

    codec: str = "fast"
    chunk_tokens: int | None = None
    codebook: str = "auto"
    verify: float = 0.0
    load_timeout_s: float = 30.0
    max_store_gib: float | None = None
    trace_dir: str | None = None

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> Self:
        """Read the settings. Raises SettingError naming the key, the value and what is allowed."""
        own = {
            key: value for key, value in extra.items() if not str(key).startswith(LMCACHE_PREFIX)
        }
        known = [field.name for field in fields(cls)]
        for key, value in own.items():
            if key not in known:
                raise SettingError(
                    f"kv_connector_extra_config has no key {key!r} (value {value!r}); "
                    f"allowed: {', '.join(known)}, and LMCache's own as 'lmcache.<key>'"
                )
            allowed, is_allowed = _ALLOWED[key]
            if not is_allowed(value):
                raise SettingError(
                    f"kv_connector_extra_config[{key!r}] is {value!r}; allowed: {allowed}"
                )
        return cls(**own)


MAX_TIMEOUT_S = 24 * 3600.0
"""No load is worth a longer wait, and the clocks of event loops end somewhere beyond it."""

MAX_STORE_GIB = 1 << 30


def _is_number_within(value: Any, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


_ALLOWED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "codec": (
        " or ".join(repr(name) for name in (*sorted(MODES), AUTO)),
        lambda value: isinstance(value, str) and (value in MODES or value == AUTO),
    ),
    "chunk_tokens": (
        "a positive integer that is a multiple of the block size",
        lambda value: type(value) is int and value > 0,
    ),
    "codebook": (
        "'auto', the name of a shipped codebook, or the path of a codebook file",
        lambda value: isinstance(value, str) and value != "",
    ),
    "verify": ("a number from 0 to 1", lambda value: _is_number_within(value, 0, 1)),
    "load_timeout_s": (
        f"a number of seconds from 0.001 to {MAX_TIMEOUT_S:.0f}",
        lambda value: _is_number_within(value, 0.001, MAX_TIMEOUT_S),
    ),
    "max_store_gib": (
        f"a number of GiB from 0.001 to {MAX_STORE_GIB}",
        lambda value: _is_number_within(value, 0.001, MAX_STORE_GIB),
    ),
    "trace_dir": (
        "the path of a directory",
        lambda value: isinstance(value, str) and value != "",
    ),
}
