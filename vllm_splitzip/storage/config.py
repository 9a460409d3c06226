"""Where the store's settings come from: LMCache's own file and variables, and vLLM's dict."""

from __future__ import annotations

import importlib
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lmcache.v1.config import LMCacheEngineConfig

from ..errors import SettingError
from .paged import SETTING as PAGE_SETTING
from .schemes import (
    PAGED,
    REFUSED_EXTRA,
    REFUSED_SETTINGS,
    STORAGE_PLUGIN,
    UNTRIED,
    check_plugin,
    check_scheme,
    explain,
    redacted,
)
from .written import Written, read_settings

Named = Callable[[str], str]

logger = logging.getLogger(__name__)

GIB = 1 << 30
DEFAULT_MAX_STORE_GIB = 10.0
MIN_POOL_BYTES = 64 << 20  # all of it is in memory from the start
POOL_OBJECTS = 6  # objects of the greatest size that the staging pool holds at once
MAX_OBJECT_BYTES = (1 << 31) - 1  # LMCache writes an object's length as a signed 32-bit number

# redis-py gives up an answer that has not arrived whole after 5 s, which a frame on a slow link
# has not. How long a call may take is for its caller to say.
_PATIENCE = "socket_timeout=86400"

_TIERS = ("local_disk", "remote_url", "remote_storage_plugins", "storage_plugins")


