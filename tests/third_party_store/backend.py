"""For `storage_plugins`. It writes in the background, as LMCache's own disk backend does."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from .files import Files


class Backend(StoragePluginInterface):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.files = Files(self.config)
        self.behaviour = self.config.extra_config.get("theirs.behaviour")
        self.writer = ThreadPoolExecutor(1)
        self.writing: set[Any] = set()
        self.lock = threading.Lock()

    def contains(self, key: Any, pin: bool = False) -> bool:
        if self.behaviour == "raises":
            raise ConnectionError("their server is gone")
        while self.behaviour == "waits" and not (self.files.directory / "go on").exists():
            time.sleep(0.02)
        return self.files.path(key).exists()

    def exists_in_put_tasks(self, key: Any) -> bool:
        with self.lock:
            return key in self.writing

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> list[Future[None]] | None:
        for key, obj in zip(keys, objs, strict=True):
            obj.ref_count_up()
            with self.lock:
                self.writing.add(key)
            self.writer.submit(self._write, key, obj, on_complete_callback)
        return None

    def _write(self, key: Any, obj: Any, done: Callable[[Any], None] | None) -> None:
        try:
            if self.behaviour != "forgets":
                time.sleep(0.02)
                self.files.write(key, obj)
        finally:
            obj.ref_count_down()
            with self.lock:
                self.writing.discard(key)
            if done is not None:
                done(key)

    def get_blocking(self, key: Any) -> Any | None:
        while self.behaviour == "waits" and not (self.files.directory / "go on").exists():
            time.sleep(0.02)
        obj = self.files.read(key, self.local_cpu_backend)
        if obj is not None and self.behaviour == "reshapes":
            obj.meta.shape = torch.Size([1, obj.get_size()])
        return obj

    def pin(self, key: Any) -> bool:
        return False

    def unpin(self, key: Any) -> bool:
        return False

    def remove(self, key: Any, force: bool = True) -> bool:
        return self.files.delete(key)

    def get_allocator_backend(self) -> Any:
        return self.local_cpu_backend

    def close(self) -> None:
        self.writer.shutdown()
