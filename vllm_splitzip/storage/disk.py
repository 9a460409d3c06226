"""The local disk tier: LMCache's LocalDiskBackend, with whole files and exact lengths."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

from vllm_splitzip.errors import StoreError
from vllm_splitzip.storage.loop import LoopThread
from vllm_splitzip.storage.pool import StagingPool

logger = logging.getLogger(__name__)

READERS = 4
CLOSE_S = 2.0


class _WholeFiles(LocalDiskBackend):
    """LMCache's backend writes in place, does not look at how much it read, and after a failed
    write keeps its key marked as being written, and its memory, for ever."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.failed: dict[str, OSError] = {}  # by path; the writer takes it out

    def write_file(self, buffer: Any, path: str) -> None:
        # Another process may share the directory, and read or write the same key.
        partial = f"{path}.{os.getpid()}-{threading.get_ident()}.tmp"
        try:
            super().write_file(buffer, partial)
            os.replace(partial, path)
        except OSError as error:
            self.failed[path] = error
            with contextlib.suppress(OSError):
                os.unlink(partial)

    def read_file(self, key: Any, buffer: Any, path: str) -> None:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != len(buffer) or file.readinto(buffer) != size:
                raise StoreError(f"{path} has {size} bytes, expected {len(buffer)}")


class DiskTier:
    """Calls of the backend with deadlines. Its index is in memory: what earlier processes left
    is found again only by `adopt`."""

    def __init__(self, config: Any, metadata: Any, pool: StagingPool) -> None:
        self._loop = LoopThread("splitzip-disk")
        self._backend = _WholeFiles(config, self._loop.loop, pool, "cpu", None, metadata)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="splitzip-disk-read")

    @property
    def path(self) -> Path:
        return Path(self._backend.path)

    def contains(self, key: Any) -> bool:
        return bool(self._backend.contains(key))

    def get(self, key: Any, timeout_s: float, late: Callable[[Any], None]) -> Any | None:
        """As RemoteTier.get.

        Raises:
            StoreError: damaged, gone, or not read in time; `late` takes what arrives later.
        """
        future: Future[Any] = self._readers.submit(self._backend.get_blocking, key)
        try:
            return future.result(timeout_s)
        except Exception as error:
            future.add_done_callback(lambda done: late(_result_of(done)))
            if not isinstance(error, TimeoutError):
                self.remove(key)
            raise StoreError(f"{key.to_string()} from local_disk: {error!r}") from error

    def put(self, key: Any, obj: Any, timeout_s: float) -> bool:
        """Stores `obj`; the backend holds a reference of its own until it has."""
        written = threading.Event()
        self._backend.submit_put_task(key, obj, lambda _: written.set())
        deadline = time.monotonic() + timeout_s
        while not written.wait(min(0.05, max(0.0, deadline - time.monotonic()))):
            if not self._backend.exists_in_put_tasks(key) or time.monotonic() > deadline:
                break  # it was there already, did not fit, or is late
        error = self._backend.failed.pop(self._backend._key_to_path(key), None)
        if error is not None:
            logger.warning("local_disk: %s", error)
            self.remove(key)
            return False
        return self.contains(key)

    def remove(self, key: Any) -> None:
        backend = self._backend
        with backend.disk_lock:
            meta = backend.dict.get(key)
            if meta is None:
                return
            if not os.path.exists(meta.path):
                # remove() unlinks first and would leave its books as they are
                with contextlib.suppress(OSError):
                    Path(meta.path).touch()
            backend.current_cache_size -= meta.size
        with contextlib.suppress(OSError, KeyError):
            backend.remove(key)

    def close(self) -> bool:
        """Returns whether nothing of it uses the pool any more."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        worker = self._backend.disk_worker
        deadline = time.monotonic() + CLOSE_S
        while worker.put_tasks and time.monotonic() < deadline:
            time.sleep(0.01)
        with contextlib.suppress(Exception):
            self._loop.submit(worker.executor.shutdown_async(wait=False)).result(CLOSE_S)
        self._loop.stop(CLOSE_S)
        return not worker.put_tasks


def _result_of(future: Future[Any]) -> Any:
    if future.cancelled() or future.exception() is not None:
        return None
    return future.result()
