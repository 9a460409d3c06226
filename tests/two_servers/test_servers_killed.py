"""Servers that are killed with requests in flight, and started again in any order.

These tests go on from one another: a server takes half a minute to start.
"""

import httpx
import pytest

from two_servers.pair import ANNOUNCED, FOR_ANOTHER, PATIENCE_S, agree


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """A server that is down has nothing to look at."""


@pytest.fixture(scope="module")
def crowd(pair, text):
    """Prompts, and what a single server answers to each."""
    crowd = [(prompt, pair.alone(prompt)) for prompt in text(300, 301, 302, 303)]
    pair.fresh()
    return crowd


def fail_at_once(futures):
    for future in futures:
        with pytest.raises(httpx.HTTPError):
            future.result(PATIENCE_S)


def test_the_decode_side_is_killed(pair, crowd):
    prompts = [prompt for prompt, _ in crowd]
    with pair.proxy("toy-proxy") as proxy:
        waiting = [
            pair.ask_in_background(pair.decode, prompt, kv_transfer_params=ANNOUNCED)
            for prompt in prompts[:2]
        ]
        running = pair.in_flight(pair.decode, prompts[2:], proxy, max_tokens=400)
        pair.decode.kill()
        fail_at_once([*waiting, *running])
        for prompt, alone in crowd:
            answer = pair.ask(pair.prefill, prompt, kv_transfer_params=FOR_ANOTHER)
            assert agree(alone, answer)
    pair.settle()


def test_the_prefill_side_is_killed(pair, text):
    futures = pair.in_flight(
        pair.prefill, text(1000, 1001, 1002), pair.prefill, kv_transfer_params=FOR_ANOTHER
    )
    pair.prefill.kill()
    fail_at_once(futures)


def test_the_decode_side_starts_before_the_prefill_side(pair, crowd):
    pair.prefill.kill()
    pair.decode.kill()
    pair.decode.start()
    pair.decode.wait_ready()
    pair.empty_store()
    (prompt, alone), (other, other_alone) = crowd[:2]
    assert agree(alone, pair.ask(pair.decode, prompt))
    # What was announced of this one never comes.
    assert agree(other_alone, pair.ask(pair.decode, other, kv_transfer_params=ANNOUNCED))

    pair.prefill.start()
    pair.prefill.wait_ready()
    pair.fresh()
    before = pair.retrieved()
    with pair.proxy("toy-proxy") as proxy:
        for prompt, alone in crowd:
            assert agree(alone, pair.ask(proxy, prompt))
    assert pair.retrieved() > before
