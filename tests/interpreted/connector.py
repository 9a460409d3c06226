"""Saves and loads of a KV cache that the kernels code, from blocks to a store and back.

The kernels run under Triton's interpreter on tensors in host memory; on a GPU the same classes
work on its tensors, with streams of its own. Run by `test_kernels.py`.
"""

import time

import numpy as np
import pytest
import torch

from vllm_splitzip.codec.codebook import Codebook
from vllm_splitzip.codec.modes import MODES
from vllm_splitzip.connector import speeds
from vllm_splitzip.connector.counters import Counters
from vllm_splitzip.connector.device_pages import device_pages
from vllm_splitzip.connector.geometry import Geometry, Part
from vllm_splitzip.connector.keys import KeySpace
from vllm_splitzip.connector.loader import Loader
from vllm_splitzip.connector.messages import NOT_WANTED, LoadFrame, LoadJob, SaveFrame
from vllm_splitzip.connector.saver import Saver
from vllm_splitzip.connector.streams import Backlog, HostStreams
from vllm_splitzip.connector.writer import Writer
from vllm_splitzip.storage import open_store

GEOMETRY = Geometry(32, 32, 4, (1,), (Part(0, None, (0,)),))
KEYS = KeySpace("sz1-0123456789abcdef", 0, 1)
BOOK = Codebook(bytes(range(115, 131)))
BLOCKS = 12
LAYOUTS = {
    "LBHNC": lambda b, h, n, c: torch.zeros(b, h, n, c, dtype=torch.bfloat16),
    "LBNHC": lambda b, h, n, c: torch.zeros(b, n, h, c, dtype=torch.bfloat16).transpose(1, 2),
    "BLNHC": lambda b, h, n, c: torch.zeros(b, 2, n, h, c, dtype=torch.bfloat16)[:, 1].transpose(
        1, 2
    ),
}


@pytest.mark.parametrize("split", [1, 2], ids=["whole blocks", "kernel blocks"])
@pytest.mark.parametrize("mode", ["fast", "raw", "dense", "max"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_blocks_come_back_bit_for_bit(tmp_path, layout, mode, split):
    random = torch.Generator().manual_seed(5)
    caches = {f"layer{i}": layout(BLOCKS * split, 2, 32 // split, 32) for i in range(2)}
    for cache in caches.values():
        cache.copy_(torch.randn(cache.shape, generator=random))
        cache[3, 0, 0, :8] = torch.tensor([0.0, -0.0, 1e-40, torch.inf, -torch.inf, 1e30, 3e-5, 1])
    caches["layer1"][4] = torch.randint(-(1 << 15), 1 << 15, (1,), generator=random).item()
    backlog = Backlog(1 << 12)
    pages = {
        name: device_pages(name, 0, cache, BLOCKS, "auto", backlog)
        for name, cache in caches.items()
    }
    counters, streams = Counters(), HostStreams()
    store = open_store({}, max_object_bytes=1 << 22, cache_dir=tmp_path)
    writer = Writer(store, counters, 1 << 30)
    saver = Saver(
        GEOMETRY, pages, KEYS, writer, streams, counters, mode=mode, book=BOOK, verify=1.0
    )
    loader = Loader(GEOMETRY, pages, KEYS, store, streams, counters, 10.0)
    saves = [
        SaveFrame(bytes([1]) * 32, 4, ([3, 7, 4, 1],)),
        SaveFrame(bytes([2]) * 32, 2, ([2, 5],)),
    ]
    saver.save_layer("layer0", saves)
    saver.finish(saves)
    writer.close(60)

    before = {name: cache.clone() for name, cache in caches.items()}
    for cache in caches.values():
        cache.fill_(7.0)
    loads = [
        LoadFrame(bytes([1]) * 32, 4, ([8, NOT_WANTED, 9, 10],)),
        LoadFrame(bytes([2]) * 32, 2, ([11, 6],)),
    ]
    for load in loads:  # One after the other: the interpreter is not made for threads.
        loader.submit(LoadJob("request", [load]))
        while not (finished := loader.take_finished()).requests:
            time.sleep(0.01)
        assert (finished.requests, finished.failed) == ({"request"}, set())
    loader.close()
    moved = {8: 3, 9: 4, 10: 1, 11: 2, 6: 5}
    for name, cache in caches.items():
        bits, expected = (
            tensor.contiguous().view(torch.int16).view(BLOCKS, -1).numpy()
            for tensor in (cache, before[name])
        )
        untouched = np.full_like(bits[0], torch.tensor(7.0, dtype=torch.bfloat16).view(torch.int16))
        for block in range(BLOCKS):
            wanted = expected[moved[block]] if block in moved else untouched
            assert np.array_equal(bits[block], wanted), (name, block)
    store.close()


def test_speeds_of_codecs_are_measured_on_the_device(monkeypatch):
    """What `codec: auto` does at start-up, on few bytes: the interpreter is slow."""
    monkeypatch.setattr(speeds, "SAMPLE_BYTES", 1 << 15)
    monkeypatch.setattr(speeds, "ROUNDS", 1)
    seen = []

    def pages_of(sample, blocks):
        seen.append((tuple(sample.shape), sample.dtype, blocks))
        return device_pages("layer", 0, sample, blocks, "auto", Backlog(1 << 20))

    cache = LAYOUTS["BLNHC"](2, 2, 32, 32)
    measured = speeds.measure_like(cache, "auto", 1, 4, pages_of, BOOK, HostStreams())
    assert seen == [((8, 2, 32, 32), torch.bfloat16, 8)]
    assert set(measured) == set(MODES)
    assert all(speed.encode > 0 and speed.decode > 0 for speed in measured.values())
