"""Every mode and format of ours beside other compressors, on the same real KV in one run.

``python -m benchmarks.codec [--model NAME] [--rounds N] [--prompts N]``

Held-out KV lies in a paged cache, layer by layer; each layer of all prompts is one call. Speeds
are GB/s of input, the medians of interleaved rounds, at 1 and 2 threads, beside `copy_`. A row that
does not give back exactly what went in has no speed. Prints two tables, writes build/codec.json and
build/codec.png.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import ablations, kv, models
from benchmarks.once import REPO_ROOT
from benchmarks.peers import PEERS
from benchmarks.ratios import cast
from benchmarks.timing import empty_cache, timed
from vllm_splitzip.codec import host
from vllm_splitzip.codec.codebook import Codebook
from vllm_splitzip.codec.coded import Blocks, Coded
from vllm_splitzip.codec.cpu.pool import keep_idle
from vllm_splitzip.codec.formats import FORMATS
from vllm_splitzip.codec.modes import MODES
from vllm_splitzip.codec.packing import channels

BLOCK_SIZE = 16
BUILD = REPO_ROOT / "build"


@dataclass(slots=True)
class Row:
    """One line. Speeds are medians over rounds in GB/s of input; None where not exact.

    `copy_gbs` is `Tensor.copy_` of as many bytes in the same rounds.
    """

    name: str
    model: str
    format: str
    threads: int
    ratio: float
    encode_gbs: float | None
    decode_gbs: float | None
    exact: bool
    copy_gbs: float | None = None

    def __str__(self) -> str:
        speeds = ""
        if self.encode_gbs and self.decode_gbs and self.copy_gbs:
            speeds = (
                f"{self.encode_gbs:7.2f} {self.decode_gbs:7.2f} {self.copy_gbs:7.2f}   "
                f"{self.encode_gbs / self.copy_gbs:.2f} {self.decode_gbs / self.copy_gbs:.2f}"
            )
        return (
            f"{self.model:13} {self.name:24} {self.format:6} {self.threads:7} {self.ratio:7.4f} "
            f"{speeds if self.exact else 'not exact'}"
        )


@dataclass(frozen=True, slots=True)
class Contender:
    """What is timed: `encode` makes an object, `decode` undoes it and says if it is exact."""

    name: str
    format: str
    encode: Callable[[], Any]
    decode: Callable[[Any], None]
    size: Callable[[Any], int]
    exact: Callable[[], bool]
    nbytes: int


def layers_of(sample: kv.KVSample, name: str, prompts: int) -> list[npt.NDArray[Any]]:
    """Each layer's blocks of all prompts. Shape of each: (blocks, heads, tokens, content)."""
    paged = [cast(sample.paged(prompt, BLOCK_SIZE), name) for prompt in range(prompts)]
    layers = np.stack(paged, axis=1)
    cache = empty_cache(layers)
    cache[:] = layers
    return list(cache.reshape(len(cache), -1, *cache.shape[3:]))


def ours(layers: Sequence[npt.NDArray[Any]], name: str, mode: str, book: Any, threads: int) -> Any:
    """A contender for one of our modes."""
    shape = (layers[0].shape[1], layers[0].shape[2], layers[0].shape[3])
    known = channels("tokens", shape)
    runs = [
        Blocks(layer.reshape(len(layer), -1), np.arange(len(layer)), name, known)
        for layer in layers
    ]
    back = [Blocks(empty_cache(run.pages), run.table, name, known) for run in runs]

    def decode(coded: list[Coded]) -> None:
        for one, target in zip(coded, back, strict=True):
            host.decode(one, book, target, threads)

    return Contender(
        name=mode,
        format=name,
        encode=lambda: [host.encode(run, mode, book, threads) for run in runs],
        decode=decode,
        size=lambda coded: sum(one.nbytes for one in coded),
        exact=lambda: all(
            np.array_equal(a.pages, b.pages) for a, b in zip(runs, back, strict=True)
        ),
        nbytes=sum(layer.nbytes for layer in layers),
    )


def theirs(layers: Sequence[npt.NDArray[Any]], peer: Any, threads: int) -> Contender:
    """A contender for another compressor."""
    encode, decode = peer.make(threads)
    data = [layer.tobytes() for layer in layers]
    back: list[bytes] = []

    def run_back(coded: list[bytes]) -> None:
        back[:] = [decode(one) for one in coded]

    return Contender(
        name=peer.name,
        format="bf16",
        encode=lambda: [encode(one) for one in data],
        decode=run_back,
        size=lambda coded: sum(map(len, coded)),
        exact=lambda: back == data,
        nbytes=sum(map(len, data)),
    )


def contenders(
    layers: Mapping[str, Sequence[npt.NDArray[Any]]], book: Codebook, threads: int
) -> Iterator[Contender]:
    """Every mode and format of ours, and every peer; each is let go of before the next."""
    for name, chosen in layers.items():
        for mode in ("fast", "dense", "max", "raw"):
            if name in MODES[mode].streams:
                needs = MODES[mode].streams[name].needs_codebook
                yield ours(chosen, name, mode, book if needs else None, threads)
    for peer in PEERS:
        yield theirs(layers["bf16"], peer, threads)


