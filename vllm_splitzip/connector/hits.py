"""Which stored frames make up the longest hit for a request: a rule, free of vLLM and of I/O."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .geometry import Geometry, Part

SCAN_CHUNKS = 16
"""Chunks asked for at once: one round trip for most prompts, and no flood for long ones."""


class Run(NamedTuple):
    """A frame's place: the part it belongs to, and its last unit + 1, which names its key."""

    part: int
    end: int


class Hit(NamedTuple):
    """A usable prefix: `units` units, the last of them inside the frame that ends at `end`."""

    units: int
    end: int


NO_HIT = Hit(0, 0)


def longest_hit(
    geometry: Geometry,
    known: int,
    limit: int,
    contains: Callable[[Sequence[Run]], Sequence[bool]],
) -> Hit:
    """The longest prefix of at most `limit` units whose every needed frame is stored.

    It ends with a whole chunk, or inside the first chunk that is not stored whole, where the end
    of another request's prompt may have left a shorter frame.

    Parameters
    ----------
    known
        Units whose hashes are known; frames can end on any of them.
    limit
        Units that may be used at most; less than `known` when the last block must be recomputed.
    contains
        Whether each of some runs is stored.
    """
    if min(known, limit) <= 0:
        return NO_HIT
    full = [part for part in geometry.parts if part.window is None]
    windowed = [part for part in geometry.parts if part.window is not None]
    chunk = geometry.chunk_units

    prefix = _scan(full, chunk, known, contains) if full else known // chunk * chunk
    tails = range(min(prefix + chunk - 1, known), prefix, -1)
    stored: dict[Run, bool] = {}
    for end in [*tails, *range(prefix, 0, -chunk)]:
        units = min(end, limit)
        if units <= geometry.chunk_start(end - 1):
            continue  # Nothing of this frame could be used.
        needed = [Run(part.index, end) for part in full] if end % chunk else []
        for part in windowed:
            needed += _window_runs(geometry, part, units, end)
        missing = [run for run in needed if run not in stored]
        stored.update(zip(missing, contains(missing), strict=True))
        if all(stored[run] for run in needed):
            return Hit(units, end)
    return NO_HIT


def _scan(
    full: Sequence[Part],
    chunk: int,
    known: int,
    contains: Callable[[Sequence[Run]], Sequence[bool]],
) -> int:
    """Units up to the first whole chunk that a part with full attention lacks."""
    ends = range(chunk, known + 1, chunk)
    for first in range(0, len(ends), SCAN_CHUNKS):
        batch = ends[first : first + SCAN_CHUNKS]
        runs = [Run(part.index, end) for end in batch for part in full]
        for run, present in zip(runs, contains(runs), strict=True):
            if not present:
                return run.end - chunk
    return len(ends) * chunk


def _window_runs(geometry: Geometry, part: Part, units: int, end: int) -> list[Run]:
    """Runs that hold the window of `part` before unit `units`, the last one ending at `end`."""
    chunk = geometry.chunk_units
    first = geometry.chunk_start(geometry.first_needed(part, units))
    last_start = geometry.chunk_start(end - 1)
    return [
        *(Run(part.index, start + chunk) for start in range(first, last_start, chunk)),
        Run(part.index, end),
    ]
