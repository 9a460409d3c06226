"""The one comparison that a lossless codec needs, with a report of where it failed."""

from typing import Any

import numpy as np
import numpy.typing as npt


def assert_bits_equal(actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    """Same shape, same dtype, same bits; NaNs and signed zeros are compared as bits too."""
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    unsigned = np.dtype(f"u{actual.dtype.itemsize}")
    ours = np.ascontiguousarray(actual).view(unsigned)
    theirs = np.ascontiguousarray(expected).view(unsigned)
    different = np.argwhere(ours != theirs)
    if different.size:
        index = tuple(different[0].tolist())
        digits = 2 * actual.dtype.itemsize
        raise AssertionError(
            f"{len(different)} of {ours.size} differ, first at {index}: "
            f"{ours[index]:#0{digits + 2}x}, expected {theirs[index]:#0{digits + 2}x}"
        )
