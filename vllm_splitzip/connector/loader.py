"""Frames from the store into the KV cache, in threads, behind the engine's back.

A job ends exactly once: when all of its frames are in place, or when each has been in place or
given up. Until then vLLM keeps the job's blocks for it, so nothing here writes to a block that
has another owner.
"""

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field

from ..errors import FrameError, FrameLayoutError
from ..frame import Frame, unpack
from ..storage.base import Store
from .auto import AutoCodec
from .counters import Counters
from .geometry import Geometry
from .keys import KeySpace
from .messages import NOT_WANTED, LoadFrame, LoadJob
from .pages import Pages
from .streams import Fence, Streams
from .trace import OFF, Trace

logger = logging.getLogger(__name__)

THREADS = 4


@dataclass(slots=True)
class Finished:
    """Jobs that ended since the last call.

    Attributes
    ----------
    requests
        All of them, by request id.
    failed
        Those of which at least one frame is not in place.
    blocks
        The blocks that are not in place, of all failed ones.
    """

    requests: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Running:
    job: LoadJob
    deadline: float
    begin: Fence
    outstanding: int
    missing: set[int] = field(default_factory=set)
    has_failed: bool = False


class Loader:
    """Loads jobs. `submit` and `take_finished` are called by the model runner's thread."""

    def __init__(
        self,
        geometry: Geometry,
        pages: Mapping[str, Pages],
        keys: KeySpace,
        store: Store,
        streams: Streams,
        counters: Counters,
        timeout_s: float,
        trace: Trace = OFF,
        auto: AutoCodec | None = None,
    ) -> None:
        self._auto = auto
        self._trace = trace
        self._geometry = geometry
        self._pages = pages
        self._keys = keys
        self._store = store
        self._streams = streams
        self._counters = counters
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._finished = Finished()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="splitzip-loader")

    def submit(self, job: LoadJob) -> None:
        """Begin a job; it will show up in `take_finished` once, whatever happens."""
        tasks = [
            (frame, part.index)
            for frame in job.frames
            for part in self._geometry.parts
            if any(frame.tables[group] is not None for group in part.groups)
        ]
        running = _Running(
            job, time.monotonic() + self._timeout_s, self._streams.fence(), len(tasks)
        )
        if tasks:
            self._counters.add(loads_open=1)
        else:
            with self._lock:
                self._finished.requests.add(job.request_id)
        for frame, part in tasks:
            self._pool.submit(self._run, running, frame, part)

    def take_finished(self) -> Finished:
        """The jobs that ended since the last call."""
        if not self._finished.requests:
            return _NONE
        with self._lock:
            finished, self._finished = self._finished, Finished()
        return finished

    def close(self) -> None:
        """Give up what has not begun, and wait for what has."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, running: _Running, frame: LoadFrame, part: int) -> None:
        loaded = False
        try:
            loaded = self._load(running, frame, part)
        except Exception:
            logger.exception("a frame could not be loaded; its blocks are computed instead")
        finally:
            self._end(running, frame, part, loaded)

    def _load(self, running: _Running, frame: LoadFrame, part: int) -> bool:
        """Fetch, check and decode one frame. False if its blocks must be computed instead."""
        key = self._keys.object_key(frame.key, part)
        started = time.perf_counter()
        name = frame.key.hex()[:8]
        remaining_s = running.deadline - time.monotonic()
        if remaining_s <= 0:
            return False
        with self._trace.span("get", frame=name):
            fetched = self._store.get(key, remaining_s)
        if fetched is None:
            return False
        with fetched:
            fetched_at = time.perf_counter()
            try:
                with self._trace.span("verify", frame=name):
                    stored = unpack(fetched.data, self._keys.key_bytes(key))
                with (
                    self._trace.span("decode", frame=name),
                    self._auto.decoding(stored) if self._auto else nullcontext(),
                    self._streams.loading(after=running.begin),
                ):
                    self._decode(stored, frame, part)
            except FrameError as error:
                logger.warning(
                    "a stored frame is damaged and is removed (%s: %s); its blocks are computed "
                    "instead",
                    type(error).__name__,
                    error,
                )
                self._store.remove(key)
                return False
            self._counters.add(
                frames_loaded=1,
                stored_bytes_loaded=len(fetched.data),
                get_seconds=fetched_at - started,
                decode_seconds=time.perf_counter() - fetched_at,
            )
        return True

    def _decode(self, stored: Frame, frame: LoadFrame, part: int) -> None:
        """Write a frame's layers into their blocks, after all of them have been checked."""
        names = sorted(layer.name for layer in stored.layers)
        expected = sorted(
            name
            for name, pages in self._pages.items()
            if pages.group in self._geometry.parts[part].groups
        )
        if names != expected:
            raise FrameLayoutError(f"holds layers {names}, expected {expected}")
        for layer in stored.layers:
            pages = self._pages[layer.name]
            blocks = frame.units * self._geometry.group_blocks[pages.group]
            found = layer.format, layer.packing, layer.shape
            expected_here = pages.format, pages.packing, pages.frame_shape(blocks)
            if found != expected_here:
                raise FrameLayoutError(f"layer {layer.name} is {found}, expected {expected_here}")
        for layer in stored.layers:
            pages = self._pages[layer.name]
            table = frame.tables[pages.group]
            if table is not None:
                pages.decode(layer.coded, layer.codebook, table)

    def _end(self, running: _Running, frame: LoadFrame, part: int, loaded: bool) -> None:
        with self._lock:
            if not loaded:
                running.has_failed = True
                for group in self._geometry.parts[part].groups:
                    table = frame.tables[group] or ()
                    running.missing.update(block for block in table if block != NOT_WANTED)
            running.outstanding -= 1
            is_last = running.outstanding == 0
            if is_last:
                self._finished.requests.add(running.job.request_id)
                if running.has_failed:
                    self._finished.failed.add(running.job.request_id)
                    self._finished.blocks |= running.missing
        self._counters.add(frames_failed=not loaded, loads_open=-is_last)


_NONE = Finished()
