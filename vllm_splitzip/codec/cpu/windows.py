"""Windows on a CPU: chosen from a sample of the blocks, and spread over a row's elements."""

# numba and llvmlite are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ..packing import Channels
from ..scheme import Scheme
from ..windows import sampled_rows, sampled_states
from .compiling import compiled
from .fast_loops import copy_bytes
from .lanes import pointer32, prefetch_again
from .memory import Pages
from .pool import ALIGNMENT
from .vector import LANES, pointer8, pointer16, pointer64

CACHED_BYTES = 1 << 19
"""A run of this size or less is brought into the cache whole while its sample is looked at."""

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Plan:
    """What the choice of a run's windows needs to know that does not depend on its elements.

    Attributes
    ----------
    held
        Arrays that the addresses below point to.
    work
        Bytes of memory that `choose` and `spread` work in; the row's bases come first.
    every, rows
        Which rows are looked at, and how many.
    sample
        Arguments of `choose` that say which of their elements.
    channels
        Arguments of both that say which channels there are.
    number_format
        Arguments of both that say what an element and a window are.
    placement
        Further arguments of `choose`.
    """

    held: tuple[Indices, ...]
    work: int
    every: int
    rows: int
    sample: tuple[int, ...]
    channels: tuple[int, ...]
    number_format: tuple[int, ...]
    placement: tuple[int, ...]


