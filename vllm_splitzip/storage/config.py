"""Where the store's settings come from: LMCache's own file and variables, and vLLM's dict."""

from __future__ import annotations

import difflib
import importlib
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from lmcache.v1.config import LMCacheEngineConfig, load_engine_config_with_overrides
from lmcache.v1.config_base import validate_and_set_config_value

from ..errors import SettingError
from .schemes import check_plugin, check_scheme, explain, redacted

logger = logging.getLogger(__name__)

GIB = 1 << 30
DEFAULT_MAX_STORE_GIB = 10.0
MIN_POOL_BYTES = GIB // 4
POOL_OBJECTS = 6  # objects of the greatest size that the staging pool holds at once
MAX_OBJECT_BYTES = (1 << 31) - 1  # LMCache writes an object's length as a signed 32-bit number

# Parts of LMCache that move KV cache around its storage backends; nothing here would use them.
_FOREIGN = (
    "enable_pd",
    "enable_p2p",
    "gds_path",
    "maru_path",
    "remote_config_url",
    "retrieve_locations",
    "store_location",
)
_TIERS = ("local_disk", "remote_url", "remote_storage_plugins")


@dataclass(frozen=True, slots=True)
class Remote:
    """One remote backend: a URL, or the name of a storage plugin."""

    url: str
    scheme: str  # of `target`
    target: str  # what `url` is in the end, behind audit://
    plugin: str | None = None

    @property
    def label(self) -> str:
        return redacted(self.url)


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Checked settings of a store."""

    lmcache: Any  # LMCacheEngineConfig, a copy that belongs to this store
    hot: bool  # the pool is also a cache of its own (local_cpu)
    disk: bool
    remotes: tuple[Remote, ...]
    pool_bytes: int
    limit_bytes: int | None  # of an fs:// directory; None when LMCache's user set no limit


def default_cache_dir() -> Path:
    """`vllm-splitzip` in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME")
    base = Path(home) if home and Path(home).is_absolute() else Path.home() / ".cache"
    return base / "vllm-splitzip"


def load_config(
    extra: Mapping[str, Any],
    *,
    max_object_bytes: int,
    cache_dir: Path | None = None,
    max_store_gib: float | None = None,
) -> StoreConfig:
    """Reads LMCACHE_CONFIG_FILE, then LMCACHE_*, then the `lmcache.*` keys of `extra`; the last
    wins. Keys of `extra` without that prefix are not looked at.

    Raises
    ------
    SettingError
        See the message; nothing has been created.
    """
    if not 0 < max_object_bytes <= MAX_OBJECT_BYTES:
        raise SettingError(
            f"one frame of this model can take {max_object_bytes / GIB:.3f} GiB, LMCache holds "
            f"objects of at most 2. Choose a smaller chunk_tokens"
        )
    config, given = _read(extra)
    _refuse_foreign(config)
    plugins = config.remote_storage_plugins or []
    default = not any(getattr(config, name) for name in _TIERS) and not (
        config.local_cpu and "local_cpu" in given
    )
    if default:
        directory = cache_dir if cache_dir is not None else default_cache_dir()
        config.remote_url = f"fs://localhost:0{_url_path(directory)}"
    remotes = [_plugin(config, name) for name in plugins]
    if config.remote_url:
        remotes.append(_remote(config))

    disk = bool(config.local_disk)
    if disk and not config.max_local_disk_size:
        raise SettingError(
            f"max_local_disk_size={config.max_local_disk_size}: local_disk is set and may hold "
            f"nothing. Allowed: a size in GB greater than 0"
        )
    hot = bool(config.local_cpu) and bool({"local_cpu", "max_local_cpu_size"} & given)
    config.local_cpu = hot
    if not hot and "max_local_cpu_size" not in given:
        pool = max(MIN_POOL_BYTES, POOL_OBJECTS * max_object_bytes)
        config.max_local_cpu_size = pool / GIB
    pool_bytes = int(config.max_local_cpu_size * GIB)
    if pool_bytes < max_object_bytes:
        raise SettingError(
            f"max_local_cpu_size={config.max_local_cpu_size}: one frame of this model can take "
            f"{max_object_bytes / GIB:.3f} GB. Allowed: that or more"
        )
    if max_store_gib is not None and (
        isinstance(max_store_gib, bool)
        or not isinstance(max_store_gib, int | float)
        or not 0 < max_store_gib < math.inf
    ):
        raise SettingError(f"max_store_gib={max_store_gib!r}. Allowed: a number greater than 0")
    if max_store_gib is None and default:
        max_store_gib = DEFAULT_MAX_STORE_GIB
    return StoreConfig(
        lmcache=config,
        hot=hot,
        disk=disk,
        remotes=tuple(remotes),
        pool_bytes=pool_bytes,
        limit_bytes=None if max_store_gib is None else int(max_store_gib * GIB),
    )


