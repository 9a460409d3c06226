"""Model families and number formats, with dummy weights: each stores and retrieves its own bits.

One engine each: it stores prompts, forgets its own prefix cache, and retrieves them.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from engine.harness import compared_blocks, engine_arguments, run_engine

CONFIGS = json.loads((Path(__file__).parent / "engine" / "tiny_configs.json").read_text())
LENGTHS = (33, 300, 700)
RETRIEVED = [32, 288, 672]

FAMILIES = {
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {}),
    "mixture of experts": ("qwen3moe", {}),
    "latent attention": ("deepseekv2", {"block_size": 16}),
    "float16": ("qwen3", {"dtype": "float16"}),
    "float32": ("qwen3", {"dtype": "float32"}),
    "fp8 e4m3 cache": ("qwen3", {"kv_cache_dtype": "fp8_e4m3"}),
    "fp8 e5m2 cache": ("qwen3", {"kv_cache_dtype": "fp8_e5m2"}),
    "tensor parallel": ("qwen3", {"tensor_parallel_size": 2}),
    "blocks of 64 tokens": ("qwen3", {"block_size": 64}),
}


TIERS = {
    "local disk": {"lmcache.local_disk": "STORE", "lmcache.max_local_disk_size": 1},
    "local cpu": {"lmcache.local_cpu": True, "lmcache.max_local_cpu_size": 0.5},
    "local cpu and disk before fs": {
        "lmcache.local_cpu": True,
        "lmcache.max_local_cpu_size": 0.5,
        "lmcache.local_disk": "STORE/disk",
        "lmcache.max_local_disk_size": 1,
        "lmcache.remote_url": "fs://localhost:0STORE/fs",
    },
    "dense": {"codec": "dense", "lmcache.remote_url": "fs://localhost:0STORE"},
    "max": {"codec": "max", "lmcache.remote_url": "fs://localhost:0STORE"},
}
"""Configurations; STORE stands for a directory."""


def run_family(directory, config, arguments, steps, extra=None):
    model, store = directory / "model", directory / "store"
    model.mkdir()
    store.mkdir()
    extra = extra or {"lmcache.remote_url": "fs://localhost:0STORE"}
    extra = {
        key: value.replace("STORE", str(store)) if isinstance(value, str) else value
        for key, value in extra.items()
    }
    (model / "config.json").write_text(json.dumps(CONFIGS[config]))
    engine = engine_arguments(
        model,
        {"verify": 1.0, **extra},
        **{
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": 1024,
            "max_num_batched_tokens": 256,
            **arguments,
        },
    )
    return run_engine(directory, "engine", engine, steps)


def prompts():
    random = np.random.default_rng(3)
    return [random.integers(10, 500, length).tolist() for length in LENGTHS]


@pytest.mark.parametrize(("config", "arguments"), FAMILIES.values(), ids=FAMILIES)
def test_a_family_retrieves_the_bits_it_stored(tmp_path, monkeypatch, config, arguments):
    if "tensor_parallel_size" in arguments:  # vLLM wants a NUMA node per rank to bind threads to.
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    block = arguments.get("block_size", 32)
    step = {"prompts": prompts(), "max_tokens": 4}
    run = run_family(tmp_path, config, arguments, [step, {**step, "forget": True}])
    retrieved = [result["cached"] for result in run.results[1]]
    assert retrieved == [(length - 1) // block * block for length in LENGTHS]
    assert compared_blocks(run, run) >= sum(retrieved) // block
    assert [r["tokens"] for r in run.results[1]] == [r["tokens"] for r in run.results[0]]


@pytest.mark.parametrize("extra", TIERS.values(), ids=TIERS)
def test_a_configuration_retrieves_the_bits_it_stored(tmp_path, extra):
    step = {"prompts": prompts(), "max_tokens": 4}
    run = run_family(tmp_path, "qwen3", {}, [step, {**step, "forget": True}], extra)
    assert [result["cached"] for result in run.results[1]] == RETRIEVED
    assert compared_blocks(run, run) >= sum(RETRIEVED) // 32


def test_a_model_with_state_that_is_no_kv_cache_is_refused_with_the_reason(tmp_path):
    with pytest.raises(AssertionError) as failure:
        run_family(tmp_path, "qwen3next", {}, [])
    assert "SplitZipConnector cannot serve" in str(failure.value)
    assert "MambaSpec" in str(failure.value)
