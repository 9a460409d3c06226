"""Speed of every mode on a CPU on real KV, beside `torch.Tensor.copy_` of the same bytes.

``python -m benchmarks.cpu_codec [--model NAME ...] [--mode NAME ...] [--threads N ...]``

Held-out KV lies in a paged cache as vLLM has it, the blocks of a run after each other or all over
the cache, and is coded in runs of one layer: of all prompts together, of 2,048 tokens, and of the
256 that a frame of the connector has. As many threads as are named take run after run, each coding
alone, as the connector's threads do. Speeds are GB/s of BF16 input. Each round measures `copy_` (on
as many threads), encode and decode, one after the other, so that what else the machine does hits
all alike; the table has the medians and, in brackets, those of the quotients by the `copy_` of the
same round. What is decoded is compared with what was encoded before any figure is printed.
"""

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import kv, models
from benchmarks.timing import empty_cache, timed
from vllm_splitzip.codec import host
from vllm_splitzip.codec.codebook import Codebook
from vllm_splitzip.codec.coded import Blocks, Coded
from vllm_splitzip.codec.cpu import fast as cpu
from vllm_splitzip.codec.cpu.dense import decode_dense, encode_dense
from vllm_splitzip.codec.cpu.max import decode_max, encode_max
from vllm_splitzip.codec.packing import channels
from vllm_splitzip.codec.scheme import DENSE, MAX

BLOCK_SIZE = 16

Encode = Callable[[Blocks], Coded | None]
Decode = Callable[[Coded, Blocks], None]


def coders(book: Codebook) -> dict[str, tuple[Encode, Decode]]:
    """(encode, decode) of each mode, on the calling thread alone."""
    dense, most = DENSE["bf16"], MAX["bf16"]
    return {
        "raw": (partial(cpu.encode_raw, threads=1), partial(cpu.decode_raw, threads=1)),
        "fast": (
            lambda blocks: cpu.encode_fast(blocks, book, 1),
            lambda coded, blocks: cpu.decode_fast(coded, book, blocks, 1),
        ),
        "dense": (
            lambda blocks: encode_dense(blocks, dense, threads=1),
            lambda coded, blocks: decode_dense(coded, dense, blocks, 1),
        ),
        "max": (
            lambda blocks: encode_max(blocks, most, 1),
            lambda coded, blocks: decode_max(coded, most, blocks, 1),
        ),
    }


def measure(
    sample: kv.KVSample, mode: str, coder: tuple[Encode, Decode], *,
    shuffled: bool, tokens: int, threads: int, rounds: int,
) -> dict[str, Any]:  # fmt: skip
    """One line of the table."""
    encode, decode = coder
    prompts = np.stack([sample.paged(prompt, BLOCK_SIZE) for prompt in range(len(sample.names))])
    shape: tuple[int, int, int] = prompts.shape[3:]
    rows = prompts.swapaxes(0, 1).reshape(-1, prompts[0, 0, 0].size)  # layer by layer
    order = np.arange(len(rows))
    if shuffled:
        order = np.random.default_rng(0).permutation(len(rows))
    cache, back = empty_cache(rows), empty_cache(rows)
    cache[order] = rows
    known = channels("tokens", shape)
    tables = np.array_split(order, len(order) * BLOCK_SIZE // tokens)
    sources = [Blocks(cache, table, "bf16", known) for table in tables]
    targets = [Blocks(back, table, "bf16", known) for table in tables]
    origin = torch.from_numpy(cache.view(np.int16))
    copied = torch.zeros_like(origin)
    torch.set_num_threads(threads)
    speeds: dict[str, list[float]] = {"copy": [], "encode": [], "decode": []}
    with ThreadPoolExecutor(threads) as pool:
        for number in range(rounds + 1):
            copy_s, _ = timed(lambda: copied.copy_(origin))
            encode_s, coded = timed(lambda: list(pool.map(encode, sources)))
            back.fill(0)
            decode_s, _ = timed(lambda coded=coded: list(pool.map(decode, coded, targets)))
            if number:  # The first touches of all memory are in the first round.
                for name, seconds in zip(speeds, (copy_s, encode_s, decode_s), strict=True):
                    speeds[name].append(cache.nbytes / seconds / 1e9)
            ratio = cache.nbytes / sum(one.nbytes for one in coded)
            del coded
        assert np.array_equal(back, cache), f"{mode} is not exact"
    by_copy = {
        name: median(ours / copy for ours, copy in zip(values, speeds["copy"], strict=True))
        for name, values in speeds.items()
    }
    return {
        "model": sample.model, "mode": mode, "tokens": tokens, "threads": threads,
        "blocks": "shuffled" if shuffled else "in order", "ratio": ratio,
        **{f"{name}_gbs": median(values) for name, values in speeds.items()},
        **{f"{name}_by_copy": by_copy[name] for name in ("encode", "decode")},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of every mode on a CPU on real KV.")
    parser.add_argument("--model", nargs="+", default=list(models.SOURCES), metavar="NAME")
    parser.add_argument(
        "--mode", nargs="+", default=["raw", "fast", "dense", "max"], metavar="NAME"
    )
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], metavar="N")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("build/cpu_codec.json"))
    options = parser.parse_args()
    host.warm_up()
    print("model | blocks | tokens | threads | mode | ratio | copy_ | encode | decode")
    rows = []
    for model in options.model:
        book = Codebook.from_histogram(kv.exponent_histogram(kv.capture(model, "calibration")))
        sample = kv.capture(model, "held_out")
        for shuffled in (False, True):
            for tokens in (sample.tokens.size, 2048, 256):
                for threads in options.threads:
                    for mode in options.mode:
                        row = measure(
                            sample, mode, coders(book)[mode], shuffled=shuffled, tokens=tokens,
                            threads=threads, rounds=options.rounds,
                        )  # fmt: skip
                        rows.append(row)
                        print(
                            f"{model} | {row['blocks']} | {tokens} | {threads} | {mode} | "
                            f"{row['ratio']:.4f} | {row['copy_gbs']:.2f} | "
                            f"{row['encode_gbs']:.2f} [{row['encode_by_copy']:.2f}] | "
                            f"{row['decode_gbs']:.2f} [{row['decode_by_copy']:.2f}]",
                            flush=True,
                        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
