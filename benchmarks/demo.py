"""Two vLLM engines and one store: what the first computed the second retrieves, bit for bit.

``python -m benchmarks.demo [--model NAME] [--codec MODE]``, or ``make demo``. Ends non-zero unless
everything that was stored was retrieved and every output is the same.
"""

import argparse
import fcntl
import json
import os
import platform
import shutil
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

from benchmarks import demo_store, models, texts
from benchmarks.demo_table import PromptResult, print_results, problems, total_ratio
from benchmarks.engine import Answer, Engine, EngineFailedError
from benchmarks.once import REPO_ROOT
from vllm_splitzip.codec.modes import MODES

BUILD = REPO_ROOT / "build"
STORE = BUILD / "demo-store"
REPORT = BUILD / "demo.json"

LENGTHS = (300, 700, 1200, 1900)
WARM_UP_LENGTH = 300
GENERATED = 24
BLOCK = 32
CONTEXT = 2304
BF16_BYTES = 2


class Prompt(NamedTuple):
    """A prompt, and the name of the text that it was taken from."""

    name: str
    ids: list[int]


class Stored(NamedTuple):
    """What the first engine made of a prompt.

    `cold` is its answer having computed the whole prompt, `again` that from its prefix cache.
    """

    cold: Answer
    again: Answer
    raw_bytes: int
    stored_bytes: int


class Steps:
    """Says what is going on: in one line on a terminal, line by line elsewhere."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._done = 0
        columns = (SpinnerColumn(), *Progress.get_default_columns()[:3], TimeElapsedColumn())
        self.bar = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self.bar.add_task("", total=total)

    def begin(self, what: str) -> None:
        """The next step begins, and with it the last one ends."""
        self.bar.update(self._task, completed=self._done, description=what)
        self._done += 1
        if not self._console.is_terminal:
            self._console.print(
                f"[{self._done:2}/{self._total}] {what}", highlight=False, markup=False
            )


def run(
    model: Path, codec: str, prompts: list[Prompt], warm_up: list[int], steps: Steps
) -> list[PromptResult]:
    """Store all prompts from one engine, then retrieve them in another."""
    shutil.rmtree(STORE, ignore_errors=True)
    STORE.mkdir(parents=True)
    arguments = engine_arguments(model, codec)
    layer_bytes = layer_bytes_per_token(model)

    stored: list[Stored] = []
    steps.begin("a first engine starts")
    with Engine(BUILD / "demo-engine-1.log", arguments) as engine:
        steps.begin("the first engine warms up")
        engine.ask(warm_up, GENERATED)
        files = demo_store.wait_for_more(STORE, {})
        for name, ids in prompts:
            steps.begin(f"the first engine computes {name}, {len(ids):,} tokens")
            cold = engine.ask(ids, GENERATED)
            before, files = files, demo_store.wait_for_more(STORE, files)
            added = [path for path in files if path not in before]
            stored.append(
                Stored(
                    cold,
                    engine.ask(ids, GENERATED),
                    sum(demo_store.layer_tokens(path) for path in added) * layer_bytes,
                    sum(files[path] for path in added),
                )
            )
        steps.begin("the first engine ends")

    results: list[PromptResult] = []
    steps.begin("a second engine starts")
    with Engine(BUILD / "demo-engine-2.log", arguments) as engine:
        steps.begin("the second engine warms up")
        failed = engine.ask(warm_up, GENERATED).counts["frames_failed"]
        for prompt, first in zip(prompts, stored, strict=True):
            steps.begin(f"the second engine retrieves {prompt.name}")
            answer = engine.ask(prompt.ids, GENERATED)
            results.append(result(prompt, first, answer, failed))
            failed = answer.counts["frames_failed"]
        steps.begin("the second engine ends")
    return results


def result(prompt: Prompt, first: Stored, answer: Answer, failed_before: float) -> PromptResult:
    """Compare the second engine's answer with the first one's."""
    return PromptResult(
        name=prompt.name,
        tokens=len(prompt.ids),
        retrieved_tokens=answer.cached_tokens,
        expected_tokens=first.again.cached_tokens,
        failed_frames=int(answer.counts["frames_failed"] - failed_before),
        raw_bytes=first.raw_bytes,
        stored_bytes=first.stored_bytes,
        ttft_cold_s=first.cold.ttft_s,
        ttft_warm_s=answer.ttft_s,
        identical=answer.token_ids == first.again.token_ids,
        identical_to_cold=answer.token_ids == first.cold.token_ids,
        text=answer.text,
    )


def engine_arguments(model: Path, codec: str) -> dict[str, Any]:
    """Arguments of `vllm.LLM`. A prompt is computed in one step, and nothing is compiled."""
    return {
        "model": str(model),
        "dtype": "bfloat16",
        "block_size": BLOCK,
        "enforce_eager": True,
        "max_model_len": CONTEXT,
        "max_num_batched_tokens": CONTEXT,
        "kv_transfer_config": {
            "kv_connector": "SplitZipConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "codec": codec,
                "lmcache.remote_url": f"fs://localhost:0{STORE}",
            },
        },
    }


def layer_bytes_per_token(model: Path) -> int:
    """Bytes of one token's key and value in one layer, by the model's own configuration."""
    config = json.loads((model / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_key_value_heads"] * 2 * head_dim * BF16_BYTES)


def take_prompts(model: Path) -> tuple[list[Prompt], list[int]]:
    """The prompts, and one more to warm up with."""
    from transformers import AutoTokenizer

    lengths = (*LENGTHS, WARM_UP_LENGTH)
    held_out = texts.held_out()
    ids = texts.prompts(AutoTokenizer.from_pretrained(model), lengths, held_out)
    return [Prompt(*pair) for pair in zip(held_out, ids[:-1], strict=False)], ids[-1]


def machine() -> str:
    """The processor by name and how many of them this process may use."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"{len(os.sched_getaffinity(0))} x {name}"


