"""vLLM's own proxies, as they are, in front of a prefill and a decode server."""

import httpx
import pytest

from two_servers.pair import agree, retrievable

LENGTHS = (40, 300, 512, 1203)
ANSWER = 16


@pytest.fixture(scope="module")
def expected(pair, text):
    """What a single server answers to each of some prompts."""
    return [(prompt, pair.alone(prompt, ANSWER)) for prompt in text(*LENGTHS)]


@pytest.mark.parametrize("name", ["prefill-proxy", "toy-proxy", "proxy-demo"])
def test_a_proxy_as_it_is(name, pair, expected):
    frames, tokens = pair.metric(pair.decode, "frames_loaded"), pair.retrieved()
    with pair.proxy(name) as proxy:
        answers = [pair.ask(proxy, prompt, ANSWER) for prompt, _ in expected]
    for (_, alone), answer in zip(expected, answers, strict=True):
        assert agree(alone, answer)
    pair.settle()
    assert pair.metric(pair.decode, "frames_loaded") > frames
    retrieved = pair.retrieved() - tokens
    most = sum(retrievable(prompt) for prompt, _ in expected)
    if name == "toy-proxy":
        assert retrieved == most, "the decode side waits for what has been announced"
    else:  # It announces nothing, and what has not been put when it asks is computed.
        assert 0 < retrieved <= most


def test_chat_and_streams_through_a_proxy(pair):
    """Prompts that servers tokenize themselves, and answers that come token by token."""
    question = "List the first twelve chemical elements, one a line. " * 8
    body = {
        "model": pair.model,
        "messages": [{"role": "user", "content": question}],
        "max_completion_tokens": 8,
        "min_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    retrieved = pair.retrieved()
    with pair.proxy("toy-proxy") as proxy:
        url = f"http://127.0.0.1:{proxy.port}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as reply:
            lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 4
    assert pair.retrieved() > retrieved
