"""Codebook files: JSON with the exponents and a card that says what they were calibrated on.

======================  =====================================================================
key                     value
======================  =====================================================================
format                  number format, "bf16"
exponents               16 distinct exponents; an exponent's code is its index
model                   what it was calibrated for: {"model_type", "num_hidden_layers",
                        "num_key_value_heads", "head_dim"}, or {} for any model
card                    model, text, tokens, coverage, escape rate, digest, command; of shipped
                        ones also `ratios`, KV cache by frames: {number format: {mode: ratio}}
======================  =====================================================================
"""

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import CodebookError
from .codebook import Codebook

PACKAGE = "vllm_splitzip.codebooks"


def shipped_names() -> list[str]:
    """Names of the codebooks that the package ships."""
    files = resources.files(PACKAGE).iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


def load_codebook(name_or_path: str) -> Codebook:
    """The codebook of a file, or a shipped one by name. Raises CodebookError."""
    return _parse(_read(name_or_path), name_or_path)


def codebook_for(model: Mapping[str, Any]) -> Codebook:
    """The shipped codebook that was calibrated for `model`, or else the one for any model."""
    return load_codebook(shipped_name_for(model))


def shipped_name_for(model: Mapping[str, Any]) -> str:
    """Name of the shipped codebook for `model`; "bf16-any" where none was calibrated for it."""
    for name in shipped_names():
        meant = _read(name).get("model")
        if meant and all(model.get(key) == value for key, value in meant.items()):
            return name
    return "bf16-any"


def measured_ratios(name: str) -> dict[str, dict[str, float]]:
    """Ratios measured on a shipped codebook's model: {number format: {mode: ratio}}.

    A mode that does not code a format is not in it.
    """
    ratios: dict[str, dict[str, float]] = _read(name)["card"]["ratios"]
    return ratios


def _read(name_or_path: str) -> dict[str, Any]:
    if name_or_path in shipped_names():
        text = (resources.files(PACKAGE) / f"{name_or_path}.json").read_text()
    else:
        try:
            text = Path(name_or_path).expanduser().read_text()
        except (OSError, ValueError, RuntimeError) as error:
            raise CodebookError(
                f"no codebook {name_or_path!r} ({error}); shipped: {', '.join(shipped_names())}"
            ) from None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CodebookError(f"codebook {name_or_path!r} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CodebookError(f"codebook {name_or_path!r} is not a JSON object")
    return content


def _parse(content: dict[str, Any], name: str) -> Codebook:
    if content.get("format") != "bf16":
        raise CodebookError(
            f"codebook {name!r} is for format {content.get('format')!r}, expected 'bf16'"
        )
    try:
        return Codebook(bytes(list(content["exponents"])))
    except (KeyError, TypeError, ValueError) as error:
        raise CodebookError(f"codebook {name!r} is malformed: {error}") from None
