"""A prefill server and a decode server, their store, and how tests talk to them."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import redis
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import vllm_scripts
from benchmarks.servers import ProxyServer, Server, VllmServer
from storage_helpers import free_port, redis_server, wait_for
from two_servers.link import Link

BLOCK = 32
UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""Otherwise both servers' workers pin themselves to the same cores, where the one that waits for
frames, and polls, keeps the one that is to make them from running at all."""

WAIT_S = 12.0
"""`load_timeout_s` of the decode side: how long it waits for frames that were announced."""

PATIENCE_S = 240.0
"""Seconds until an answer is taken for a hang; machines that are shared are slow at times."""

HELD = ("requests_open", "lookups_open", "loads_open", "frames_waiting")

FOR_ANOTHER = {"do_remote_decode": True, "do_remote_prefill": False}
"""What a proxy tells the prefill side."""

ANNOUNCED = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "elsewhere",
    "remote_block_ids": [[1, 2, 3]],
    "remote_host": "203.0.113.1",
    "remote_port": 5600,
    "a_key_of_another_connector": {"tp_size": 8},
}
"""What a proxy may tell the decode side, here with an address that leads nowhere."""


@dataclass(frozen=True)
class Answer:
    """What a server answered.

    Attributes
    ----------
    tokens
        Token ids that were generated, greedily.
    best
        By token: logits of the best tokens there, by token id.
    """

    tokens: list[int]
    best: list[dict[int, float]]


