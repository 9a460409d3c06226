"""What the prefill side stores for the decode side, and what the decode side waits for."""

import time

import httpx
import pytest

from two_servers.pair import ANNOUNCED, FOR_ANOTHER, PATIENCE_S, WAIT_S, agree, retrievable


@pytest.fixture(scope="module")
def proxy(pair):
    with pair.proxy("toy-proxy") as proxy:
        yield proxy


def test_what_the_prefill_side_had_itself_is_stored_too(pair, text, proxy):
    [prompt] = text(700)
    retrieved = pair.retrieved()
    first = pair.ask(proxy, prompt)
    pair.settle()
    pair.empty_store()
    pair.forget(pair.decode)
    second = pair.ask(proxy, prompt)
    assert pair.retrieved() - retrieved == 2 * retrievable(prompt)
    assert agree(first, second)


def test_frames_that_were_announced_are_waited_for(pair, text):
    [prompt] = text(700)
    alone = pair.alone(prompt)
    pair.settle()
    pair.empty_store()
    retrieved = pair.retrieved()
    early = pair.ask_in_background(pair.decode, prompt, kv_transfer_params=ANNOUNCED)
    time.sleep(1.5)
    assert not early.done(), "it computed what it was told to wait for"
    # It has all of the prompt itself, so that no slow machine can make it late.
    pair.ask(pair.prefill, prompt, 1, kv_transfer_params=FOR_ANOTHER)
    assert agree(alone, early.result(PATIENCE_S))
    assert pair.retrieved() - retrieved == retrievable(prompt)


def test_after_the_deadline_the_longest_prefix_is_used(pair, text):
    [prompt] = text(1000)
    alone = pair.alone(prompt)
    pair.fresh()
    pair.ask(pair.prefill, prompt[:600], 1)
    pair.settle()
    retrieved, begin = pair.retrieved(), time.monotonic()
    answer = pair.ask(pair.decode, prompt, kv_transfer_params=ANNOUNCED)
    assert time.monotonic() - begin >= WAIT_S
    assert pair.retrieved() - retrieved == 576, "two whole frames, and one of two blocks"
    assert agree(alone, answer)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "remote_block_ids": None, "remote_host": None},
        {**ANNOUNCED, "do_remote_decode": True},
        {"do_remote_decode": True, "remote_num_tokens": "many"},
    ],
    ids=["empty", "bare", "nulls", "both", "strange"],
)
def test_parameters_that_proxies_may_send(parameters, pair, text):
    [prompt] = text(100)
    alone = pair.ask(pair.prefill, prompt, kv_transfer_params=parameters)
    pair.settle()
    retrieved = pair.retrieved()
    answer = pair.ask(pair.decode, prompt, kv_transfer_params=parameters)
    assert pair.retrieved() - retrieved == retrievable(prompt)
    assert agree(alone, answer)


def test_one_prompt_many_times_at_once(pair, text, proxy):
    [prompt] = text(300)
    alone = pair.alone(prompt)
    pair.fresh()
    saved = pair.metric(pair.prefill, "frames_saved")
    answers = [pair.ask_in_background(proxy, prompt) for _ in range(5)]
    for answer in answers:
        assert agree(alone, answer.result(PATIENCE_S))
    pair.settle()
    assert pair.metric(pair.prefill, "frames_saved") - saved == 2


def test_requests_that_are_aborted(pair, text, proxy):
    """The clients leave during the prefill, while frames are waited for, and in the answer."""
    prompts = text(900, 901, 902)
    for prompt, server, parameters, max_tokens in (
        (prompts[0], proxy, None, 8),
        (prompts[1], pair.decode, ANNOUNCED, 8),
        (prompts[2], pair.prefill, FOR_ANOTHER, 500),
    ):
        with pytest.raises(httpx.ReadTimeout):
            pair.ask(server, prompt, max_tokens, kv_transfer_params=parameters, timeout_s=0.5)
    begin = time.monotonic()
    pair.settle()
    assert time.monotonic() - begin < WAIT_S, "what was aborted is waited for all the same"


def test_requests_that_are_refused(pair, text):
    [prompt] = text(1900)
    for server in (pair.decode, pair.prefill):
        for wrong in ({"prompt": prompt * 2}, {"max_tokens": -1}, {"prompt": [1 << 40]}):
            body = {"model": pair.model, "prompt": prompt, "kv_transfer_params": ANNOUNCED, **wrong}
            url = f"http://127.0.0.1:{server.port}/v1/completions"
            assert pair.http.post(url, json=body).status_code == 400