@dataclass(frozen=True, slots=True)
class Remote:
    """One remote backend: a URL, or the name of a storage plugin."""

    url: str
    scheme: str  # of `target`; of plugins what schemes.py calls them
    target: str  # what `url` is in the end, behind audit://
    plugin: str | None = None

    @property
    def label(self) -> str:
        return redacted(self.url.replace(_PATIENCE, "").rstrip("?&"))


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
    written = read_settings(extra)
    config, given = _config_of(written), written.keys()

    def named(name: str) -> str:
        """What a setting is called where it was written."""
        return written[name].label if name in written else name

    _check_sizes(config, named)
    _refuse_foreign(config, named)
    _check_own(config, named)
    try:
        config.validate()
    except (ValueError, AssertionError) as error:
        raise SettingError(f"LMCache refuses its settings: {explain(error)}") from error
    plugins = config.remote_storage_plugins or []
    default = not any(getattr(config, name) for name in _TIERS) and not (
        config.local_cpu and "local_cpu" in given
    )
    if default:
        directory = cache_dir if cache_dir is not None else default_cache_dir()
        config.remote_url = f"fs://localhost:0{_url_path(directory)}"
    remotes = [_plugin(config, name, named) for name in plugins]
    if config.remote_url:
        remotes.append(_remote(config, named("remote_url")))
    remotes += [_storage_plugin(config, name, named) for name in config.storage_plugins or []]
    for remote in remotes:
        _check_credentials(config, remote)
        if remote.scheme in UNTRIED:
            logger.warning(
                "%s: this project has not been run with LMCache's %s backend. A failure of it "
                "costs hits, no more",
                remote.label,
                remote.scheme,
            )

    disk = bool(config.local_disk)
    if disk and not config.max_local_disk_size:
        raise SettingError(
            f"{named('local_disk')}={config.local_disk!r}: {named('max_local_disk_size')} is "
            f"{'0' if 'max_local_disk_size' in given else 'not given'}, so that it may hold "
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
            f"{named('max_local_cpu_size')}={config.max_local_cpu_size}: one frame of this "
            f"model can take {max_object_bytes / GIB:.3f} GB. Allowed: that or more"
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


def _config_of(written: Mapping[str, Written]) -> LMCacheEngineConfig:
    config = LMCacheEngineConfig.from_dict({name: one.value for name, one in written.items()})
    if config.remote_serde not in (None, "naive"):
        logger.warning("remote_serde=%r is not used: SplitZip is the codec", config.remote_serde)
    # LMCache caches by layer only inside its engine; for connectors it changes what is stored.
    config.use_layerwise = False
    # Without it a backend gives back objects of one fixed size.
    config.extra_config = {**(config.extra_config or {}), "save_chunk_meta": True}
    return config


def _check_sizes(config: LMCacheEngineConfig, named: Named) -> None:
    if config.chunk_size < 1:
        raise SettingError(
            f"{named('chunk_size')}={config.chunk_size}. Allowed: a number of tokens, at least 1"
        )
    for name in ("max_local_cpu_size", "max_local_disk_size"):
        value = getattr(config, name)
        least = "greater than 0" if name == "max_local_cpu_size" else "of at least 0"
        if not 0 <= value < math.inf or (value == 0 and name == "max_local_cpu_size"):
            raise SettingError(f"{named(name)}={value!r}. Allowed: a size in GB {least}")


def _refuse_foreign(config: LMCacheEngineConfig, named: Named) -> None:
    """Refuses parts of LMCache that move KV cache around its storage backends; nothing here would
    use them."""
    for name, why in REFUSED_SETTINGS.items():
        if getattr(config, name):
            raise SettingError(
                f"{named(name)}={getattr(config, name)!r}: SplitZipConnector stores through "
                f"LMCache's local_cpu, local_disk, remote and plugin backends; LMCache's engine "
                f"alone uses this, and {why}. Leave it out"
            )
    for name, why in REFUSED_EXTRA.items():
        if config.extra_config.get(name):
            raise SettingError(f"{named('extra_config')}.{name}: {why}. Leave it out")


def _check_own(config: LMCacheEngineConfig, named: Named) -> None:
    """Refuses what is called like a setting of this package in `extra_config`, and is none."""
    for name, value in config.extra_config.items():
        if str(name).startswith("splitzip_") and name != PAGE_SETTING:
            raise SettingError(
                f"{named('extra_config')}.{name}={value!r}: there is no such setting. "
                f"Did you mean {PAGE_SETTING}?"
            )


def _plugin(config: LMCacheEngineConfig, name: str, named: Named) -> Remote:
    prefix = f"remote_storage_plugin.{name}"
    scheme = check_plugin(
        named("remote_storage_plugins"), name, _has_class(config.extra_config, prefix)
    )
    url = f"plugin://{name}"
    return Remote(url, scheme, url, name)


def _storage_plugin(config: LMCacheEngineConfig, name: str, named: Named) -> Remote:
    prefix = f"storage_plugin.{name}"
    if not _has_class(config.extra_config, prefix):
        raise SettingError(
            f"{named('storage_plugins')}={name!r}: extra_config has no {prefix}.module_path and "
            f".class_name"
        )
    url = f"{STORAGE_PLUGIN}://{name}"
    return Remote(url, STORAGE_PLUGIN, url, name)


def _has_class(extra: Mapping[str, Any], prefix: str) -> bool:
    """Whether a plugin's class is named.

    Raises
    ------
    SettingError
        It is, and cannot be imported, which LMCache says in its log only.
    """
    module, name = extra.get(f"{prefix}.module_path"), extra.get(f"{prefix}.class_name")
    if not module or not name:
        return False
    try:
        getattr(importlib.import_module(module), name)
    except Exception as error:
        raise SettingError(
            f"{prefix}: {module}.{name} cannot be imported: {explain(error)}"
        ) from error
    return True


def _remote(config: LMCacheEngineConfig, setting: str) -> Remote:
    config.remote_url = url = _with_host(str(config.remote_url))
    scheme = check_scheme(setting, url)
    if scheme in ("redis", "rediss", "unix") and "socket_timeout=" not in url:
        config.remote_url = url = f"{url}{'&' if '?' in url else '?'}{_PATIENCE}"
    if scheme != "audit":
        return Remote(url, scheme, url)
    extra = config.extra_config
    actual = extra.get("audit_actual_remote_url", config.audit_actual_remote_url)
    if not actual:
        raise SettingError(
            f"{setting}={redacted(url)!r}: extra_config has no audit_actual_remote_url. "
            f"Allowed: the URL of the backend that audit:// shows the use of"
        )
    extra["audit_actual_remote_url"] = target = _with_host(str(actual))
    kind = check_scheme("audit_actual_remote_url", target)
    if kind in (*PAGED, "mooncakestore", "audit"):
        raise SettingError(
            f"audit_actual_remote_url={redacted(target)!r}: {kind}:// cannot be behind audit://. "
            f"Use it as remote_url"
        )
    return Remote(url, kind, target)


def _check_credentials(config: LMCacheEngineConfig, remote: Remote) -> None:
    extra = config.extra_config
    if remote.scheme == "resp":
        password = extra.get("password") or os.environ.get("LMCACHE_RESP_PASSWORD")
        if password and not (extra.get("username") or os.environ.get("LMCACHE_RESP_USERNAME")):
            raise SettingError(
                "extra_config.password: LMCache's resp backend connects to no server with a "
                "password alone. Add extra_config.username; Redis's own user is 'default'"
            )
    if remote.scheme == "s3" and not extra.get("s3_region"):
        raise SettingError(
            f"{remote.label}: extra_config has no s3_region. Allowed: the bucket's region, such "
            f"as us-east-1"
        )
    for name in ("valkey_username", "valkey_password"):
        if remote.scheme == "valkey" and extra.get(name):
            raise SettingError(
                f"extra_config.{name}: LMCache {version('lmcache')} hands a valkey server the "
                f"user's name as password and the password as name. Use redis:// for this server"
            )


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
