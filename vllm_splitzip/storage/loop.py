"""An asyncio event loop on a thread of its own: LMCache's connectors are coroutines on one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """The thread is a daemon: some connectors block the loop in a system call without a timeout,
    and such a one must not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        # What was submitted before the stop becomes a task in this pass; what is cancelled
        # then releases its memory in the callbacks of its future.
        self.loop.run_until_complete(asyncio.sleep(0))
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts `coroutine` on the loop.

        Raises
        ------
        RuntimeError
            The loop has been stopped.
        """
        with self._lock:
            if not self._stopping:
                return asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        coroutine.close()
        raise RuntimeError("the event loop has been stopped")

    def stop(self, timeout_s: float) -> bool:
        """Cancels what still runs. Returns whether the thread ended within `timeout_s`."""
        with self._lock:
            first, self._stopping = not self._stopping, True
        if first:
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
