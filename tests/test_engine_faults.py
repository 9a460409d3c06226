"""An engine whose store fails in the middle: requests are served, nothing hangs, one warning."""

import pytest
from transformers import AutoTokenizer

from benchmarks import models, texts
from benchmarks.engine import Engine
from storage_helpers import BlackHole, lm_server


@pytest.fixture(scope="module")
def model():
    return models.ensure("smollm2-135m")


@pytest.fixture(scope="module")
def prompts(model):
    return texts.prompts(AutoTokenizer.from_pretrained(model), [300, 301, 302, 303, 304])


def engine_with(model, log, extra):
    return Engine(
        log,
        {
            "model": str(model),
            "dtype": "bfloat16",
            "block_size": 32,
            "enforce_eager": True,
            "max_model_len": 512,
            "kv_transfer_config": {
                "kv_connector": "SplitZipConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            },
        },
    )


def test_a_store_that_dies_and_comes_back(model, prompts, tmp_path):
    server = lm_server(tmp_path)
    log = tmp_path / "engine.log"
    try:
        with engine_with(model, log, {"lmcache.remote_url": f"lm://127.0.0.1:{server.port}"}) as e:
            assert len(e.ask(prompts[0], 4).token_ids) == 4
            server.kill()
            for prompt in prompts[1:4]:
                assert len(e.ask(prompt, 4).token_ids) == 4
            server.start()
            assert len(e.ask(prompts[4], 4).token_ids) == 4
    finally:
        server.kill()
    text = log.read_text()
    assert "Traceback" not in text
    assert text.count("failed (") == 1, "one warning for one failure of the store"


def test_a_store_that_never_answers(model, prompts, tmp_path):
    silent = BlackHole()
    log = tmp_path / "engine.log"
    extra = {"lmcache.remote_url": f"redis://127.0.0.1:{silent.port}", "load_timeout_s": 2}
    try:
        with engine_with(model, log, extra) as e:
            for prompt in prompts[:3]:
                assert len(e.ask(prompt, 4).token_ids) == 4
    finally:
        silent.close()
    assert "Traceback" not in log.read_text()
