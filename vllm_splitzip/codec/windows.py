"""Windows of magnitudes, one per channel, derived from the very elements that are coded.

An element without its sign is a number (its *magnitude*), nearly logarithmic: one binade is
2**mantissa of them. A channel's magnitudes crowd together, so what is stored of an element is its
distance from the *base* of its channel's window, modulo the number of magnitudes::

    rotated = (magnitude - base) << 1 | sign

A base is named by one byte, and a run's bytes travel with it as table `windows`, so nothing has
to be calibrated. Byte 0 is base 0, which suits channels of zeros; any other byte b is
``origin + (b << shift)``. How they are chosen matters to the size alone: from the mean and the
maximum of a sample, 64 elements or more of each channel.

There is more in a rotated element's top byte than the exponent if that has fewer than 8 bits, but
it always begins with it::

    bf16  eeeeeeee | mmmmmmms        fp16  eeeeemmm | mmmmmmms
    e5m2  eeeeemms                   e4m3  eeeemmms
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .coded import Bytes
from .formats import NumberFormat

ENOUGH = 256
"""Elements of a channel that are enough to judge it by; a run that has fewer is looked at whole."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a window lies: at ``mean + weight / 8 * (maximum - mean) - below / 32 binades``.

    The maximum counts as no more than 4 binades above the mean: it may be a lone outlier.
    """

    weight: int
    below: int


def sampled_rows(rows: int, states: int) -> slice:
    """Which of a run's rows are looked at; they hold `states` elements of each channel."""
    return slice(None, None, max(1, min(rows * states // (2 * ENOUGH), rows // 8)))


def sampled_states(rows: int, states: int) -> slice:
    """Which of a channel's elements in a row are looked at, where `rows` rows are."""
    return slice(None, None, 1 if rows * states < ENOUGH else max(4, states // ENOUGH))


def place(
    total: npt.NDArray[np.int64],
    number: npt.NDArray[np.int64],
    maximum: npt.NDArray[np.int64],
    sample: int,
    number_format: NumberFormat,
    placement: Placement,
) -> Bytes:
    """The windows, from statistics per channel of magnitudes that are not zero.

    Parameters
    ----------
    total, number, maximum
        Shape: (channels,), int64. Their sum, how many they are, the largest.
    sample
        How many elements of each channel were looked at.
    """
    mean = total // np.maximum(number, 1)
    above = np.minimum(maximum - mean, 4 << number_format.mantissa)
    below = (placement.below << number_format.mantissa) >> 5
    base = mean + (above * placement.weight >> 3) - below
    byte = np.clip((base - number_format.origin) >> number_format.shift, 0, 255)
    return np.where(2 * number >= sample, byte, 0).astype(np.uint8)


def bases(windows: Bytes, number_format: NumberFormat) -> npt.NDArray[np.uint16]:
    """The bases that the bytes name. Same shape, uint16."""
    base = windows.astype(np.uint16) << np.uint16(number_format.shift)
    base += np.where(windows, number_format.origin, 0).astype(np.uint16)
    return base & np.uint16(number_format.magnitudes - 1)
