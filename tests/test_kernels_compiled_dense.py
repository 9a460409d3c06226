"""The kernels of mode `dense` compiled for GPUs that are not here: see `test_kernels_compiled`."""

from functools import cache

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from vllm_splitzip.kernels import dense_decode, dense_encode, windows
from vllm_splitzip.kernels.tiles import step_of, unroll_of

from benchmarks.offline import Sass, accesses, compile_kernel
from test_kernels_compiled import VIEWS, Recorder
from vllm_splitzip.codec.device.windowed import window_rule
from vllm_splitzip.codec.scheme import DENSE, FAST

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

KERNELS = {
    "encode": dense_encode.dense_encode_kernel,
    "collect": dense_encode.dense_collect_kernel,
    "decode": dense_decode.dense_decode_kernel,
    "windows": windows.choose_windows_kernel,
}
LAYOUTS = {"vectors": True, "elements": False}
NVIDIA = ["sm_80", "sm_90", "sm_100"]
SCHEMES = {name: (scheme.number_format.item, scheme.packed) for name, scheme in DENSE.items()}
SCHEMES["e5m2-fast"] = (1, FAST["e5m2"].packed)

_ELEMENTS = {1: "*u8", 2: "*i16"}
_POINTERS = {
    "ids": "*i32", "low": "*u8", "plane4": "*u8", "plane2": "*u8",
    "plane1": "*u8", "counts": "*u8", "numbers": "*i32", "ends": "*i32", "positions": "*u8",
    "excesses": "*u8", "to_positions": "*u8", "to_excesses": "*u8", "firsts": "*i32",
    "windows": "*u8",
}  # fmt: skip


@cache
def machine_code(name: str, scheme: str, layout: str, target: str) -> Sass:
    kernel, (item, packed), wide = KERNELS[name], SCHEMES[scheme], LAYOUTS[layout]
    pointers = _POINTERS | dict.fromkeys(("cache", "raw", "bases"), _ELEMENTS[item])
    constants = {"PACKED": packed, "STEP": step_of(wide), "UNROLL": unroll_of(wide), "WIDE": wide, "ASM": True}
    compiled = compile_kernel(
        kernel,
        {key: kind for key, kind in pointers.items() if key in kernel.arg_names},
        {key: value for key, value in constants.items() if key in kernel.arg_names},
        target,
        warps=4 if name == "windows" else 1,
    )
    return Sass.of(compiled)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("target", NVIDIA)
def test_registers_suffice(kernel, layout, target):
    code = machine_code(kernel, "bf16", layout, target)
    assert (code.used("STACK"), code.used("LOCAL")) == (0, 0)


@pytest.mark.parametrize("scheme", ["fp16", "e4m3", "e5m2", "e5m2-fast"])
@pytest.mark.parametrize("kernel", ["encode", "decode"])
def test_registers_suffice_for_other_formats(kernel, scheme):
    for layout in LAYOUTS:
        code = machine_code(kernel, scheme, layout, "sm_90")
        assert (code.used("STACK"), code.used("LOCAL")) == (0, 0)


@pytest.mark.parametrize("target", NVIDIA)
def test_elements_are_loaded_and_stored_by_vectors(target):
    """8 elements of 16 bits are 128 bits, as are their bases; of all else they are 64 at most."""
    encode = accesses(machine_code("encode", "bf16", "vectors", target).instructions)
    assert encode["LDG.E.128"] == 2  # The elements and their bases, in a loop.
    assert encode["STG.E.64"] == 1 + 2 + 1  # Low bytes in the loop, planes of 2 and of 1 bit.
    decode = accesses(machine_code("decode", "bf16", "vectors", target).instructions)
    assert (decode["LDG.E.64"], decode["LDG.E.128"], decode["STG.E.128"]) == (8 + 2 + 1, 8, 8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("target", NVIDIA)
def test_entries_are_written_after_what_they_replace(layout, target):
    instructions = machine_code("decode", "bf16", layout, target).instructions
    stores = [i for i, text in enumerate(instructions) if "STG.E" in text]
    barriers = [i for i, text in enumerate(instructions) if "BAR.SYNC" in text]
    assert "STG.E.U16" in instructions[stores[-1]]
    assert any(stores[-2] < barrier < stores[-1] for barrier in barriers)


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_compilation_serves_all_sizes_and_strides(kernel, monkeypatch):
    recorder, device, scheme = Recorder(), torch.device("cpu"), DENSE["bf16"]
    for module in (dense_encode, dense_decode, windows):
        for name, jitted in list(vars(module).items()):
            if jitted in KERNELS.values():
                known = jitted is KERNELS[kernel]
                monkeypatch.setattr(module, name, recorder if known else Recorder())
    for view, blocks in VIEWS.values():
        ids, some = torch.zeros(blocks, dtype=torch.int32), torch.zeros(64, dtype=torch.uint8)
        elements, channels = blocks * view[0].numel(), view.shape[1] * view.shape[3]
        bases = torch.zeros(channels, dtype=torch.int16)
        if kernel == "decode":
            dense_decode.dense_decode(
                view, ids, 3, bases, some, (some, some, some), some, ids, some, some
            )
        else:
            limit = dense_encode.entry_limit(elements, 2, 3, channels)
            buffers = dense_encode.DenseBuffers.allocate(elements, channels, 2, 3, device)
            buffers.numbers.zero_()
            rule = window_rule(scheme, blocks, view.shape[2])
            dense_encode.dense_encode(view, ids, rule, limit, buffers)

    jitted = KERNELS[kernel]
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binder = create_function_from_signature(jitted.signature, jitted.params, backend)
    keys = {str(binder(*args, **kwargs, debug=False)[1]) for args, kwargs in recorder.launches}
    assert len(recorder.launches) == len(VIEWS)
    assert len(keys) == 1, keys
