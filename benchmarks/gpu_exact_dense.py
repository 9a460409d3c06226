"""As `gpu_exact.py`, for mode `dense` and for mode `fast` where it is one of windows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm_splitzip.kernels import dense_encode

from vllm_splitzip.codec.device import dense as codec
from vllm_splitzip.codec.packing import channels
from vllm_splitzip.codec.reference import dense as reference_dense
from vllm_splitzip.codec.scheme import DENSE, FAST, Scheme

from .gpu_data import LAYOUTS
from .gpu_exact import FORMATS, UNTOUCHED, Different, coded_by_device, memory_of, same_bits

Shape = tuple[int, int, int]

SCHEMES = [("dense", scheme) for scheme in DENSE.values()]
SCHEMES += [("fast", scheme) for scheme in FAST.values()]

_INTEGERS = {1: torch.uint8, 2: torch.int16}
_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16}


def checks(device: torch.device, tiny: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """(name, check), to be called one after the other."""
    shapes: tuple[Shape, ...] = ((8, 16, 256), (1, 64, 576), (3, 16, 160), (2, 16, 72), (5, 3, 14))
    for mode, scheme in SCHEMES:
        what = f"{mode} {scheme.number_format.name}"
        one = partial(round_trip, mode, scheme)
        size = 2 * scheme.number_format.magnitudes
        bits = torch.randperm(size, device=device)[: 2048 if tiny else size]
        bits = bits.to(_INTEGERS[scheme.number_format.item])
        yield f"{what}: every pattern", partial(_never_raw, one, "contiguous", (1, 8, 16), bits)
        for shape in ((2, 3, 16),) if tiny else shapes:
            for layout in ("rows_first", "misaligned") if tiny else LAYOUTS:
                bits = kv_like(scheme, 4 if tiny else 40, shape, 0.02, device)
                yield f"{what}: {layout}, {shape}", partial(_never_raw, one, layout, shape, bits)
        for elements in (2, 2048) if tiny else (2, 14, 256, 510, 2040, 2046, 2048, 2050, 4098):
            shape = (1, 1, elements)
            bits = kv_like(scheme, 1, shape, 0.05, device)
            yield f"{what}: {elements}", partial(_never_raw, one, "contiguous", shape, bits)
        if not tiny:
            for run in range(3 if what == "dense bf16" else 1):
                bits = kv_like(scheme, 512, (8, 16, 128), 0.001, device)
                yield f"{what}: large, {run}", partial(one, "rows_first", (8, 16, 128), bits)
        yield f"{what}: left to raw", partial(left_to_raw, mode, scheme, device)


def kv_like(
    scheme: Scheme, blocks: int, shape: Shape, wild: float, device: torch.device
) -> torch.Tensor:
    """Channels of different size, as integers, flat; a share `wild` may be anything."""
    heads, _, content = shape
    scale = torch.exp2(1.2 * torch.randn(heads, 1, content, device=device))
    values = torch.randn(blocks, *shape, device=device) * scale
    integers = _INTEGERS[scheme.number_format.item]
    bits = values.to(FORMATS[scheme.number_format.name]).view(integers)
    low, high = (0, 1 << 8) if integers == torch.uint8 else (-(1 << 15), 1 << 15)
    anything = torch.randint(low, high, bits.shape, device=device).to(integers)
    return torch.where(torch.rand(bits.shape, device=device) < wild, anything, bits).reshape(-1)


def a_view(layout: str, blocks: int, shape: Shape, item: int, device: torch.device) -> torch.Tensor:
    """A cache as integers. Layouts are those of 2-byte elements: two of 1 byte stand for one."""
    heads, states, content = shape
    cache = LAYOUTS[layout]((blocks, heads, states, content * item // 2), device)
    return cache.view(_INTEGERS[item])


def round_trip(mode: str, scheme: Scheme, layout: str, shape: Shape, bits: torch.Tensor) -> None:
    """Encode and decode blocks that lie in any order among two others."""
    blocks, device = bits.numel() // int(np.prod(shape)), bits.device
    rows = bits.reshape(blocks, *shape)
    ids = torch.randperm(blocks + 2, device=device)[:blocks]
    table = ids.cpu().numpy()
    view = a_view(layout, blocks + 2, shape, bits.element_size(), device)
    view[ids] = rows
    expected = reference_dense.encode(
        bits.cpu().numpy().view(_UNSIGNED[bits.element_size()]),
        scheme, channels("tokens", shape), mode,
    )  # fmt: skip
    coded = coded_by_device(codec.encode_dense(view, table, scheme, mode))
    for name, theirs in expected.tables.items():
        same_bits(name, torch.from_numpy(coded.tables[name]), torch.from_numpy(theirs))
    for i, (ours, theirs) in enumerate(zip(coded.dense, expected.dense, strict=True)):
        same_bits(f"dense {i}", torch.from_numpy(ours), torch.from_numpy(theirs))

    memory = memory_of(view).fill_(UNTOUCHED)
    unwanted = torch.arange(blocks, device=device) % 5 == 4
    codec.decode_dense(expected, scheme, view, np.where(unwanted.cpu().numpy(), -1, table))
    kept = ids[~unwanted]
    same_bits("decoded", view[kept].reshape(-1), rows[~unwanted].reshape(-1))
    blank = a_view(layout, blocks + 2, shape, bits.element_size(), device)
    everything = memory_of(blank).fill_(UNTOUCHED)
    blank[kept] = rows[~unwanted]
    same_bits("memory around", memory, everything)


def left_to_raw(mode: str, scheme: Scheme, device: torch.device) -> None:
    """What does not pay is kept as it is, before the blocks are used for anything else."""
    bits = kv_like(scheme, 6, (2, 16, 64), 1.0, device)
    view = a_view("rows_first", 6, (2, 16, 64), bits.element_size(), device)
    view[:] = bits.reshape(view.shape)
    pending = codec.encode_dense(view, np.arange(6), scheme, mode)
    view.zero_()
    coded = pending.result()
    if coded.mode != "raw":
        raise Different("not left to raw")
    same_bits("kept", torch.from_numpy(coded.dense[0]), bits.cpu().view(torch.uint8))


def _never_raw(check: Callable[..., None], *args: Any) -> None:
    """Run a check on input that would be left to mode raw, as too small or too wild."""
    with _no_limit():
        check(*args)


@contextmanager
def _no_limit() -> Iterator[None]:
    limit, pays = dense_encode.entry_limit, codec.pays
    dense_encode.entry_limit = lambda elements, *_: elements + 256
    codec.pays = lambda coded, size: True  # type: ignore[assignment]
    try:
        yield
    finally:
        dense_encode.entry_limit, codec.pays = limit, pays
