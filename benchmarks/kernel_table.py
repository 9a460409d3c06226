"""Every variant of the kernels, compiled for every target: what its machine code says.

python -m benchmarks.kernel_table   prints the table and writes it to benchmarks/kernels.md
"""

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import triton
from vllm_splitzip.kernels.fast_decode import fast_decode_kernel
from vllm_splitzip.kernels.fast_encode import fast_encode_kernel

from .offline import TARGETS, Sass, accesses, compile_kernel

KERNELS = {"encode": fast_encode_kernel, "decode": fast_decode_kernel}
BOOKS = {"table": 0, "window": 1, "zero-window": 2}
LAYOUTS = {"groups": True, "elements": False}
"""Whether 32 elements at a time are contiguous in the cache, and aligned."""

ELEMENTS_PER_LANE = 32

_POINTERS = {
    "cache": "*i16", "ids": "*i32", "table": "*u8", "codes": "*u8", "rests": "*u8",
    "counts": "*i16", "starts": "*i32", "firsts": "*i32", "positions": "*i16",
    "exponents": "*u8", "reserved": "*i64",
}  # fmt: skip

PAGE = Path(__file__).parent / "kernels.md"


@dataclass(frozen=True)
class Variant:
    """One kernel as it is compiled for one target."""

    kernel: str
    book: str
    layout: str
    target: str

    def __str__(self) -> str:
        return f"{self.kernel}-{self.book}-{self.layout}-{self.target}"

    @cached_property
    def compiled(self) -> Any:
        kernel = KERNELS[self.kernel]
        return compile_kernel(
            kernel,
            {name: kind for name, kind in _POINTERS.items() if name in kernel.arg_names},
            {
                "KIND": BOOKS[self.book],
                "WIDE": LAYOUTS[self.layout],
                "ASM": self.target.startswith("sm"),
            },
            self.target,
            warps=1,
        )

    @cached_property
    def sass(self) -> Sass:
        return Sass.of(self.compiled)

    @cached_property
    def path(self) -> list[str]:
        """What a program with one chunk and no escape executes."""
        dense = r"STG\.E\.128" if self.kernel == "encode" else r"LDG\.E\.128"
        return self.sass.shortest_path(dense)

    @property
    def instructions(self) -> float:
        """Per element, in a program with one chunk and no escape."""
        return len(self.path) / ELEMENTS_PER_LANE

    @property
    def bytes_moved(self) -> float:
        """Per element, by 128-bit accesses."""
        wide = sum(n for name, n in accesses(self.path).items() if name.endswith(".128"))
        return 16 * wide / ELEMENTS_PER_LANE

    @property
    def scratch(self) -> dict[str, int]:
        """Bytes of memory a lane uses for want of registers."""
        if self.target.startswith("sm"):
            return {name: self.sass.used(name) for name in ("STACK", "LOCAL")}
        found = re.findall(
            r"\.(private_segment_fixed_size|vgpr_spill_count):\s*(\d+)",
            self.compiled.asm["amdgcn"],
        )
        return {name: int(size) for name, size in found}


def variants() -> list[Variant]:
    return [
        Variant(kernel, book, layout, target)
        for target, kernel, layout, book in product(TARGETS, KERNELS, LAYOUTS, BOOKS)
    ]


def table() -> str:
    """What is compiled for NVIDIA's targets. AMD's code is only checked for spills."""
    lines = [
        "| target | kernel | codebook | cache | registers | spills and stack (B) "
        "| instructions per element | bytes moved per element | memory accesses of a lane |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for variant in variants():
        if variant.target.startswith("sm"):
            moved = f"{variant.bytes_moved:.2f}" if variant.layout == "groups" else ""
            ways = ", ".join(f"{n} {name}" for name, n in sorted(accesses(variant.path).items()))
            lines.append(
                f"| {variant.target} | {variant.kernel} | {variant.book} | {variant.layout} "
                f"| {variant.sass.used('REG')} | {sum(variant.scratch.values())} "
                f"| {variant.instructions:.2f} | {moved} | {ways} |"
            )
    return "\n".join(lines)


def page() -> str:
    return f"""# Machine code of the kernels

Written by `python -m benchmarks.kernel_table` with Triton {triton.__version__}; no GPU is needed.

Instructions, bytes and accesses are those on the way of one chunk without escapes through a
program: a static count, not a time. What a program does once is in it once, although programs of
large inputs take several chunks. A lane has 32 elements of a chunk. *zero-window* is what
codebooks calibrated on real KV are; *elements* are caches whose layout allows no 128-bit access,
such as rows of a number of elements that is not a multiple of 32. Beside the bytes counted here
each chunk takes 2 bytes for its number of escapes, and its blocks' ids.

{table()}
"""


if __name__ == "__main__":
    PAGE.write_text(page())
    print(page())
