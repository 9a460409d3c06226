"""How large a model's KV cache is: from its configuration alone."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..codec.modes import ITEM_BYTES
from ..errors import SplitZipError, UnsupportedModelError

FULL = frozenset({"full_attention", "attention", "chunked_attention", "global"})
"""Layers whose KV cache of all tokens is kept. Chunked attention reads less of it."""

SLIDING = frozenset({"sliding_attention", "local"})

CACHE_DTYPES = {
    "auto": None,
    "bfloat16": "bf16",
    "float16": "fp16",
    "fp8": "e4m3",
    "fp8_e4m3": "e4m3",
    "fp8_e5m2": "e5m2",
}
"""vLLM's names for `--kv-cache-dtype`, and the number formats that they are."""

_MODEL_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "bf16"}
"""vLLM computes in BF16 what was trained in FP32."""


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers that are alike.

    Attributes
    ----------
    number
        How many there are.
    heads, content
        KV heads, and elements that each of them keeps of a token: its key and its value.
    window
        Tokens of its sliding window; None for full attention.
    """

    number: int
    heads: int
    content: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class KVSize:
    """A model's KV cache: its layers, and the number format of its elements."""

    layers: tuple[Layers, ...]
    format: str
    is_latent: bool

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return sum(each.number * self._layer_bytes(each) for each in self.layers)

    def prompt_bytes(self, tokens: int) -> int:
        """Bytes that a prompt of `tokens` tokens leaves for the next token to be computed."""
        return sum(
            each.number * self._layer_bytes(each) * min(tokens, each.window or tokens)
            for each in self.layers
        )

    def _layer_bytes(self, layers: Layers) -> int:
        return layers.heads * layers.content * ITEM_BYTES[self.format]


def load_config(name: str) -> Any:
    """The text part of a Hugging Face model's configuration, by name or directory.

    Raises
    ------
    SplitZipError
        There is none, or it cannot be read.
    """
    file = Path(name).expanduser() / "config.json"
    try:
        from transformers import AutoConfig, PretrainedConfig

        try:
            config = AutoConfig.from_pretrained(name)
        except (ValueError, KeyError):
            if not file.is_file():
                raise
            # A kind of model that transformers does not know. vLLM may; the names are the same.
            config = PretrainedConfig.from_dict(json.loads(file.read_text()))
        return config.get_text_config(decoder=True)
    except Exception as error:  # transformers raises almost anything for a damaged file
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SplitZipError(f"no configuration of a model {name!r}: {reason}") from error


def kv_size_of(config: Any, cache_dtype: str = "auto") -> KVSize:
    """The KV cache of a model in vLLM.

    Parameters
    ----------
    config
        Configuration with the attributes of transformers.
    cache_dtype
        One of `CACHE_DTYPES`.

    Raises
    ------
    UnsupportedModelError
        The model has no KV cache, or one that the connector refuses, or that is not understood.
    """
    kind = getattr(config, "model_type", "?")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{kind} is an encoder with a decoder; expected a decoder")
    if getattr(config, "index_topk", None):
        raise UnsupportedModelError(
            f"{kind} keeps an index beside its KV cache, of a size of its own"
        )
    number_format = CACHE_DTYPES[cache_dtype] or _model_format(config, kind)
    rank = getattr(config, "kv_lora_rank", None)
    if rank:
        content = rank + _positive(config, "qk_rope_head_dim", kind)
        layers = Layers(_positive(config, "num_hidden_layers", kind), 1, content)
        return KVSize((layers,), number_format, is_latent=True)
    counts: dict[Layers, int] = {}
    for each in _attention_layers(config, kind):
        counts[each] = counts.get(each, 0) + 1
    alike = (Layers(n, each.heads, each.content, each.window) for each, n in counts.items())
    return KVSize(tuple(alike), number_format, is_latent=False)


def _attention_layers(config: Any, kind: str) -> list[Layers]:
    number = _positive(config, "num_hidden_layers", kind)
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", None) is False:
        window = None
    if window is not None:
        window = _positive(config, "sliding_window", kind)
    types = getattr(config, "layer_types", None)
    if not types:
        types = ["sliding_attention" if window else "full_attention"] * number
    if len(types) != number:
        raise UnsupportedModelError(f"{kind} has {number} layers, but {len(types)} types of layers")
    others = sorted({each for each in types if each not in FULL | SLIDING})
    if others:
        raise UnsupportedModelError(
            f"{kind} has layers of {', '.join(others)}, whose state is no KV cache of tokens; "
            "the connector refuses them"
        )
    # The last ones may read what an earlier layer keeps.
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    if not isinstance(shared, int) or not 0 <= shared < number:
        raise UnsupportedModelError(
            f"{kind} has num_kv_shared_layers {shared!r}; expected 0 to {number - 1}"
        )
    kept = number - shared
    own = getattr(config, "per_layer_config", None)
    layers = []
    for index, each in enumerate(types[:kept]):
        heads, dims = _heads(own[index] if own else config, kind)
        layers.append(Layers(1, heads, 2 * dims, window if each in SLIDING else None))
    return layers


def _heads(config: Any, kind: str) -> tuple[int, int]:
    """(KV heads, elements of a key or value) of a layer."""
    queries = _positive(config, "num_attention_heads", kind)
    if getattr(config, "head_dim", None):
        dims = _positive(config, "head_dim", kind)
    else:
        dims = _positive(config, "hidden_size", kind) // queries
    if getattr(config, "new_decoder_architecture", False):  # of Falcon
        return _positive(config, "num_kv_heads", kind), dims
    if getattr(config, "multi_query", False):
        return 1, dims
    if getattr(config, "num_key_value_heads", None):
        return _positive(config, "num_key_value_heads", kind), dims
    return queries, dims


def _model_format(config: Any, kind: str) -> str:
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or "bfloat16"
    name = str(dtype).removeprefix("torch.")
    if name not in _MODEL_DTYPES:
        raise UnsupportedModelError(
            f"{kind} has dtype {name}; expected one of {', '.join(_MODEL_DTYPES)}, or say "
            "--kv-cache-dtype"
        )
    return _MODEL_DTYPES[name]


def _positive(config: Any, name: str, kind: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or value <= 0:
        raise UnsupportedModelError(f"{kind} has {name} {value!r}; expected a positive number")
    return value
