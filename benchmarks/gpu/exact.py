"""Exactness on a device: the reference's bytes, every bit back, and nothing written elsewhere."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from vllm_splitzip.kernels import fast_encode

from vllm_splitzip.codec.codebook import Codebook
from vllm_splitzip.codec.device import fast as codec
from vllm_splitzip.codec.reference import fast as reference

from . import exact_windowed
from .bits import (
    FORMATS,
    UNTOUCHED,
    Different,
    coded_by_device,
    memory_of,
    replaced,
    same_bits,
    same_streams,
)
from .data import BOOKS, LAYOUTS, Layout, kv_like, read, write


def checks(device: torch.device, tiny: bool) -> Iterator[tuple[str, str | None]]:
    """(name, what is wrong or None) of one check after the other."""
    for name, check in chain(_all(device, tiny), exact_windowed.checks(device, tiny)):
        try:
            check()
            yield name, None
        except Different as error:
            yield name, str(error)


def _all(device: torch.device, tiny: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    blocks = 2 if tiny else 64
    for book_name, book in BOOKS.items():
        words = torch.randperm(1 << 16, device=device).to(torch.int16)
        words = words[:2048] if tiny else words
        yield (
            f"fast: every pattern, {book_name}",
            partial(_never_raw, fast, LAYOUTS["contiguous"], (1, 16, 64), words, book),
        )
    book = BOOKS["zero-window"]
    for shape in ((8, 16, 256), (1, 64, 576), (3, 16, 160), (2, 16, 72), (5, 3, 7)):
        shape = (shape[0], 2, 48) if tiny else shape
        for name, layout in LAYOUTS.items():
            words = kv_like(blocks * int(np.prod(shape)), book, 0.003, device)
            yield (
                f"fast: {name}, [B, {', '.join(map(str, shape))}]",
                partial(_never_raw, fast, layout, shape, words, book),
            )
    for elements in (1, 31, 32, 1000, 1023, 1025, 2080) if tiny else range(1, 4200, 61):
        words = kv_like(elements, book, 0.05, device)
        yield (
            f"fast: {elements} elements",
            partial(_never_raw, fast, LAYOUTS["contiguous"], (1, 1, elements), words, book),
        )
    if tiny:
        rates = {"no escape": 0.0}
    else:
        rates = {"no escape": 0.0, "0.2 % escapes": 0.002, "15 % escapes": 0.15}
    for name, rate in rates.items():
        words = kv_like(4096 if tiny else 1 << 24, book, rate, device)
        for repeat in range(1 if tiny else 4):
            yield (
                f"fast: {words.numel()} elements, {name}, run {repeat}",
                partial(fast, LAYOUTS["rows_first"], (2, 16, 64), words, book),
            )
    for name, dtype in FORMATS.items():
        yield f"raw: {name}", partial(raw, dtype, device)
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0
    if free > 24 << 30:
        yield "fast: blocks more than 8 GiB from the cache's start", partial(_far, device)


def fast(
    layout: Layout, shape: tuple[int, int, int], words: torch.Tensor, book: Codebook, spare: int = 2
) -> None:
    """Encode and decode blocks that lie in any order among `spare` others."""
    blocks = words.numel() // int(np.prod(shape))
    ids = torch.randperm(blocks + spare, device=words.device)[:blocks]
    view = layout((blocks + spare, *shape), words.device)
    write(view, ids, words)
    table = ids.cpu().numpy()
    same_streams(
        coded_by_device(codec.encode_fast(view, table, book)),
        expected := reference.encode(words.cpu().numpy().view(np.uint16), book),
    )
    memory = memory_of(view).fill_(UNTOUCHED)
    unwanted = torch.arange(blocks, device=words.device) % 5 == 4
    codec.decode_fast(expected, book, view, np.where(unwanted.cpu().numpy(), -1, table))
    kept = ids[~unwanted]
    same_bits("decoded", read(view, kept), words.reshape(blocks, -1)[~unwanted].reshape(-1))
    view.view(torch.int16)[kept] = UNTOUCHED
    same_bits("memory around", memory, torch.full_like(memory, UNTOUCHED))


def raw(dtype: torch.dtype, device: torch.device) -> None:
    bits = torch.randint(256, (6, 8, 3, 16 * dtype.itemsize), device=device).to(torch.uint8)
    view, table = bits.view(dtype).transpose(1, 2), np.array([5, 0, 3])
    coded = codec.encode_raw(view, table).result()
    back = torch.zeros_like(bits)
    codec.decode_raw(coded, back.view(dtype).transpose(1, 2), table)
    bits[[1, 2, 4]] = 0
    same_bits("decoded", back, bits)


def _far(device: torch.device) -> None:
    """Byte and element offsets beyond 32 bits, in both forms of the kernels."""
    book = BOOKS["zero-window"]
    for columns in (512, 516):
        cache = torch.zeros(1 << 16, 4, 32, columns, dtype=torch.bfloat16, device=device)
        view = cache[..., columns - 512 :]
        ids = torch.tensor([0, (1 << 16) - 1, 1 << 15], device=device)
        words = kv_like(3 * view[0].numel(), book, 0.01, device)
        write(view, ids, words)
        coded = coded_by_device(codec.encode_fast(view, ids.cpu().numpy(), book))
        same_streams(coded, reference.encode(words.cpu().numpy().view(np.uint16), book))
        view[ids] = 0
        codec.decode_fast(coded, book, view, ids.cpu().numpy())
        same_bits("decoded", read(view, ids), words)
        if int(cache.view(torch.int16)[1:100].count_nonzero()):
            raise Different("another block was written")
        del cache, view


def _never_raw(check: Callable[..., None], *args: Any) -> None:
    """Run a check on input that would be left to mode raw, as too small or too wild."""
    with replaced((fast_encode, "escape_limit", lambda elements: elements)):
        check(*args)
