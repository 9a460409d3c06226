"""Real KV: what a model caches while it reads real texts, as BF16 bit patterns.

Keys are taken after the rotary embedding, as every engine caches them. Gemma's sliding layers are
kept whole, all tokens, although an engine may drop what lies outside the window.

``python -m benchmarks.kv [NAME ...]`` captures both splits of the named models, or of all.
"""

import argparse
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from benchmarks import models, texts
from benchmarks.once import build_once, build_root
from vllm_splitzip.commands.capture import cached_bits, load_model

Split = Literal["calibration", "held_out"]
SPLITS: tuple[Split, ...] = ("calibration", "held_out")
KEY, VALUE = 0, 1
EXPONENT_SHIFT, EXPONENT_MASK = 7, 0xFF  # of a BF16 bit pattern: sign, 8 bits exponent, 7 mantissa


@dataclass(frozen=True, eq=False)
class KVSample:
    """KV of P prompts of T tokens each, in a model of L layers with H KV heads of D elements."""

    model: str
    split: Split
    names: list[str]  # P names of texts
    tokens: npt.NDArray[np.int32]  # [P, T] token ids
    bits: npt.NDArray[np.uint16]  # [P, L, 2, H, T, D] BF16 bit patterns, 2 = (KEY, VALUE); mapped

    def layer(self, layer: int, kind: int) -> npt.NDArray[np.uint16]:
        """Keys (kind ``KEY``) or values (``VALUE``) of one layer, [P, H, T, D]; no copy."""
        view: npt.NDArray[np.uint16] = self.bits[:, layer, kind]
        return view

    def paged(self, prompt: int, block_size: int) -> npt.NDArray[np.uint16]:
        """One prompt in the shape of vLLM's GPU cache, [L, B, H, N, 2 * D] uint16; a copy.

        ``paged(p, n)[l]`` is layer ``l``'s tensor: B = T // N blocks of N = ``block_size`` tokens,
        each token's key followed by its value. Tokens that fill no block are left out.
        """
        layers, _, heads, length, width = self.bits.shape[1:]
        blocks = length // block_size
        whole = self.bits[prompt][..., : blocks * block_size, :]
        split = whole.reshape(layers, 2, heads, blocks, block_size, width)
        # [L, 2, H, B, N, D] -> [L, B, H, N, 2, D]
        pages: npt.NDArray[np.uint16] = split.transpose(0, 3, 2, 4, 1, 5)
        return pages.reshape(layers, blocks, heads, block_size, 2 * width)


def exponent_histograms(sample: KVSample) -> npt.NDArray[np.int64]:
    """How often each exponent field occurs: [L, 2, 256] int64, by layer and by (KEY, VALUE)."""
    prompts, layers, kinds = sample.bits.shape[:3]
    counts = np.zeros((layers, kinds, EXPONENT_MASK + 1), np.int64)
    for prompt, layer, kind in np.ndindex(prompts, layers, kinds):
        exponents = (sample.bits[prompt, layer, kind] >> EXPONENT_SHIFT) & EXPONENT_MASK
        counts[layer, kind] += np.bincount(exponents.ravel(), minlength=EXPONENT_MASK + 1)
    return counts


def exponent_histogram(sample: KVSample) -> npt.NDArray[np.int64]:
    """How often each exponent field occurs in the whole sample: [256] int64."""
    total: npt.NDArray[np.int64] = exponent_histograms(sample).sum(axis=(0, 1))
    return total


def kv_dir() -> Path:
    """Where captured KV lies: ``$SPLITZIP_KV_DIR``, else ``build/kv``."""
    return build_root("SPLITZIP_KV_DIR", "kv")


def capture(
    model_name: str, split: Split, tokens_per_prompt: int = 2048, prompts: int = 6
) -> KVSample:
    """KV of the first ``prompts`` texts of a split; captured once, then mapped from disk.

    Only the prefill is captured, in one forward pass per prompt, with transformers on the CPU. A
    change of the texts (another version of a package) leads to a new capture.
    """
    source = texts.calibration() if split == "calibration" else texts.held_out()
    chosen = dict(list(source.items())[:prompts])
    if len(chosen) < prompts:
        raise ValueError(f"{prompts} prompts wanted, the {split} split has {len(chosen)} texts")
    digest = hashlib.sha256(json.dumps(chosen).encode()).hexdigest()[:12]
    target = kv_dir() / model_name / f"{split}-{prompts}x{tokens_per_prompt}-{digest}"
    build_once(
        target, lambda scratch: _capture(scratch, model_name, split, tokens_per_prompt, chosen)
    )
    return KVSample(
        model=model_name,
        split=split,
        names=list(chosen),
        tokens=np.load(target / "tokens.npy"),
        bits=np.load(target / "kv.npy", mmap_mode="r"),
    )


def _capture(
    out: Path, model_name: str, split: Split, tokens_per_prompt: int, chosen: dict[str, str]
) -> None:
    model, tokenizer = load_model(str(models.ensure(model_name)))
    tokens = texts.prompts(tokenizer, [tokens_per_prompt] * len(chosen), chosen)
    np.save(out / "tokens.npy", np.array(tokens, np.int32))
    config = model.config
    shape = (
        len(tokens),
        config.num_hidden_layers,
        2,
        config.num_key_value_heads,
        tokens_per_prompt,
        config.head_dim,
    )
    bits = np.empty(shape, np.uint16)
    for prompt, ids in enumerate(tqdm(tokens, desc=f"{model_name} {split}", unit="prompt")):
        for layer, (keys, values) in enumerate(cached_bits(model, ids)):
            bits[prompt, layer, KEY], bits[prompt, layer, VALUE] = keys, values
    np.save(out / "kv.npy", bits)


def main() -> None:
    parser = argparse.ArgumentParser(description="Capture the KV of real texts.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(models.SOURCES))
    for name in parser.parse_args().names or models.SOURCES:
        for split in SPLITS:
            sample = capture(name, split)
            print(f"{name} {split}: {sample.bits.shape} {', '.join(sample.names)}")


if __name__ == "__main__":
    main()
