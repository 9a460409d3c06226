"""A client of vLLM's servers: streamed completions with their times, and the servers' counters."""

import asyncio
import json
import math
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 900.0
TOP = 5
"""Best logits that are asked for at each token."""


class RequestFailedError(RuntimeError):
    """A server answered with an error, or not at all."""


@dataclass
class Answer:
    """One completion.

    Attributes
    ----------
    sent_at
        Monotonic time in seconds.
    ttft_s, total_s
        Seconds until the first token, and until the end.
    token_ids
        What was generated, greedily.
    logits
        At each token the best `TOP` logits, by token id.
    """

    sent_at: float
    ttft_s: float = 0.0
    total_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    logits: list[dict[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Prompt:
    """Token ids, and a salt: prompts of different salts share no KV cache anywhere."""

    token_ids: Sequence[int]
    salt: str


def ask(url: str, model: str, prompts: Sequence[Prompt], max_tokens: int) -> list[Answer]:
    """Completions of all prompts, asked for at the same time. Raises RequestFailedError."""
    return asyncio.run(_ask_all(url, model, prompts, max_tokens))


def counters(url: str) -> dict[str, float]:
    """A server's Prometheus samples, summed over labels; buckets are left out."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as reply:
        text = reply.read().decode()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def same_tokens(reference: Answer, answer: Answer) -> bool:
    """Whether two greedy runs agree, or part where two logits tie in BF16.

    Sums are rounded in another order where a prefix was not computed in the same run, so that of
    two logits no further apart than one step of BF16 either may come out first.
    """
    for place, (expected, token) in enumerate(
        zip(reference.token_ids, answer.token_ids, strict=True)
    ):
        if token != expected:
            logits = reference.logits[place]
            return token in logits and is_tie(logits[expected], logits[token])
    return True


def is_tie(one: float, other: float) -> bool:
    """Whether two numbers are at most one BF16 step apart."""
    largest = max(abs(one), abs(other))
    step = math.ldexp(1.0, math.frexp(largest)[1] - 8)  # 8 significant bits
    return abs(one - other) <= step


async def _ask_all(
    url: str, model: str, prompts: Sequence[Prompt], max_tokens: int
) -> list[Answer]:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        return list(
            await asyncio.gather(
                *(_ask(session, url, model, prompt, max_tokens) for prompt in prompts)
            )
        )


async def _ask(
    session: aiohttp.ClientSession, url: str, model: str, prompt: Prompt, max_tokens: int
) -> Answer:
    body = {
        "model": model,
        "prompt": list(prompt.token_ids),
        "cache_salt": prompt.salt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "logprobs": TOP,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    answer = Answer(time.monotonic())
    try:
        async with session.post(f"{url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                raise RequestFailedError(f"{url} answered {reply.status}: {await reply.text()}")
            async for line in reply.content:
                text = line.decode().strip().removeprefix("data: ")
                if text and text != "[DONE]":
                    _take(answer, json.loads(text))
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise RequestFailedError(f"{url}: {type(error).__name__}: {error}") from error
    answer.total_s = time.monotonic() - answer.sent_at
    if len(answer.token_ids) != max_tokens:
        raise RequestFailedError(
            f"{url} answered {len(answer.token_ids)} tokens, expected {max_tokens}"
        )
    return answer


def _take(answer: Answer, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        raise RequestFailedError(str(chunk["error"]))
    for choice in chunk["choices"]:
        if choice.get("token_ids") and not answer.token_ids:
            answer.ttft_s = time.monotonic() - answer.sent_at
        answer.token_ids += choice.get("token_ids") or []
        for best in (choice.get("logprobs") or {}).get("top_logprobs") or []:
            answer.logits.append({int(key.rpartition(":")[2]): v for key, v in best.items()})
