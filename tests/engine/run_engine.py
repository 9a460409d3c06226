"""Runs one vLLM engine through a list of steps; for tests, in a process of its own.

Usage: python run_engine.py JOB.json, where JOB is
{"engine": keyword arguments of vllm.LLM, "steps": [step, ...], "result": path}. A step is
{"prompts": [[token id, ...], ...], "max_tokens": n, "together": whether to send them at once,
"forget": whether to empty vLLM's own prefix cache first}.
The result is {"steps": [[{"tokens", "cached"} by prompt], ...], "preemptions"} or {"error"}.
"""

import json
import sys
import time
from pathlib import Path


def main(job_path: str) -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(Path(job_path).read_text())
    try:
        llm = LLM(disable_log_stats=False, **job["engine"])
    except Exception as error:
        Path(job["result"]).write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    results = []
    for step in job["steps"]:
        if step.get("forget"):
            assert llm.reset_prefix_cache()
        sampling = SamplingParams(
            temperature=0, max_tokens=step.get("max_tokens", 8), ignore_eos=True
        )
        prompts = [{"prompt_token_ids": ids} for ids in step["prompts"]]
        batches = [prompts] if step.get("together") else [[prompt] for prompt in prompts]
        outputs = [
            out for batch in batches for out in llm.generate(batch, sampling, use_tqdm=False)
        ]
        results.append(
            [
                {"tokens": list(out.outputs[0].token_ids), "cached": out.num_cached_tokens}
                for out in outputs
            ]
        )
        # What a step stored is to be in the store before the next one looks.
        time.sleep(step.get("pause_s", 1.0))
    preemptions = sum(
        metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"
    )
    Path(job["result"]).write_text(json.dumps({"steps": results, "preemptions": preemptions}))


if __name__ == "__main__":
    main(sys.argv[1])
