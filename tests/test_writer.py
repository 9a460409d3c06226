"""Frames on their way to a real store: each is put once, and again when it is gone."""

import time

import pytest
import torch

from storage_helpers import opened
from vllm_splitzip.codec import host
from vllm_splitzip.connector.counters import Counters
from vllm_splitzip.connector.keys import KeySpace
from vllm_splitzip.connector.pages import host_pages
from vllm_splitzip.connector.writer import AGAIN_S, Writer
from vllm_splitzip.frame import Frame, Layer

KEYS = KeySpace("sz1-0123456789abcdef", 0, 1)


def frame(value):
    """A frame of one layer, raw."""
    cache = torch.full((2, 2, 16, 64), value, dtype=torch.bfloat16)
    pages = host_pages("layer0", 0, cache, 2)
    layer = Layer("layer0", pages.format, pages.frame_shape(2), pages.encode([0, 1], "raw", None)())
    return Frame(32, (layer,))


class Put:
    """A writer in front of a store, to which one frame is handed over and over."""

    def __init__(self, store):
        self.store, self.counters = store, Counters()
        self.writer = Writer(store, self.counters, 1 << 20)
        self.key = KEYS.object_key(bytes(32), 0)

    def __call__(self):
        self.writer.put(self.key, KEYS.key_bytes(self.key), lambda: frame(1.0), 8192)
        while self.writer._waiting_bytes:
            time.sleep(0.001)
        counts = self.counters.take() or {}
        return counts.get("frames_saved", 0), counts.get("frames_dropped", 0)


@pytest.fixture
def put(tmp_path):
    host.warm_up()
    with opened({"lmcache.remote_url": f"fs://localhost:0{tmp_path}"}) as store:
        putting = Put(store)
        yield putting
        putting.writer.close(10)


def test_a_frame_that_was_put_a_moment_ago_is_not_put_again(put):
    assert [put(), put(), put()] == [(1, 0), (0, 0), (0, 0)]


def test_a_frame_that_is_gone_is_put_again_at_once(put):
    assert put() == (1, 0)
    put.store.remove(put.key)
    assert [put(), put()] == [(1, 0), (0, 0)]


def test_after_a_while_a_frame_is_put_without_a_look(put, monkeypatch):
    assert put() == (1, 0)
    later = time.monotonic() + AGAIN_S + 1
    monkeypatch.setattr("vllm_splitzip.connector.writer.time.monotonic", lambda: later)
    assert put() == (1, 0)
