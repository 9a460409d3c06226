"""Input for the GPU checks, made where it is used: no model and no network is needed."""

from collections.abc import Callable

import torch

from vllm_splitzip.codec.codebook import Codebook
from vllm_splitzip.codec.scheme import Scheme

from .bits import FORMATS

BOOKS = {
    "zero-window": Codebook(bytes([0, *range(118, 133)])),
    "window": Codebook(bytes(range(115, 131))),
    "table": Codebook(bytes([*range(90, 122, 4), *range(122, 138, 2)])),
    "first-window": Codebook(bytes(range(16))),
    "last-window": Codebook(bytes(range(240, 256))),
    "low-zero-window": Codebook(bytes([0, *range(2, 17)])),
    "high-zero-window": Codebook(bytes([0, *range(241, 256)])),
}
"""The first is what calibration on real KV found. The others: all kinds, and both ends."""

Shape = tuple[int, int, int, int]
Layout = Callable[[Shape, torch.device], torch.Tensor]

_SLAB = 1 << 26


def contiguous(shape: Shape, device: torch.device) -> torch.Tensor:
    """LBHNC: a block is one run of memory."""
    return torch.zeros(shape, dtype=torch.bfloat16, device=device)


def rows_first(shape: Shape, device: torch.device) -> torch.Tensor:
    """LBNHC, what vLLM's GPU backends use by default."""
    b, h, n, c = shape
    return contiguous((b, n, h, c), device).transpose(1, 2)


def layers_inside(shape: Shape, device: torch.device) -> torch.Tensor:
    """BLHNC: other layers' data between the blocks."""
    return contiguous((shape[0], 2 * shape[1], *shape[2:]), device)[:, shape[1] :]


def heads_first(shape: Shape, device: torch.device) -> torch.Tensor:
    """LHBNC."""
    b, h, n, c = shape
    return contiguous((h, b, n, c), device).transpose(0, 1)


def misaligned(shape: Shape, device: torch.device) -> torch.Tensor:
    """No 128-bit access can be used."""
    return contiguous((*shape[:3], shape[3] + 4), device)[..., 4:]


LAYOUTS: dict[str, Layout] = {
    layout.__name__: layout
    for layout in (contiguous, rows_first, layers_inside, heads_first, misaligned)
}


def kv_like(
    elements: int, book: Codebook, escapes: float, device: torch.device, zeros: float = 0.004
) -> torch.Tensor:
    """BF16 bit patterns (int16): exponents around the middle of the codebook, and some outside."""
    words = torch.empty(elements, dtype=torch.int16, device=device)
    entries = torch.tensor(list(book.exponents), dtype=torch.int32, device=device)
    others = torch.tensor(
        sorted(set(range(256)) - set(book.exponents)), dtype=torch.int32, device=device
    )
    for begin in range(0, elements, _SLAB):
        size = min(_SLAB, elements - begin)
        normal = torch.randn(size, device=device)
        exponent = entries[(9 + 2.2 * normal).round().clamp(0, 15).long()]
        chance = torch.rand(size, device=device)
        wild = others[torch.randint(len(others), (size,), device=device)]
        exponent = torch.where(chance < escapes, wild, exponent)
        bits = torch.randint(1 << 16, (size,), device=device, dtype=torch.int32)
        word = (bits & 0x807F) | (exponent << 7)
        if 0 in book.exponents:
            word = torch.where(chance > 1 - zeros, 0, word)
        words[begin : begin + size] = word.to(torch.int16)
    return words


INTEGERS = {1: torch.uint8, 2: torch.int16}


def channels_like(
    scheme: Scheme, blocks: int, shape: tuple[int, int, int], wild: float, device: torch.device
) -> torch.Tensor:
    """Channels of different size, as integers, flat; a share `wild` may be anything."""
    heads, _, content = shape
    item = scheme.number_format.item
    scale = torch.exp2(1.2 * torch.randn(heads, 1, content, device=device))
    low, high = (0, 1 << 8) if item == 1 else (-(1 << 15), 1 << 15)
    each = max(1, _SLAB // (heads * shape[1] * content))
    slabs = []
    for begin in range(0, blocks, each):
        values = torch.randn(min(each, blocks - begin), *shape, device=device) * scale
        bits = values.to(FORMATS[scheme.number_format.name]).view(INTEGERS[item])
        anything = torch.randint(low, high, bits.shape, device=device).to(bits.dtype)
        chosen = torch.rand(bits.shape, device=device) < wild
        slabs.append(torch.where(chosen, anything, bits).reshape(-1))
    return torch.cat(slabs)


def as_integers(
    layout: str, blocks: int, shape: tuple[int, int, int], item: int, device: torch.device
) -> torch.Tensor:
    """A cache as integers. Layouts are those of 2-byte elements: two of 1 byte stand for one."""
    heads, states, content = shape
    cache = LAYOUTS[layout]((blocks, heads, states, content * item // 2), device)
    return cache.view(INTEGERS[item])


def write(view: torch.Tensor, ids: torch.Tensor, words: torch.Tensor) -> None:
    """Put the words of a run into its blocks."""
    view.view(torch.int16)[ids.long()] = words.reshape(-1, *view.shape[1:])


def read(view: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The words of a run, flat."""
    return view.view(torch.int16)[ids.long()].reshape(-1)
