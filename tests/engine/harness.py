"""Starts engines in processes of their own and reads what they report."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BLOCK = 32


@dataclass
class Run:
    """What an engine's run left: results by step, digests by event, and its log."""

    results: list[list[dict[str, Any]]]
    preemptions: int
    log: str
    digests: dict[str, dict[str, dict[str, list[str | None]]]] = field(default_factory=dict)


def engine_arguments(model: Path, extra: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """Arguments of vllm.LLM on a CPU, with DigestConnector and `extra` as its configuration."""
    return {
        "model": str(model),
        "dtype": "bfloat16",
        "block_size": BLOCK,
        "enforce_eager": True,
        "max_model_len": 2304,
        "kv_transfer_config": {
            "kv_connector": "DigestConnector",
            "kv_connector_module_path": "digest_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        },
        **arguments,
    }


def run_engine(
    directory: Path, name: str, engine: dict[str, Any], steps: Sequence[dict[str, Any]]
) -> Run:
    """Run an engine to its end. Its files are kept under `directory`, named after `name`."""
    result, digests = directory / f"{name}.result.json", directory / f"{name}.digests"
    job = directory / f"{name}.job.json"
    job.write_text(json.dumps({"engine": engine, "steps": steps, "result": str(result)}))
    environment = {
        **os.environ,
        "SPLITZIP_TEST_DIGESTS": str(digests),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "VLLM_PLUGINS": "splitzip",
    }
    log_path = directory / f"{name}.log"
    with log_path.open("w") as log:
        subprocess.run(
            [sys.executable, str(HERE / "run_engine.py"), str(job)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=600,
            check=False,
        )
    text = log_path.read_text()
    content = json.loads(result.read_text()) if result.exists() else {"error": "no result"}
    assert "error" not in content, f"{content['error']}; the end of its log:\n{text[-6000:]}"
    run = Run(content["steps"], content["preemptions"], text)
    for path in sorted(directory.glob(f"{name}.digests.*")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            run.digests.setdefault(entry["event"], {})[entry["key"]] = entry["layers"]
    return run


def compared_blocks(saved: Run, loaded: Run) -> int:
    """Compare every block that `loaded` loaded with what `saved` saved; the number of blocks."""
    compared = 0
    for key, layers in loaded.digests.get("loaded", {}).items():
        for name, digests in layers.items():
            for index, digest in enumerate(digests):
                if digest is not None:
                    expected = saved.digests["saved"][key][name][index]
                    assert digest == expected, f"block {index} of layer {name} in frame {key}"
                    compared += 1
    return compared