def retrievable(prompt: Sequence[int]) -> int:
    """Tokens of a stored prompt that another engine can retrieve: its last one is computed."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def agree(expected: Answer, answer: Answer) -> bool:
    """Whether two answers are the same, or differ from where two tokens were equally good.

    Sums in BF16 depend on their order, so logits that are one step of BF16 apart may change
    places between a whole prefill and one that begins with a retrieved prefix.
    """
    for one, other, best in zip(expected.tokens, answer.tokens, expected.best, strict=True):
        if one != other:
            step = 2.0 ** (math.floor(math.log2(abs(best[one]))) - 7)
            return other in best and best[one] - best[other] <= step
    return True


class Pair:
    """Both servers and their store. Started at once; `close` ends everything."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.directory = directory
        self.model = str(model)
        # A server closes what it has not heard of for 5 s, perhaps while the next request is sent.
        self.http = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))
        self.pool = ThreadPoolExecutor(16)
        self.store = redis_server(directory)
        self.link = Link(self.store.port)
        with contextlib.ExitStack() as stack:
            stack.callback(self.store.kill)
            self.prefill = self._server(model, "prefill", "kv_producer")
            stack.callback(self.prefill.kill)
            self.decode = self._server(model, "decode", "kv_both")
            stack.callback(self.decode.kill)
            self.prefill.wait_ready()
            self.decode.wait_ready()
            stack.pop_all()

    def _server(self, model: Path, name: str, role: str) -> VllmServer:
        return VllmServer(
            model,
            free_port(),
            self.directory / f"{name}.log",
            kv_transfer={
                "kv_connector": "SplitZipConnector",
                "kv_role": role,
                "kv_connector_extra_config": {
                    "lmcache.remote_url": f"redis://127.0.0.1:{self.link.port}",
                    "load_timeout_s": WAIT_S,
                },
            },
            arguments={
                "dtype": "bfloat16",
                "block-size": BLOCK,
                "enforce-eager": True,
                "max-model-len": 2048,
                # Few enough that every block has been written to before memory is measured.
                "num-gpu-blocks-override": 192,
                "max-num-batched-tokens": 512,
                "logprobs-mode": "raw_logits",
            },
            extra_environment={"VLLM_SERVER_DEV_MODE": "1", **UNBOUND},
        )

    @contextlib.contextmanager
    def proxy(self, name: str) -> Iterator[Server]:
        """One of vLLM's proxies in front of the two."""
        port = free_port()
        arguments = vllm_scripts.proxy_arguments(
            name,
            port,
            f"localhost:{self.prefill.port}",
            f"localhost:{self.decode.port}",
            self.model,
            host="127.0.0.1",
        )
        script = vllm_scripts.ensure(name)
        with ProxyServer(script, port, self.directory / f"{name}.log", arguments) as server:
            yield server.wait_ready(60)

    def ask(
        self,
        server: Server,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        timeout_s: float = PATIENCE_S,
        **body: Any,
    ) -> Answer:
        """Greedy completion of a prompt of token ids. Raises httpx's errors."""
        reply = self.http.post(
            f"http://127.0.0.1:{server.port}/v1/completions",
            json={
                "model": self.model,
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 5,
                "return_tokens_as_token_ids": True,
                "return_token_ids": True,
                **body,
            },
            timeout=timeout_s,
        )
        reply.raise_for_status()
        answer = reply.json()
        [choice] = answer["choices"]
        return Answer(
            choice["token_ids"],
            [
                {int(name.removeprefix("token_id:")): logit for name, logit in best.items()}
                for best in choice["logprobs"]["top_logprobs"]
            ],
        )

    def ask_in_background(self, *arguments: Any, **body: Any) -> "Future[Answer]":
        """As `ask`, by a thread."""
        return self.pool.submit(self.ask, *arguments, **body)

    def in_flight(
        self, server: Server, prompts: Sequence[Sequence[int]], through: Server, **body: Any
    ) -> "list[Future[Answer]]":
        """Ask for all of some prompts at once, and return when the first is with `server`."""
        futures = [self.ask_in_background(through, prompt, **body) for prompt in prompts]

        def has_some() -> bool:
            states = ("vllm:num_requests_running", "vllm:num_requests_waiting")
            is_there = sum(self._metric(server, state) for state in states) > 0
            return is_there or any(future.done() for future in futures)

        assert wait_for(has_some, 30)
        return futures

    def alone(self, prompt: Sequence[int], max_tokens: int = 8) -> Answer:
        """What a single server answers that loads nothing and has nothing of the prompt."""
        self.forget(self.prefill)
        return self.ask(self.prefill, prompt, max_tokens)

    def forget(self, *servers: Server) -> None:
        """Empty vLLM's own prefix cache of some servers, which must be idle.

        vLLM refuses while it has not freed all blocks, which it does after it has answered.
        """
        for server in servers:
            url = f"http://127.0.0.1:{server.port}/reset_prefix_cache"

            def is_empty(url: str = url) -> bool:
                return bool(self.http.post(url).raise_for_status().json()["success"])

            assert wait_for(is_empty, 30), f"{url} does not succeed"

    def empty_store(self) -> None:
        """Delete all that is stored."""
        with redis.Redis(port=self.store.port) as client:
            client.flushall()

    def keys(self) -> int:
        """How many keys there are in the store: two for each frame."""
        with redis.Redis(port=self.store.port) as client:
            return int(client.dbsize())

    def fresh(self) -> None:
        """Nothing is stored, nothing cached, nothing on its way; the store is well."""
        self.link.delay_s = 0.0
        if not self.store.is_running:
            self.store.start()
        self.settle()
        self.empty_store()
        self.forget(self.prefill, self.decode)

    def retrieved(self) -> float:
        """Tokens that the decode side took from the store since its start.

        What it reports with an answer is what the prefill side found in its own cache.
        """
        return self._metric(self.decode, "vllm:external_prefix_cache_hits_total")

    def metric(self, server: Server, name: str) -> float:
        """A count of the connector since the server's start, or a gauge."""
        name = f"vllm:splitzip_{name}"
        return self._metric(server, name if name.endswith(HELD) else f"{name}_total")

    def _metric(self, server: Server, name: str) -> float:
        reply = self.http.get(f"http://127.0.0.1:{server.port}/metrics")
        samples = [
            sample.value
            for family in text_string_to_metric_families(reply.text)
            for sample in family.samples
            if sample.name == name
        ]
        return sum(samples)

    def settle(self) -> None:
        """Wait until the connectors hold on to nothing.

        vLLM reports metrics with a step only, so each look is a request of one block or less.
        """
        for server in (self.prefill, self.decode):
            if not server.processes():
                continue
            assert wait_for(lambda s=server: not any(self.held(s).values()), 60), self.held(server)

    def held(self, server: Server) -> dict[str, float]:
        """What a server's connector holds on to."""
        self.ask(server, [1, 2, 3], 1)
        return {name: self.metric(server, name) for name in HELD}

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.http.close()
        self.decode.stop()
        self.prefill.stop()
        self.link.close()
        self.store.kill()
