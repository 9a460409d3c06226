"""The local disk tier: LMCache's LocalDiskBackend, with whole files and exact lengths.

LMCache's index is in memory, so what earlier or other processes stored is not found and never
deleted. Here the directory is the truth: a file that is there is taken into the index when it is
asked for, one that is gone is taken out, and a janitor keeps them all within the limit.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lmcache import torch_dev, torch_device_type
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

from ..errors import SettingError, StoreError
from .base import DamagedError, Health
from .breaker import Breaker
from .guards import without_statistics
from .janitor import Janitor
from .loop import LoopThread
from .pool import FORMAT, StagingPool
from .schemes import explain

logger = logging.getLogger(__name__)

READERS = 4
CLOSE_S = 2.0
POLL_S = 0.05


class _WholeFiles(LocalDiskBackend):
    """LMCache's backend writes in place, does not look at how much it read, and after a failed
    write keeps its key marked as being written, and its memory, for ever."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        without_statistics(self.cache_policy)
        self.failed: dict[str, OSError] = {}  # by path; the writer takes it out
        self._adopting = threading.Lock()

    def path_of(self, key: Any) -> str:
        return str(self._key_to_path(key))

    def write_file(self, buffer: Any, path: str) -> None:
        # Another process may share the directory, and read or write the same key.
        partial = f"{path}.{os.getpid()}-{threading.get_ident()}.tmp"
        try:
            super().write_file(buffer, partial)
            try:
                os.replace(partial, path)
            except IsADirectoryError:
                os.rmdir(path)  # fails when something is in it
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

    def adopt(self, key: Any) -> bool:
        """Makes the index agree with the directory. Whether the object is there."""
        with self._adopting:
            return self._adopt(key)

    def _adopt(self, key: Any) -> bool:
        path = self.path_of(key)
        try:
            found = os.stat(path)
        except OSError:
            self.forget(key)
            return False
        if not stat.S_ISREG(found.st_mode):
            self.forget(key)
            return False
        size = found.st_size
        with self.disk_lock:
            known = self.dict.get(key)
        if self.exists_in_put_tasks(key) or (known is not None and known.shape[0] == size):
            return known is not None
        self.forget(key)
        if not size:
            return False
        self.insert_key(key, size, torch.Size([size]), torch.uint8, FORMAT)
        with self.disk_lock:
            self.current_cache_size += size
            self.cache_policy.update_on_put(key)
        return True

    def forget(self, key: Any) -> None:
        """Takes the object out of the index and leaves its file. (LMCache's own `remove` leaves
        the size that it counts for the limit.)"""
        with self.disk_lock:
            meta = self.dict.pop(key, None)
            if meta is not None:
                self.current_cache_size -= meta.size
                self.cache_policy.update_on_force_evict(key)

    def remove(self, key: Any, force: bool = True) -> bool:
        """Called by LMCache to evict, with the lock held and the size already taken off."""
        try:
            return bool(super().remove(key, force))
        except FileNotFoundError:
            return True  # another process was first


class DiskTier:
    """Calls of the backend with deadlines."""

    def __init__(self, config: Any, metadata: Any, pool: StagingPool) -> None:
        """
        Raises
        ------
        SettingError
            The directory cannot be used.
        """
        # Of several paths LMCache chooses by the accelerator that the process uses.
        device = "cpu"
        if torch_dev.is_available():
            device = f"{torch_device_type}:{torch_dev.current_device()}"
        self._loop = LoopThread("splitzip-disk")
        try:
            self._backend = _WholeFiles(config, self._loop.loop, pool, device, None, metadata)
        except (OSError, ValueError) as error:
            self._loop.stop(CLOSE_S)
            raise SettingError(
                f"local_disk={config.local_disk!r}: LMCache cannot use it: {explain(error)}"
            ) from error
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="splitzip-disk-read")
        self._janitor = Janitor([self.path], ".pt", self._backend.max_cache_size)
        self._writes = Breaker(f"storing into local_disk {self.path}", "nothing is stored there")

    @property
    def path(self) -> Path:
        return Path(self._backend.path)

    @property
    def health(self) -> Health:
        return "read-only" if self._writes.is_open else "up"

    @property
    def evicted(self) -> int:
        """Files that were deleted for the limit, other than by LMCache itself."""
        return self._janitor.evicted

    def contains(self, key: Any) -> bool:
        return self._backend.adopt(key)

    def get(self, key: Any, timeout_s: float, late: Callable[[Any], None]) -> Any | None:
        """As RemoteTier.get.

        Raises
        ------
        StoreError
            Damaged, gone, or not read in time; `late` takes what arrives later.
        """
        future: Future[Any] = self._readers.submit(self._backend.get_blocking, key)
        try:
            obj = future.result(timeout_s)
        except Exception as error:
            future.add_done_callback(lambda done: late(_result_of(done)))
            if isinstance(error, DamagedError):
                self.remove(key)
            elif isinstance(error, StoreError | OSError) and not isinstance(error, TimeoutError):
                self._backend.forget(key)
            raise StoreError(f"{key.to_string()} from local_disk: {error!r}") from error
        self._janitor.touch(Path(self._backend.path_of(key)))
        return obj

    def put(self, key: Any, obj: Any, timeout_s: float) -> bool:
        """Stores `obj`; the backend holds a reference of its own until it has."""
        if self._backend.adopt(key):
            self._janitor.touch(Path(self._backend.path_of(key)))
            return True
        deadline = time.monotonic() + timeout_s
        ticket = self._writes.enter()
        if ticket is None:
            return False
        try:
            self._janitor.make_room(obj.get_size(), deadline)
        except StoreError as error:
            self._writes.failed(ticket, str(error))
            return False
        path = self._backend.path_of(key)
        self._backend.failed.pop(path, None)  # of an earlier put that was given up
        written = threading.Event()
        self._backend.submit_put_task(key, obj, lambda _: written.set())
        while not written.wait(min(POLL_S, max(0.0, deadline - time.monotonic()))):
            if not self._backend.exists_in_put_tasks(key) or time.monotonic() > deadline:
                break  # did not fit, or is late
        failure = self._backend.failed.pop(path, None)
        if failure is not None:
            self._backend.forget(key)
            if failure.errno == errno.ENOTEMPTY:  # a directory in the file's place, and no more
                self._writes.abandoned(ticket)
                logger.warning("%s is a directory with something in it, not a frame's file", path)
            else:
                self._writes.failed(ticket, str(failure))
            return False
        if written.is_set():
            self._writes.succeeded(ticket)
        else:
            self._writes.abandoned(ticket)
        return bool(self._backend.contains(key))

    def remove(self, key: Any) -> None:
        self._backend.forget(key)
        with contextlib.suppress(OSError):
            os.unlink(self._backend.path_of(key))

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
        self._janitor.close()
        return not worker.put_tasks


def _result_of(future: Future[Any]) -> Any:
    if future.cancelled() or future.exception() is not None:
        return None
    return future.result()
