"""What the windowed modes on a GPU have in common: windows, and the dense streams."""

# The folder `kernels` becomes a part of the package only when it is installed.
# mypy: disable-error-code="import-not-found"

from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ...errors import FrameLayoutError
from ...kernels.windows import WindowRule
from ..coded import Bytes, Coded
from ..planes import TILE, tiles_of
from ..scheme import Scheme
from ..windows import bases, sampled_rows, sampled_states
from .memory import checked_stream, download


class DenseStreams(Protocol):
    """What the buffers of these modes have in common: low bytes and planes, uint8."""

    @property
    def low(self) -> torch.Tensor: ...
    @property
    def plane4(self) -> torch.Tensor: ...
    @property
    def plane2(self) -> torch.Tensor: ...
    @property
    def plane1(self) -> torch.Tensor: ...


@cache
def window_rule(scheme: Scheme, rows: int, states: int) -> WindowRule:
    """How the windows of runs of `rows` blocks of `states` states are chosen."""
    number_format, placement = scheme.number_format, scheme.placement
    every = sampled_rows(rows, states).step
    return WindowRule(
        every=every,
        skip=sampled_states(-(-rows // every), states).step,
        origin=number_format.origin,
        shift=number_format.shift,
        weight=placement.weight,
        most=4 << number_format.mantissa,
        below=(placement.below << number_format.mantissa) >> 5,
    )


def download_dense(buffers: DenseStreams, scheme: Scheme, elements: int) -> tuple[Bytes, ...]:
    """The dense streams of a run in host memory, once the current stream has got there."""
    planes = ((4, buffers.plane4), (2, buffers.plane2), (1, buffers.plane1))
    low = [download(buffers.low[:elements])] if scheme.number_format.item == 2 else []
    return (
        *low,
        *(
            download(plane[: tiles_of(elements) * TILE * width // 8])
            for width, plane in planes
            if scheme.packed & width
        ),
    )


def checked_dense(coded: Coded, scheme: Scheme, elements: int) -> list[Bytes]:
    """The dense streams.

    Raises
    ------
    FrameLayoutError
        When they are not those of so many elements.
    """
    sizes = scheme.dense_bytes(elements)
    if coded.elements != elements or len(coded.dense) != len(sizes):
        raise FrameLayoutError(
            f"{coded.elements} elements in {len(coded.dense)} dense streams, "
            f"expected {elements} in {len(sizes)}"
        )
    return [
        checked_stream(f"dense[{index}]", stream, size)
        for index, (stream, size) in enumerate(zip(coded.dense, sizes, strict=True))
    ]


def low_and_planes(
    dense: list[torch.Tensor], scheme: Scheme
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(low bytes, planes of 4, 2 and 1 bits) of the dense streams, any one for what is not there.

    Kernels do not touch what a scheme has not.
    """
    low, planes = dense[0], iter(dense[scheme.number_format.item - 1 :])
    four, two, one = (next(planes) if scheme.packed & width else low for width in (4, 2, 1))
    return low, (four, two, one)


def bases_of(windows: Bytes, scheme: Scheme) -> npt.NDArray[np.uint8 | np.uint16]:
    """The windows' bases, as wide as elements."""
    of_channels = bases(windows, scheme.number_format)
    return of_channels if scheme.number_format.item == 2 else of_channels.astype(np.uint8)
