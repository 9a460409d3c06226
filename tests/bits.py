"""The comparisons that a lossless codec needs, with a report of where they failed."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_splitzip.codec.coded import Coded


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


def assert_same_streams(actual: Coded, expected: Coded) -> None:
    """Same mode, and the same bits in all streams, in the same order."""
    assert (actual.mode, actual.elements) == (expected.mode, expected.elements)
    assert list(actual.tables) == list(expected.tables)
    for ours, theirs in zip(actual.dense, expected.dense, strict=True):
        assert_bits_equal(ours, theirs)
    for name, theirs in expected.tables.items():
        assert_bits_equal(actual.tables[name], theirs)


def at_odd_addresses(coded: Coded) -> Coded:
    """With streams as a frame holds them: read-only, at odd addresses."""

    def moved(stream: npt.NDArray[Any]) -> npt.NDArray[Any]:
        held = np.frombuffer(b"\0" + stream.tobytes(), np.uint8)
        return held[1:] if held.ctypes.data % 2 == 0 else held[1:].copy()

    return replace(
        coded,
        dense=tuple(moved(s) for s in coded.dense),
        tables={name: moved(s) for name, s in coded.tables.items()},
    )
