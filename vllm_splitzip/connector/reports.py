"""How fast loads go, told to whoever stores: for `codec: auto` across engines.

A prefill server whose store is beside it puts in no time, and never loads. That its frames then
cross a slow link only the decode server sees. So an engine that loads leaves a note of what it
measured in the store, and one that stores looks for it now and then.

Notes lie under keys of their own, one for each rank and ten seconds: whoever loads first in them
says how fast, and takes away the note it left before. Clocks may differ by about as much.
"""

import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable

import msgpack

from ..choice.costs import Link
from ..storage.base import ObjectKey, Store

logger = logging.getLogger(__name__)

PERIOD_S = 10.0
"""Of a note; an engine that stores looks three times as often."""

FRESH_S = 300.0
"""A note tells for so long, should no other come."""

TIMEOUT_S = 1.0


class LinkReports:
    """One rank's notes. The methods may be called from any thread, and may take `TIMEOUT_S`,
    which no frame should wait for.

    Parameters
    ----------
    store
        Shared by the engines.
    key_of
        From a digest of 32 bytes to a key of this rank.
    now
        Seconds since the epoch.
    """

    def __init__(
        self,
        store: Store,
        key_of: Callable[[bytes], ObjectKey],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._key_of = key_of
        self._now = now
        self._lock = threading.Lock()
        self._published: int | None = None
        self._looked_at = -math.inf
        self._looked_through = 0
        self._heard: tuple[float, Link] | None = None

    def publish(self, link: Link) -> None:
        """Leave a note, unless this period has one of ours."""
        period = int(self._now() // PERIOD_S)
        with self._lock:
            last = self._published
            if last is not None and last >= period:
                return
            self._published = period
        data = msgpack.packb([link.latency_s, link.bytes_per_s])
        self._store.put(self._key(period), [data], len(data), TIMEOUT_S)
        if last is not None:
            self._store.remove(self._key(last))

    def latest(self) -> Link | None:
        """The newest note there is, or was in the last five minutes. Asks the store seldom."""
        now = self._now()
        with self._lock:
            is_due = now - self._looked_at >= PERIOD_S / 3
            if is_due:
                self._looked_at = now
        if is_due:
            self._look(now)
        heard = self._heard
        return heard[1] if heard is not None and now - heard[0] < FRESH_S else None

    def _look(self, now: float) -> None:
        """Take the newest note that can be read: where requests are rare, it is not of late.

        Nobody leaves a note for a period that has passed, so that few are asked for at a time:
        every question takes the interpreter from the thread that computes.
        """
        newest = int(now // PERIOD_S)
        oldest = max(newest - int(FRESH_S // PERIOD_S) + 1, self._looked_through - 1)
        self._looked_through = newest
        periods = range(newest, oldest - 1, -1)
        keys = [self._key(period) for period in periods]
        there = self._store.contains(keys, TIMEOUT_S)
        for period, key, found in zip(periods, keys, there, strict=True):
            link = self._read(key) if found else None
            if link is not None:
                self._heard = period * PERIOD_S, link
                return

    def _read(self, key: ObjectKey) -> Link | None:
        fetched = self._store.get(key, TIMEOUT_S)
        if fetched is None:
            return None
        with fetched:
            return _link_of(bytes(fetched.data))

    def _key(self, period: int) -> ObjectKey:
        return self._key_of(hashlib.sha256(b"splitzip link report %d" % period).digest())


def _link_of(data: bytes) -> Link | None:
    """What a note says; None where it is none."""
    try:
        latency_s, bytes_per_s = map(float, msgpack.unpackb(data))
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    if not (0 <= latency_s < math.inf and 0 < bytes_per_s < math.inf):
        return None
    return Link(latency_s, bytes_per_s)
