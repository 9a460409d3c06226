"""The servers of the benchmark: for each arm a prefill and a decode server and a proxy.

All of SplitZip's arms share one decode server, since a frame says itself how it was coded, and one
store. Requests carry a salt, so that no arm finds what another one has stored.
"""

import os
import shutil
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import redis

from benchmarks import vllm_scripts
from benchmarks.disagg import nixl
from benchmarks.disagg.link import DECODE, PREFILL, Side
from benchmarks.once import REPO_ROOT
from benchmarks.servers import ProxyServer, Server, VllmServer

BUILD = REPO_ROOT / "build"
LOGS = BUILD / "disagg-logs"

CODECS = ("raw", "fast", "dense", "max", "auto")
ARMS = ("none", "nixl", *CODECS)

SERVER_BYTES = {"smollm2-135m": 3.4e9, "gemma3-270m": 6.2e9}
"""Memory of one vLLM server with its three processes, by model."""

LOAD_TIMEOUT_S = 300.0
"""On a slow link several prompts take longer than the default."""

STORE_PORT = 6400
FIRST_PORT = {"prefill": 8100, "decode": 8200, "proxy": 8300, "nixl": 5600}
EVERYWHERE = "0.0.0.0"


@dataclass(frozen=True)
class Setup:
    """What all servers have in common.

    Attributes
    ----------
    model
        Directory of the model; its name is the one that requests give.
    step_tokens
        Tokens that a server computes in one step: longer prompts are prefilled in chunks.
    kv_bytes
        KV cache of each server.
    store_at
        Where the store runs.
    trace_dir
        Directory for the connectors' traces; None: none are kept.
    """

    model: Path
    step_tokens: int = 512
    kv_bytes: int = 320 << 20
    store_at: Side = PREFILL
    trace_dir: Path | None = None


@dataclass(frozen=True)
class Pair:
    """Where an arm's requests go, and where its counters are. URLs as this machine sees them."""

    url: str
    prefill_url: str
    decode_url: str


def servers_of(arm: str) -> frozenset[str]:
    """Names of the vLLM servers that an arm needs."""
    return frozenset({f"prefill-{arm}", f"decode-{'splitzip' if arm in CODECS else arm}"})


def groups_of(arms: Sequence[str], most_servers: int) -> list[list[str]]:
    """Arms in groups, each of which needs at most `most_servers`, or is one arm alone."""
    if _count(arms) <= most_servers:
        return [list(arms)]
    groups: list[list[str]] = []
    for family in (set(ARMS) - set(CODECS), set(CODECS)):
        group: list[str] = []
        for arm in arms:
            if arm in family:
                if group and _count([*group, arm]) > most_servers:
                    groups.append(group)
                    group = []
                group.append(arm)
        if group:
            groups.append(group)
    return groups