def write_report(
    options: argparse.Namespace, results: list[PromptResult], wrong: list[str]
) -> None:
    """Leave the results for other programs, in build/demo.json."""
    report = {
        **vars(options),
        "ratio": round(total_ratio(results), 6),
        "identical": bool(results) and all(result.identical for result in results),
        "problems": wrong,
        "prompts": [asdict(result) | {"ratio": round(result.ratio, 6)} for result in results],
        "machine": machine(),
        "versions": {name: version(name) for name in ("vllm-splitzip", "torch", "lmcache")},
    }
    REPORT.write_text(json.dumps(report, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Store KV cache in one engine, use it in another.")
    parser.add_argument("--model", choices=list(models.SOURCES), default="smollm2-135m")
    parser.add_argument("--codec", choices=sorted(MODES), default="fast")
    options = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console.width = 120
    BUILD.mkdir(exist_ok=True)
    lock = (BUILD / "demo.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit("Another demo is running in this checkout, and would share its store.")
    REPORT.unlink(missing_ok=True)
    try:
        model = models.ensure(options.model)
        prompts, warm_up = take_prompts(model)
        steps = Steps(console, 6 + 2 * len(prompts))
        with steps.bar:
            results = run(model, options.codec, prompts, warm_up, steps)
    except (models.ModelUnavailableError, EngineFailedError) as error:
        sys.exit(str(error))
    wrong = problems(results)
    write_report(options, results, wrong)
    console.print(
        f"\n{options.model}, stored as {options.codec}, on {machine()}\n", highlight=False
    )
    print_results(console, results, block=BLOCK, generated=GENERATED)
    console.print(f"\nLogs, store and figures: {BUILD.name}/demo*", highlight=False)
    if wrong:
        sys.exit("\n".join(["The demo failed:", *wrong]))


if __name__ == "__main__":
    main()
