"""What the connector did when, for pictures of a timeline; nothing is kept when it is off.

Files are in Chrome's trace event format, which Perfetto and chrome://tracing open as they are. The
closing bracket is left out, as the format allows, so that a process that is killed leaves a file
that can be read. Times are microseconds of the wall clock, taken from the monotonic clock and one
reading of both, so that traces of several processes can be laid over each other.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ..errors import SettingError

_NOTHING: AbstractContextManager[None] = nullcontext()


class Trace:
    """Off: `span` costs a call, and the other methods do nothing."""

    def span(self, name: str, **arguments: Any) -> AbstractContextManager[None]:
        """Context: what happens in it is one bar of the timeline, in this thread's row."""
        return _NOTHING

    def between(self, name: str, start: float, **arguments: Any) -> None:
        """A bar from `start`, seconds of `time.monotonic`, until now."""

    def close(self) -> None:
        """Write out what is held back. A second call does nothing."""


class FileTrace(Trace):
    """Writes events to a file as they end.

    Parameters
    ----------
    directory
        Made if it is not there. The file is called after `label` and this process.
    label
        Name of the process in the timeline.

    Raises
    ------
    OSError
        The file cannot be written.
    """

    def __init__(self, directory: Path, label: str) -> None:
        self._origin = time.time() - time.monotonic()
        self._lock = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / f"{label}-{os.getpid()}.json").open("w", buffering=1 << 16)
        self._file.write("[\n")
        self._emit({"ph": "M", "name": "process_name", "args": {"name": label}})

    @contextmanager
    def span(self, name: str, **arguments: Any) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.between(name, start, **arguments)

    def between(self, name: str, start: float, **arguments: Any) -> None:
        end = time.monotonic()
        self._emit(
            {
                "ph": "X",
                "name": name,
                "ts": round((self._origin + start) * 1e6, 1),
                "dur": round((end - start) * 1e6, 1),
                "args": arguments,
            }
        )

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _emit(self, event: dict[str, Any]) -> None:
        event |= {"pid": os.getpid(), "tid": threading.get_native_id()}
        line = json.dumps(event)
        with self._lock:
            if not self._file.closed:
                self._file.write(f"{line},\n")
                self._file.flush()


OFF = Trace()
"""For whoever keeps none."""


def open_trace(directory: str | None, label: str) -> Trace:
    """A trace into `directory`, or one that is off. Raises SettingError if it cannot be kept."""
    if directory is None:
        return OFF
    try:
        return FileTrace(Path(directory), label)
    except OSError as error:
        raise SettingError(
            f"kv_connector_extra_config['trace_dir'] is {directory!r}: {error}"
        ) from error
