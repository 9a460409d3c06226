"""Objects of any size over backends that keep objects of one size only.

An object is laid over pages. Each page is one object of the backend and starts with this header,
little-endian, 32 bytes:

    offset  bytes  field
    0       4      "SZP1"
    4       4      number of this page, from 0
    8       8      bytes of the whole object
    16      16     XXH3-128 of the whole object, big-endian as xxhash gives it

The object's bytes follow, and zeros fill the last page. Page 0 is written last, and is the one
that is asked for, so that an object is seen only when it is whole. A page that is missing, torn,
or of another object than page 0 makes the object a miss: the digest is that of all bytes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import struct
from collections.abc import Awaitable, Iterable
from typing import Any

import torch
import xxhash
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from ..errors import SettingError, StoreError
from .budget import PAGE as ALIGNMENT
from .connection import close_connector
from .pool import FORMAT, StagingPool, view_of

MAGIC = b"SZP1"
HEADER = struct.Struct("<4sIQ16s")
DEFAULT_PAGE_BYTES = 1 << 20
MAX_PAGE_BYTES = 1 << 26
AT_ONCE = 16  # pages that are under way at once, for all objects of a connection
SETTING = "splitzip_page_bytes"


def page_bytes_of(extra_config: dict[str, Any]) -> int:
    """The size of a page, from LMCache's `extra_config`.

    Raises
    ------
    SettingError
        It is not a multiple of 4096 from 4096 to 64 Mi.
    """
    value = extra_config.get(SETTING, DEFAULT_PAGE_BYTES)
    right = isinstance(value, int) and not isinstance(value, bool)
    if not right or value % ALIGNMENT or not ALIGNMENT <= value <= MAX_PAGE_BYTES:
        raise SettingError(
            f"extra_config.{SETTING}={value!r}. Allowed: bytes of a page, a multiple of "
            f"{ALIGNMENT} up to {MAX_PAGE_BYTES}"
        )
    return int(value)


class PagePool(LocalCPUBackend):
    """Memory for the pages of one connection, for LMCache's connector to fill and to read."""

    def __init__(self, config: Any, page_bytes: int) -> None:
        """`config` is a copy of LMCache's that belongs to this connection."""
        config.local_cpu = False
        # Some more than are under way: a call that failed may keep its page until it is collected.
        config.max_local_cpu_size = 2 * AT_ONCE * page_bytes / (1 << 30)
        super().__init__(config, page_metadata(page_bytes), "cpu")
        self._shapes = self.metadata.get_shapes()

    def _setup_metrics(self) -> None:  # as in StagingPool
        pass

    def allocate(
        self,
        shapes: Any,
        dtypes: Any,
        fmt: Any = None,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> Any:
        """As LMCache's, without waiting on the event loop.

        Raises
        ------
        StoreError
            There is no page free.
        """
        for _ in range(2):
            obj = super().allocate(shapes, dtypes, fmt, eviction=False, busy_loop=False)
            if obj is not None:
                return obj
            gc.collect()
        raise StoreError("no page is free")

    def page(self) -> Any:
        """A MemoryObj of one page."""
        return self.allocate(self._shapes, self.metadata.get_dtypes())


def page_metadata(page_bytes: int) -> LMCacheMetadata:
    """A model whose whole chunk takes `page_bytes`, as its connectors calculate it."""
    return LMCacheMetadata(
        model_name="splitzip",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.uint8,
        kv_shape=(1, 1, ALIGNMENT, 1, page_bytes // ALIGNMENT),
        chunk_size=ALIGNMENT,
        role="worker",
    )


class PagedConnector:
    """Stores MemoryObj of any size through an LMCache connector for one size.

    Has the calls of LMCache's RemoteConnector that RemoteTier makes.
    """

    def __init__(self, inner: Any, pages: PagePool, objects: StagingPool, page_bytes: int) -> None:
        """`objects` is where fetched objects are allocated. To be made on no event loop."""
        self.inner = inner
        self._pages = pages
        self._objects = objects
        self._page_bytes = page_bytes
        self._payload = page_bytes - HEADER.size
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def exists(self, key: Any) -> bool:
        return bool(await self.inner.exists(self._name(key, 0)))

    async def get(self, key: Any) -> Any | None:
        """
        Raises
        ------
        ValueError
            A page is missing, torn, or belongs to another object.
        StoreError
            There is no memory for the object.
        """
        if not await self.exists(key):
            return None
        async with self._gate:
            head = await self._fetch(key, 0)
            try:
                _, _, nbytes, digest = HEADER.unpack_from(view_of(head))
                obj = self._objects.allocate(torch.Size([nbytes]), torch.uint8, FORMAT)
                view_of(obj)[: self._payload] = view_of(head)[HEADER.size :][:nbytes]
            finally:
                head.ref_count_down()
        try:
            pages = range(1, self._count(nbytes))
            await _all(self._fetch_into(key, page, obj, digest) for page in pages)
            _check(key, obj, digest)
        except BaseException:
            obj.ref_count_down()
            raise
        return obj

    async def put(self, key: Any, obj: Any) -> None:
        """
        Raises
        ------
        OSError
            The backend did not take it.
        """
        digest = xxhash.xxh3_128_digest(view_of(obj))
        rest = range(1, self._count(obj.get_size()))
        await _all(self._store(key, page, obj, digest) for page in rest)
        await self._store(key, 0, obj, digest)
        if not await self.exists(key):
            raise OSError(f"{key.to_string()} is not there after it was stored")

    def remove_sync(self, key: Any) -> None:
        """Page 0 first: from then on the object is not there.

        Raises
        ------
        NotImplementedError
            The backend cannot delete.
        """
        remove = getattr(type(self.inner), "remove_sync", RemoteConnector.remove_sync)
        if remove is RemoteConnector.remove_sync:
            raise NotImplementedError
        page = 0
        while self.inner.exists_sync(self._name(key, page)):
            if not self.inner.remove_sync(self._name(key, page)):
                break
            page += 1

    async def close(self) -> None:
        await close_connector(self.inner)

    def _name(self, key: Any, page: int) -> Any:
        """The key of a page. Engines with pages of another size look elsewhere. A namespace has
        no dot in it."""
        units = self._page_bytes // ALIGNMENT
        return dataclasses.replace(key, model_name=f"{key.model_name}.{units}.{page}")

    def _count(self, nbytes: int) -> int:
        return -(-nbytes // self._payload)

    async def _fetch(self, key: Any, number: int) -> Any:
        """The page's MemoryObj, when its header says that it is this page."""
        page = await self.inner.get(self._name(key, number))
        if page is None:
            raise ValueError(f"{key.to_string()}: page {number} is missing")
        magic, found, nbytes, _ = HEADER.unpack_from(view_of(page))
        if magic != MAGIC or found != number or self._count(nbytes) <= number:
            page.ref_count_down()
            raise ValueError(f"{key.to_string()}: page {number} is none of an object's")
        return page

    async def _fetch_into(self, key: Any, number: int, obj: Any, digest: bytes) -> None:
        async with self._gate:
            page = await self._fetch(key, number)
            try:
                _, _, nbytes, same = HEADER.unpack_from(view_of(page))
                if nbytes != obj.get_size() or same != digest:
                    raise ValueError(f"{key.to_string()}: page {number} is of another object")
                start = number * self._payload
                target = view_of(obj)[start : start + self._payload]
                target[:] = view_of(page)[HEADER.size :][: len(target)]
            finally:
                page.ref_count_down()

    async def _store(self, key: Any, number: int, obj: Any, digest: bytes) -> None:
        async with self._gate:
            page = self._pages.page()
            try:
                view = view_of(page)
                HEADER.pack_into(view, 0, MAGIC, number, obj.get_size(), digest)
                start = number * self._payload
                part = view_of(obj)[start : start + self._payload]
                end = HEADER.size + len(part)
                view[HEADER.size : end] = part
                if end < len(view):
                    view[end:] = bytes(len(view) - end)
                await self.inner.put(self._name(key, number), page)
            finally:
                page.ref_count_down()


def _check(key: Any, obj: Any, digest: bytes) -> None:
    if xxhash.xxh3_128_digest(view_of(obj)) != digest:
        raise ValueError(f"{key.to_string()}: the pages are not those of one object")


async def _all(calls: Iterable[Awaitable[None]]) -> None:
    """Waits for all, also when one has failed: they use the caller's memory until they end.

    Raises
    ------
    Exception
        The first one's.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
