"""The store: LMCache's backends as tiers, in LMCache's order local_cpu, local_disk, remote."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from ..errors import SettingError, StoreError
from .base import (
    Buffer,
    DamagedError,
    Fetched,
    Health,
    ObjectKey,
    Store,
    StoreStats,
)
from .budget import Budget, Reservation
from .config import GIB, StoreConfig
from .disk import DiskTier
from .keys import lmcache_key, lmcache_metadata
from .pool import Loan, StagingPool, gather
from .remote import RemoteTier
from .remotes import FsTier, open_remote
from .schemes import explain

logger = logging.getLogger(__name__)

CLOSE_S = 2.0
REMOVE_S = 5.0  # on a machine where every core computes, 2 s pass without a turn
FETCH_TRIES = 5  # others may take the memory that was there a moment before
MAX_REMOVED = 10_000  # keys remembered as removed; beyond, the oldest may be found again

Fetch = Callable[[float, Callable[[Any], None]], Any]


class LMCacheStore(Store):
    """See Store. Opened by `open_store`."""

    def __init__(self, config: StoreConfig, max_object_bytes: int) -> None:
        """
        Raises
        ------
        SettingError
            A backend cannot work with its settings.
        """
        self._config = config
        self._max_object_bytes = max_object_bytes
        self._lock = threading.Lock()
        self._stats = StoreStats()
        self._putting: dict[ObjectKey, Future[bool]] = {}
        self._removed: dict[ObjectKey, None] = {}
        self._closed = False
        metadata = lmcache_metadata(config.lmcache.chunk_size, max_object_bytes)
        try:
            self._pool = StagingPool(config.lmcache, metadata, max_object_bytes)
        except (RuntimeError, MemoryError, ValueError, OSError) as error:
            raise SettingError(
                f"max_local_cpu_size={config.lmcache.max_local_cpu_size}: LMCache cannot allocate "
                f"that many GB: {explain(error)}"
            ) from error
        self._budget = Budget(config.pool_bytes)
        self._disk: DiskTier | None = None
        self._remotes: list[RemoteTier] = []
        try:
            if config.disk:
                self._disk = DiskTier(config.lmcache, metadata, self._pool)
            for remote in config.remotes:
                self._remotes.append(open_remote(remote, config, metadata, self._pool))
        except BaseException:
            self.close()
            raise

    def contains(self, keys: Sequence[ObjectKey], timeout_s: float) -> list[bool]:
        deadline = time.monotonic() + timeout_s
        names = [lmcache_key(key) for key in keys]
        found = [self._is_local(name) for name in names]
        asking = [place for place, key in enumerate(keys) if key not in self._removed]
        for remote in self._remotes:
            asking = [place for place in asking if not found[place]]
            if asking and not self._closed:
                answers = remote.exists([names[place] for place in asking], _left(deadline))
                for place, answer in zip(asking, answers, strict=True):
                    found[place] = answer
        return found

    def _is_local(self, name: Any) -> bool:
        if self._config.hot and self._pool.contains(name):
            return True
        return self._disk is not None and self._disk.contains(name)

    def get(self, key: ObjectKey, timeout_s: float) -> Fetched | None:
        deadline = time.monotonic() + timeout_s
        name = lmcache_key(key)
        fetched = None
        tier = "local_cpu"
        if self._config.hot:
            fetched = self._fetch_hot(name, deadline)
        if fetched is None and self._disk is not None and self._disk.contains(name):
            tier = "local_disk"
            disk = self._disk
            fetched = self._fetch(key, lambda left, late: disk.get(name, left, late), deadline)
        if fetched is None and key not in self._removed:
            tier = "remote"
            fetched = self._fetch_remote(key, deadline)
        with self._lock:
            if fetched is None:
                self._stats.misses += 1
            else:
                self._stats.hits[tier] = self._stats.hits.get(tier, 0) + 1
                self._stats.bytes_fetched += fetched.data.nbytes
        return fetched

    def _fetch_hot(self, name: Any, deadline: float) -> Fetched | None:
        obj = self._pool.get_hot(name)
        if obj is None:
            return None
        share = self._budget.reserve(obj.get_size(), deadline)
        if share is None:
            obj.ref_count_down()
            return None
        return _lend(obj, share)

    def _fetch_remote(self, key: ObjectKey, deadline: float) -> Fetched | None:
        name = lmcache_key(key)
        for remote in self._remotes:
            fetched = self._fetch(key, functools.partial(remote.get, name), deadline)
            if fetched is not None:
                return fetched
        return None

    def _fetch(self, key: ObjectKey, fetch: Fetch, deadline: float) -> Fetched | None:
        """One tier's answer."""
        for _ in range(FETCH_TRIES):
            failures = self._pool.failures
            fetched = self._fetch_once(key, fetch, deadline)
            if fetched is not None or failures == self._pool.failures:
                return fetched
        return None

    def _fetch_once(self, key: ObjectKey, fetch: Fetch, deadline: float) -> Fetched | None:
        """With the memory for the object reserved while it may arrive."""
        share = self._budget.reserve(self._max_object_bytes, deadline)
        if share is None:
            return None

        def late(obj: Any) -> None:
            if obj is not None:
                obj.ref_count_down()
            share.release()

        self._pool.wait_for_gap(deadline)
        try:
            obj = fetch(_left(deadline), late)
        except StoreError as error:
            logger.debug("%s", error)
            if isinstance(error, DamagedError):
                self._mark_removed(key)
            return None
        if obj is None:
            share.release()
            return None
        share.shrink(obj.get_size())
        if self._config.hot:
            self._pool.submit_put_task(lmcache_key(key), obj)
        return _lend(obj, share)

    def put(self, key: ObjectKey, parts: Sequence[Buffer], nbytes: int, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            running = self._putting.get(key)
            if running is None:
                mine: Future[bool] = Future()
                self._putting[key] = mine
        if running is not None:
            # Equal keys name equal bytes, and some backends tear what two write at once.
            with contextlib.suppress(TimeoutError):
                return running.result(_left(deadline))
            return False
        stored = False
        try:
            stored = self._put(key, parts, nbytes, deadline)
        finally:
            with self._lock:
                del self._putting[key]
                self._stats.puts += 1
                self._stats.puts_failed += not stored
                self._stats.bytes_stored += nbytes * stored
                if stored:
                    self._removed.pop(key, None)
            mine.set_result(stored)
        return stored

    def _put(self, key: ObjectKey, parts: Sequence[Buffer], nbytes: int, deadline: float) -> bool:
        if not 0 < nbytes <= self._max_object_bytes:
            return False
        share = self._budget.reserve(nbytes, deadline)
        if share is None:
            return False
        obj = self._pool.allocate_bytes(nbytes, deadline)
        if obj is None:
            share.release()
            return False
        with Loan(obj, share) as loan:
            gather(parts, nbytes, obj)
            name = lmcache_key(key)
            stored = self._config.hot
            if self._config.hot:
                self._pool.submit_put_task(name, obj)
            if self._disk is not None:
                stored = self._disk.put(name, obj, _left(deadline))
            if self._remotes:
                fresh = key in self._removed
                answers = [
                    remote.put(name, loan.again(), _left(deadline), loan.back, fresh=fresh)
                    for remote in self._remotes
                ]
                stored = any(answers)
        return stored

    def remove(self, key: ObjectKey) -> None:
        name = lmcache_key(key)
        self._mark_removed(key)
        self._pool.remove(name)
        if self._disk is not None:
            self._disk.remove(name)
        for remote in self._remotes:
            remote.remove(name, REMOVE_S)

    def _mark_removed(self, key: ObjectKey) -> None:
        """Not every backend can delete; until it is overwritten, the key counts as absent."""
        with self._lock:
            self._removed[key] = None
            while len(self._removed) > MAX_REMOVED:
                del self._removed[next(iter(self._removed))]

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._budget.close()
        idle = self._disk.close() if self._disk is not None else True
        for remote in self._remotes:
            remote.close()
        # Memory that somebody still reads or writes is better lost than freed.
        if idle and self._budget.wait_idle(CLOSE_S):
            self._pool.close()

    @property
    def health(self) -> Health:
        states = {tier.health for tier in (self._disk, *self._remotes) if tier is not None}
        for state in ("down", "read-only"):
            if state in states:
                return state
        return "up"

    @property
    def stats(self) -> StoreStats:
        with self._lock:
            tiers = [self._disk, *(r for r in self._remotes if isinstance(r, FsTier))]
            evicted = sum(tier.evicted for tier in tiers if tier is not None)
            return dataclasses.replace(self._stats, hits=dict(self._stats.hits), evicted=evicted)

    def describe(self) -> str:
        tiers = []
        if self._config.hot:
            tiers.append(f"local_cpu ({self._config.pool_bytes / GIB:.2f} GiB)")
        if self._disk is not None:
            limit_gb = self._config.lmcache.max_local_disk_size
            tiers.append(f"local_disk {self._disk.path} ({limit_gb:g} GiB)")
        limit = self._config.limit_bytes
        for remote in self._remotes:
            room = f" ({limit / GIB:g} GiB)" if limit and isinstance(remote, FsTier) else ""
            tiers.append(f"{remote.label}{room}")
        return ", then ".join(tiers)


def _lend(obj: Any, share: Reservation) -> Fetched:
    loan = Loan(obj, share)
    return Fetched(loan.view().toreadonly(), loan.back)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
