"""The kernels of modes `dense` and `max` compiled for GPUs that are not here.

See `test_kernels_compiled.py`.
"""

from functools import cache

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from vllm_splitzip.kernels import dense_decode, dense_encode, max_decode, max_encode, windows

from benchmarks.kernels_windowed import KERNELS, LAYOUTS, Windowed
from benchmarks.offline import TARGETS, accesses
from test_kernels_compiled import VIEWS, Recorder
from vllm_splitzip.codec.device.windowed import window_rule
from vllm_splitzip.codec.scheme import DENSE, FAST, MAX

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

NVIDIA = [target for target in TARGETS if target.startswith("sm")]
NAMES = [(mode, kernel) for mode, kernels in KERNELS.items() for kernel in kernels]
SCHEMES = {"dense": DENSE, "max": MAX, "fast": FAST}

variant = cache(Windowed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("mode", "kernel"), NAMES)
@pytest.mark.parametrize("target", TARGETS)
def test_registers_suffice(mode, kernel, layout, target):
    scratch = variant(mode, kernel, "bf16", layout, target).scratch
    assert scratch
    assert not any(scratch.values()), scratch


@pytest.mark.parametrize(
    ("mode", "name"),
    [(mode, name) for mode, schemes in SCHEMES.items() for name in schemes if name != "bf16"],
)
@pytest.mark.parametrize("kernel", ["encode", "decode"])
def test_registers_suffice_for_other_formats(kernel, mode, name):
    for layout in LAYOUTS:
        assert not any(variant(mode, kernel, name, layout, "sm_90").scratch.values())


@pytest.mark.parametrize("target", NVIDIA)
def test_elements_are_loaded_and_stored_by_vectors(target):
    """8 elements of 16 bits are 128 bits, as are their bases; of all else they are 64 at most."""
    # Of 8 chunks: elements and bases, low bytes, and the planes of 2 and of 1 bit.
    encode = variant("dense", "encode", "bf16", "vectors", target)
    assert encode.wide_accesses == {"LDG.E.128": 8 + 8, "STG.E.64": 8 + 2 + 1}
    decode = variant("dense", "decode", "bf16", "vectors", target)
    assert decode.wide_accesses == {"LDG.E.128": 8, "LDG.E.64": 8 + 2 + 1, "STG.E.128": 8}
    # In a loop, of 2 chunks at a time, and the plane of 2 bits beside it.
    encode = accesses(variant("max", "encode", "bf16", "vectors", target).sass.instructions)
    assert (encode["LDG.E.128"], encode["STG.E.64"]) == (2 + 2, 2 + 2)
    decode = accesses(variant("max", "decode", "bf16", "vectors", target).sass.instructions)
    assert (decode["LDG.E.128"], decode["STG.E.128"]) == (2, 2)
    assert decode["LDG.E.64"] == 2 + 2 + 1  # Where the escapes begin is a number of 64 bits.


@pytest.mark.parametrize(
    ("mode", "kernel", "most"),
    [
        ("dense", "encode", 17),
        ("dense", "decode", 12),
        ("max", "encode", 40),
        ("max", "decode", 50),
    ],
)
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_instructions_per_element(mode, kernel, most, target):
    """In `max` those of a tile of real KV, every level included."""
    assert variant(mode, kernel, "bf16", "vectors", target).instructions <= most


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("target", NVIDIA)
def test_entries_are_written_after_what_they_replace(layout, target):
    instructions = variant("dense", "decode", "bf16", layout, target).sass.instructions
    stores = [i for i, text in enumerate(instructions) if "STG.E" in text]
    barriers = [i for i, text in enumerate(instructions) if "BAR.SYNC" in text]
    assert "STG.E.U16" in instructions[stores[-1]]
    assert any(stores[-2] < barrier < stores[-1] for barrier in barriers)


@pytest.mark.parametrize(("kernel", "levels"), [("encode", 3), ("decode", 3)])
@pytest.mark.parametrize("target", NVIDIA)
def test_levels_wait_for_what_other_lanes_have_written(kernel, levels, target):
    """A level's loads do not move above the barrier behind the stores of the one before."""
    instructions = variant("max", kernel, "bf16", "vectors", target).sass.instructions
    barriers = [i for i, text in enumerate(instructions) if "BAR.SYNC" in text]
    assert len(barriers) == levels
    for begin, end in zip([0, *barriers], barriers, strict=False):
        assert any("STG.E.U8" in text for text in instructions[begin:end])
    assert any("LDG.E" in text for text in instructions[barriers[-1] :])


@pytest.mark.parametrize(("mode", "kernel"), NAMES)
def test_one_compilation_serves_all_sizes_and_strides(mode, kernel, monkeypatch):
    recorder, device, scheme = Recorder(), torch.device("cpu"), SCHEMES[mode]["bf16"]
    jitted = KERNELS[mode][kernel]
    for module in (dense_encode, dense_decode, max_encode, max_decode, windows):
        for name, each in list(vars(module).items()):
            if any(each is known for kernels in KERNELS.values() for known in kernels.values()):
                monkeypatch.setattr(module, name, recorder if each is jitted else Recorder())
    for view, blocks in VIEWS.values():
        ids, some = torch.zeros(blocks, dtype=torch.int32), torch.zeros(64, dtype=torch.uint8)
        elements, channels = blocks * view[0].numel(), view.shape[1] * view.shape[3]
        room, needed = (
            (elements, channels, 2, scheme.packed),
            (elements, 2, scheme.packed, channels),
        )
        bases, planes = torch.zeros(channels, dtype=torch.int16), (some, some, some)
        rule = window_rule(scheme, blocks, view.shape[2])
        if mode == "max" and kernel == "decode":
            max_decode.max_decode(view, ids, 2, bases, some, planes, ids.long(), some)
        elif mode == "max":
            buffers = max_encode.MaxBuffers.allocate(*room, device)
            buffers.sizes.zero_()
            limit = max_encode.escape_bytes_limit(*needed)
            max_encode.max_encode(view, ids, rule, limit, buffers)
        elif kernel == "decode":
            dense_decode.dense_decode(view, ids, 3, bases, some, planes, some, ids, some, some)
        else:
            buffers = dense_encode.DenseBuffers.allocate(*room, device)
            buffers.numbers.zero_()
            limit = dense_encode.entry_limit(*needed)
            dense_encode.dense_encode(view, ids, rule, limit, buffers)

    backend = make_backend(GPUTarget("cuda", 90, 32))
    binder = create_function_from_signature(jitted.signature, jitted.params, backend)
    keys = {str(binder(*args, **kwargs, debug=False)[1]) for args, kwargs in recorder.launches}
    assert len(recorder.launches) == len(VIEWS)
    assert len(keys) == 1, keys
