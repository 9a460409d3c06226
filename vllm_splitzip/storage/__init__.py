"""Storage: moves opaque objects through LMCache's own backends. Knows no codec and no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .base import Buffer, Fetched, Health, ObjectKey, Store, StoreStats

__all__ = ["Buffer", "Fetched", "Health", "ObjectKey", "Store", "StoreStats", "open_store"]


def open_store(
    extra: Mapping[str, Any],
    *,
    max_object_bytes: int,
    cache_dir: Path | None = None,
    max_store_gib: float | None = None,
) -> Store:
    """Opens the store that LMCache's configuration describes, or the default one.

    Parameters
    ----------
    extra
        `kv_connector_extra_config`; its `lmcache.*` keys win over LMCACHE_* variables,
        and those over LMCACHE_CONFIG_FILE. Other keys are not looked at.
    max_object_bytes
        no object is larger; the staging pool holds at least this much.
    cache_dir
        of the default fs:// store; `vllm-splitzip` in the user's cache directory
        unless given.
    max_store_gib
        limit of an fs:// store in GiB. The default store has 10 unless given,
        one that LMCache's configuration names has none unless given.

    Raises
    ------
    SettingError
        Names the setting, its value and what is allowed. A server that does not
        answer is no error: its calls miss until it does.
    """
    from .quiet import quiet_lmcache  # imports of LMCache take seconds

    with quiet_lmcache():
        from .config import load_config
        from .lmcache_tiers import LMCacheStore

        config = load_config(
            extra,
            max_object_bytes=max_object_bytes,
            cache_dir=cache_dir,
            max_store_gib=max_store_gib,
        )
        return LMCacheStore(config, max_object_bytes)