def _read(extra: Mapping[str, Any]) -> tuple[Any, set[str]]:
    """LMCache's configuration, and the names of what somebody set in it."""
    path = os.environ.get("LMCACHE_CONFIG_FILE")
    try:
        config = load_engine_config_with_overrides()
    except (OSError, yaml.YAMLError) as error:
        raise SettingError(f"LMCACHE_CONFIG_FILE={path!r} cannot be read: {error}") from error
    except (ValueError, TypeError, AttributeError, AssertionError) as error:
        raise SettingError(f"LMCache's configuration is not valid: {error!r}") from error
    given = set(config._user_set_keys)
    for key, value in extra.items():
        if not key.startswith("lmcache."):
            continue
        name = key.removeprefix("lmcache.")
        if name not in config._config_definitions:
            near = difflib.get_close_matches(name, config._config_definitions)
            hint = f" Did you mean lmcache.{near[0]}?" if near else ""
            raise SettingError(f"{key}={value!r}: LMCache has no such setting.{hint}")
        if not validate_and_set_config_value(config, name, value):
            kind = config._config_definitions[name]["type"]
            raise SettingError(f"{key}={value!r}. Allowed: {getattr(kind, '__name__', kind)}")
        given.add(name)
    _check_sizes(config)
    if config.remote_serde not in (None, "naive"):
        logger.warning("remote_serde=%r is not used: SplitZip is the codec", config.remote_serde)
    # LMCache caches by layer only inside its engine; for connectors it changes what is stored.
    config.use_layerwise = False
    # Without it a backend gives back objects of one fixed size.
    config.extra_config = {**(config.extra_config or {}), "save_chunk_meta": True}
    return config, given


def _check_sizes(config: LMCacheEngineConfig) -> None:
    # A value that LMCache cannot convert becomes None there, with a line in its log.
    for name in ("max_local_cpu_size", "max_local_disk_size"):
        value = getattr(config, name)
        least = "greater than 0" if name == "max_local_cpu_size" else "of at least 0"
        if not isinstance(value, float | int) or not (
            0 <= value < math.inf and (value > 0 or name == "max_local_disk_size")
        ):
            raise SettingError(f"{name}={value!r}. Allowed: a size in GB {least}")


def _refuse_foreign(config: LMCacheEngineConfig) -> None:
    for name in _FOREIGN:
        if getattr(config, name):
            raise SettingError(
                f"{name}={getattr(config, name)!r}: SplitZipConnector stores through LMCache's "
                f"local_cpu, local_disk and remote backends and does not use this. Leave it out"
            )
    extra = config.extra_config
    if extra.get("enable_nixl_storage"):
        raise SettingError(
            "extra_config.enable_nixl_storage: LMCache's nixl backend stores objects of one "
            "fixed size. Use fs://, redis:// or mooncakestore://"
        )
    if config.storage_plugins:
        raise SettingError(
            f"storage_plugins={config.storage_plugins!r} is not supported yet. "
            f"Use remote_storage_plugins"
        )


def _plugin(config: LMCacheEngineConfig, name: str) -> Remote:
    prefix = f"remote_storage_plugin.{name}"
    extra = config.extra_config
    named = bool(extra.get(f"{prefix}.module_path") and extra.get(f"{prefix}.class_name"))
    check_plugin(name, named)
    if named:
        try:
            module = importlib.import_module(extra[f"{prefix}.module_path"])
            getattr(module, extra[f"{prefix}.class_name"])
        except Exception as error:  # LMCache says it in its log only
            raise SettingError(
                f"{prefix}: {extra[f'{prefix}.module_path']}.{extra[f'{prefix}.class_name']} "
                f"cannot be imported: {explain(error)}"
            ) from error
    url = f"plugin://{name}"
    return Remote(url, name.partition(".")[0], url, name)


def _remote(config: LMCacheEngineConfig) -> Remote:
    config.remote_url = url = _with_host(str(config.remote_url))
    scheme = check_scheme("remote_url", url)
    if scheme != "audit":
        return Remote(url, scheme, url)
    extra = config.extra_config
    actual = extra.get("audit_actual_remote_url", config.audit_actual_remote_url)
    extra["audit_actual_remote_url"] = target = _with_host(str(actual))
    return Remote(url, check_scheme("audit_actual_remote_url", target), target)


def _with_host(url: str) -> str:
    """LMCache documents fs:///PATH, and refuses it for the missing host and port."""
    return url.replace("fs://", "fs://localhost:0", 1) if url.startswith("fs:///") else url


def _url_path(directory: Path) -> str:
    path = str(directory.absolute())
    if any(character in path for character in ",?#"):
        raise SettingError(
            f"cache directory {path!r}: LMCache takes a path with , ? or # apart. "
            f"Set XDG_CACHE_HOME to another directory"
        )
    return path
