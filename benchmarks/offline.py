"""Kernels compiled for GPUs that are not here, and what their machine code says.

Triton brings NVIDIA's assembler and disassembler along, so none of this needs a GPU or a driver.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

_JUMP = re.compile(r"\b(?:BRA\b|CALL\.REL).*?(\.L_x_\d+)")
"""A branch; what looks like a call is one out of a loop, where nothing returns."""

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def compile_kernel(
    kernel: Any, pointers: Mapping[str, str], constants: Mapping[str, Any], target: str, warps: int
) -> Any:
    """A kernel as its first launch would compile it: pointers aligned, integers of any value."""
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in pointers},
    )
    return triton.compile(source, target=TARGETS[target], options={"num_warps": warps})


@dataclass(frozen=True)
class Sass:
    """NVIDIA machine code of one kernel."""

    listing: str
    usage: str

    @classmethod
    def of(cls, compiled: Any) -> "Sass":
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            return cls(
                _run("nvdisasm", "-c", file.name), _run("cuobjdump", "-res-usage", file.name)
            )

    def used(self, what: str) -> int:
        """REG (registers a thread), STACK or LOCAL (bytes a thread), SHARED (bytes a program)."""
        found = re.search(rf"\b{what}:(\d+)", self.usage)
        assert found, self.usage
        return int(found[1])

    @cached_property
    def instructions(self) -> list[str]:
        """In order of address, predicates included."""
        return [text for text, _ in self._lines]

    @cached_property
    def _lines(self) -> list[tuple[str, list[str]]]:
        """(instruction, labels before it)."""
        lines, labels = [], []
        for line in self.listing.splitlines():
            if label := re.match(r"(\.L_x_\d+):", line):
                labels.append(label[1])
            elif text := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.+?)\s*;", line):
                lines.append((text[1], labels))
                labels = []
        return lines

    def shortest_path(self, through: str) -> list[str]:
        """The shortest way from start to end on which all instructions like `through` are.

        Branches are taken or not as suits, so a loop is gone through once.
        """
        return self._shortest(0, None, through)

    def loops(self) -> list[int]:
        """The length of each loop's body, in order of address: the shortest through all accesses.

        Only innermost loops are meant. The endless one behind the end is left out.
        """
        bodies = []
        for last, (text, _) in enumerate(self._lines):
            jump = _JUMP.search(text)
            first = self._at[jump[1]] if jump else last
            if first < last:
                bodies.append((first, len(self._shortest(first, last, r"\b(LDG|STG)\b"))))
        return [length for _, length in sorted(bodies)]

    @cached_property
    def _at(self) -> dict[str, int]:
        return {label: i for i, (_, labels) in enumerate(self._lines) for label in labels}

    def _shortest(self, first: int, last: int | None, through: str) -> list[str]:
        """From one instruction to another, or to the end."""
        lines = self._lines
        span = range(first, len(lines) if last is None else last + 1)
        wanted = [i for i in span if re.search(through, lines[i][0])]
        goals = {i: 1 << k for k, i in enumerate(wanted)}
        complete = (1 << len(goals)) - 1
        came_from: dict[tuple[int, int], tuple[int, int] | None] = {}
        queue: list[tuple[int, tuple[int, int], tuple[int, int] | None]] = [(0, (first, 0), None)]
        while queue:
            length, state, previous = heappop(queue)
            if state in came_from or state[0] not in span:
                continue
            came_from[state] = previous
            i, done = state[0], state[1] | goals.get(state[0], 0)
            text = lines[i][0]
            ended = re.search(r"\bEXIT\b", text) if last is None else i == last
            if done == complete and ended:
                return self._walked(came_from, state)
            jump = _JUMP.search(text)
            if jump:
                heappush(queue, (length + 1, (self._at[jump[1]], done), state))
            conditional = text[0] == "@" or re.search(r"\bBRA\S* !?UP\d", text)
            if conditional or not re.search(r"\b(EXIT|BRA)\b", text):
                heappush(queue, (length + 1, (i + 1, done), state))
        raise ValueError(f"no way through all of {through}")

    def _walked(
        self,
        came_from: dict[tuple[int, int], tuple[int, int] | None],
        state: tuple[int, int] | None,
    ) -> list[str]:
        path = []
        while state is not None:
            path.append(self._lines[state[0]][0])
            state = came_from[state]
        return path[::-1]


def scratch(compiled: Any, target: str) -> dict[str, int]:
    """Bytes of memory that a lane uses for want of registers."""
    if target.startswith("sm"):
        sass = Sass.of(compiled)
        return {name: sass.used(name) for name in ("STACK", "LOCAL")}
    found = re.findall(
        r"\.(private_segment_fixed_size|vgpr_spill_count):\s*(\d+)", compiled.asm["amdgcn"]
    )
    return {name: int(size) for name, size in found}


def accesses(instructions: list[str]) -> Counter[str]:
    """Instructions that go to memory, by name, such as LDG.E.128."""
    names = (text.split()[text[0] == "@"] for text in instructions)
    return Counter(name for name in names if re.match(r"(LD|ST|ATOM|RED)[GSL]?(\.|$)", name))


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout
