"""A vLLM engine in a process of its own: prompts in, answers out, its log in a file.

An engine that shares no process with another can know of it only through the store.

The child reads one JSON request per line from its standard input and writes one JSON reply per
line to what was its standard output; everything else that it prints goes to the log.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.once import REPO_ROOT

START_TIMEOUT_S = 600.0
ANSWER_TIMEOUT_S = 300.0
CLOSE_TIMEOUT_S = 60.0
METRIC_PREFIX = "vllm:splitzip_"

# Whatever a user's shell says about stores, hubs and plugins must not change what is measured.
UNSET = ("LMCACHE_", "SPLITZIP_", "PYTHONHASHSEED")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "splitzip",
}


def engine_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment as an engine is to see it, with `extra` on top."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(UNSET)}
    return {"VLLM_CPU_KVCACHE_SPACE": "1", **inherited, **ENVIRONMENT, **(extra or {})}


def end_of_log(log: Path) -> str:
    """The last lines of a log, and the last errors that it names."""
    lines = log.read_text(errors="replace").splitlines()
    causes = [line for line in lines if re.search(r"\b\w+(Error|Exception): ", line)]
    return "\n".join(dict.fromkeys([*causes[-5:], *lines[-10:]]))


class EngineFailedError(RuntimeError):
    """An engine did not start, answer or end; the message holds the end of its log."""


@dataclass(frozen=True)
class Answer:
    """What became of one prompt.

    Attributes
    ----------
    token_ids, text
        What was generated, greedily.
    cached_tokens
        Tokens of the prompt that vLLM did not compute.
    ttft_s
        Seconds from the request's arrival to its first token.
    counts
        The connector's counters since the engine started (`vllm_splitzip.connector.counters`).
    """

    token_ids: list[int]
    text: str
    cached_tokens: int
    ttft_s: float
    counts: dict[str, float]


class Engine:
    """Starts at once and is ready when the constructor returns; a context manager.

    Parameters
    ----------
    log
        File for everything that the engine and its workers print.
    arguments
        Of `vllm.LLM`.

    Raises
    ------
    EngineFailedError
        By the constructor and by `ask`.
    """

    def __init__(self, log: Path, arguments: dict[str, Any]) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.engine"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=REPO_ROOT,
                env=engine_environment(),
                start_new_session=True,
            )
        try:
            self._talk(arguments, START_TIMEOUT_S)
        except BaseException:
            self._kill()
            raise

    def ask(self, prompt: list[int], max_tokens: int) -> Answer:
        """Generate up to `max_tokens` tokens after `prompt` (token ids)."""
        return Answer(**self._talk({"prompt": prompt, "max_tokens": max_tokens}, ANSWER_TIMEOUT_S))

    def close(self) -> None:
        """Let the engine shut down, and wait until all of its processes are gone."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_TIMEOUT_S)
        self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._kill()

    def _talk(self, request: dict[str, Any], timeout_s: float) -> Any:
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            return json.loads(self._read_line(time.monotonic() + timeout_s))
        except (OSError, ValueError) as error:
            raise EngineFailedError(
                f"the vLLM engine failed: {error}. The end of its log, {self._log}:\n"
                f"{end_of_log(self._log)}"
            ) from error

    def _read_line(self, deadline: float) -> bytes:
        # A worker that outlives its engine keeps the pipe open, so that its end proves nothing.
        assert self._process.stdout is not None
        while not select.select([self._process.stdout], [], [], 0.5)[0]:
            if self._process.poll() is not None:
                raise OSError(f"it ended with status {self._process.returncode}")
            if time.monotonic() > deadline:
                raise OSError("it does not answer")
        line = self._process.stdout.readline()
        if not line:
            raise OSError(f"it ended with status {self._process.wait(CLOSE_TIMEOUT_S)}")
        return line

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def _serve() -> None:
    """Run an engine as `Engine` wants it: the child's side."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    llm = LLM(**json.loads(sys.stdin.readline()), disable_log_stats=False)
    replies.write("{}\n")
    for line in sys.stdin:
        request = json.loads(line)
        sampling = SamplingParams(temperature=0, max_tokens=request["max_tokens"])
        [output] = llm.generate({"prompt_token_ids": request["prompt"]}, sampling, use_tqdm=False)
        answer = {
            "token_ids": list(output.outputs[0].token_ids),
            "text": output.outputs[0].text,
            "cached_tokens": output.num_cached_tokens,
            "ttft_s": output.metrics.first_token_latency,
            "counts": {
                metric.name.removeprefix(METRIC_PREFIX): metric.value
                for metric in llm.get_metrics()
                if metric.name.startswith(METRIC_PREFIX)
            },
        }
        replies.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    _serve()
