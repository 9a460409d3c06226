"""LMCache's fs connector, made to read nothing but files.

It opens whatever has a frame's name, and waits for ever at a fifo; it takes a damaged file for an
object that is there, and a directory in a file's place for a failure of the store.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import StoreError
from .janitor import Janitor, Seen, identity
from .pool import StagingPool


class Files:
    """Calls of an FSConnector. `path_of` tells where it keeps a key."""

    def __init__(
        self,
        connector: Any,
        path_of: Callable[[Any], Path],
        janitor: Janitor,
        pool: StagingPool,
    ) -> None:
        self.connector = connector
        self._path_of = path_of
        self._janitor = janitor
        self._pool = pool

    async def exists(self, key: Any) -> bool:
        path = self._path_of(key)
        if path in self._janitor.condemned:
            return False
        return await asyncio.to_thread(os.path.isfile, path)

    async def get(self, key: Any) -> Any | None:
        path = self._path_of(key)
        seen, is_file = await asyncio.to_thread(_look, path)
        if seen is None:
            return None
        failures = self._pool.failures
        obj = await self.connector.get(key) if is_file else None
        if obj is None and failures == self._pool.failures:
            # There and not readable; it would be found again and again.
            self._janitor.discard(path, seen)
        return obj

    async def put(self, key: Any, obj: Any) -> None:
        path = self._path_of(key)
        blocked = path in self._janitor.blocked
        if not blocked:
            try:
                await self.connector.put(key, obj)
            except IsADirectoryError:
                blocked = True
        if blocked:
            self._janitor.discard(path, None)  # the next put may find it gone
            raise StoreError(f"{path}: a directory is in the place of a frame")

    def remove_sync(self, key: Any) -> bool:
        return bool(self.connector.remove_sync(key))

    async def close(self) -> None:
        await self.connector.close()


def _look(path: Path) -> tuple[Seen | None, bool]:
    """What is there, if anything, and whether it is a file, which can be read to an end."""
    try:
        return identity(path), path.is_file()
    except OSError:
        return None, False
