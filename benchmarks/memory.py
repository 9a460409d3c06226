"""Peak memory of a worker process with the connector, over one without it, per KV cache in flight.

Prompts are sent at once to a server of each kind: one that has no connector, one that prefills and
stores, and a fresh one that retrieves. Each is started, lets one short prompt pass, and then
serves the prompts; the kernel keeps the peak of its worker's resident memory. In flight are the
prompts' KV cache, all of which is stored or loaded between the first request and the last answer.

``python -m benchmarks.memory [--prompts 8]`` prints a table and writes build/memory.json.
"""

import argparse
import json
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoTokenizer

from benchmarks import models, texts
from benchmarks.once import REPO_ROOT
from benchmarks.servers import VllmServer

BUILD = REPO_ROOT / "build"
BAR = 1.3
PORT = 8431
SETTLE_S = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", choices=models.SOURCES)
    parser.add_argument("--codec", default="fast")
    parser.add_argument("--prompts", type=int, default=8, help="prompts at once")
    parser.add_argument("--prompt-tokens", type=int, default=1900)
    options = parser.parse_args()

    model = models.ensure(options.model)
    lengths = [64, *[options.prompt_tokens] * options.prompts]
    first, *prompts = texts.prompts(AutoTokenizer.from_pretrained(model), lengths)
    store = BUILD / "memory-store"
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir(parents=True)
    connector = {
        "kv_connector": "SplitZipConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.remote_url": f"fs://localhost:0{store}",
            "codec": options.codec,
        },
    }
    in_flight = len(prompts) * options.prompt_tokens * kv_bytes_per_token(model)
    rows = []
    for name, kv_transfer in (
        ("without", None),
        ("with, storing", connector),
        ("with, retrieving", connector),
    ):
        idle, peak = measure(model, name, kv_transfer, first, prompts)
        rows.append({"server": name, "idle_bytes": idle, "peak_bytes": peak})
    base = rows[0]
    for row in rows:
        row["idle_over"] = (row["idle_bytes"] - base["idle_bytes"]) / in_flight
        row["peak_over"] = (row["peak_bytes"] - base["peak_bytes"]) / in_flight

    table = Table(title=f"worker's memory; {in_flight / 1e6:.0f} MB of KV cache in flight")
    for head in ("server", "idle, MB", "peak, MB", "idle over", "peak over without"):
        table.add_column(head, justify="left" if head == "server" else "right")
    for row in rows:
        table.add_row(
            row["server"],
            f"{row['idle_bytes'] / 1e6:.0f}",
            f"{row['peak_bytes'] / 1e6:.0f}",
            f"{row['idle_over']:.2f}",
            f"{row['peak_over']:.2f}",
        )
    Console().print(table)
    worst = max(row["peak_over"] for row in rows)
    print(f"at most {worst:.2f} times the KV cache in flight; the bar is {BAR}")
    result = {"in_flight_bytes": in_flight, "bar": BAR, "rows": rows, **vars(options)}
    (BUILD / "memory.json").write_text(json.dumps(result, indent=1) + "\n")


def kv_bytes_per_token(model: Path) -> int:
    """Bytes of BF16 KV cache of one token."""
    config = AutoConfig.from_pretrained(model)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head)


def measure(
    model: Path,
    name: str,
    kv_transfer: dict[str, Any] | None,
    first: list[int],
    prompts: list[list[int]],
) -> tuple[int, int]:
    """(bytes that the worker holds before, its peak while it serves the prompts)."""
    log = BUILD / f"memory-{re.sub('[^a-z]+', '-', name)}.log"
    log.unlink(missing_ok=True)
    arguments = {
        "dtype": "bfloat16",
        "block-size": 32,
        "enforce-eager": True,
        "max-model-len": 2304,
        # So that the process that holds the KV cache is one of its own without a connector too.
        "distributed-executor-backend": "mp",
    }
    with VllmServer(model, PORT, log, kv_transfer=kv_transfer, arguments=arguments) as server:
        server.wait_ready()
        [worker] = [p for p in server.processes() if p.name().startswith("VLLM::Worker")]
        status = Path(f"/proc/{worker.pid}/status")

        def ask(prompt: list[int]) -> None:
            body = {"model": str(model), "prompt": prompt, "max_tokens": 4, "temperature": 0}
            url = f"http://127.0.0.1:{PORT}/v1/completions"
            httpx.post(url, json=body, timeout=600).raise_for_status()

        ask(first)
        time.sleep(SETTLE_S)
        idle = read_kb(status, "VmRSS")
        Path(f"/proc/{worker.pid}/clear_refs").write_text("5")  # the peak begins anew
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(ask, prompts))
        time.sleep(SETTLE_S)
        return idle, read_kb(status, "VmHWM")


def read_kb(status: Path, field: str) -> int:
    """A field of /proc/PID/status, in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
