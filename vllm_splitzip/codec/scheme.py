"""How a windowed mode divides the elements of one number format; shared by every implementation."""

from dataclasses import dataclass

from .formats import FORMATS, NumberFormat
from .planes import plane_bytes
from .windows import Placement


@dataclass(frozen=True, slots=True)
class Scheme:
    """One mode's way with one format.

    Attributes
    ----------
    number_format
        What it codes.
    code
        Bits that the plain elements' binade within their window gets.
    placement
        Where windows lie.
    """

    number_format: NumberFormat
    code: int
    placement: Placement

    @property
    def below(self) -> int:
        """Bits of a rotated element's top byte that lie below the binade."""
        return 8 - self.number_format.exponent

    @property
    def packed(self) -> int:
        """Low bits of the top byte that are packed into planes."""
        return self.code + self.below

    def dense_bytes(self, elements: int) -> tuple[int, ...]:
        """Length in bytes of each dense stream: low bytes if there are two, then the planes."""
        low = (elements,) if self.number_format.item == 2 else ()
        return low + plane_bytes(elements, self.packed)


def _schemes(code: int, placement: Placement, *names: str) -> dict[str, Scheme]:
    return {name: Scheme(FORMATS[name], code, placement) for name in names}


# Weights and distances are the best of those tried on real KV, see benchmarks/ratios.py.
FAST = _schemes(4, Placement(weight=4, below=425), "e5m2")
DENSE = _schemes(3, Placement(weight=4, below=201), *FORMATS)
MAX = _schemes(2, Placement(weight=2, below=52), *FORMATS)
SCHEMES = {"fast": FAST, "dense": DENSE, "max": MAX}
"""By mode and number format. What is not in here is coded in some other way, or not at all."""
