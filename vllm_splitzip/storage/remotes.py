"""Opening the remote backends, each with what it needs around LMCache's connector."""

from __future__ import annotations

import contextlib
import copy
import errno
import importlib
import os
import pkgutil
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lmcache.v1.storage_backend import connector

from ..errors import SettingError, StoreError
from .config import Remote, StoreConfig
from .connection import Traits
from .fs import Files
from .guards import check_metadata_format
from .janitor import TMP_PREFIX, Janitor
from .mooncake import Mooncake, fill_in, master_of
from .paged import PagedConnector, PagePool, page_bytes_of
from .plugin import PluginConnector, launch
from .pool import StagingPool
from .remote import RemoteTier
from .s3 import S3
from .schemes import PAGED, STORAGE_PLUGIN

OPEN_S = 5.0  # start-up waits this long for a remote that does not answer

# Of a directory that can never be used, whoever tries. Others say that a file system is not there.
_UNUSABLE = {
    errno.ENOENT,  # its parent is one in which nothing can be made, as /proc
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EINVAL,
}


def open_remote(
    remote: Remote, config: StoreConfig, metadata: Any, pool: StagingPool
) -> RemoteTier:
    """
    Raises
    ------
    SettingError
        LMCache cannot use the remote as it is configured.
    """
    try:
        check_metadata_format()
    except StoreError as error:
        raise SettingError(f"{remote.label}: {error}") from error
    _import_connector(remote.scheme)
    lmcache = copy.copy(config.lmcache)
    tmp_name = _own_tmp_name(lmcache)
    lmcache.extra_config = {
        **lmcache.extra_config,
        "fs_connector_relative_tmp_dir": tmp_name,
        "save_chunk_meta": remote.scheme not in PAGED,
    }
    if remote.scheme == "mooncakestore":
        fill_in(lmcache.extra_config, remote.target, remote.label)
    opener = _opener(remote, lmcache, metadata, pool)

    tier: RemoteTier
    if remote.scheme == "fs":
        tier = FsTier(
            remote.label,
            opener,
            _directories(remote, lmcache),
            limit=config.limit_bytes,
            tmp_name=tmp_name,
            pool=pool,
        )
    else:
        tier = RemoteTier(remote.label, opener, _traits(remote.scheme), check_metadata_format)
    try:
        tier.open(OPEN_S)
    except BaseException:
        tier.close()
        raise
    return tier


def _opener(remote: Remote, lmcache: Any, metadata: Any, pool: StagingPool) -> Callable[[Any], Any]:
    """What makes a connector on an event loop."""

    def create(loop: Any, local_cpu: Any, metadata: Any) -> Any:
        opened = connector.CreateConnector(
            remote.url, loop, local_cpu, lmcache, metadata, remote.plugin
        )
        # Without LMCache's instruments: they keep a number per call for a reporter that only
        # its engine runs.
        return opened.getWrappedConnector()

    def paged(loop: Any) -> Any:
        page_bytes = page_bytes_of(lmcache.extra_config)
        lmcache.save_unfull_chunk = False  # asked of LMCache's users by the same connectors
        pages = PagePool(copy.copy(lmcache), page_bytes)
        inner = create(loop, pages, pages.metadata)
        if remote.scheme == "s3":
            inner = S3(inner)
        return PagedConnector(inner, pages, pool, page_bytes)

    def mooncake(loop: Any) -> Any:
        master = master_of(lmcache.extra_config)
        if master is not None:
            _knock(f"mooncakestore://{master}")  # it would try for 90 s
        return Mooncake(create(loop, pool, metadata), pool)

    def plugin(loop: Any) -> Any:
        return PluginConnector(launch(str(remote.plugin), lmcache, metadata, loop, pool))

    def plain(loop: Any) -> Any:
        if remote.scheme == "lm":
            _knock(remote.target)
        return create(loop, pool, metadata)

    if remote.scheme in PAGED:
        page_bytes_of(lmcache.extra_config)
        return paged
    return {"mooncakestore": mooncake, STORAGE_PLUGIN: plugin}.get(remote.scheme, plain)