@lru_cache(maxsize=256)
def plan_for(channels: Channels, scheme: Scheme, rows: int) -> Plan:
    """How the windows of runs of `rows` rows are chosen."""
    number_format, row = scheme.number_format, channels.of_position.size
    every = sampled_rows(rows, channels.states).step
    sampled = -(-rows // every)
    skip = sampled_states(sampled, channels.states).step
    positions = np.sort(channels.positions()[:, ::skip].reshape(-1))
    of_position = channels.of_position.astype(np.int64)
    all_pieces, adjacent = _pieces(np.arange(row), of_position)
    pieces, together = _pieces(positions, of_position)
    if not together:
        # Loops over short pieces are slower than one over all that lies between them as well.
        pieces = np.array([0, row, 0], np.int64)
    held = (pieces, positions, of_position[positions], all_pieces, of_position)
    address = {id(array): array.ctypes.data for array in held}
    return Plan(
        held=held,
        work=_aligned(row * number_format.item) + 8 * row + 26 * channels.number + 8 * ALIGNMENT,
        every=every,
        rows=sampled,
        sample=(
            address[id(pieces)], pieces.size // 3, int(together),
            address[id(positions)], address[id(held[2])], positions.size,
            sampled * -(-channels.states // skip),
        ),
        channels=(
            channels.number, row, address[id(all_pieces)], all_pieces.size // 3, int(adjacent),
            address[id(of_position)],
        ),
        number_format=(
            number_format.item, number_format.magnitudes - 1, number_format.origin,
            number_format.shift,
        ),
        placement=(
            scheme.placement.weight, 4 << number_format.mantissa,
            (scheme.placement.below << number_format.mantissa) >> 5,
        ),
    )  # fmt: skip


def _pieces(positions: Indices, of_position: Indices) -> tuple[Indices, bool]:
    """(begin, end, first channel of each stretch whose channels follow each other, if they pay)."""
    breaks = (np.diff(positions) != 1) | (np.diff(of_position[positions]) != 1)
    begins = np.concatenate(
        [np.zeros(min(1, positions.size), np.int64), np.flatnonzero(breaks) + 1]
    )
    ends = np.append(begins[1:], positions.size)
    pieces = [positions[begins], positions[ends - 1] + 1, of_position[positions[begins]]]
    return np.stack(pieces, axis=1).reshape(-1), begins.size * LANES // 4 <= positions.size


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def choose_windows(pages: Pages, plan: Plan, windows: int, work: int) -> None:
    """Choose a run's windows, and spread their bases over a row.

    Parameters
    ----------
    windows, work
        Addresses of a byte for each channel and of the memory that the plan asks for.
    """
    choose(
        pages.address, pages.stride, pages.ids, plan.every, plan.rows,
        *plan.sample, *plan.channels, *plan.number_format, *plan.placement, windows, work,
    )  # fmt: skip


def spread_bases(windows: int, plan: Plan, work: int) -> None:
    """The base of each element of a row, as wide as an element, to where `work` begins."""
    spread(windows, *plan.channels, *plan.number_format, work)


@compiled
def ask_for(address, size):
    """Have memory brought into the cache."""
    for i in range(0, size, LANES):
        prefetch_again(address + i)


@compiled
def measure(source, item, mask, begin, end, sums, maxima, numbers):
    """Add elements `begin` to `end` of a row to statistics, one for each of them."""
    total, maximum, number = pointer32(sums), pointer16(maxima), pointer16(numbers)
    if item == 2:
        words = pointer16(source + 2 * begin)
        for i in range(end - begin):
            magnitude = words[i] & mask
            total[i] += magnitude
            maximum[i] = max(maximum[i], magnitude)
            number[i] += magnitude != 0
    else:
        elements = pointer8(source + begin)
        for i in range(end - begin):
            magnitude = elements[i] & mask
            total[i] += magnitude
            maximum[i] = max(maximum[i], magnitude)
            number[i] += magnitude != 0


@compiled
def choose(
    pages, stride, table, every, rows,
    pieces, number_of_pieces, together, positions, of_sample, sampled, sample,
    channels, row, all_pieces, number_of_all, adjacent, of_position,
    item, mask, origin, shift, weight, most, below, windows, work,
):  # fmt: skip
    """Sum up the sample, place the windows and spread them. `windows.py` has the arithmetic."""
    ids, piece = pointer64(table), pointer64(pieces)
    # Statistics are kept by channel where whole pieces of a row have consecutive ones; else by
    # position, and added up by channel at the end.
    size = channels if together else row
    sums = work + (item * row + 63) // 64 * 64
    maxima, numbers = sums + 4 * size, sums + 6 * size
    total, maximum, number = pointer32(sums), pointer16(maxima), pointer16(numbers)
    for i in range(size):
        total[i] = 0
        maximum[i] = 0
        number[i] = 0
    whole = every == 1 and rows * row * item <= CACHED_BYTES
    for index in range(rows):
        source = pages + ids[index * every] * stride
        following = pages + ids[min(index + 1, rows - 1) * every] * stride
        for k in range(number_of_pieces):
            at = piece[3 * k + 2]
            if whole:
                size_of_part = (item * row // number_of_pieces + 63) // 64 * 64
                ask_for(following + k * size_of_part, size_of_part)
            else:
                ask_for(following + item * piece[3 * k], item * (piece[3 * k + 1] - piece[3 * k]))
            measure(
                source, item, mask, piece[3 * k], piece[3 * k + 1],
                sums + 4 * at, maxima + 2 * at, numbers + 2 * at,
            )  # fmt: skip
    if not together:
        by_channel = sums + (8 * row + 63) // 64 * 64
        total, maximum, number = add_up(
            positions, of_sample, sampled, channels, sums, maxima, numbers, by_channel
        )

    window = pointer8(windows)
    for i in range(channels):
        byte = 0
        # Signed: numba makes floats of what mixes signs.
        count = np.int64(number[i])
        if 2 * count >= sample and count != 0:
            mean = np.int64(total[i]) // count
            base = mean + (min(np.int64(maximum[i]) - mean, most) * weight >> 3) - below
            byte = min(max((base - origin) >> shift, 0), 255)
        window[i] = byte
    spread(
        windows, channels, row, all_pieces, number_of_all, adjacent, of_position,
        item, mask, origin, shift, work,
    )  # fmt: skip


@compiled
def add_up(positions, of_sample, sampled, channels, sums, maxima, numbers, by_channel):
    """Statistics by channel from those by position."""
    position, channel = pointer64(positions), pointer64(of_sample)
    total, maximum, number = pointer32(sums), pointer16(maxima), pointer16(numbers)
    totals, maximums = pointer32(by_channel), pointer16(by_channel + 4 * channels)
    counts = pointer16(by_channel + 6 * channels)
    for i in range(channels):
        totals[i] = 0
        maximums[i] = 0
        counts[i] = 0
    for k in range(sampled):
        i, j = position[k], channel[k]
        totals[j] += total[i]
        maximums[j] = max(maximums[j], maximum[i])
        counts[j] += number[i]
    return totals, maximums, counts


@compiled
def spread(
    windows, channels, row, all_pieces, number_of_all, adjacent, of_position,
    item, mask, origin, shift, work,
):  # fmt: skip
    """The base of each element of a row, as wide as an element."""
    window = pointer8(windows)
    piece, channel = pointer64(all_pieces), pointer64(of_position)
    bases = work + (item * row + 63) // 64 * 64
    if item == 2:
        base, words = pointer16(bases), pointer16(work)
        for i in range(channels):
            byte = window[i]
            base[i] = (byte << shift) + (origin if byte else 0)
        if not adjacent:
            for i in range(row):
                words[i] = base[channel[i]]
    else:
        narrow, elements = pointer8(bases), pointer8(work)
        for i in range(channels):
            narrow[i] = (window[i] << shift) & mask
        if not adjacent:
            for i in range(row):
                elements[i] = narrow[channel[i]]
    if adjacent:
        for k in range(number_of_all):
            begin, size = piece[3 * k], piece[3 * k + 1] - piece[3 * k]
            copy_bytes(bases + item * piece[3 * k + 2], work + item * begin, item * size)