def servers_that_fit(model: str) -> int:
    """vLLM servers of a model for which this machine has memory now."""
    return max(2, int((psutil.virtual_memory().available - 1.5e9) // SERVER_BYTES[model]))


class Fleet:
    """The servers of some arms, and their store. Ready when the constructor returns.

    Raises
    ------
    EngineFailedError
        A server did not start; the message holds the end of its log.
    """

    def __init__(self, arms: Sequence[str], setup: Setup) -> None:
        self._setup = setup
        self._processes: dict[str, list[psutil.Process]] = {}
        self.pairs: dict[str, Pair] = {}
        self._store: redis.Redis | None = None
        self._stack = ExitStack()
        try:
            self._start(arms)
        except BaseException:
            self._stack.close()
            raise

    def focus(self, arm: str) -> Pair:
        """Let only this arm's servers run; all others stand still until it is their turn.

        NIXL polls for as long as its server lives, half a core for each one, and would take from
        every arm what only its own should pay for.
        """
        for name, processes in self._processes.items():
            runs = name in servers_of(arm)
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    (process.resume if runs else process.suspend)()
        return self.pairs[arm]

    def empty_store(self) -> None:
        """Forget every frame: none is asked for twice, and memory is short."""
        if self._store is not None:
            self._store.flushall(asynchronous=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for processes in self._processes.values():
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.resume()
        self._stack.__exit__(kind, error, trace)

    def _start(self, arms: Sequence[str]) -> None:
        if set(arms) & set(CODECS):
            self._start_store()
        names = sorted(set().union(*(servers_of(arm) for arm in arms)))
        servers = {
            name: self._stack.enter_context(self._vllm(name, place))
            for place, name in enumerate(names)
        }
        for name, server in servers.items():
            server.wait_ready()
            if name.endswith("nixl"):
                unpin(server)
        self._processes = {name: server.processes() for name, server in servers.items()}
        for place, arm in enumerate(arms):
            self.pairs[arm] = self._pair(arm, place, servers)

    def _start_store(self) -> None:
        side = self._setup.store_at
        command = [_redis_server(), "--port", str(STORE_PORT), "--bind", EVERYWHERE]
        command += ["--protected-mode", "no", "--save", "", "--appendonly", "no"]
        store = Server(command, STORE_PORT, LOGS / "store.log", prefix=side.prefix)
        self._stack.enter_context(store)
        store.wait_ready()
        self._store = self._stack.enter_context(redis.Redis(side.control, STORE_PORT))

    def _vllm(self, name: str, place: int) -> VllmServer:
        role, _, kind = name.partition("-")
        side = PREFILL if role == "prefill" else DECODE
        log = LOGS / f"{name}.log"
        with suppress(FileNotFoundError):
            log.unlink()
        environment = {
            # One thread for each server, wherever the kernel puts it: two servers on few cores
            # that are pinned, or that spin for each other, take turns in slices.
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HOST_IP": "127.0.0.1",
        }
        kv_transfer: dict[str, Any] | None = None
        if kind == "nixl":
            kv_transfer = {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_both",
                "kv_buffer_device": "cpu",
            }
            environment |= {
                "PYTHONPATH": str(nixl.ensure()),
                "UCX_TLS": "tcp",
                "UCX_NET_DEVICES": side.device,
                "VLLM_NIXL_SIDE_CHANNEL_HOST": side.address,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(FIRST_PORT["nixl"] + place),
            }
        elif kind != "none":
            extra: dict[str, Any] = {
                "lmcache.remote_url": f"redis://{self._setup.store_at.address}:{STORE_PORT}",
                "load_timeout_s": LOAD_TIMEOUT_S,
            }
            # The decode side stores nothing; with `auto` it tells the other one of the link.
            extra["codec"] = kind if role == "prefill" else "auto"
            if self._setup.trace_dir is not None:
                extra["trace_dir"] = str(self._setup.trace_dir / role)
            kv_transfer = {
                "kv_connector": "SplitZipConnector",
                "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
                "kv_connector_extra_config": extra,
            }
        return VllmServer(
            self._setup.model,
            FIRST_PORT[role] + place,
            log,
            kv_transfer=kv_transfer,
            arguments={
                "host": EVERYWHERE,
                "served-model-name": self._setup.model.name,
                "dtype": "bfloat16",
                "block-size": 32,
                "enforce-eager": True,
                "max-model-len": 2048,
                "max-num-batched-tokens": self._setup.step_tokens,
                "kv-cache-memory-bytes": self._setup.kv_bytes,
                "logprobs-mode": "raw_logits",
            },
            extra_environment=environment,
            prefix=side.prefix,
        )

    def _pair(self, arm: str, place: int, servers: Mapping[str, VllmServer]) -> Pair:
        names = servers_of(arm)
        [decode] = [name for name in names if name.startswith("decode")]
        decode_url = f"http://{DECODE.control}:{servers[decode].port}"
        prefill = servers[f"prefill-{arm}"]
        port = FIRST_PORT["proxy"] + place
        proxy = ProxyServer(
            vllm_scripts.ensure("toy-proxy"),
            port,
            LOGS / f"proxy-{arm}.log",
            vllm_scripts.proxy_arguments(
                "toy-proxy",
                port,
                f"{PREFILL.control}:{prefill.port}",
                f"{DECODE.control}:{servers[decode].port}",
                self._setup.model.name,
                "127.0.0.1",
            ),
        )
        self._stack.enter_context(proxy)
        proxy.wait_ready()
        return Pair(
            f"http://127.0.0.1:{port}", f"http://{PREFILL.control}:{prefill.port}", decode_url
        )


def end_tidily() -> None:
    """Let a termination signal end this process as an error does, so that servers end with it."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def unpin(server: Server) -> None:
    """Let every thread of a server run on every core.

    NixlConnector pins its worker to the last core, where it and NIXL's progress thread, which
    polls, take the time from each other: on a machine of two cores a transfer then takes minutes.
    """
    cores = range(os.cpu_count() or 1)
    for process in server.processes():
        with suppress(psutil.NoSuchProcess):
            for thread in process.threads():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, cores)


def _count(arms: Iterable[str]) -> int:
    return len(frozenset().union(*(servers_of(arm) for arm in arms)))


def _redis_server() -> str:
    """The command, from PATH or beside this interpreter."""
    beside = Path(sys.executable).parent
    found = shutil.which("redis-server", path=f"{beside}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        raise FileNotFoundError("no redis-server: install the project's development extras")
    return found
