"""Estimates from the last few measurements: bounded in memory, and unmoved by a few bad ones."""

from collections import deque
from itertools import combinations
from statistics import median

from .costs import Link

WINDOW = 16
TRIMMED = 8
"""One in so many measurements is left out at each end: a pause of the machine is not the link's."""

DIFFERENT = 0.25
"""By so much of the largest object two must differ in size to tell latency from bandwidth."""

PAIRS = 8

CHANGED = 3
MUCH = 2.0
"""A link has changed when the last three objects all were so many times as fast, or as slow, as
objects of about their size before. What it was like then tells nothing any more."""

LEAST_PACE = 1e-15
"""Seconds per byte that no link goes below."""


class LinkEstimate:
    """A link's latency and bandwidth, from objects that crossed it.

    Where their sizes differ, latency is what an object of no bytes would take by the median slope
    of all pairs (Theil and Sen). Where they do not, it is the round trip measured at start-up.

    Parameters
    ----------
    latency_s
        Seconds of an empty round trip.
    """

    def __init__(self, latency_s: float = 0.0) -> None:
        self._latency_s = latency_s
        self._objects: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self.seen = 0

    def add(self, nbytes: float, seconds: float) -> None:
        """Take in that an object of `nbytes` bytes took `seconds` seconds."""
        if nbytes > 0 and seconds >= 0:
            self._objects.append((nbytes, seconds))
            self.seen += 1
            self._forget_another_link()

    def link(self) -> Link | None:
        """The estimate; None while nothing has crossed."""
        if not self._objects:
            return None
        latency_s = self._latency()
        by_pace = sorted(self._objects, key=lambda each: max(0.0, each[1] - latency_s) / each[0])
        kept = trimmed(by_pace)
        seconds = sum(max(0.0, each[1] - latency_s) for each in kept)
        pace = seconds / sum(each[0] for each in kept)
        return Link(latency_s, 1 / max(pace, LEAST_PACE))

    def _forget_another_link(self) -> None:
        objects = list(self._objects)
        before, last = objects[:-CHANGED], objects[-CHANGED:]
        slower = [_times_as_slow(each, before) for each in last]
        if min(slower) > MUCH or max(slower) < 1 / MUCH:
            self._objects.clear()
            self._objects.extend(last)

    def _latency(self) -> float:
        least = min(seconds for _, seconds in self._objects)
        apart = DIFFERENT * max(nbytes for nbytes, _ in self._objects)
        slopes = [
            (b[1] - a[1]) / (b[0] - a[0])
            for a, b in combinations(self._objects, 2)
            if abs(b[0] - a[0]) >= apart
        ]
        if len(slopes) < PAIRS:
            return min(self._latency_s, least)
        pace = max(0.0, median(slopes))
        return min(max(0.0, median(each[1] - pace * each[0] for each in self._objects)), least)


def _times_as_slow(one: tuple[float, float], others: list[tuple[float, float]]) -> float:
    """As others of about its size; 1 where there are too few to tell."""
    alike = [seconds for nbytes, seconds in others if one[0] / 2 <= nbytes <= one[0] * 2]
    usual = median(alike) if len(alike) >= CHANGED else 0.0
    return one[1] / usual if usual > 0 else 1.0


class Quotient:
    """A quotient of two sums, such as KV cache over its frames, or real seconds over expected.

    Parameters
    ----------
    expected
        What it is taken for until it has been measured four times.
    window
        Measurements that it is made of.
    """

    def __init__(self, expected: float = 1.0, window: int = WINDOW) -> None:
        self._expected = expected
        self._terms: deque[tuple[float, float]] = deque(maxlen=window)

    def add(self, over: float, under: float) -> None:
        """Take in one measurement of both sums."""
        if over > 0 and under > 0:
            self._terms.append((over, under))

    @property
    def is_measured(self) -> bool:
        """Whether there are measurements enough."""
        return len(self._terms) >= 4

    @property
    def value(self) -> float:
        """The quotient now."""
        if not self.is_measured:
            return self._expected
        kept = trimmed(sorted(self._terms, key=lambda term: term[0] / term[1]))
        return sum(over for over, _ in kept) / sum(under for _, under in kept)


def trimmed(ordered: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """All but the first and the last few."""
    out = len(ordered) // TRIMMED
    return ordered[out : len(ordered) - out]
