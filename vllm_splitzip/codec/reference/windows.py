"""Windows and rotation, written to be read. `windows.py` says what they mean."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ..coded import Bytes, Coded
from ..formats import NumberFormat
from ..packing import Channels
from ..scheme import Scheme
from ..windows import Placement, bases, place, sampled_rows, sampled_states

Elements = npt.NDArray[Any]


def choose_windows(
    elements: Elements, number_format: NumberFormat, channels: Channels, placement: Placement
) -> Bytes:
    """The windows of a run of whole rows. Returns shape: (channels,)."""
    rows: Elements = elements.reshape(-1, max(1, channels.of_position.size))
    rows = rows[sampled_rows(len(rows), channels.states)]
    positions = channels.positions()[:, sampled_states(len(rows), channels.states)]
    magnitudes = rows[:, positions].astype(np.int64) & (number_format.magnitudes - 1)
    return place(
        total=magnitudes.sum(axis=(0, 2)),
        number=(magnitudes > 0).sum(axis=(0, 2)),
        maximum=magnitudes.max(axis=(0, 2), initial=0),
        sample=magnitudes.shape[0] * magnitudes.shape[2],
        number_format=number_format,
        placement=placement,
    )


def rotate(
    elements: Elements, number_format: NumberFormat, channels: Channels, windows: Bytes
) -> tuple[Bytes, Bytes]:
    """(top bytes, low bytes) of the rotated elements; none of the latter in 1-byte formats."""
    base = _base_of_each(elements.size, number_format, channels, windows)
    magnitude = elements & (number_format.magnitudes - 1)
    sign = elements >> (number_format.bits - 1)
    distance = (magnitude - base) & (number_format.magnitudes - 1)
    rotated = (distance << 1) | sign
    if number_format.item == 1:
        return rotated.astype(np.uint8), np.zeros(0, np.uint8)
    return (rotated >> 8).astype(np.uint8), (rotated & 0xFF).astype(np.uint8)


def unrotate(
    top: Bytes, low: Bytes, number_format: NumberFormat, channels: Channels, windows: Bytes
) -> Elements:
    """The elements back. Returns shape: (elements,), uint16 or uint8."""
    base = _base_of_each(top.size, number_format, channels, windows)
    rotated = top if number_format.item == 1 else (top.astype(np.uint16) << 8) | low
    magnitude = ((rotated >> 1) + base) & (number_format.magnitudes - 1)
    restored: Elements = magnitude | ((rotated & 1) << (number_format.bits - 1))
    return restored.astype(rotated.dtype)


def join_streams(low: Bytes, planes: tuple[Bytes, ...], scheme: Scheme) -> tuple[Bytes, ...]:
    """The dense streams; low bytes are one only in 2-byte formats."""
    return (low, *planes) if scheme.number_format.item == 2 else planes


def split_streams(coded: Coded, scheme: Scheme) -> tuple[Bytes, tuple[Bytes, ...]]:
    """(low bytes, planes) of the dense streams."""
    if scheme.number_format.item == 2:
        return coded.dense[0], coded.dense[1:]
    return np.zeros(0, np.uint8), coded.dense


def _base_of_each(
    elements: int, number_format: NumberFormat, channels: Channels, windows: Bytes
) -> Elements:
    row: Elements = bases(windows, number_format)[channels.of_position]
    row = row.astype(np.uint16 if number_format.item == 2 else np.uint8)
    return np.tile(row, elements // max(1, row.size))
