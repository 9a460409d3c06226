"""The kernels compiled for GPUs that are not here: what the machine code must and must not do."""

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from vllm_splitzip.kernels import fast_decode, fast_encode
from vllm_splitzip.kernels.book import DeviceBook

from benchmarks.kernel_table import BOOKS, KERNELS, LAYOUTS, TARGETS, Variant, variants
from benchmarks.offline import accesses

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

NVIDIA = [target for target in TARGETS if target.startswith("sm")]


@pytest.mark.parametrize("variant", variants(), ids=str)
def test_registers_suffice(variant):
    assert variant.scratch
    assert not any(variant.scratch.values()), variant.scratch


@pytest.mark.parametrize("book", BOOKS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("target", NVIDIA)
def test_dense_accesses_are_128_bits_wide(kernel, book, target):
    variant = Variant(kernel, book, "groups", target)
    # The ids of two blocks, and how many escapes there are: a word a chunk, mostly cached.
    expected = {"LDG.E": 2, "LDG.E.128": 4, "STG.E.128": 3, "STG.E.U16": 1}
    if kernel == "decode":
        expected = {"LDG.E": 4, "LDG.E.128": 3, "STG.E.128": 4}
    if book == "table":  # A byte of it for each element, or all of it.
        expected |= {"LDG.E.U8": 32} if kernel == "encode" else {"LDG.E": 8}
    assert accesses(variant.path) == expected
    assert variant.bytes_moved == 3.5
    assert variant.sass.used("SHARED") == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("target", NVIDIA)
def test_escapes_are_written_after_what_they_replace(layout, target):
    instructions = Variant("decode", "zero-window", layout, target).sass.instructions
    dense, sparse = (
        [i for i, text in enumerate(instructions) if name in text]
        for name in ("STG.E.128" if layout == "groups" else "STG.E.U16", "STG.E.U16")
    )
    barriers = [i for i, text in enumerate(instructions) if "BAR.SYNC" in text]
    last_dense = dense[-1] if layout == "groups" else dense[-2]
    assert any(last_dense < barrier < sparse[-1] for barrier in barriers)


@pytest.mark.parametrize("book", BOOKS)
@pytest.mark.parametrize(("kernel", "most"), [("encode", 10), ("decode", 9)])
@pytest.mark.parametrize("target", NVIDIA)
def test_few_instructions_without_escapes(kernel, most, book, target):
    assert Variant(kernel, book, "groups", target).instructions <= most


class Recorder:
    """Stands in for a kernel and keeps what it is launched with."""

    def __init__(self) -> None:
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launches.append((args, kwargs))


VIEWS = {
    "one-block": (torch.empty(1, 1, 32, 128, dtype=torch.bfloat16), 1),
    "contiguous": (torch.empty(40, 2, 16, 128, dtype=torch.bfloat16), 16),
    "rows-first": (torch.empty(40, 16, 8, 256, dtype=torch.bfloat16).transpose(1, 2), 37),
    "C576": (torch.empty(9, 1, 64, 576, dtype=torch.bfloat16), 8),
    "layers-inside": (torch.empty(9, 7, 2, 48, 96, dtype=torch.bfloat16)[:, 3], 9),
}


def test_a_table_to_encode_with_must_be_aligned():
    view, blocks = VIEWS["contiguous"]
    room = torch.zeros(600, dtype=torch.uint8)
    table = room[-room.data_ptr() % 256 + 16 :][:256]
    buffers = fast_encode.EncodeBuffers.allocate(view.numel(), torch.device("cpu"))
    ids = torch.zeros(blocks, dtype=torch.int32)
    with pytest.raises(ValueError, match="not aligned to its 256 bytes"):
        fast_encode.fast_encode(view, ids, DeviceBook(0, 0, table, table, 0), buffers)


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_compilation_serves_all_sizes_and_strides(kernel, monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(fast_encode, "fast_encode_kernel", recorder)
    monkeypatch.setattr(fast_decode, "fast_decode_kernel", recorder)
    for number, (view, blocks) in enumerate(VIEWS.values()):
        room = torch.zeros(512, dtype=torch.uint8)
        table = room[-room.data_ptr() % 256 :][:256]
        book = DeviceBook(kind=1, base=1 + 16 * number, encoding=table, decoding=table, pad=number)
        ids = torch.zeros(blocks, dtype=torch.int32)
        if kernel == "encode":
            elements = blocks * view[0].numel()
            buffers = fast_encode.EncodeBuffers.allocate(elements, torch.device("cpu"))
            fast_encode.fast_encode(view, ids, book, buffers)
        else:
            positions = torch.zeros(8, dtype=torch.int16)
            fast_decode.fast_decode(view, ids, book, table, table, ids, positions, table)

    jitted = KERNELS[kernel]
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binder = create_function_from_signature(jitted.signature, jitted.params, backend)
    keys = {str(binder(*args, **kwargs, debug=False)[1]) for args, kwargs in recorder.launches}
    assert len(recorder.launches) == len(VIEWS)
    assert len(keys) == 1, keys
