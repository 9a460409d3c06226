"""Frames on their way to the store: packed and put by a thread, behind the engine's back.

What waits here is bounded. When the store cannot keep up, new frames are dropped: that costs a
later request a miss, and never a running one its memory.
"""

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ..frame import Frame, pack
from ..storage.base import ObjectKey, Store
from .counters import Counters
from .trace import OFF, Trace

logger = logging.getLogger(__name__)

PUT_TIMEOUT_S = 30.0

AGAIN_S = 10.0
"""A frame that is handed over again so soon after it was put is put only if it is gone."""

CONTAINS_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class _Item:
    key: ObjectKey
    key_bytes: bytes
    build: Callable[[], Frame]
    raw_bytes: int


class Writer:
    """Puts frames into a store, in the order they were handed over.

    Parameters
    ----------
    max_waiting_bytes
        Bytes of KV cache whose frames may wait; one more is dropped, unless none waits.
    """

    def __init__(
        self, store: Store, counters: Counters, max_waiting_bytes: int, trace: Trace = OFF
    ) -> None:
        self._trace = trace
        self._store = store
        self._counters = counters
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0
        self._waiting: set[ObjectKey] = set()
        self._put_at: OrderedDict[ObjectKey, float] = OrderedDict()
        self._lock = threading.Lock()
        self._warned = False
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="splitzip-writer", daemon=True)
        self._thread.start()

    def put(
        self, key: ObjectKey, key_bytes: bytes, build: Callable[[], Frame], raw_bytes: int
    ) -> None:
        """Hand a frame over. `build` is called by the thread and may wait for a device.

        Nothing is done when a frame of this key waits already: equal keys name equal bytes.
        """
        with self._lock:
            if key in self._waiting:
                return
            waiting = self._waiting_bytes
            drop = waiting > 0 and waiting + raw_bytes > self._max_waiting_bytes
            if not drop:
                self._waiting_bytes += raw_bytes
                self._waiting.add(key)
        if drop:
            self._counters.add(frames_dropped=1)
            if not self._warned:
                self._warned = True
                logger.warning(
                    "the store is slower than KV cache is made: %.0f MB wait, frames are dropped",
                    waiting / 1e6,
                )
            return
        self._counters.add(frames_waiting=1)
        self._queue.put(_Item(key, key_bytes, build, raw_bytes))

    def close(self, timeout_s: float) -> None:
        """Let what waits be stored, for at most `timeout_s` seconds, then stop."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("gave up on %.1f MB not stored yet", self._waiting_bytes / 1e6)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._store_one(item)
            except Exception:
                logger.exception("a frame could not be stored")
                self._counters.add(frames_dropped=1)
            finally:
                with self._lock:
                    self._waiting_bytes -= item.raw_bytes
                    self._waiting.remove(item.key)
                self._counters.add(frames_waiting=-1)
            del item  # Its streams are not to stay in memory until the next one comes.

    def _store_one(self, item: _Item) -> None:
        if self._is_there(item.key):
            return
        start = time.perf_counter()
        name = item.key.chunk_hash.hex()[:8]
        with self._trace.span("pack", frame=name):
            parts, nbytes = pack(item.build(), item.key_bytes)
        with self._trace.span("put", frame=name, bytes=nbytes):
            stored = self._store.put(item.key, parts, nbytes, PUT_TIMEOUT_S)
        seconds = time.perf_counter() - start
        if stored:
            self._put_at[item.key] = time.monotonic()
            self._counters.add(
                frames_saved=1,
                raw_bytes_saved=item.raw_bytes,
                stored_bytes_saved=nbytes,
                put_seconds=seconds,
            )
        else:
            self._counters.add(frames_dropped=1, put_seconds=seconds)

    def _is_there(self, key: ObjectKey) -> bool:
        """Whether the frame was put a moment ago and still is in the store.

        A request that looked for it before that, and did not find it, has it stored once more.
        """
        now = time.monotonic()
        while self._put_at and next(iter(self._put_at.values())) < now - AGAIN_S:
            self._put_at.popitem(last=False)
        # Gone from here, so that it goes to the end when it is put again.
        was_put = self._put_at.pop(key, None)
        if was_put is None or not self._store.contains([key], CONTAINS_TIMEOUT_S)[0]:
            return False
        self._put_at[key] = now
        return True
