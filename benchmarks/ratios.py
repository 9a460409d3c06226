"""How small real KV gets: every mode, number format and packing, in whole frames.

``python -m benchmarks.ratios [--model NAME ...] [--tokens N] [--prompts N]``

Held-out KV of each model, cast to each number format, is cut into frames as the connector stores
them, all layers of 256 tokens, and packed to their last byte: header, metadata, windows, escapes
and padding are in the ratio. The columns:

ratio       bytes of KV by bytes of frames
bits        bits per element that this is
calibrated  ratio with windows from the calibration texts, that no frame would carry
bar         what issue 3 asks for

Prints a table and writes build/ratios.json.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import kv, models
from vllm_splitzip.codec import host
from vllm_splitzip.codec.codebook import Codebook
from vllm_splitzip.codec.coded import Blocks, Bytes, Coded
from vllm_splitzip.codec.formats import FORMATS
from vllm_splitzip.codec.modes import MODES
from vllm_splitzip.codec.packing import channels
from vllm_splitzip.codec.reference import dense as reference_dense
from vllm_splitzip.codec.reference import max as reference_max
from vllm_splitzip.codec.scheme import SCHEMES
from vllm_splitzip.frame import Frame, Layer, pack

BARS = {
    ("bf16", "fast"): 1.327,
    ("bf16", "dense"): 1.41,
    ("bf16", "max"): 1.485,
    ("fp16", "dense"): 1.11,
    ("e5m2", "fast"): 1.13,
    ("e5m2", "dense"): 1.26,
    ("e4m3", "dense"): 1.10,
}
BLOCK_SIZES = {"tokens": 16, "cpu-vec": 32, "cpu-amx": 32, "halves": 32}
KEY = b"sz1-0123456789abcdef/0/0/1/" + bytes(32)
DTYPES = {"fp16": torch.float16, "e5m2": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}

Elements = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    model: str
    format: str
    mode: str
    packing: str
    ratio: float
    bits: float
    calibrated: float | None
    bar: float | None

    def __str__(self) -> str:
        calibrated = f"{self.calibrated:.4f}" if self.calibrated else ""
        bar = f"{self.bar:.3f} {'met' if self.ratio >= self.bar else 'MISSED'}" if self.bar else ""
        return (
            f"{self.model:13} | {self.format:6} | {self.mode:5} | {self.packing:7} | "
            f"{self.ratio:.4f} | {self.bits:6.3f} | {calibrated:10} | {bar}"
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One layer's blocks of one frame: shape (blocks, row), and what a block is."""

    layer: int
    rows: Elements
    shape: tuple[int, int, int]


def cast(bits: npt.NDArray[np.uint16], name: str) -> Elements:
    """BF16 bit patterns as those of another format, as vLLM's cache would hold them."""
    if name == "bf16":
        return bits
    values = torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(torch.bfloat16)
    narrow = values.to(DTYPES[name])
    if FORMATS[name].item == 1:
        return narrow.view(torch.uint8).numpy()
    return narrow.view(torch.int16).numpy().view(np.uint16)


