"""What the launchers have in common."""

import torch
import triton

MOST_PER_PROGRAM = 4
"""Chunks that a warp takes one after the other, so that starting it does not cost more."""

_WARPS_WANTED = 8192
"""Warps that keep a large GPU's memory busy; with fewer chunks than that each has its own."""


def chunks_per_program(chunks: int) -> int:
    """How many chunks a program takes."""
    return max(1, min(MOST_PER_PROGRAM, chunks // _WARPS_WANTED))


def has_ptx(device: torch.device) -> bool:
    """Whether kernels for the device may contain PTX. Not under Triton's interpreter."""
    return device.type == "cuda" and not torch.version.hip and not triton.knobs.runtime.interpret
