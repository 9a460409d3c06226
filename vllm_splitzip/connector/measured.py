"""A store whose puts and gets are timed, for `codec: auto`."""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ..storage.base import Buffer, Fetched, Health, ObjectKey, Store, StoreStats
from .auto import AutoCodec
from .reports import LinkReports

logger = logging.getLogger(__name__)

LATE_S = 1.0
"""A put that was given up after so long says how slow the link is; one refused at once does not."""

ASKED = 3
PATIENCE_S = 0.2


def round_trip_s(store: Store, absent: ObjectKey) -> float:
    """Seconds that the store takes to say that it has not got `absent`: the least of a few.

    0 where it does not answer. Takes no longer than a fraction of a second.
    """
    least = 0.0
    for _ in range(ASKED):
        begin = time.perf_counter()
        store.contains([absent], PATIENCE_S)
        seconds = time.perf_counter() - begin
        if store.health == "down" or seconds >= PATIENCE_S:
            return least
        least = min(least or seconds, seconds)
    return least


class MeasuredStore(Store):
    """Hands everything on to a store. What is put and fetched is what that store's tiers take.

    Notes to and from other engines have a thread of their own: no frame waits for them.

    Parameters
    ----------
    auto
        Told the bytes of each object, and while they are under way.
    reports
        Between `auto` and those of other engines.
    """

    def __init__(self, store: Store, auto: AutoCodec, reports: LinkReports) -> None:
        self._store = store
        self._auto = auto
        self._reports = reports
        self._puts, self._gets = auto.puts, auto.gets
        self._notes = ThreadPoolExecutor(1, "splitzip-notes")
        self._noting: Future[None] | None = None

    def contains(self, keys: Sequence[ObjectKey], timeout_s: float) -> list[bool]:
        return self._store.contains(keys, timeout_s)

    def get(self, key: ObjectKey, timeout_s: float) -> Fetched | None:
        fetched = None
        self._gets.enter()
        try:
            fetched = self._store.get(key, timeout_s)
        finally:
            self._gets.leave(fetched.data.nbytes if fetched is not None else 0)
        self._meanwhile(self._publish)
        return fetched

    def put(self, key: ObjectKey, parts: Sequence[Buffer], nbytes: int, timeout_s: float) -> bool:
        stored = False
        begin = time.monotonic()
        self._puts.enter()
        try:
            stored = self._store.put(key, parts, nbytes, timeout_s)
        finally:
            counts = stored or time.monotonic() - begin > LATE_S
            self._puts.leave(nbytes if counts else 0)
        self._meanwhile(self._listen)
        return stored

    def remove(self, key: ObjectKey) -> None:
        self._store.remove(key)

    def close(self) -> None:
        self._notes.shutdown()
        self._store.close()

    @property
    def health(self) -> Health:
        return self._store.health

    @property
    def stats(self) -> StoreStats:
        return self._store.stats

    def describe(self) -> str:
        return self._store.describe()

    def _meanwhile(self, work: Callable[[], None]) -> None:
        """Let the notes' thread do something, unless it is still busy: there is a next time."""
        if self._noting is None or self._noting.done():
            # A frame that a closing worker no longer waits for may end after the thread has.
            with contextlib.suppress(RuntimeError):
                self._noting = self._notes.submit(_logged, work)

    def _publish(self) -> None:
        link = self._auto.get_link
        if link is not None:
            self._reports.publish(link)

    def _listen(self) -> None:
        self._auto.heard(self._reports.latest())


def _logged(work: Callable[[], None]) -> None:
    """The thread's boundary: without notes an engine knows its own link only."""
    try:
        work()
    except Exception:
        logger.exception("SplitZip cannot exchange notes of how fast loads go")
