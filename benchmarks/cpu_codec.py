"""Speed of the CPU codec on real KV, beside `torch.Tensor.copy_` of the same bytes.

``python -m benchmarks.cpu_codec [--model NAME ...] [--threads N ...] [--rounds N]``

The held-out KV lies in a paged cache as vLLM has it. It is coded in one call with its blocks in
order of address, which is the way `copy_` goes; in one call with its blocks in random order, which
is the worst a block table can be; and in random order in as many calls as there are layers of 2,048
or of 256 tokens, the latter being what the connector asks for. Speeds are GB/s of BF16 input. Each
round measures everything once, one after the other, so that what else the machine does hits all
alike; the table has the median of the rounds and, in brackets, the lowest and the highest.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import kv, models
from vllm_splitzip.codec.codebook import Codebook
from vllm_splitzip.codec.coded import Blocks, Coded, Words
from vllm_splitzip.codec.cpu import fast as cpu
from vllm_splitzip.codec.reference import fast as reference

BLOCK_SIZE = 16
RUNS = {
    "all, in order": None,
    "all, shuffled": None,
    "2,048 tokens, shuffled": 2048,
    "256 tokens, shuffled": 256,
}


@dataclass(frozen=True, slots=True)
class Row:
    """What one run length did at one number of threads."""

    ratio: float
    speeds: dict[str, list[float]]

    def __str__(self) -> str:
        cells = [
            f"{median(speeds):6.2f} [{min(speeds):5.2f} - {max(speeds):5.2f}]"
            for speeds in self.speeds.values()
        ]
        return " | ".join([f"{self.ratio:.4f}", *cells])


def paged(model: str) -> tuple[Words, npt.NDArray[np.int64], Codebook]:
    """(cache of pages, table of all blocks, layer by layer in token order, codebook)."""
    book = Codebook.from_histogram(kv.exponent_histogram(kv.capture(model, "calibration")))
    sample = kv.capture(model, "held_out")
    prompts = [sample.paged(prompt, BLOCK_SIZE) for prompt in range(len(sample.names))]
    rows = np.concatenate([prompt.reshape(-1, prompt[0, 0].size) for prompt in prompts])
    order = np.random.default_rng(0).permutation(len(rows))
    cache = empty_cache(rows)
    cache[order] = rows
    return cache, order, book


def empty_cache(like: Words) -> Words:
    """Pages from torch, as vLLM allocates its cache."""
    return torch.zeros(like.shape, dtype=torch.int16).numpy().view(np.uint16)


SCRATCH = np.ones(128 << 20, np.uint8)


def flush() -> None:
    """Fill the cache with clean lines, so that no step pays for what the one before left there."""
    SCRATCH.max()


def check(blocks: Blocks, book: Codebook) -> None:
    """The bytes are the reference's."""
    expected = reference.encode(blocks.pages[blocks.table].reshape(-1), book)
    actual = cpu.encode_fast(blocks, book)
    assert actual is not None
    for ours, theirs in zip(actual.dense, expected.dense, strict=True):
        assert np.array_equal(ours, theirs)
    for name, table in expected.tables.items():
        assert np.array_equal(actual.tables[name], table), name


def measure(
    cache: Words, tables: list[npt.NDArray[np.int64]], book: Codebook, threads: int, rounds: int
) -> Row:
    torch.set_num_threads(threads)
    back = empty_cache(cache)
    runs = [(Blocks(cache, table), Blocks(back, table)) for table in tables]
    origin = torch.from_numpy(cache.view(np.int16))
    copied = torch.zeros_like(origin)
    coded: list[Coded] = []

    def encode() -> None:
        for source, _ in runs:
            one = cpu.encode_fast(source, book, threads)
            assert one is not None, "real KV gets smaller"
            coded.append(one)

    def decode() -> None:
        for one, (_, target) in zip(coded, runs, strict=True):
            cpu.decode_fast(one, book, target, threads)

    def gather() -> None:
        coded.extend(cpu.encode_raw(source, threads) for source, _ in runs)

    def scatter() -> None:
        for one, (_, target) in zip(coded, runs, strict=True):
            cpu.decode_raw(one, target, threads)

    steps: dict[str, Callable[[], object]] = {
        "copy_": lambda: copied.copy_(origin),
        "fast encode": encode,
        "fast decode": decode,
        "raw encode": gather,
        "raw decode": scatter,
    }
    speeds: dict[str, list[float]] = {name: [] for name in steps}
    ratio = 0.0
    # `raw` has rounds of its own: two modes' output at once is more than the codec keeps memory
    # for. In each first round every page's first touch is included, so it does not count.
    for mode in ("fast", "raw"):
        for number in range(rounds + 1):
            for name in ("copy_", f"{mode} encode", f"{mode} decode"):
                if name.endswith("encode"):
                    coded.clear()
                    back.fill(0)
                flush()
                start = time.perf_counter()
                steps[name]()
                seconds = time.perf_counter() - start
                if number:
                    speeds[name].append(cache.nbytes / seconds / 1e9)
            assert np.array_equal(back, cache), f"{mode} is not exact"
            if mode == "fast":
                ratio = cache.nbytes / sum(one.nbytes for one in coded)
    return Row(ratio, speeds)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the CPU codec on real KV.")
    parser.add_argument("--model", nargs="+", default=list(models.SOURCES), metavar="NAME")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], metavar="N")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    cpu.warm_up()
    for model in arguments.model:
        cache, order, book = paged(model)
        check(Blocks(cache, order[: len(order) // 6]), book)
        window = "window" if book.window else "table"
        print(f"\n{model}: {cache.nbytes / 1e6:.0f} MB, codebook {[*book.exponents]} ({window})")
        print("run | threads | ratio | copy_ | fast encode | fast decode | raw encode | raw decode")
        for name, tokens in RUNS.items():
            parts = 1 if tokens is None else len(order) * BLOCK_SIZE // tokens
            table = order if name.endswith("shuffled") else np.arange(len(order))
            tables = np.array_split(table, parts)
            for threads in arguments.threads:
                row = measure(cache, tables, book, threads, arguments.rounds)
                print(f"{name} | {threads} | {row}", flush=True)


if __name__ == "__main__":
    main()
