"""Keeps directories of objects within a limit: what was not used for longest goes.

Any number of processes may share the directories. Recency is a file's modification time, which a
hit renews; a file is deleted whole; nothing is deleted whose name is not one of this package's.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from ..errors import StoreError
from .loop import LoopThread

T = TypeVar("T")
Seen = tuple[int, int, int]  # inode, bytes, modification time in ns

logger = logging.getLogger(__name__)

GIB = 1 << 30
HIGH_WATER = 0.95  # what one process knows of may fill this share of the limit ...
LOW_WATER = 0.9  # ... and is then swept down to this one.
RESCAN_SHARE = 0.05  # Others' files are counted again after this share was written: two writers
# keep within the limit together, each one more can exceed it by this share.
RESCAN_S = 600.0
STALE_S = 3600.0  # what a crashed writer left is deleted at this age
TMP_PREFIX = "sz1-tmp-"

_NAME = r"sz1-[a-z0-9-]{1,28}@\d+@\d+@[0-9a-f]{1,64}@uint8"
_TMP_FILE = re.compile(rf"{_NAME}\.pt\.\d+-\d+\.tmp")
_TMP_DIR = re.compile(r"(.+-)?sz1-tmp-\d+-[0-9a-f]{8}")


class Janitor:
    """Works on a thread of its own: a directory on a network file system may hang.

    `suffix` is that of the objects' files, `limit` in bytes, and `tmp_name` a directory in each
    of `directories` that this process writes in and other processes' janitors leave alone.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        suffix: str,
        limit: int | None,
        tmp_name: str | None = None,
    ) -> None:
        self._directories = list(directories)
        self._object = re.compile(_NAME + re.escape(suffix))
        self._tmp_name = tmp_name
        self._limit = limit
        self._estimate = 0  # bytes, as of the last scan and what this process wrote since
        self._written = 0  # bytes since the last scan
        self._scanned_at = -RESCAN_S
        self._touched_tmp_at = -RESCAN_S
        self._thread = LoopThread("splitzip-janitor")
        self.evicted = 0
        self.condemned: set[Path] = set()  # damaged, and about to be deleted
        self.blocked: set[Path] = set()  # where something is that no object can replace
        self._run(self._sweep, 0)

    def make_room(self, nbytes: int, deadline: float) -> None:
        """Prepares for writing a file of `nbytes`. `deadline` is of time.monotonic, in s.

        Raises
        ------
        StoreError
            The limit or the disk does not allow it, or the directory does not answer.
        """
        left_s = max(0.0, deadline - time.monotonic())
        try:
            self._run(self._make_room, nbytes).result(left_s)
        except (TimeoutError, RuntimeError, OSError) as error:
            raise StoreError(f"{self._directories[0]}: making room failed: {error!r}") from error

    def touch(self, path: Path) -> None:
        """Renews the recency of a file, soon."""
        if self._limit is not None:
            self._soon(_touch, path)

    def discard(self, path: Path, seen: Seen | None) -> None:
        """Deletes what is in an object's place and cannot be read, soon, unless it is no longer
        what was `seen` there. Room that is made later is made after that: a put wins. A directory
        with something in it stays, and is `blocked` until somebody else has removed it."""
        self.condemned.add(path)
        self._soon(self._discard, path, seen)

    def close(self) -> None:
        for path in self._tmp_paths():
            with contextlib.suppress(OSError):
                path.rmdir()
        self._thread.stop(2.0)

    def _tmp_paths(self) -> list[Path]:
        return [directory / self._tmp_name for directory in self._directories if self._tmp_name]

    def _run(self, act: Callable[..., T], *args: object) -> Future[T]:
        async def call() -> T:
            return act(*args)

        return self._thread.submit(call())

    def _soon(self, act: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # closed
            self._run(act, *args)

    def _discard(self, path: Path, seen: Seen | None) -> None:
        if _is_removed(path, seen):
            self.blocked.discard(path)
        elif path not in self.blocked:
            self.blocked.add(path)
            logger.warning(
                "%s is a directory with something in it, in the place of a frame: "
                "that frame is a cache miss until the directory is removed",
                path,
            )
        self.condemned.discard(path)

    def _make_room(self, nbytes: int) -> None:
        self._keep_tmp()
        if self._limit is None:
            return
        due = (
            self._estimate + nbytes > HIGH_WATER * self._limit
            or self._written + nbytes > RESCAN_SHARE * self._limit
            or time.monotonic() - self._scanned_at > RESCAN_S
            or self._free() < nbytes
        )
        if due:
            self._sweep(nbytes)
        self._estimate += nbytes
        self._written += nbytes

    def _keep_tmp(self) -> None:
        """Shows other processes' janitors that this process's directory is in use."""
        if time.monotonic() - self._touched_tmp_at < RESCAN_S / 10:
            return
        for path in self._tmp_paths():
            path.mkdir(parents=True, exist_ok=True)
            _touch(path)
        self._touched_tmp_at = time.monotonic()

    def _sweep(self, nbytes: int) -> None:
        """Counts what is there, and deletes what is too much for `nbytes` more."""
        for directory in self._directories:
            self._remove_leftovers(directory)
        if self._limit is None:
            return
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        limit = min(self._limit, total + self._free())
        if total + nbytes > HIGH_WATER * limit:
            goal = max(0, min(limit - nbytes, int(LOW_WATER * limit)))
            for _, size, path in files:
                if total <= goal:
                    break
                try:
                    os.unlink(path)
                    self.evicted += 1
                except FileNotFoundError:
                    pass  # another process was first
                except OSError as error:
                    logger.debug("cannot delete %s: %s", path, error)
                    continue
                total -= size
        self._estimate = total
        self._written = 0
        self._scanned_at = time.monotonic()
        if total + nbytes > limit:
            raise StoreError(
                f"{nbytes} bytes do not fit: {total} are stored, "
                f"{min(limit, self._limit)} are allowed with what is free on the disk"
            )

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """(modification time in ns, bytes, path) of every object."""
        for directory in self._directories:
            if not directory.is_dir():
                continue
            with os.scandir(directory) as entries:
                for entry in entries:
                    if self._object.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        with contextlib.suppress(FileNotFoundError):
                            stat = entry.stat(follow_symlinks=False)
                            yield stat.st_mtime_ns, stat.st_size, entry.path

    def _free(self) -> int:
        """Bytes that the fullest of the disks can still give; some are left to its other users."""
        frees = []
        for directory in self._directories:
            with contextlib.suppress(FileNotFoundError):
                usage = shutil.disk_usage(directory)
                frees.append(usage.free - min(GIB, usage.total // 20))
        return min(frees, default=GIB)

    def _remove_leftovers(self, directory: Path) -> None:
        """Deletes what a writer left behind that has not shown itself for STALE_S."""
        before = time.time() - STALE_S
        with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
            for entry in entries:
                is_file = bool(_TMP_FILE.fullmatch(entry.name))
                if not is_file and not _TMP_DIR.fullmatch(entry.name):
                    continue
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime >= before:
                        continue
                    if is_file:
                        os.unlink(entry.path)
                        continue
                    for name in os.listdir(entry.path):
                        if self._object.fullmatch(name):
                            os.unlink(Path(entry.path) / name)
                    os.rmdir(entry.path)


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.utime(path)


def identity(path: Path) -> Seen:
    """Which file is at `path` now. A put makes a new one.

    Raises
    ------
    OSError
        None is.
    """
    found = os.lstat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


def _is_removed(path: Path, seen: Seen | None) -> bool:
    """Deletes what is at `path`, if it is what was seen. False when a directory is in the way."""
    try:
        if path.is_symlink() or not path.is_dir():
            if identity(path) == seen:
                path.unlink()
                logger.warning("deleted %s, which could not be read", path)
            return True
        path.rmdir()
    except OSError as error:
        return error.errno not in (errno.ENOTEMPTY, errno.EEXIST)
    logger.warning("deleted %s, a directory in the place of a frame", path)
    return True
