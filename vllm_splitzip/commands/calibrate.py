"""`vllm-splitzip calibrate`: the exponents that a model's KV cache is made of, as a codebook."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ..codec.codebook import Codebook
from ..errors import SplitZipError
from .capture import cached_bits, load_model, prompts_of
from .files import check_output, check_texts
from .sizes import FrameSizes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--model", required=True, help="name or directory of a HF model")
    parser.add_argument(
        "--text", required=True, nargs="+", type=Path, help="text files to calibrate on"
    )
    parser.add_argument(
        "--held-out",
        nargs="*",
        type=Path,
        default=[],
        help="text files to measure coverage, escapes and the ratio of every mode on",
    )
    parser.add_argument("--output", required=True, type=Path, help="codebook file to write")
    parser.add_argument(
        "--tokens", type=int, default=2048, help="tokens per forward pass (default %(default)s)"
    )
    parser.add_argument(
        "--max-prompts", type=int, default=12, help="forward passes per set (default %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Write the codebook, and print its card."""
    for name, value in (("--tokens", options.tokens), ("--max-prompts", options.max_prompts)):
        if value < 1:
            raise SplitZipError(f"{name} is {value}; allowed: 1 or more")
    check_texts("--text", options.text)
    check_texts("--held-out", options.held_out)
    check_output("--output", options.output)
    model, tokenizer = load_model(options.model)
    sizes = FrameSizes()

    def measure(
        files: list[Path], label: str, book: Codebook | None = None
    ) -> tuple[npt.NDArray[np.int64], int]:
        counts, tokens = np.zeros(256, np.int64), 0
        for number, ids in enumerate(prompts_of(tokenizer, files, options.tokens)):
            if number == options.max_prompts:
                break
            for keys, values in cached_bits(model, ids):
                for bits in (keys, values):
                    counts += np.bincount(((bits >> 7) & 0xFF).reshape(-1), minlength=256)
                if book is not None:
                    sizes.add(keys, values, book)
            tokens += len(ids)
            print(f"{label}: {tokens} tokens", flush=True)
        if not tokens:
            names = ", ".join(map(str, files))
            raise SplitZipError(f"the {label} texts have no tokens: {names}")
        return counts, tokens

    counts, tokens = measure(options.text, "calibration")
    book = Codebook.from_histogram(counts)
    card = {
        "model": Path(options.model).name,
        "text": [path.name for path in options.text],
        "tokens": tokens,
        **_coverage(book, counts),
        "digest": xxhash.xxh3_64_hexdigest(book.exponents),
        "command": "vllm-splitzip calibrate --model MODEL --text TEXT... --held-out TEXT...",
    }
    if options.held_out:
        held_out, held_out_tokens = measure(options.held_out, "held-out", book)
        card["held_out"] = {
            "text": [path.name for path in options.held_out],
            "tokens": held_out_tokens,
            **_coverage(book, held_out),
        }
        if sizes.ratios:  # of whole frames, and there may be none
            card["ratios"] = {"bf16": {mode: round(r, 4) for mode, r in sizes.ratios.items()}}
    config = model.config.get_text_config()
    content = {
        "format": "bf16",
        "exponents": list(book.exponents),
        "model": {
            "model_type": config.model_type,
            "num_hidden_layers": config.num_hidden_layers,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
        },
        "card": card,
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content, indent=1))
    return 0


def _coverage(book: Codebook, counts: npt.NDArray[np.int64]) -> dict[str, Any]:
    escape_rate = 1 - counts[list(book.exponents)].sum() / counts.sum()
    return {"coverage": round(1 - escape_rate, 7), "escape_rate": round(escape_rate, 7)}
