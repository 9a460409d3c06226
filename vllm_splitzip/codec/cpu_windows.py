"""Windows on a CPU: chosen from a sample of the blocks, and spread over a row's elements."""

# numba and llvmlite are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .coded import Bytes
from .cpu_compile import compiled
from .cpu_lanes import pointer32
from .cpu_memory import Pages
from .cpu_pool import aligned_bytes
from .cpu_vector import LANES, pointer8, pointer16, pointer64
from .packing import Channels
from .scheme import Scheme
from .windows import sampled_rows, sampled_states

Indices = npt.NDArray[np.int64]


def choose_windows(pages: Pages, channels: Channels, scheme: Scheme) -> Bytes:
    """The windows of a run. Shape: (channels,)."""
    windows = aligned_bytes(channels.number)
    number_format = scheme.number_format
    every = sampled_rows(pages.table.size).step
    rows = -(-pages.table.size // every)
    skip = sampled_states(rows, channels.states).step
    runs, positions, of_sample = _sample(channels, skip)
    row = channels.of_position.size
    per_position, per_channel = aligned_bytes(8 * row), aligned_bytes(24 * channels.number)
    choose(
        pages.address, pages.stride, pages.ids, every, rows, row,
        number_format.item, number_format.magnitudes - 1,
        runs.ctypes.data, runs.size // 2,
        positions.ctypes.data, of_sample.ctypes.data, positions.size,
        per_position.ctypes.data, per_channel.ctypes.data, channels.number,
        scheme.placement.weight,
        (scheme.placement.below << number_format.mantissa) >> 5,
        number_format.origin, number_format.step,
        rows * -(-channels.states // skip), windows.ctypes.data,
    )  # fmt: skip
    return windows


def spread_bases(windows: Bytes, channels: Channels, scheme: Scheme) -> Bytes:
    """The base of each element of a row, as wide as an element. Shape: (bytes of a row,)."""
    number_format = scheme.number_format
    row = channels.of_position.size
    spread_out = aligned_bytes(row * number_format.item)
    spread(
        np.ascontiguousarray(windows).ctypes.data, channels.number,
        aligned_bytes(2 * channels.number).ctypes.data,
        channels.of_position.ctypes.data, row, number_format.item,
        number_format.origin, number_format.step, spread_out.ctypes.data,
    )  # fmt: skip
    return spread_out


@lru_cache(maxsize=256)
def _sample(channels: Channels, skip: int) -> tuple[Indices, Indices, Indices]:
    """Which positions of a row are looked at, every `skip`th of each channel.

    Returns (begin and end of each piece of the row that holds some, the positions, their channels).
    """
    chosen = channels.positions()[:, ::skip]
    positions = np.sort(chosen.reshape(-1))
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    pieces = np.split(positions, breaks)
    runs = np.array([(piece[0], piece[-1] + 1) for piece in pieces if piece.size], np.int64)
    if len(runs) * LANES > positions.size:
        # Loops over short pieces are slower than one over all that lies between them as well.
        runs = np.array([(0, channels.of_position.size)], np.int64)
    return runs.reshape(-1), positions, channels.of_position[positions].astype(np.int64)


@compiled
def measure(source, item, mask, begin, end, sums, maxima, numbers):
    """Add elements `begin` to `end` of a row to the statistics of their positions."""
    total, maximum, number = pointer32(sums), pointer16(maxima), pointer16(numbers)
    if item == 2:
        words = pointer16(source)
        for i in range(begin, end):
            magnitude = words[i] & mask
            total[i] += magnitude
            maximum[i] = max(maximum[i], magnitude)
            number[i] += magnitude != 0
    else:
        elements = pointer8(source)
        for i in range(begin, end):
            magnitude = elements[i] & mask
            total[i] += magnitude
            maximum[i] = max(maximum[i], magnitude)
            number[i] += magnitude != 0


@compiled
def choose(
    pages, stride, table, every, rows, row, item, mask, runs, pieces, positions, of_sample, sampled,
    per_position, per_channel, channels, weight, below, origin, step, sample, windows,
):  # fmt: skip
    """Sum up rows, then positions, and place the windows. `windows.py` has the arithmetic."""
    ids, piece = pointer64(table), pointer64(runs)
    sums, maxima, numbers = per_position, per_position + 4 * row, per_position + 6 * row
    total, maximum, number = pointer32(sums), pointer16(maxima), pointer16(numbers)
    for i in range(row):
        total[i] = 0
        maximum[i] = 0
        number[i] = 0
    for index in range(rows):
        source = pages + ids[index * every] * stride
        for k in range(pieces):
            measure(source, item, mask, piece[2 * k], piece[2 * k + 1], sums, maxima, numbers)

    position, channel = pointer64(positions), pointer64(of_sample)
    totals, maximums = pointer64(per_channel), pointer64(per_channel + 8 * channels)
    counts = pointer64(per_channel + 16 * channels)
    for i in range(channels):
        totals[i] = 0
        maximums[i] = 0
        counts[i] = 0
    for k in range(sampled):
        i, j = position[k], channel[k]
        totals[j] += total[i]
        maximums[j] = max(maximums[j], maximum[i])
        counts[j] += number[i]

    window = pointer8(windows)
    for i in range(channels):
        byte = 0
        if 2 * counts[i] >= sample:
            mean = totals[i] // max(counts[i], 1)
            base = mean + ((maximums[i] - mean) * weight >> 3) - below
            byte = min(max((base - origin) // step, 0), 255)
        window[i] = byte


@compiled
def spread(windows, channels, bases, of_position, row, item, origin, step, target):
    """The base of each element of a row."""
    window, base, channel = pointer8(windows), pointer16(bases), pointer32(of_position)
    for i in range(channels):
        byte = window[i]
        base[i] = byte * step + (origin if byte else 0)
    if item == 2:
        words = pointer16(target)
        for i in range(row):
            words[i] = base[channel[i]]
    else:
        elements = pointer8(target)
        for i in range(row):
            elements[i] = base[channel[i]] & 0x7F