class FsTier(RemoteTier):
    """An fs:// store, with its limit."""

    def __init__(
        self,
        label: str,
        opener: Callable[[Any], Any],
        directories: Sequence[Path],
        *,
        limit: int | None,
        tmp_name: str,
        pool: StagingPool,
    ) -> None:
        self._directories = directories
        self._janitor = Janitor(directories, ".data", limit, tmp_name)

        def files(loop: Any) -> Files:
            return Files(opener(loop), self.path_of, self._janitor, pool)

        super().__init__(label, files, Traits(), check_metadata_format)

    @property
    def evicted(self) -> int:
        return self._janitor.evicted

    def get(self, key: Any, timeout_s: float, late: Callable[[Any], None]) -> Any | None:
        obj = super().get(key, timeout_s, late)
        if obj is not None:
            self._janitor.touch(self.path_of(key))
        return obj

    def _is_setting_error(self, error: Exception) -> bool:
        unusable = isinstance(error, OSError) and error.errno in _UNUSABLE
        return unusable or super()._is_setting_error(error)

    def _prepare(self, key: Any, nbytes: int, deadline: float, *, fresh: bool) -> bool:
        if not fresh and self.exists([key], max(0.0, deadline - time.monotonic()))[0]:
            self._janitor.touch(self.path_of(key))
            return True
        self._janitor.make_room(nbytes, deadline)
        return False

    def path_of(self, key: Any) -> Path:
        """Where LMCache's fs connector keeps it."""
        name = f"{key.to_string().replace('/', '-SEP-')}.data"
        return self._directories[key.chunk_hash % len(self._directories)] / name

    def close(self) -> None:
        super().close()
        self._janitor.close()


def _traits(scheme: str) -> Traits:
    if scheme == "lm":  # talks over one socket, and lets go of its lock between header and body
        return Traits(width=1, confirms=False)
    return Traits(
        cancellable=_is_redis(scheme),
        confirms=scheme not in ("infinistore", "hf3fs", "eic", "sagemaker-hyperpod"),
        replaces=scheme != "mooncakestore",
    )


def _is_redis(scheme: str) -> bool:
    return scheme.startswith("redis") or scheme == "unix"


def _import_connector(scheme: str) -> None:
    """Imports now, while LMCache is kept quiet, what it imports when it connects."""
    kind = "redis" if _is_redis(scheme) else scheme
    for module in pkgutil.iter_modules(connector.__path__):
        if module.name.endswith("_adapter") or module.name == f"{kind}_connector":
            with contextlib.suppress(ImportError):
                importlib.import_module(f"{connector.__name__}.{module.name}")


def _knock(url: str) -> None:
    """LMCache's lm connector connects without a time limit, and leaves its socket when it fails.

    Raises
    ------
    OSError
        Nobody listens.
    """
    parsed = urlparse(url)
    if parsed.hostname and parsed.port:
        socket.create_connection((parsed.hostname, parsed.port), OPEN_S).close()


def _own_tmp_name(lmcache: Any) -> str:
    """LMCache's fs connector writes a key under one temporary name, the same in every process;
    in a directory per process, two writers do not tear each other's file."""
    configured = lmcache.get_extra_config_value("fs_connector_relative_tmp_dir")
    prefix = f"{configured}-" if configured else ""
    return f"{prefix}{TMP_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _directories(remote: Remote, lmcache: Any) -> list[Path]:
    """The base paths, as FSConnector takes them from the URL or from extra_config."""
    if remote.plugin is None:
        paths = urlparse(remote.target).path
    else:
        paths = lmcache.get_extra_config_value(
            f"remote_storage_plugin.{remote.plugin}.base_path"
        ) or lmcache.get_extra_config_value("fs_base_path")
    if not paths:
        raise SettingError(f"{remote.label}: no path. Allowed: fs://HOST:PORT/PATH[,/PATH...]")
    return [Path(path.strip()) for path in str(paths).split(",")]
