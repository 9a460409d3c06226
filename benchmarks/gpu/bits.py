"""Comparing bits on a device: what the checks of all modes have in common."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm_splitzip.codec.coded import Coded
from vllm_splitzip.codec.device.memory import Pending

UNTOUCHED = -0x1234

FORMATS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e5m2": torch.float8_e5m2,
    "e4m3": torch.float8_e4m3fn,
    "bytes": torch.uint8,
}


class Different(Exception):
    """Bits are not what they must be."""


def same_bits(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    if actual.shape != expected.shape:
        raise Different(f"{name}: {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    wrong = (actual != expected).reshape(-1)
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        found, wanted = actual.reshape(-1)[first], expected.reshape(-1)[first]
        raise Different(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} differ, first at {first}: "
            f"{int(found):#x}, expected {int(wanted):#x}"
        )


def same_streams(actual: Coded, expected: Coded) -> None:
    names = (*(f"dense {i}" for i in range(len(expected.dense))), *expected.tables)
    ours = (*actual.dense, *(actual.tables[name] for name in expected.tables))
    theirs = (*expected.dense, *expected.tables.values())
    for name, one, other in zip(names, ours, theirs, strict=True):
        same_bits(name, torch.from_numpy(one), torch.from_numpy(other))


def memory_of(view: torch.Tensor) -> torch.Tensor:
    """All of the storage behind a view."""
    return torch.empty(0, dtype=torch.int16, device=view.device).set_(view.untyped_storage())


def coded_by_device(pending: Pending) -> Coded:
    coded = pending.result()
    if coded.mode == "raw":
        raise Different("left to mode raw")
    return coded


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """(module, name, value): values that names have for a while."""
    kept = [(module, name, getattr(module, name)) for module, name, _ in changes]
    _set(changes)
    try:
        yield
    finally:
        _set(kept)


def _set(values: Iterable[tuple[Any, str, Any]]) -> None:
    for module, name, value in values:
        setattr(module, name, value)
