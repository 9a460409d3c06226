"""KV cache of real text: what a Hugging Face model caches while it reads."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import SplitZipError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_model(name: str) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Model (BF16, on the GPU if there is one) and tokenizer. Raises SplitZipError."""
    import torch

    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (ImportError, OSError, ValueError) as error:
        raise SplitZipError(f"cannot load the model {name!r}: {error}") from error
    own = str(getattr(model.config.get_text_config(), "dtype", None)).removeprefix("torch.")
    if own not in ("bfloat16", "float32", "None"):
        print(
            f"the model is {own}, and read as bfloat16: its KV cache in vLLM is {own} too, unless "
            "--dtype or --kv-cache-dtype says otherwise",
            file=sys.stderr,
        )
    if torch.cuda.is_available():
        model = model.cuda()  # type: ignore[call-arg]
    return model, tokenizer


def cached_bits(
    model: "PreTrainedModel", token_ids: list[int]
) -> Iterator[tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]]:
    """(keys, values) of each layer after one prefill, as BF16 bit patterns.

    Each of shape (heads, tokens, head dimension). Keys are taken after the rotary embedding, as
    engines cache them.
    """
    import torch
    from transformers import DynamicCache

    # Given the model's config, the cache would cut sliding layers to their window.
    cache: Any = DynamicCache()
    ids = torch.tensor([token_ids], device=model.device)
    with torch.inference_mode():
        model(ids, past_key_values=cache, logits_to_keep=1)
    for layer in cache.layers:
        yield _bits(layer.keys[0]), _bits(layer.values[0])


def prompts_of(
    tokenizer: "PreTrainedTokenizerBase", files: list[Path], tokens: int
) -> Iterator[list[int]]:
    """Token ids of each text, cut into pieces of at most `tokens` tokens."""
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        ids: list[int] = tokenizer(text)["input_ids"]
        for start in range(0, len(ids), tokens):
            yield ids[start : start + tokens]


def _bits(tensor: Any) -> npt.NDArray[np.uint16]:
    import torch

    bits: npt.NDArray[np.uint16] = tensor.contiguous().view(torch.int16).cpu().numpy()
    return bits.view(np.uint16)
