"""Paged caches in all layouts, for the windowed modes under Triton's interpreter."""

from typing import Any

import numpy as np
import torch

from windowed import UNSIGNED

RNG = np.random.default_rng(20260502)
DTYPES = {1: torch.uint8, 2: torch.int16}


def contiguous(b: int, h: int, n: int, c: int, dtype: torch.dtype) -> torch.Tensor:
    """LBHNC: a block is one run of memory."""
    return torch.zeros(b, h, n, c, dtype=dtype)


def rows_first(b: int, h: int, n: int, c: int, dtype: torch.dtype) -> torch.Tensor:
    """LBNHC, what GPU backends use by default."""
    return torch.zeros(b, n, h, c, dtype=dtype).transpose(1, 2)


def layers_inside(b: int, h: int, n: int, c: int, dtype: torch.dtype) -> torch.Tensor:
    """BLNHC: other layers' data between the blocks."""
    return torch.zeros(b, 3, n, h, c, dtype=dtype)[:, 1].transpose(1, 2)


def misaligned(b: int, h: int, n: int, c: int, dtype: torch.dtype) -> torch.Tensor:
    """No vector can be used."""
    return torch.zeros(b, h, n, c + 4, dtype=dtype)[..., 4:]


def scattered(b: int, h: int, n: int, c: int, dtype: torch.dtype) -> torch.Tensor:
    """Not even the columns are contiguous."""
    return torch.zeros(b, h, c, n, dtype=dtype).transpose(2, 3)


LAYOUTS = [contiguous, rows_first, layers_inside, misaligned, scattered]
SHAPES = {
    "H1-N4-C576": (1, 4, 576),
    "H2-N16-C128": (2, 16, 128),
    "H3-N4-C40": (3, 4, 40),
    "H2-N3-C7": (2, 3, 7),
    "H1-N1-C1": (1, 1, 1),
}


def memory(view: torch.Tensor) -> Any:
    """All of the storage behind a view."""
    flat = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage()).numpy()
    return flat.view(UNSIGNED[view.element_size()])


def cache(layout, blocks: int, shape: tuple[int, int, int], item: int, fill: int) -> torch.Tensor:
    view = layout(blocks, *shape, DTYPES[item])
    memory(view)[:] = fill
    return view


def write(view: torch.Tensor, table: Any, rows: Any) -> None:
    """Put the rows of a run into their blocks."""
    bits = torch.from_numpy(rows.view({1: np.uint8, 2: np.int16}[rows.dtype.itemsize]))
    view[torch.from_numpy(table)] = bits.reshape(table.size, *view.shape[1:])


def a_table(blocks: int) -> Any:
    """Blocks in any order, among two others."""
    return RNG.permutation(blocks + 2)[:blocks].astype(np.int64)
