"""The connector's own settings: keys of `kv_connector_extra_config`, checked at start-up.

Keys that begin with ``lmcache.`` are LMCache's and are passed on as they are.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from .codec.modes import MODES
from .errors import SettingError

LMCACHE_PREFIX = "lmcache."


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user may set.

    Attributes
    ----------
    codec
        Codec mode that KV cache is stored in.
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
    """

    codec: str = "fast"
    chunk_tokens: int | None = None
    codebook: str = "auto"
    verify: float = 0.0
    load_timeout_s: float = 30.0
    max_store_gib: float | None = None

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> Self:
        """Read the settings. Raises SettingError naming the key, the value and what is allowed."""
        own = {key: value for key, value in extra.items() if not key.startswith(LMCACHE_PREFIX)}
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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


_ALLOWED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "codec": (
        " or ".join(repr(name) for name in sorted(MODES)),
        lambda value: isinstance(value, str) and value in MODES,
    ),
    "chunk_tokens": (
        "a positive integer that is a multiple of the block size",
        lambda value: type(value) is int and value > 0,
    ),
    "codebook": (
        "'auto', the name of a shipped codebook, or the path of a codebook file",
        lambda value: isinstance(value, str) and value != "",
    ),
    "verify": ("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1),
    "load_timeout_s": ("a positive number of seconds", _is_positive),
    "max_store_gib": ("a positive number of GiB", _is_positive),
}
