"""What can happen to the store that two servers share, while requests run."""

import random

import pytest
import redis

from storage_helpers import wait_for
from two_servers.pair import FOR_ANOTHER, PATIENCE_S, WAIT_S, agree, retrievable

LENGTHS = (300, 301, 302, 303)

WARM_UP, REQUESTS = 60, 200
MAX_GROWTH = 64 << 20
"""Bytes of resident memory, of both servers' processes. A frame of each request would be 230 MB."""


@pytest.fixture(scope="module")
def proxy(pair):
    with pair.proxy("toy-proxy") as proxy:
        yield proxy


@pytest.fixture(scope="module")
def crowd(pair, text):
    """Prompts, and what a single server answers to each."""
    return [(prompt, pair.alone(prompt)) for prompt in text(*LENGTHS)]


def ask_all(pair, proxy, crowd):
    """Send all prompts at once, and return the answers' futures when some are on their way."""
    return pair.in_flight(pair.prefill, [prompt for prompt, _ in crowd], proxy)


def all_agree(crowd, futures):
    answers = [future.result(PATIENCE_S) for future in futures]
    return all(agree(alone, answer) for (_, alone), answer in zip(crowd, answers, strict=True))


def finds_again(pair, proxy, crowd):
    """Whether the decode side retrieves a prompt's KV cache again, once the store is well."""
    prompt, _ = crowd[0]

    def finds() -> bool:
        pair.forget(pair.decode)
        before = pair.retrieved()
        pair.ask(proxy, prompt, 1)
        return pair.retrieved() > before

    return wait_for(finds, 90)


def test_the_store_is_killed_and_started_again(pair, proxy, crowd):
    futures = ask_all(pair, proxy, crowd)
    pair.store.kill()
    assert all_agree(crowd, futures)
    pair.forget(pair.decode)
    futures = ask_all(pair, proxy, crowd)
    pair.store.start()
    assert all_agree(crowd, futures)
    assert finds_again(pair, proxy, crowd)


def test_the_store_answers_after_the_deadline(pair, proxy, crowd):
    """Lookups are answered in time; each piece of a frame is held back, so that loads are late."""
    for prompt, _ in crowd:
        pair.ask(pair.prefill, prompt, 1, kv_transfer_params=FOR_ANOTHER)
    pair.settle()
    assert wait_for(lambda: pair.keys() >= 2 * len(crowd))
    failed = pair.metric(pair.decode, "frames_failed")
    pair.link.delay_s = 0.05
    futures = [pair.ask_in_background(pair.decode, prompt) for prompt, _ in crowd]
    assert all_agree(crowd, futures)
    pair.link.delay_s = 0.0
    pair.settle()
    assert pair.metric(pair.decode, "frames_failed") > failed
    assert finds_again(pair, proxy, crowd)


def test_the_store_answers_nothing_for_longer_than_the_deadline(pair, proxy, crowd):
    futures = ask_all(pair, proxy, crowd)
    pair.link.delay_s = 2 * WAIT_S
    assert all_agree(crowd, futures)
    pair.link.delay_s = 0.0
    assert finds_again(pair, proxy, crowd)


def test_the_store_is_full(pair, proxy, crowd):
    dropped = pair.metric(pair.prefill, "frames_dropped")
    with redis.Redis(port=pair.store.port) as client:
        used = client.info("memory")["used_memory"]
        client.config_set("maxmemory", used + (1 << 20))
        try:
            assert all_agree(crowd, ask_all(pair, proxy, crowd))
        finally:
            client.config_set("maxmemory", 0)
    pair.settle()
    assert pair.metric(pair.prefill, "frames_dropped") > dropped
    assert finds_again(pair, proxy, crowd)


def test_two_servers_prefill_one_prompt_at_once(pair, crowd):
    both = (pair.prefill, pair.decode)
    futures = [
        pair.ask_in_background(server, prompt, kv_transfer_params=FOR_ANOTHER)
        for prompt, _ in crowd
        for server in both
    ]
    assert all_agree([one for one in crowd for _ in both], futures)
    pair.settle()
    pair.forget(pair.decode)
    before = pair.retrieved()
    for prompt, alone in crowd:
        assert agree(alone, pair.ask(pair.decode, prompt))
    assert pair.retrieved() - before == sum(retrievable(prompt) for prompt, _ in crowd)


def test_memory_does_not_grow(pair, proxy):
    numbers = random.Random(0)

    def serve(count):
        prompts = [[numbers.randrange(1000, 40000) for _ in range(70)] for _ in range(count)]
        for future in [pair.ask_in_background(proxy, prompt, 2) for prompt in prompts]:
            assert len(future.result(PATIENCE_S).tokens) == 2
        pair.settle()
        return [server.rss_bytes() for server in (pair.prefill, pair.decode)]

    before = serve(WARM_UP)
    after = serve(REQUESTS)
    growth = [late - early for early, late in zip(before, after, strict=True)]
    print(f"grew by {[f'{g / 1e6:.1f} MB' for g in growth]}")
    assert max(growth) < MAX_GROWTH
