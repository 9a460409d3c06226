"""Real models in two vLLM engines, one after the other, that share nothing but a store."""

import os
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks import models, texts
from engine.harness import BLOCK, compared_blocks, engine_arguments, run_engine

LENGTHS = (31, 33, 300, 512, 700, 1203, 1900)
"""Below a block, one block, a frame and a tail, exactly two frames, ... in tokens."""


def retrievable(tokens: int) -> int:
    """Tokens of a stored prompt that a fresh engine can retrieve: all whole blocks but the last
    token's, since that one is computed for its output."""
    return (tokens - 1) // BLOCK * BLOCK


ANSWER = 220
"""Tokens that each of a crowd generates, so that their blocks do not suffice in the end."""

CROWDS = {"smollm2-135m": (90, 650), "gemma3-270m": (230, 300)}
"""(blocks of the cache, tokens of each prompt of a crowd). The blocks are enough for any one
request and for the crowd's prompts, but not for what it generates: some have to be preempted."""


@pytest.fixture(scope="module", params=CROWDS)
def runs(request, tmp_path_factory):
    """(prompts, engine that computes and stores, fresh one that retrieves, damaged frames)."""
    directory = tmp_path_factory.mktemp(request.param)
    store = directory / "store"
    store.mkdir()
    model = models.ensure(request.param)
    prompts = texts.prompts(AutoTokenizer.from_pretrained(model), LENGTHS)
    blocks, tokens = CROWDS[request.param]
    crowd = texts.prompts(AutoTokenizer.from_pretrained(model), (*LENGTHS, *[tokens] * 4))[-4:]
    extra = {"lmcache.remote_url": f"fs://localhost:0{store}", "verify": 1.0}
    # Few blocks and small steps, so that prompts are prefilled in pieces and requests preempted.
    arguments = engine_arguments(
        model, extra, max_num_batched_tokens=400, num_gpu_blocks_override=blocks
    )
    steps = [{"prompts": prompts}, {"prompts": crowd, "together": True, "max_tokens": ANSWER}]
    first = run_engine(directory, "first", arguments, steps)
    damaged = damage_some(store)
    second = run_engine(directory, "second", arguments, [steps[0], steps[0], steps[1]])
    return prompts, first, second, damaged


def damage_some(store: Path) -> list[str]:
    """Damage three frames: a flipped bit, a file cut short, a file that is not there."""
    frames = sorted(store.glob("*.data"), key=os.path.getmtime)
    flipped, short, gone = frames[3], frames[5], frames[7]
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 0x10
    flipped.write_bytes(data)
    short.write_bytes(short.read_bytes()[:-1000])
    gone.unlink()
    return [path.name for path in (flipped, short, gone)]


def test_every_block_retrieved_has_the_bits_that_were_computed(runs):
    _, first, second, _ = runs
    assert compared_blocks(first, second) > 1000


def test_whole_prompts_are_retrieved(runs):
    prompts, _, second, _ = runs
    retrieved = [result["cached"] for result in second.results[1]]
    assert retrieved == [retrievable(len(prompt)) for prompt in prompts]


def test_damaged_frames_are_computed_again_and_stored_again(runs):
    prompts, _, second, _ = runs
    assert "a stored frame is damaged" in second.log
    assert second.digests["saved"], "what was damaged was not stored again"
    assert "Failing" not in second.log
    assert [len(r["tokens"]) for r in second.results[0]] == [8] * len(prompts)


def test_preempted_requests_are_served(runs):
    _, first, second, _ = runs
    for run in (first, second):
        assert run.preemptions > 0
        assert [len(result["tokens"]) for result in run.results[-1]] == [ANSWER] * 4
