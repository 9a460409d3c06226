"""One of LMCache's remote connectors together with the event loop it lives on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from vllm_splitzip.storage.loop import LoopThread
from vllm_splitzip.storage.quickack import QuickAckSocket

T = TypeVar("T")
Opener = Callable[[asyncio.AbstractEventLoop], Any]

logger = logging.getLogger(__name__)

CLOSE_S = 2.0  # for each step of closing


class Connection:
    """Opened by the constructor, which blocks as long as LMCache's does. Disposable: after a
    failure it is closed and another one is made, since what state a connector is left in by a
    call that never returned, only its author knows."""

    def __init__(self, name: str, opener: Opener, width: int) -> None:
        self._loop = LoopThread(f"splitzip-{name}")
        try:
            self.connector = opener(self._loop.loop)
        except BaseException:
            self._loop.stop(CLOSE_S)
            raise
        self._gate = asyncio.Semaphore(width)
        self._socket: QuickAckSocket | None = None
        found = getattr(self.connector, "client_socket", None)  # lm:// has one
        if isinstance(found, socket.socket):
            self._socket = self.connector.client_socket = QuickAckSocket(found)

    def submit(self, call: Callable[[Any], Coroutine[Any, Any, T]]) -> Future[T]:
        """Starts `call(connector)`, at most `width` at a time.

        Raises:
            RuntimeError: the connection has been closed.
        """
        return self._loop.submit(self._gated(call))

    async def _gated(self, call: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        async with self._gate:
            return await call(self.connector)

    def close(self) -> None:
        """Ends what is in flight. Takes at most some seconds, even when the loop is stuck."""
        if self._socket is not None:
            # lm:// receives on the loop without a timeout; this wakes it up.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._loop.submit(self._close_connector()).result(CLOSE_S)
        except Exception as error:
            logger.debug("closing a connector: %r", error)
        if not self._loop.stop(CLOSE_S):
            logger.debug("a connector's event loop is stuck and left behind")

    def close_soon(self) -> threading.Thread:
        """Closes in the background."""
        thread = threading.Thread(target=self.close, name="splitzip-close", daemon=True)
        thread.start()
        return thread

    async def _close_connector(self) -> None:
        executor = getattr(self.connector, "pq_executor", None)
        if executor is None:
            await self.connector.close()
            return
        # The redis connectors' own close() blocks the loop to wait for a task on that loop.
        await executor.shutdown_async(wait=False)
        client = getattr(self.connector, "connection", None)
        if client is not None:
            await client.aclose()
