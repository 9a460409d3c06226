"""LMCache's remote connectors, each together with the event loop it lives on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import StoreError
from .loop import LoopThread
from .quickack import QuickAckSocket

T = TypeVar("T")
Opener = Callable[[asyncio.AbstractEventLoop], Any]

logger = logging.getLogger(__name__)

CLOSE_S = 2.0  # for each step of closing


@dataclass(frozen=True, slots=True)
class Traits:
    """What has to be known of a connector to run it."""

    width: int = 16  # calls that may be under way at once
    # Calls use memory in the loop's thread only, and may be ended wherever they wait. Others
    # have threads that go on writing to it.
    cancellable: bool = False
    confirms: bool = True  # a put that failed raises; others have to be asked whether it is there
    replaces: bool = True  # a put replaces what is there; others keep it

    @property
    def is_stream(self) -> bool:
        """After a call that did not come to its end, no other one can follow."""
        return self.width == 1


class Connection:
    """Opened by the constructor, which blocks as long as LMCache's does. Disposable: after a
    failure it is closed and another one is made, since what state a connector is left in by a
    call that never returned, only its author knows."""

    def __init__(self, name: str, opener: Opener, traits: Traits) -> None:
        self._traits = traits
        self._calls = 0
        self._changed = threading.Condition()
        self._loop = LoopThread(f"splitzip-{name}")
        try:
            self.connector = opener(self._loop.loop)
        except BaseException:
            self._loop.stop(CLOSE_S)
            raise
        self._gate = asyncio.Semaphore(traits.width)
        self._socket: QuickAckSocket | None = None
        found = getattr(self.connector, "client_socket", None)  # lm:// has one
        if isinstance(found, socket.socket):
            self._socket = self.connector.client_socket = QuickAckSocket(found)

    def submit(self, call: Callable[[Any], Coroutine[Any, Any, T]]) -> Future[T]:
        """Starts `call(connector)`, at most `width` at a time.

        Raises
        ------
        RuntimeError
            The connection has been closed.
        """
        future = self._loop.submit(self._gated(call))
        with self._changed:
            self._calls += 1
        future.add_done_callback(self._ended)
        return future

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Calls `act` on the loop, unless the connection has been closed by then."""
        with contextlib.suppress(RuntimeError):
            self._loop.loop.call_soon_threadsafe(self._loop.loop.call_later, delay_s, act)

    def _ended(self, _: Future[Any]) -> None:
        with self._changed:
            self._calls -= 1
            self._changed.notify_all()

    async def _gated(self, call: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        async with self._gate:
            return await call(self.connector)

    def close(self) -> None:
        """Ends what is under way, or waits for its end, however long that takes."""
        if self._socket is not None:
            # lm:// receives on the loop without a timeout; this wakes it up.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        if not self._traits.cancellable:
            with self._changed:
                self._changed.wait_for(lambda: self._calls == 0)
        try:
            self._loop.submit(close_connector(self.connector)).result(CLOSE_S)
        except Exception as error:
            logger.debug("closing a connector: %r", error)
        if not self._loop.stop(CLOSE_S):
            logger.debug("a connector's event loop is stuck and left behind")

    def close_soon(self) -> threading.Thread:
        """Closes in the background."""
        thread = threading.Thread(target=self.close, name="splitzip-close", daemon=True)
        thread.start()
        return thread


async def close_connector(connector: Any) -> None:
    """Closes one of LMCache's connectors.

    Those that have a queue of calls block the loop in their own close(), to wait for a task on
    that loop.
    """
    queue = getattr(connector, "pq_executor", None)
    if queue is None:
        await connector.close()
        return
    await queue.shutdown_async(wait=False)
    for name in ("connection", "cluster"):  # of redis:// and redis-cluster://
        connection = getattr(connector, name, None)
        if connection is not None:
            await connection.aclose()
    client = getattr(connector, "client", None)  # of resp://
    if client is not None:
        await asyncio.to_thread(client.close)


class Line:
    """The current connection to a backend: made when it is first wanted, and made anew after one
    has been given up."""

    def __init__(
        self, name: str, opener: Opener, traits: Traits, check: Callable[[], None]
    ) -> None:
        """`check` raises when no connection may be made now."""
        self._name = name
        self._opener = opener
        self._traits = traits
        self._check = check
        self._lock = threading.Lock()
        self._current: Connection | None = None
        self._coming: Future[Connection] | None = None
        self._closing: list[threading.Thread] = []
        self._closed = False

    def get(self, deadline: float) -> Connection:
        """Made on a thread of its own: LMCache's constructors know no deadline.

        Raises
        ------
        TimeoutError
            Not by `deadline` (time.monotonic, in s); it may come yet.
        Exception
            Whatever the constructor raised.
        """
        with self._lock:
            if self._closed:
                raise StoreError(f"{self._name} has been closed")
            if self._current is not None:
                return self._current
            coming = self._coming
            if coming is None:
                coming = self._coming = Future()
                threading.Thread(
                    target=self._make, args=(coming,), name="splitzip-connect", daemon=True
                ).start()
        return coming.result(max(0.0, deadline - time.monotonic()))

    def give_up(self, connection: Connection) -> None:
        """Closes it in the background, unless another one has taken its place already."""
        with self._lock:
            if self._current is connection:
                self._current = None
                self._closing = [thread for thread in self._closing if thread.is_alive()]
                self._closing.append(connection.close_soon())

    def close(self) -> None:
        """Takes some seconds at most; what has not ended by then ends by itself."""
        with self._lock:
            self._closed = True
            connection = self._current
        if connection is not None:
            self.give_up(connection)
        for thread in self._closing:
            thread.join(2 * CLOSE_S)

    def _make(self, coming: Future[Connection]) -> None:
        try:
            self._check()
            connection = Connection(self._name, self._opener, self._traits)
        except BaseException as error:
            with self._lock:
                self._coming = None
            coming.set_exception(error)
            return
        with self._lock:
            self._coming = None
            wanted = not self._closed
            if wanted:
                self._current = connection
        if not wanted:
            connection.close()
        coming.set_result(connection)
