"""The remote tier: LMCache's connector behind deadlines and a circuit breaker."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import struct
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from ..errors import SettingError, StoreError
from .base import DamagedError, Health
from .breaker import Breaker
from .connection import Connection, Line, Opener, Traits
from .schemes import explain, redacted

T = TypeVar("T")

logger = logging.getLogger(__name__)

STUCK_S = 30.0  # after its deadline

_REFUSALS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EFBIG,
    errno.ENAMETOOLONG,
}
_REFUSED_IN_WORDS = ("OOM", "READONLY", "SET: response was not OK")
# What a connector's constructor raises for settings it cannot work with; anything else is taken
# for a server that is not there yet.
_SETTING_ERRORS = (
    ImportError,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    AssertionError,
    PermissionError,
    NotADirectoryError,
    FileExistsError,
)
# What connectors stumble over in an object that is damaged, when the server is well.
_DAMAGE = (
    ValueError,
    TypeError,
    LookupError,
    AssertionError,
    struct.error,
    IsADirectoryError,  # in a file's place
)


class RemoteTier:
    """Calls of one remote backend. Keys are LMCache's CacheEngineKey, objects its MemoryObj.

    `check` raises StoreError when no call may be made at all.
    """

    def __init__(
        self, label: str, opener: Opener, traits: Traits, check: Callable[[], None]
    ) -> None:
        self.label = label
        self._traits = traits
        self._check = check
        self._line = Line(label, opener, traits, check)
        self._breaker = Breaker(f"store {label}", "calls are cache misses")
        self._writes = Breaker(f"storing into {label}", "nothing is stored")

    @property
    def health(self) -> Health:
        if self._breaker.is_open:
            return "down"
        return "read-only" if self._writes.is_open else "up"

    def open(self, timeout_s: float) -> None:
        """Connects, or leaves it for later when the server is not there.

        Raises
        ------
        SettingError
            The connector cannot work with its settings at all.
        """
        ticket = self._breaker.enter()
        if ticket is None:
            return
        try:
            self._line.get(time.monotonic() + timeout_s)
        except TimeoutError:
            self._breaker.failed(ticket, f"not connected within {timeout_s:g} s")
        except SettingError:
            raise
        except Exception as error:
            if self._is_setting_error(error):
                raise SettingError(
                    f"{self.label}: LMCache cannot use it: {explain(error)}"
                ) from error
            self._breaker.failed(ticket, explain(error))

    def _is_setting_error(self, error: Exception) -> bool:
        """Whether trying again could not help."""
        return isinstance(error, _SETTING_ERRORS)

    def exists(self, keys: Sequence[Any], timeout_s: float) -> list[bool]:
        async def ask(connector: Any) -> list[bool]:
            return list(await asyncio.gather(*(connector.exists(key) for key in keys)))

        try:
            return [bool(answer) for answer in self._call(ask, timeout_s)]
        except StoreError:
            return [False] * len(keys)

    def get(self, key: Any, timeout_s: float, late: Callable[[Any], None]) -> Any | None:
        """A MemoryObj, or None. `late` takes what arrives after this call has returned; it is
        called once, with None when that is nothing, exactly when the call raises StoreError.

        Raises
        ------
        DamagedError
            What is there is no object of this store.
        StoreError
            No answer.
        """

        async def ask(connector: Any) -> Any:
            try:
                return await connector.get(key)
            except Exception as error:
                # LMCache keeps the last error of each of its workers, and its frames keep the
                # memory that the failed call had allocated and not given back.
                error.__traceback__ = None
                # On a stream these are as likely the end of it, or somebody else's bytes.
                if isinstance(error, _DAMAGE) and not self._traits.is_stream:
                    raise DamagedError(explain(error)) from error
                raise

        return self._call(ask, timeout_s, late)

    def put(
        self, key: Any, obj: Any, timeout_s: float, done: Callable[[], None], *, fresh: bool
    ) -> bool:
        """Stores `obj`. `done` is called once, when the backend has let go of it. `fresh`: what
        the backend may have under this key is known to be damaged."""
        deadline = time.monotonic() + timeout_s
        ticket = self._writes.enter()
        if ticket is None:
            done()
            return False
        try:
            if self._prepare(key, obj.get_size(), deadline, fresh=fresh):
                self._writes.abandoned(ticket)
                done()
                return True
        except StoreError as error:
            self._writes.failed(ticket, redacted(str(error)))
            done()
            return False

        async def ask(connector: Any) -> bool:
            if fresh and not self._traits.replaces:
                with contextlib.suppress(NotImplementedError):
                    connector.remove_sync(key)
            await connector.put(key, obj)
            # lm:// acknowledges nothing: its put has "succeeded" when the kernel took the bytes.
            return self._traits.confirms or bool(await connector.exists(key))

        def refusal(error: BaseException) -> bool:
            if _is_refusal(error):
                self._writes.failed(ticket, explain(error))
                return True
            return False

        left_s = max(0.0, deadline - time.monotonic())
        try:
            stored = self._call(ask, left_s, lambda _: done(), refusal)
        except StoreError as error:
            self._writes.abandoned(ticket)
            logger.debug("not stored: %s", error)
            return False
        self._writes.succeeded(ticket)
        done()
        return stored

    def _prepare(self, key: Any, nbytes: int, deadline: float, *, fresh: bool) -> bool:
        """Before a put. Whether there is nothing to do.

        Raises
        ------
        StoreError
            There is no room.
        """
        return False

    def remove(self, key: Any, timeout_s: float) -> None:
        """Deletes, where the backend can."""

        async def ask(connector: Any) -> None:
            if await connector.exists(key):
                with contextlib.suppress(NotImplementedError):
                    connector.remove_sync(key)

        with contextlib.suppress(StoreError):
            self._call(ask, timeout_s)

    def close(self) -> None:
        self._line.close()

    def _call(
        self,
        ask: Callable[[Any], Coroutine[Any, Any, T]],
        timeout_s: float,
        late: Callable[[Any], None] | None = None,
        tolerate: Callable[[BaseException], bool] = lambda _: False,
    ) -> T:
        """Runs `ask` with a deadline and tells the breaker how it went.

        Raises
        ------
        StoreError
            Refused by the breaker, failed, or late; `late` has been or will be
            called once.
        """
        drop = late if late is not None else _ignore
        ticket = self._breaker.enter()
        if ticket is None:
            drop(None)
            raise StoreError(f"{self.label} is down")
        started = time.monotonic()
        connection: Connection | None = None
        future: Future[T] | None = None
        try:
            self._check()
            connection = self._line.get(started + timeout_s)
            future = connection.submit(ask)
            result = future.result(max(0.0, started + timeout_s - time.monotonic()))
        except BaseException as error:
            waited_s = time.monotonic() - started
            if tolerate(error) or (future is not None and isinstance(error, StoreError)):
                # it works; the object, the pool or its disk does not
                self._breaker.succeeded(ticket)
            elif isinstance(error, TimeoutError):  # the deadline, or the backend's own
                self._breaker.timed_out(ticket, waited_s)
            else:
                self._breaker.failed(ticket, explain(error))
            if future is None:
                drop(None)
            else:
                future.add_done_callback(lambda done: drop(_result_of(done)))
            if connection is not None and (self._breaker.is_open or self._traits.is_stream):
                self._line.give_up(connection)
            elif connection is not None and future is not None:
                self._give_up_if_stuck(connection, future)
            if not isinstance(error, Exception):
                raise
            kind = DamagedError if isinstance(error, DamagedError) else StoreError
            raise kind(f"{self.label}: {explain(error)} after {waited_s:.2f} s") from error
        self._breaker.succeeded(ticket)
        return result

    def _give_up_if_stuck(self, connection: Connection, future: Future[Any]) -> None:
        """A late call holds memory until it ends. One that never does ends with its connection."""

        def look() -> None:
            if not future.done():
                self._line.give_up(connection)

        if not future.done():
            connection.later(STUCK_S, look)


def _is_refusal(error: BaseException) -> bool:
    """Whether a backend that works has refused to store: full, read-only, too big."""
    if isinstance(error, OSError) and error.errno in _REFUSALS:
        return True
    # redis-py's class for an answer that is an error (out of memory, read-only replica); the other
    # clients of such a server have no class for it
    names = {kind.__name__ for kind in type(error).__mro__}
    return "ResponseError" in names or str(error).startswith(_REFUSED_IN_WORDS)


def _result_of(future: Future[Any]) -> Any:
    if future.cancelled() or future.exception() is not None:
        return None
    return future.result()


def _ignore(_: Any) -> None:
    pass