def measure(contender: Contender, model: str, threads: int, rounds: int) -> Row:
    """Time one contender, and a copy beside it. The first round is for the proof, not for time."""
    torch.set_num_threads(threads)
    source = torch.ones(contender.nbytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    steps: dict[str, list[float]] = {"copy": [], "encode": [], "decode": []}
    exact, size = False, 0
    coded = None
    for number in range(rounds + 1):
        del coded  # or its memory could not be used again, as it is between frames
        copy_s, _ = timed(lambda: target.copy_(source))
        encode_s, coded = timed(contender.encode)
        decode_s, _ = timed(lambda coded=coded: contender.decode(coded))
        if number == 0:
            exact, size = contender.exact(), contender.size(coded)
            if not exact:
                break
        else:
            for step, seconds in zip(steps.values(), (copy_s, encode_s, decode_s), strict=True):
                step.append(seconds)
    copy, encode, decode = (
        contender.nbytes / median(step) / 1e9 if step else None for step in steps.values()
    )
    ratio = contender.nbytes / size if size else 0.0
    return Row(contender.name, model, contender.format, threads, ratio, encode, decode, exact, copy)


def artifact_row(layers: Sequence[npt.NDArray[Any]], model: str, book: Codebook) -> Row:
    """The paper's Top-16 as its public artifact counts it, 7 bytes an escape; a size, no code."""
    elements = sum(layer.size for layer in layers)
    escapes = sum(ablations.escapes(layer, book) for layer in layers)
    size = elements * 1.5 + 7 * escapes
    return Row("top-16, 7 B an escape", model, "bf16", 0, 2 * elements / size, None, None, True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=list(models.SOURCES), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=6, help="of 2,048 tokens")
    options = parser.parse_args()
    host.warm_up()
    keep_idle(1 << 30)  # All of a model's streams are held at once here, unlike in the connector.
    rows: list[Row] = []
    print(
        f"{'model':13} {'what':24} {'format':6} threads   ratio  encode  decode   copy_   "
        "GB/s, and of copy_"
    )
    for model in options.model:
        sample = kv.capture(model, "held_out")
        histogram = kv.exponent_histogram(kv.capture(model, "calibration"))
        book = Codebook.from_histogram(histogram)
        layers = {name: layers_of(sample, name, options.prompts) for name in FORMATS}
        rows.append(artifact_row(layers["bf16"], model, book))
        print(rows[-1])
        for threads in (1, 2):
            for contender in contenders(layers, book, threads):
                rows.append(measure(contender, model, threads, options.rounds))
                print(rows[-1], flush=True)
    print("\nablations, ratio without framing")
    ablated = [row for model in options.model for row in ablations.rows(model, options.prompts)]
    for line in ablated:
        print(f"{line['model']:13} {line['what']:44} {line['ratio']:.4f}")
    copies = [row.copy_gbs for row in rows if row.threads == 2 and row.copy_gbs]
    content = {
        "copy_gbs": median(copies),
        "rows": [asdict(row) for row in rows],
        "ablations": ablated,
    }
    BUILD.mkdir(exist_ok=True)
    (BUILD / "codec.json").write_text(json.dumps(content, indent=1) + "\n")
    draw(rows, BUILD / "codec.png")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Ratio over decode speed of every BF16 row at 2 threads; a marker for each model."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    chosen = [r for r in rows if r.format == "bf16" and r.threads == 2 and r.decode_gbs]
    names = list(dict.fromkeys(row.model for row in chosen))
    figure, axis = plt.subplots(figsize=(8.5, 5.5), layout="constrained")
    for model, marker in zip(names, "os^D", strict=False):
        mine = [row for row in chosen if row.model == model]
        axis.scatter(
            [row.decode_gbs or 0 for row in mine],
            [row.ratio for row in mine],
            c=["#4e9a06" if row.name in MODES else "#888888" for row in mine],
            marker=marker, s=40, label=model,
        )  # fmt: skip
    for row in chosen:  # labelled once, at the first model's marker
        if row.model == names[0]:
            axis.annotate(
                row.name, (row.decode_gbs or 0, row.ratio), xytext=(6, 4), fontsize=8,
                textcoords="offset points", weight="bold" if row.name in MODES else "normal",
            )  # fmt: skip
    copies = [row.copy_gbs for row in chosen if row.copy_gbs]
    axis.axvline(median(copies), c="#3465a4", ls="--", lw=1)
    axis.text(median(copies), 1.25, " copy_", c="#3465a4", fontsize=8)
    axis.set(xscale="log", xlabel="decode, GB/s of BF16 KV at 2 threads", ylabel="ratio")
    ticks = [1, 2, 5, 10, 20, 40]
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_title("Lossless compression of real KV cache on a CPU")
    axis.legend(loc="lower left")
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    main()
