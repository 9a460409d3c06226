"""When to leave a mode for another: late enough that noise moves nothing back and forth."""

from collections.abc import Mapping

from .costs import cheapest

START = "fast"
"""In use until enough has been measured."""

MARGIN = 0.03
"""Another mode must take this share less time than the one in use."""

DWELL = 16
MOST_DWELL = 1024
CALM = 8


class Decider:
    """Keeps one mode of several.

    A mode stays for at least a dwell of so many frames. Whoever comes back to a mode it has left
    doubles the dwell, up to `MOST_DWELL`, so that two modes which are about as good change places
    ever more seldom. `CALM` dwells without a change make it short again.

    Parameters
    ----------
    start
        The mode until anything is known.
    """

    def __init__(self, start: str) -> None:
        self.mode = start
        self.dwell = DWELL
        self._changed_at: int | None = None
        self._left: set[str] = set()

    def decide(self, totals: Mapping[str, float], frames: int, evidence: float = 1.0) -> bool:
        """Choose by total seconds. Whether the mode changed.

        Parameters
        ----------
        totals
            Seconds by mode, of the one in use too.
        frames
            Frames coded so far.
        evidence
            Share, above 0 to 1, of the measurements that estimates are made of once there are
            enough. The fewer there are, the more must a change gain.
        """
        if self._changed_at is not None:
            stayed = frames - self._changed_at
            if stayed < self.dwell:
                return False
            if stayed >= CALM * self.dwell:
                self.dwell = DWELL
                self._left.clear()
        best = cheapest(totals)
        if best == self.mode or totals[best] >= (1 - MARGIN / evidence) * totals[self.mode]:
            return False
        if best in self._left:
            self.dwell = min(2 * self.dwell, MOST_DWELL)
        self._left.add(self.mode)
        self._changed_at = frames
        self.mode = best
        return True
