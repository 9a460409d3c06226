"""A third party's storage backend (LMCache's `storage_plugins`), called like a remote connector."""

from __future__ import annotations

import asyncio
import copy
import errno
import logging
from collections import OrderedDict
from typing import Any

import torch
from lmcache.v1.storage_backend import storage_plugin_launcher

from ..errors import SettingError
from .pool import StagingPool

POLL_S = 0.01


def launch(name: str, lmcache: Any, metadata: Any, loop: Any, pool: StagingPool) -> Any:
    """The backend that LMCache makes of `storage_plugin.NAME.*` in its extra_config.

    Raises
    ------
    SettingError
        It makes none.
    """
    config = copy.copy(lmcache)
    config.storage_plugins = [name]
    made: OrderedDict[str, Any] = OrderedDict()
    errors = _Errors()
    log = logging.getLogger(storage_plugin_launcher.__module__)
    log.addHandler(errors)  # the only place where it says what failed
    try:
        storage_plugin_launcher(config, metadata, loop, pool, "cpu", made)
    finally:
        log.removeHandler(errors)
    if name not in made:
        why = "; ".join(errors.messages) or "LMCache does not say why"
        raise SettingError(f"storage_plugins={name!r}: LMCache cannot make this backend: {why}")
    return made[name]


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class PluginConnector:
    """A StorageBackendInterface with the calls of a RemoteConnector that RemoteTier makes."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    async def exists(self, key: Any) -> bool:
        return bool(await asyncio.to_thread(self.backend.contains, key))

    async def get(self, key: Any) -> Any | None:
        """
        Raises
        ------
        ValueError
            What the backend gave back is no object of this store.
        """
        obj = await asyncio.to_thread(self.backend.get_blocking, key)
        if obj is not None and (obj.get_dtype() is not torch.uint8 or len(obj.get_shape()) != 1):
            found = f"{obj.get_dtype()}, {tuple(obj.get_shape())}"
            obj.ref_count_down()
            raise ValueError(f"not an object of this store: {found}")
        return obj

    async def put(self, key: Any, obj: Any) -> None:
        """
        Raises
        ------
        OSError
            The backend did not take it.
        """
        futures = await asyncio.to_thread(self.backend.batched_submit_put_task, [key], [obj])
        for future in futures or ():
            if future is not None:
                await asyncio.wrap_future(future)
        while await asyncio.to_thread(self.backend.exists_in_put_tasks, key):
            await asyncio.sleep(POLL_S)
        if not await self.exists(key):
            raise OSError(errno.ENOSPC, "the plugin did not take the object")

    def remove_sync(self, key: Any) -> bool:
        return bool(self.backend.remove(key))

    async def close(self) -> None:
        await asyncio.to_thread(self.backend.close)
