"""The kernels of modes `dense` and `max` compiled for GPUs that are not here.

See `test_kernels_compiled.py`.
"""

from functools import cache

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
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


@pytest.mark.parametrize("layout", ["groups", "vectors"])
@pytest.mark.parametrize("target", NVIDIA)
def test_all_is_loaded_and_stored_by_vectors(target, layout):
    """As are bases, low bytes and planes: 128 bits a lane. Nothing of them is 64 bits or goes
    through shared memory."""
    # Of 8 vectors a lane: elements and bases; low bytes are 4, the planes of 2 and of 1 bit one.
    encode = variant("dense", "encode", "bf16", layout, target)
    assert encode.wide_accesses == {"LDG.E.128": 8 + 8, "STG.E.128": 4 + 1 + 1}
    decode = variant("dense", "decode", "bf16", layout, target)
    assert decode.wide_accesses == {"LDG.E.128": 8 + 4 + 1 + 1, "STG.E.128": 8}
    # In a loop, of 2 vectors at a time, and the plane of 2 bits beside it.
    encode = variant("max", "encode", "bf16", layout, target)
    assert encode.wide_accesses == {"LDG.E.128": 2 + 2, "STG.E.128": 1 + 1}
    # Where the escapes begin is a number of 64 bits.
    decode = variant("max", "decode", "bf16", layout, target)
    assert decode.wide_accesses == {"LDG.E.128": 2 + 1 + 1, "LDG.E.64": 1, "STG.E.128": 2}


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("mode", ["dense", "max"])
def test_planes_of_all_widths_are_loaded_and_stored_by_vectors(mode, target):
    """FP16 has planes of 4 bits: two accesses a lane; 7 bits, of E4M3 in `dense`, have all three.

    A vector of elements of 8 bits is 64 bits.
    """
    widths = {
        "fp16": (4, 2 if mode == "dense" else 1),
        "e4m3": (4, 2, 1)[: 3 if mode == "dense" else 2],
    }
    for name, planes in widths.items():
        assert sum(planes) == SCHEMES[mode][name].packed
        wide = sum(2 if width == 4 else 1 for width in planes)
        encode = accesses(variant(mode, "encode", name, "groups", target).sass.instructions)
        decode = accesses(variant(mode, "decode", name, "groups", target).sass.instructions)
        times = 1 if mode == "max" else 4
        item = SCHEMES[mode][name].number_format.item
        low, elements = times * (item - 1), 2 * times
        assert encode["STG.E.128"] == low + wide
        if item == 2:
            assert encode["LDG.E.128"] == 2 * elements
            assert decode["LDG.E.128"] == elements + low + wide
            assert decode["STG.E.128"] == elements
        else:
            assert encode["LDG.E.64"] == 2 * elements
            assert decode["LDG.E.128"] == wide
            assert decode["STG.E.64"] == elements


@pytest.mark.parametrize("target", NVIDIA)
def test_decode_fills_sectors(target):
    """Neighbouring lanes have exchanged 64 bits of low bytes and of top bytes for each pair."""
    path = variant("dense", "decode", "bf16", "groups", target).path
    shuffles = [text for text in path if "SHFL" in text and "SHFL.UP" not in text]
    assert len(shuffles) == 4 * (2 + 2)


@pytest.mark.parametrize(
    ("mode", "kernel", "most"),
    [
        ("dense", "encode", 14),
        ("dense", "decode", 10.5),
        ("max", "encode", 35),
        ("max", "decode", 47),
    ],
)
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_instructions_per_element(mode, kernel, most, target):
    """In `max` those of a tile of real KV, every level included."""
    assert variant(mode, kernel, "bf16", "groups", target).instructions <= most


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
    instructions = variant("max", kernel, "bf16", "groups", target).sass.instructions
    barriers = [i for i, text in enumerate(instructions) if "BAR.SYNC" in text]
    assert len(barriers) == levels
    for begin, end in zip([0, *barriers], barriers, strict=False):
        assert any("STG.E.U8" in text for text in instructions[begin:end])
    assert any("LDG.E" in text for text in instructions[barriers[-1] :])


class Allocations(TorchDispatchMode):
    """Which operations return memory that is not that of an argument."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = [
            each for each in (*args, *(kwargs or {}).values()) if isinstance(each, torch.Tensor)
        ]
        known = {each.untyped_storage().data_ptr() for each in given}
        made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        if any(each.untyped_storage().data_ptr() not in known for each in made):
            self.found.append(str(function))
        return result


def test_allocations_are_noticed():
    with Allocations() as allocations:
        some = torch.zeros(4)
        some[1:].view(3, 1).add_(1)
        torch.cumsum(some, 0, out=some)
        torch.empty(4)
    assert allocations.found == ["aten.zeros.default", "aten.empty.memory_format"]


@pytest.mark.parametrize(("mode", "kernel"), NAMES)
def test_one_compilation_serves_all_sizes_and_strides(mode, kernel, monkeypatch):
    """And a launch allocates nothing."""
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
            lists = torch.zeros(max_decode.lists_bytes(elements), dtype=torch.uint8)
            firsts = ids.long()
            with Allocations() as allocations:
                max_decode.max_decode(view, ids, 2, bases, some, planes, firsts, some, lists)
        elif mode == "max":
            buffers = max_encode.MaxBuffers.allocate(*room, device)
            buffers.sizes.zero_()
            limit = max_encode.escape_bytes_limit(*needed)
            with Allocations() as allocations:
                max_encode.max_encode(view, ids, rule, limit, buffers)
        elif kernel == "decode":
            with Allocations() as allocations:
                dense_decode.dense_decode(view, ids, 3, bases, some, planes, some, ids, some, some)
        else:
            buffers = dense_encode.DenseBuffers.allocate(*room, device)
            buffers.numbers.zero_()
            limit = dense_encode.entry_limit(*needed)
            with Allocations() as allocations:
                dense_encode.dense_encode(view, ids, rule, limit, buffers)
        assert not allocations.found, allocations.found

    backend = make_backend(GPUTarget("cuda", 90, 32))
    binder = create_function_from_signature(jitted.signature, jitted.params, backend)
    keys = {str(binder(*args, **kwargs, debug=False)[1]) for args, kwargs in recorder.launches}
    assert len(recorder.launches) == len(VIEWS)
    assert len(keys) == 1, keys
