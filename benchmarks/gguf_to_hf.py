"""Dequantise one GGUF file to a BF16 Hugging Face directory: ``gguf_to_hf.py IN.gguf OUT_DIR``.

Run as a process of its own (see `benchmarks.models`), so that the caller keeps its threads, its
log settings and its memory.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(gguf: Path, out: Path) -> None:
    """Write config.json, model.safetensors (BF16) and the tokenizer's files into ``out``."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        # Packed weights cannot be saved again.
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(out)
    _drop_quantization(out / "config.json")

    if model.config.model_type.startswith("gemma"):
        _prepend_bos(tokenizer)
    else:
        _split_digits(tokenizer)
    tokenizer.save_pretrained(out)


def _drop_quantization(config_file: Path) -> None:
    """Remove what would make a loader look for GGUF blocks."""
    config = json.loads(config_file.read_text())
    config.pop("quantization_config", None)
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _prepend_bos(tokenizer: Any) -> None:
    """Add <bos> to every prompt: Gemma repeats one word without it, and GGUF does not say so."""
    bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
    )


def _split_digits(tokenizer: Any) -> None:
    """Cut numbers into digits as SmolLM2 was trained to (GGUF pre-tokenizer "smollm")."""
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
