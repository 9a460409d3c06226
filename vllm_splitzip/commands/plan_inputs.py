"""What `vllm-splitzip plan` reckons with: speeds of the codec and ratios, and their sources."""

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..choice.units import parse_rate
from ..codec.modes import MODES
from ..codec.shipped import measured_ratios, shipped_name_for
from ..errors import SettingError, SplitZipError
from .kv_size import KVSize

FRAME_TOKENS = 256
BLOCK_TOKENS = 16

PAPER = {"fast": (613e9, 2182e9)}
PAPER_NOTE = (
    "the paper's (arXiv 2605.01708) for its own code on one H200, fast only; not measured by us"
)


def given_speeds(
    options: argparse.Namespace,
) -> tuple[dict[str, tuple[float, float]], str] | None:
    """Encode and decode of each mode in bytes per second as options say, and their source.

    None where they are to be measured. Raises SettingError for options that contradict.
    """
    rates = [options.encode, options.decode]
    raw = {"raw": (math.inf, math.inf)}
    if options.gpu is not None:
        if rates != [None, None]:
            raise SettingError("--gpu stands for --encode and --decode; expected one or the other")
        return raw | PAPER, PAPER_NOTE
    if rates == [None, None]:
        return None
    if None in rates:
        raise SettingError("--encode and --decode belong together; only one of them is there")
    encode, decode = map(parse_rate, rates)
    return raw | {mode: (encode, decode) for mode in MODES if mode != "raw"}, "as given"


def measured_speeds(size: KVSize) -> tuple[dict[str, tuple[float, float]], str]:
    """As `codec: auto` measures them when an engine starts."""
    import torch

    from ..codec import host
    from ..codec.cpu.threads import DEFAULT_THREADS
    from ..codec.shipped import load_codebook
    from ..connector.pages import host_pages
    from ..connector.speeds import measure_like
    from ..connector.streams import HostStreams

    dtypes = {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
    }
    layer = size.layers[0]
    like = torch.empty((1, layer.heads, BLOCK_TOKENS, layer.content), dtype=dtypes[size.format])
    host.warm_up()
    speeds = measure_like(
        like,
        "auto",
        1,
        FRAME_TOKENS // BLOCK_TOKENS,
        lambda sample, blocks: host_pages("layer", 0, sample, blocks),
        load_codebook("bf16-any"),
        HostStreams(),
    )
    by_mode = {mode: (speed.encode, speed.decode) for mode, speed in speeds.items()}
    return by_mode, f"measured now on this machine's CPU, up to {DEFAULT_THREADS} threads"


def ratios_for(
    options: argparse.Namespace, config: Any, size: KVSize
) -> tuple[Mapping[str, float], str]:
    """Ratio of each mode that codes the model's number format, and where they come from."""
    if options.ratios is not None:
        return _ratios_of_file(options.ratios, size)
    layer = size.layers[0]
    name = shipped_name_for(
        {
            "model_type": getattr(config, "model_type", None),
            "num_hidden_layers": getattr(config, "num_hidden_layers", None),
            "num_key_value_heads": layer.heads,
            "head_dim": layer.content // 2,
        }
    )
    where = f"of codebook {name}, measured on held-out text"
    if name == "bf16-any":
        where = (
            "of codebook bf16-any: the lower of SmolLM2-135M's and Gemma-3-270M's; "
            "`vllm-splitzip analyze` measures your model's"
        )
    return measured_ratios(name)[size.format], where


MOST_RATIO = 16.0
"""Of KV cache of which nothing but one of 16 bits is left: no codec here comes near."""


def _ratios_of_file(path: Path, size: KVSize) -> tuple[dict[str, float], str]:
    if size.format != "bf16":
        raise SettingError(
            f"--ratios is {str(path)!r}, which is about bf16; the KV cache is {size.format}"
        )
    try:
        content = json.loads(path.read_text())
        ratios, model = content["ratios"], content.get("model", "an unnamed model")
        found = {mode: float(ratios[mode]) for mode in MODES if mode in ratios}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SplitZipError(
            f"--ratios is {str(path)!r}; expected a file of `analyze --json`: "
            f"{type(error).__name__} {error}"
        ) from error
    if not found or not all(0 < ratio <= MOST_RATIO for ratio in found.values()):
        raise SplitZipError(
            f"--ratios is {str(path)!r}, with {ratios}; expected numbers from 0 to {MOST_RATIO:g}"
        )
    return found, f"of {path}, measured on {model}"
