"""The staging pool: LMCache's LocalCPUBackend, which is its allocator and its hot cache."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from ..errors import StoreError
from .base import Buffer, DamagedError
from .budget import Reservation
from .guards import forget_types, without_statistics

RETRY_S = 0.005
COLLECT_S = 30.0  # at most that often; the collector stops every thread
FORMAT = MemoryFormat.EC_TD  # one that every tier takes, for a tensor of one dimension


class StagingPool(LocalCPUBackend):
    """LMCache's pool, except that it never waits, publishes no metrics, and holds frames only."""

    def __init__(self, config: Any, metadata: Any, max_object_bytes: int) -> None:
        super().__init__(config, metadata, "cpu")
        without_statistics(self.cache_policy)
        self._max_object_bytes = max_object_bytes
        self._collected_at = time.monotonic()
        self.failures = 0  # of allocations by LMCache

    def _setup_metrics(self) -> None:
        # LMCache registers gauges in the process-global Prometheus registry, under the labels of
        # whichever engine comes first. The process belongs to vLLM; stay out of it.
        pass

    def allocate(
        self,
        shapes: Any,
        dtypes: Any,
        fmt: Any = None,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> Any:
        """As LMCache's, called by its connectors with what an object's stored metadata say.

        Raises
        ------
        DamagedError
            Those are not of an object of this store.
        StoreError
            There is not so much memory free in one piece.
        """
        shape = shapes[0] if isinstance(shapes, list) else shapes
        dtype = dtypes[0] if isinstance(dtypes, list) else dtypes
        if (
            fmt is not FORMAT
            or dtype is not torch.uint8
            or len(shape) != 1
            or not 0 < shape[0] <= self._max_object_bytes
        ):
            raise DamagedError(f"not an object of this store: {fmt}, {dtype}, {tuple(shape)}")
        obj = self._try(shapes, dtypes, fmt, eviction)
        if obj is None:
            self.failures += 1
            # Connectors differ in what they do with None; lm:// loses its place in the stream.
            raise StoreError(f"no {shape[0]} contiguous bytes are free in the staging pool")
        return obj

    def _try(self, shapes: Any, dtypes: Any, fmt: Any, eviction: bool = True) -> Any | None:
        forget_types()
        # Connectors ask with busy_loop=True from their event loop: when the pool is full that
        # sleeps, for ever, in the thread that would have to free something.
        obj = super().allocate(shapes, dtypes, fmt, eviction=eviction, busy_loop=False)
        if obj is None and time.monotonic() - self._collected_at > COLLECT_S:
            # What LMCache has lost in a call that failed comes back when it is collected.
            self._collected_at = time.monotonic()
            gc.collect()
            obj = super().allocate(shapes, dtypes, fmt, eviction=eviction, busy_loop=False)
        return obj

    def allocate_bytes(self, nbytes: int, deadline: float) -> Any | None:
        """A MemoryObj of `nbytes`; fragments are waited out until `deadline` (monotonic, s)."""
        while True:
            obj = self._try(torch.Size([nbytes]), torch.uint8, FORMAT)
            if obj is not None or time.monotonic() >= deadline:
                return obj
            time.sleep(RETRY_S)

    def wait_for_gap(self, deadline: float) -> None:
        """Waits until an object of any size would fit, or `deadline`. Reserved memory is free
        memory, but may lie in pieces. (A hot cache makes its own room.)"""
        if not self.use_hot:
            obj = self.allocate_bytes(self._max_object_bytes, deadline)
            if obj is not None:
                obj.ref_count_down()

    def get_hot(self, name: Any) -> Any | None:
        """The object from the hot cache, with a reference for the caller."""
        obj = self.get_blocking(name)
        if obj is not None:
            with self.cpu_lock:
                if name in self.hot_cache:
                    self.cache_policy.update_on_hit(name, self.hot_cache)
        return obj

    def free_bytes(self) -> int:
        """Bytes that nothing holds; what the hot cache holds counts as held."""
        manager = self.memory_allocator.pin_allocator.address_manager
        return int(manager.get_free_size())


class Loan:
    """A MemoryObj and its reservation, given back together when the last holder is done."""

    __slots__ = ("_holders", "_lock", "_obj", "_share")

    def __init__(self, obj: Any, share: Reservation) -> None:
        self._obj = obj
        self._share = share
        self._holders = 1
        self._lock = threading.Lock()

    def view(self) -> memoryview:
        """The bytes, writable."""
        return view_of(self._obj)

    def again(self) -> Any:
        """The object for one more holder, who calls `back`."""
        with self._lock:
            self._holders += 1
        return self._obj

    def back(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        self._obj.ref_count_down()
        self._share.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.back()


def view_of(obj: Any) -> memoryview:
    """The bytes of a MemoryObj, writable."""
    array = obj.raw_data[: obj.get_size()].numpy()
    return memoryview(array)


def gather(parts: Sequence[Buffer], nbytes: int, obj: Any) -> None:
    """Copies `parts` one after the other into `obj`, which holds `nbytes`.

    Raises
    ------
    StoreError
        They are not `nbytes` in all.
    """
    views = [_flat(part) for part in parts]
    total = sum(view.nbytes for view in views)
    if total != nbytes:
        raise StoreError(f"{len(views)} parts hold {total} bytes, expected {nbytes}")
    target = np.frombuffer(view_of(obj), np.uint8)
    start = 0
    for view in views:
        # numpy copies without the GIL; a slice assignment of a memoryview holds it
        target[start : start + view.nbytes] = np.frombuffer(view, np.uint8)
        start += view.nbytes


def _flat(part: Any) -> memoryview:
    view = memoryview(part)
    return view.cast("B") if view.nbytes else memoryview(b"")
