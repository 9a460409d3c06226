"""As `exact.py`, for modes `dense` and `max`, and for `fast` where it is one of windows."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm_splitzip.kernels import dense_encode, max_encode

from vllm_splitzip.codec.coded import Coded
from vllm_splitzip.codec.device import dense, modes
from vllm_splitzip.codec.packing import channels
from vllm_splitzip.codec.reference import dense as reference_dense
from vllm_splitzip.codec.reference import max as reference_max
from vllm_splitzip.codec.scheme import DENSE, FAST, MAX, Scheme

from .bits import (
    UNTOUCHED,
    Different,
    coded_by_device,
    memory_of,
    replaced,
    same_bits,
    same_streams,
)
from .data import INTEGERS, LAYOUTS, as_integers, channels_like

Shape = tuple[int, int, int]

SCHEMES = [("dense", scheme) for scheme in DENSE.values()]
SCHEMES += [("max", scheme) for scheme in MAX.values()]
SCHEMES += [("fast", scheme) for scheme in FAST.values()]

_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16}


def checks(device: torch.device, tiny: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """(name, check), to be called one after the other."""
    shapes: tuple[Shape, ...] = ((8, 16, 256), (1, 64, 576), (3, 16, 160), (2, 16, 72), (5, 3, 14))
    for mode, scheme in SCHEMES:
        what = f"{mode} {scheme.number_format.name}"
        one = partial(round_trip, mode, scheme)
        size = 2 * scheme.number_format.magnitudes
        bits = torch.randperm(size, device=device)[: 2048 if tiny else size]
        bits = bits.to(INTEGERS[scheme.number_format.item])
        yield f"{what}: every pattern", partial(_never_raw, one, "contiguous", (1, 8, 16), bits)
        for shape in ((2, 3, 16),) if tiny else shapes:
            for layout in ("rows_first", "misaligned") if tiny else LAYOUTS:
                bits = channels_like(scheme, 4 if tiny else 16, shape, 0.02, device)
                yield f"{what}: {layout}, {shape}", partial(_never_raw, one, layout, shape, bits)
        for elements in (2, 2048) if tiny else (2, 14, 256, 510, 2040, 2046, 2048, 2050, 4098):
            shape = (1, 1, elements)
            bits = channels_like(scheme, 1, shape, 0.05, device)
            yield f"{what}: {elements}", partial(_never_raw, one, "contiguous", shape, bits)
        if not tiny:
            for run in range(3 if scheme.number_format.name == "bf16" else 1):
                bits = channels_like(scheme, 256, (8, 16, 128), 0.001, device)
                yield f"{what}: large, {run}", partial(one, "rows_first", (8, 16, 128), bits)
        yield f"{what}: left to raw", partial(left_to_raw, mode, scheme, device)


def round_trip(mode: str, scheme: Scheme, layout: str, shape: Shape, bits: torch.Tensor) -> None:
    """Encode and decode blocks that lie in any order among two others."""
    blocks, device, item = bits.numel() // int(np.prod(shape)), bits.device, bits.element_size()
    rows, name = bits.reshape(blocks, *shape), scheme.number_format.name
    ids = torch.randperm(blocks + 2, device=device)[:blocks]
    table = ids.cpu().numpy()
    view = as_integers(layout, blocks + 2, shape, item, device)
    view[ids] = rows
    expected = _expected(bits.cpu().numpy().view(_UNSIGNED[item]), mode, scheme, shape)
    same_streams(coded_by_device(modes.encode(view, table, name, mode, None)), expected)

    memory = memory_of(view).fill_(UNTOUCHED)
    unwanted = torch.arange(blocks, device=device) % 5 == 4
    modes.decode(expected, name, None, view, np.where(unwanted.cpu().numpy(), -1, table))
    kept = ids[~unwanted]
    same_bits("decoded", view[kept].reshape(-1), rows[~unwanted].reshape(-1))
    blank = as_integers(layout, blocks + 2, shape, item, device)
    everything = memory_of(blank).fill_(UNTOUCHED)
    blank[kept] = rows[~unwanted]
    same_bits("memory around", memory, everything)


def _expected(elements: Any, mode: str, scheme: Scheme, shape: Shape) -> Coded:
    known = channels("tokens", shape)
    if mode == "max":
        return reference_max.encode(elements, scheme, known)
    return reference_dense.encode(elements, scheme, known, mode)


def left_to_raw(mode: str, scheme: Scheme, device: torch.device) -> None:
    """What does not pay is kept as it is, before the blocks are used for anything else."""
    bits = channels_like(scheme, 6, (2, 16, 64), 1.0, device)
    view = as_integers("rows_first", 6, (2, 16, 64), bits.element_size(), device)
    view[:] = bits.reshape(view.shape)
    pending = modes.encode(view, np.arange(6), scheme.number_format.name, mode, None)
    view.zero_()
    coded = pending.result()
    if coded.mode != "raw":
        raise Different("not left to raw")
    same_bits("kept", torch.from_numpy(coded.dense[0]), bits.cpu().view(torch.uint8))


def _never_raw(check: Callable[..., None], *args: Any) -> None:
    """Run a check on input that would be left to mode raw, as too small or too wild."""
    with replaced(
        (dense_encode, "entry_limit", lambda elements, *_: elements + 256),
        (dense, "pays", lambda coded, size: True),
        (max_encode, "escape_bytes_limit", lambda elements, *_: 2 * elements + 4096),
    ):
        check(*args)