def runs_of(
    sample: kv.KVSample, name: str, packing: str, tokens: int, prompts: int
) -> Iterator[list[Run]]:
    """Frame by frame, all layers."""
    block = BLOCK_SIZES[packing]
    for prompt in range(prompts):
        paged = cast(sample.paged(prompt, block), name)
        layers, blocks, *rest = paged.shape
        shape = (rest[0], rest[1], rest[2])
        # Where vLLM's CPU attention would put what a GPU's has at each position.
        order = channels("tokens", shape).positions().reshape(-1)
        there = channels("cpu-vec" if packing == "halves" else packing, shape).positions()
        rows = paged.reshape(layers, blocks, -1)
        moved = np.empty_like(rows)
        moved[..., there.reshape(-1)] = rows[..., order]
        for begin in range(0, blocks - tokens // block + 1, tokens // block):
            yield [
                Run(layer, moved[layer, begin : begin + tokens // block], shape)
                for layer in range(layers)
            ]


def frame_bytes(runs: list[Run], tokens: int, name: str, mode: str, packing: str, book: Any) -> int:
    """Length of the frame that the connector would store."""
    layers = []
    for run in runs:
        known = channels(packing, run.shape)
        blocks = Blocks(run.rows, np.arange(len(run.rows)), name, known)
        coded = host.encode(blocks, mode, book)
        back = Blocks(np.zeros_like(run.rows), blocks.table, name, known)
        host.decode(coded, book, back)
        assert np.array_equal(back.pages, run.rows), "not exact"
        used = book if MODES[coded.mode].streams[name].needs_codebook else None
        layer_name = f"model.layers.{run.layer}.self_attn.attn"
        layers.append(Layer(layer_name, name, (len(run.rows), *run.shape), coded, used, packing))
    return pack(Frame(tokens, tuple(layers)), KEY)[1]


def calibrated_windows(
    sample: kv.KVSample, name: str, mode: str, tokens: int, prompts: int
) -> list[Bytes]:
    """By layer: the median of the windows that frames of the calibration texts would have."""
    found: dict[int, list[Bytes]] = {}
    for runs in runs_of(sample, name, "tokens", tokens, prompts):
        for run in runs:
            coded = _reference(run, name, mode, None)
            found.setdefault(run.layer, []).append(coded.tables["windows"])
    return [np.median(found[layer], axis=0).astype(np.uint8) for layer in sorted(found)]


def _reference(run: Run, name: str, mode: str, windows: Bytes | None) -> Coded:
    scheme, known = SCHEMES[mode][name], channels("tokens", run.shape)
    elements = run.rows.reshape(-1)
    if mode == "max":
        return reference_max.encode(elements, scheme, known, windows)
    return reference_dense.encode(elements, scheme, known, mode, windows)


def measure(
    model: str, name: str, mode: str, packing: str, tokens: int, prompts: int, calibrate: bool
) -> Row:
    calibration, held_out = kv.capture(model, "calibration"), kv.capture(model, "held_out")
    book = Codebook.from_histogram(kv.exponent_histogram(calibration)) if mode == "fast" else None
    windows = None
    if calibrate:
        windows = calibrated_windows(calibration, name, mode, tokens, prompts)
    elements = coded_bytes = without_table = 0
    for runs in runs_of(held_out, name, packing, tokens, prompts):
        coded_bytes += frame_bytes(runs, tokens, name, mode, packing, book)
        for run in runs:
            elements += run.rows.size
            if windows is not None:
                coded = _reference(run, name, mode, windows[run.layer])
                without_table += coded.nbytes - coded.tables["windows"].nbytes
    nbytes = elements * FORMATS[name].item
    return Row(
        model=model,
        format=name,
        mode=mode,
        packing=packing,
        ratio=nbytes / coded_bytes,
        bits=8 * coded_bytes / elements,
        calibrated=nbytes / without_table if without_table else None,
        bar=BARS.get((name, mode)) if packing == "tokens" else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Ratios of every mode on real KV.")
    parser.add_argument("--model", nargs="+", default=list(models.SOURCES), metavar="NAME")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="per frame")
    parser.add_argument("--prompts", type=int, default=6, metavar="N", help="of 2,048 tokens")
    parser.add_argument("--out", type=Path, default=Path("build/ratios.json"))
    options = parser.parse_args()
    print("model         | format | mode  | packing | ratio  | bits   | calibrated | bar")
    rows = []
    for model in options.model:
        cases = [
            (name, mode, "tokens")
            for name in FORMATS
            for mode in ("fast", "dense", "max")
            if name in MODES[mode].streams
        ]
        packings = [packing for packing in BLOCK_SIZES if packing != "tokens"]
        cases += [("bf16", mode, packing) for mode in ("dense", "max") for packing in packings]
        for name, mode, packing in cases:
            calibrate = name == "bf16" and mode != "fast" and packing == "tokens"
            row = measure(model, name, mode, packing, options.tokens, options.prompts, calibrate)
            rows.append(row)
            print(row, flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    content = {"tokens": options.tokens, "rows": [asdict(row) for row in rows]}
    options.out.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
