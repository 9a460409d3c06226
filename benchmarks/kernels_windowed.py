"""The kernels of modes `dense` and `max`, compiled for every target: what their code says."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm_splitzip.kernels import dense_decode, dense_encode, max_decode, max_encode, windows
from vllm_splitzip.kernels.cascade import ROUND
from vllm_splitzip.kernels.tiles import PAIRS, step_of, unroll_of

from vllm_splitzip.codec.scheme import SCHEMES

from .offline import Sass, accesses, compile_kernel, scratch

KERNELS = {
    "dense": {
        "encode": dense_encode.dense_encode_kernel,
        "collect": dense_encode.dense_collect_kernel,
        "decode": dense_decode.dense_decode_kernel,
        "windows": windows.choose_windows_kernel,
    },
    "max": {
        "encode": max_encode.max_encode_kernel,
        "collect": max_encode.max_collect_kernel,
        "decode": max_decode.max_decode_kernel,
    },
}
LAYOUTS = {"groups": 32, "vectors": 8, "elements": 0}
"""How many elements at a time are contiguous in the cache, and aligned to vectors."""

ELEMENTS_PER_LANE = 64

TYPICAL = (565, 121, 35)
"""Elements of a tile of real BF16 KV on levels 2 to 4 of `max` (Gemma 3 270M)."""

_ELEMENTS = {1: "*u8", 2: "*i16"}
_POINTERS = {
    "ids": "*i32", "windows": "*u8",
    "low": "*u8", "plane4": "*u8", "plane2": "*u8", "plane1": "*u8",
    "counts": "*u8", "numbers": "*i32", "positions": "*u8", "excesses": "*u8",
    "to_positions": "*u8", "to_excesses": "*u8",
    "sizes": "*i16", "lasts": "*i16", "listed": "*u8", "digits": "*u8", "escapes": "*u8",
    "lists": "*u8",
}  # fmt: skip
_OFFSETS = {"dense": "*i32", "max": "*i64"}


@dataclass(frozen=True)
class Windowed:
    """One kernel as it is compiled for one format and target. `mode` is dense, max or fast."""

    mode: str
    kernel: str
    format: str
    layout: str
    target: str

    def __str__(self) -> str:
        return f"{self.mode}-{self.kernel}-{self.format}-{self.layout}-{self.target}"

    @cached_property
    def compiled(self) -> Any:
        scheme, wide = SCHEMES[self.mode][self.format], LAYOUTS[self.layout]
        family = "dense" if self.mode == "fast" else self.mode
        kernel = KERNELS[family][self.kernel]
        elements = dict.fromkeys(("cache", "raw", "bases"), _ELEMENTS[scheme.number_format.item])
        pointers = _POINTERS | elements | dict.fromkeys(("ends", "firsts"), _OFFSETS[family])
        constants = {
            "PACKED": scheme.packed, "BELOW": scheme.below, "STEP": step_of(wide),
            "UNROLL": unroll_of(wide), "WIDE": wide, "ASM": self.target.startswith("sm"),
        }  # fmt: skip
        return compile_kernel(
            kernel,
            {name: kind for name, kind in pointers.items() if name in kernel.arg_names},
            {name: value for name, value in constants.items() if name in kernel.arg_names},
            self.target,
            warps=4 if self.kernel == "windows" else 1,
        )

    @cached_property
    def sass(self) -> Sass:
        return Sass.of(self.compiled)

    @cached_property
    def path(self) -> list[str]:
        """What a program executes whose tile nothing is listed of; each loop is gone through once.

        In mode `max` that is a tile with something on every level.
        """
        if self.mode == "max":
            return self.sass.shortest_path(r"\b(LDG|STG)\b")
        return self.sass.shortest_path(
            r"(LDG|STG)\.E\.128" if self.kernel == "encode" else r"STG\.E\.128"
        )

    @property
    def rounds(self) -> list[int]:
        """How often each loop of mode `max` is gone through, in order of address, in real KV."""
        begins = [0, TYPICAL[0], TYPICAL[0] + TYPICAL[1]]
        second, third, fourth = (
            -(-(number + begin % 4) // ROUND.value)
            for number, begin in zip(TYPICAL, begins, strict=True)
        )
        if self.kernel == "encode":
            return [PAIRS.value, second, third, fourth]
        return [second, third, fourth, third, second, PAIRS.value]

    @property
    def instructions(self) -> float | None:
        """Per element; None where the compiler has unrolled a loop, and rounds cannot be told."""
        if self.mode != "max":
            return len(self.path) / ELEMENTS_PER_LANE
        try:
            bodies, number = self.sass.loops(), len(self.path)
        except ValueError:
            return None
        if len(bodies) != len(self.rounds):
            return None
        number += sum(body * (times - 1) for body, times in zip(bodies, self.rounds, strict=True))
        return number / ELEMENTS_PER_LANE

    @property
    def wide_accesses(self) -> dict[str, int]:
        """Accesses of 64 and 128 bits, by name."""
        found = accesses(self.sass.instructions if self.mode == "max" else self.path).items()
        return {name: number for name, number in sorted(found) if re.search(r"\.(64|128)$", name)}

    @property
    def shown_accesses(self) -> str:
        ways = ", ".join(f"{number} {name}" for name, number in self.wide_accesses.items())
        return f"{ways} in 2 of 8 chunks" if self.mode == "max" else ways

    @property
    def scratch(self) -> dict[str, int]:
        """Bytes of memory a lane uses for want of registers."""
        return scratch(self.compiled, self.target)
