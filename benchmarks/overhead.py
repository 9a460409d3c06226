"""What the connector costs a request that finds nothing in the store: engines with and without it.

Both engines are alive at once and take turns with the same fresh prompt, so that what else the
machine does falls on both. A pair's figure is the ratio of its two times. Which engine is started
first matters (threads, memory), so that a figure is worth something only with both orders of
`--first`.

``python -m benchmarks.overhead [--pairs 5]`` prints the pairs and writes build/overhead.json.
"""

import argparse
import json
import os
import shutil
import statistics
import time
from contextlib import ExitStack
from typing import Any

from transformers import AutoTokenizer

from benchmarks import models, texts
from benchmarks.engine import Engine
from benchmarks.once import REPO_ROOT

BUILD = REPO_ROOT / "build"
SETTLE_S = 1.0
"""Seconds between requests, in which what was stored reaches the disk."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", choices=models.SOURCES)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument(
        "--first", choices=["with", "without"], default="without", help="engine started first"
    )
    options = parser.parse_args()

    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
    model = models.ensure(options.model)
    prompts = texts.prompts(
        AutoTokenizer.from_pretrained(model), [options.prompt_tokens] * (options.pairs + 2)
    )
    store = BUILD / "overhead-store"
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir(parents=True)
    plain = {
        "model": str(model),
        "dtype": "bfloat16",
        "block_size": 32,
        "enforce_eager": True,
        # On a CPU vLLM gives an engine with a connector a worker process and one core more than an
        # engine without. Here both get the same.
        "distributed_executor_backend": "mp",
        "max_model_len": options.prompt_tokens + options.max_tokens,
    }
    connected = {
        **plain,
        "kv_transfer_config": {
            "kv_connector": "SplitZipConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.remote_url": f"fs://localhost:0{store}"},
        },
    }
    starts = [("without", plain), ("with", connected)]
    if options.first == "with":
        starts.reverse()
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(Engine(BUILD / f"overhead-{name}.log", arguments))
            for name, arguments in starts
        }
        without, with_connector = engines["without"], engines["with"]
        pairs = [
            measure(without, with_connector, prompt, options.max_tokens, index)
            for index, prompt in enumerate(prompts)
        ][2:]  # The first requests of a process pay for what later ones find ready.
    ratios = [pair["with_s"] / pair["without_s"] for pair in pairs]
    for pair, ratio in zip(pairs, ratios, strict=True):
        print(f"without {pair['without_s']:.3f} s   with {pair['with_s']:.3f} s   {ratio:.3f}")
    median = statistics.median(ratios)
    print(f"median ratio {median:.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    result = {"median_ratio": median, "ratios": ratios, "pairs": pairs, **vars(options)}
    (BUILD / "overhead.json").write_text(json.dumps(result, indent=1) + "\n")


def measure(
    without: Engine, with_connector: Engine, prompt: list[int], max_tokens: int, index: int
) -> dict[str, Any]:
    """Seconds of one prompt on both engines, which begin in turn."""
    engines = {"without_s": without, "with_s": with_connector}
    seconds = {}
    for name in sorted(engines, reverse=bool(index % 2)):
        begin = time.perf_counter()
        answer = engines[name].ask(prompt, max_tokens)
        seconds[name] = time.perf_counter() - begin
        if answer.cached_tokens:
            raise RuntimeError(f"{answer.cached_tokens} tokens were a hit; this measures misses")
        time.sleep(SETTLE_S)
    return seconds


if __name__ == "__main__":
    main()
