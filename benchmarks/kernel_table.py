"""Every variant of the kernels, compiled for every target: what its machine code says.

python -m benchmarks.kernel_table   prints the table and writes it to benchmarks/kernels.md
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import triton
from vllm_splitzip.kernels.fast_decode import fast_decode_kernel
from vllm_splitzip.kernels.fast_encode import fast_encode_kernel

from vllm_splitzip.codec.scheme import SCHEMES

from . import kernels_windowed
from .kernels_windowed import Windowed
from .offline import TARGETS, Sass, accesses, compile_kernel, scratch

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
        return scratch(self.compiled, self.target)


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


def windowed_variants() -> list[Windowed]:
    return [
        Windowed(mode, kernel, "bf16", layout, target)
        for target, (mode, kernels), layout in product(
            TARGETS, kernels_windowed.KERNELS.items(), kernels_windowed.LAYOUTS
        )
        for kernel in kernels
    ]


def windowed_table() -> str:
    lines = [
        "| target | mode | kernel | cache | registers | spills and stack (B) "
        "| instructions per element | vector accesses of a lane to a tile |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for variant in windowed_variants():
        found, ways = "", ""
        nvidia = variant.target.startswith("sm")
        if nvidia and variant.layout != "elements" and variant.kernel in ("encode", "decode"):
            number = variant.instructions
            found = "unrolled" if number is None else f"{number:.2f}"
            ways = variant.shown_accesses
        registers = variant.sass.used("REG") if nvidia else ""
        lines.append(
            f"| {variant.target} | {variant.mode} | {variant.kernel} | {variant.layout} "
            f"| {registers} | {sum(variant.scratch.values())} | {found} | {ways} |"
        )
    return "\n".join(lines)


def shown(kernel: str) -> str:
    """Instructions per element of `dense` as it is."""
    return f"{Windowed('dense', kernel, 'bf16', 'groups', 'sm_90').instructions:.2f}"


def moved_table() -> str:
    """Bytes per element that the kernels have to move, and do."""
    lines = [
        "| mode | format | bits in planes | elements | low bytes and planes | sum |",
        "|---|---|---|---|---|---|",
    ]
    for mode, schemes in SCHEMES.items():
        for name, scheme in schemes.items():
            item = scheme.number_format.item
            dense = sum(scheme.dense_bytes(1 << 11)) / (1 << 11)
            lines.append(
                f"| {mode} | {name} | {scheme.packed} | {item} | {dense:.3f} | {item + dense:.3f} |"
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

## Modes `dense` and `max`

BF16; a lane has 64 elements of a tile, in both directions. *groups* are caches whose rows are
multiples of 32 aligned elements, *vectors* those of other multiples of 8. Instructions are those of
all of a program: in `dense` of a tile without entries, in `max` of one of real KV, with
{", ".join(map(str, kernels_windowed.TYPICAL))} elements on levels 2 to 4, all loops gone through as
often as that takes. `collect` moves entries and escapes next to each other; `windows` looks at a
sample of at least 64 elements a channel. Where the compiler has unrolled a loop over digits, as in
`max` decode for sm_80, its rounds are counted as if it had not: then the figure is too high (or
*unrolled*, if loops cannot be told).

{windowed_table()}

Elements, bases, low bytes and planes are all loaded and stored by 128 bits a lane. For that a lane
has 16 neighbours of each 512 elements, their 16 low bytes, and 16 bytes of each plane for its 64
elements; in the plane of 1 bit two lanes share 16 bytes, which they put together by shuffles when
encoding and read both when decoding. In decode neighbouring lanes exchange 8 of 16 neighbours, so
that a store of all lanes fills whole sectors of 32 bytes; encode loads halves of sectors, and finds
the other halves in the L1 cache. What was tried, in instructions per element on sm_90, rows of
multiples of 32, in the first two lines of 8; the last line is of today, the others of when it was
tried:

| what | encode | decode |
|---|---|---|
| 8 neighbours a lane; low bytes and planes by 64 bits | 15.97 | 11.02 |
| 16 neighbours, each 8 of them found in the cache by themselves | 15.41 | 11.08 |
| 16, found once; the plane of 1 bit put together by a reduction, still 64 bits | 13.77 | |
| the same, put together by shuffles, 128 bits | 13.55 | 9.19 |
| the same, and decode exchanges: what there is | {shown("encode")} | {shown("decode")} |

Each element of the cache and each byte of the dense streams is loaded or stored once, and that is
the least:

{moved_table()}

Beside them are the windows' bases, as many bytes as elements but read again and again by all
tiles, so that they stay in the cache; an entry of `dense` (2 bytes, twice written and once read
when encoding); in `max` a byte in a list for each element that the first level hands on.

For gfx942 the kernels are compiled, without PTX, and use no scratch memory; none has run there.
"""


if __name__ == "__main__":
    PAGE.write_text(page())
    print(page())
