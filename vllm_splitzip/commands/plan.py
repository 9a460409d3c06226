"""`vllm-splitzip plan`: which codec a link and a model are worth, before either is there.

The arithmetic is that of `codec: auto` (`vllm_splitzip/choice/costs.py`).
"""

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..choice.costs import FRAMES, Codec, Link, Seconds, break_even, cost, costs
from ..choice.costs import Path as Way
from ..choice.decider import START, Decider
from ..choice.units import parse_rate, rate_text
from ..codec.modes import MODES
from ..errors import SettingError
from .kv_size import CACHE_DTYPES, KVSize, kv_size_of, load_config
from .plan_inputs import FRAME_TOKENS, given_speeds, measured_speeds, ratios_for


@dataclass(frozen=True, slots=True)
class Row:
    """One mode. `pays_below` is a rate in bytes per second; of `raw` it is None."""

    mode: str
    ratio: float
    stored_bytes: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    seconds: Seconds
    pays_below: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--link", required=True, metavar="RATE", help="of the store, each way: 50GB/s, 20Mbit/s"
    )
    parser.add_argument("--model", required=True, help="name or directory of a HF model")
    parser.add_argument(
        "--prompt-tokens", type=int, default=4096, help="tokens of a prompt (default %(default)s)"
    )
    parser.add_argument(
        "--prefill-tokens-per-s", type=float, help="compares with computing the prompt again"
    )
    parser.add_argument(
        "--latency-ms", type=float, default=0.0, help="of a put or get (default %(default)s)"
    )
    parser.add_argument(
        "--kv-cache-dtype", choices=list(CACHE_DTYPES), default="auto", help="as vLLM's"
    )
    parser.add_argument(
        "--ratios",
        type=Path,
        metavar="FILE",
        help="your model's, from `analyze --json` (default: those of a shipped codebook)",
    )
    speeds = parser.add_argument_group("speed of the codec (default: measured on this CPU now)")
    speeds.add_argument("--encode", metavar="RATE", help="of every codec, in KV cache")
    speeds.add_argument("--decode", metavar="RATE", help="of every codec, in KV cache")
    speeds.add_argument("--gpu", choices=["paper"], help="figures that the paper reports for H200")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    rate = parse_rate(options.link)
    _check("--prompt-tokens", options.prompt_tokens, 1, 1e9)
    _check("--latency-ms", options.latency_ms, 0, 1e6)
    if options.prefill_tokens_per_s is not None:
        _check("--prefill-tokens-per-s", options.prefill_tokens_per_s, 1e-6, 1e12)
    given = given_speeds(options)
    config = load_config(options.model)
    size = kv_size_of(config, options.kv_cache_dtype)
    ratios, ratios_from = ratios_for(options, config, size)
    speeds, speeds_from = given if given is not None else measured_speeds(size)
    codecs = {
        mode: Codec(1.0 if mode == "raw" else ratios[mode], *speeds[mode])
        for mode in MODES
        if mode in speeds and (mode == "raw" or mode in ratios)
    }
    link = Link(options.latency_ms / 1e3, rate)
    kv_bytes = size.prompt_bytes(options.prompt_tokens)
    frames = -(-options.prompt_tokens // FRAME_TOKENS)
    way = Way(link, link, kv_bytes / frames, frames)
    rows = [
        Row(
            mode,
            codec.ratio,
            kv_bytes / codec.ratio,
            codec.encode_bytes_per_s,
            codec.decode_bytes_per_s,
            cost(codec, way),
            None if mode == "raw" else break_even(codec, codecs["raw"], way.frame_bytes, frames),
        )
        for mode, codec in codecs.items()
    ]
    decider = Decider(START if START in codecs else "raw")
    decider.decide(costs(codecs, Way(link, link, way.frame_bytes, FRAMES)), 0)
    plan = {
        "model": options.model,
        "kv_format": size.format,
        "kv_bytes_per_token": size.token_bytes,
        "prompt_tokens": options.prompt_tokens,
        "kv_bytes": kv_bytes,
        "frames": frames,
        "link_bytes_per_s": rate,
        "latency_s": link.latency_s,
        "ratios_from": ratios_from,
        "speeds_from": speeds_from,
        "rows": [asdict(row) for row in rows],
        "not_coded": [mode for mode in MODES if size.format not in MODES[mode].streams],
        "auto": decider.mode,
        "prefill_s": options.prefill_tokens_per_s
        and options.prompt_tokens / options.prefill_tokens_per_s,
    }
    if options.json:
        print(json.dumps(_finite(plan), indent=1))
    else:
        _print(plan, size, rows)
    return 0


def _check(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise SettingError(f"{name} is {value:g}; allowed: a number from {least:g} to {most:g}")


def _finite(value: Any) -> Any:
    """JSON knows no infinity: None, "any rate"."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if value == math.inf else value


def _print(plan: Mapping[str, Any], size: KVSize, rows: list[Row]) -> None:
    layers = "; ".join(
        f"{each.number} layers of {each.heads} x {each.content} elements"
        + (f", the last {each.window:,} tokens" if each.window else "")
        for each in size.layers
    )
    prompt_s, auto = plan["prefill_s"], plan["auto"]
    print(f"model   {plan['model']}: {layers}; {size.format}, {size.token_bytes:,} bytes a token")
    print(
        f"prompt  {plan['prompt_tokens']:,} tokens: {plan['kv_bytes'] / 1e6:,.2f} MB of KV cache "
        f"in {plan['frames']:,} frames"
    )
    print(f"link    {rate_text(plan['link_bytes_per_s'])} each way")
    print(f"codec   {plan['speeds_from']}")
    print(f"ratios  {plan['ratios_from']}\n")
    titles = ("mode", "ratio", "MB", "encode s", "put s", "get s", "decode s", "total s", "of raw")
    print("  ".join(f"{title:>9}" for title in titles) + "   pays on links below")
    raw = next(row for row in rows if row.mode == "raw").seconds.total
    for row in rows:
        times = row.seconds
        numbers = (times.encode, times.put, times.get, times.decode, times.total)
        cells = [row.mode, f"{row.ratio:.3f}", f"{row.stored_bytes / 1e6:,.2f}"]
        cells += [f"{number:.4g}" for number in numbers]
        cells += [f"{100 * times.total / raw:.1f} %"]
        pays = "" if row.pays_below is None else rate_text(row.pays_below)
        print("  ".join(f"{cell:>9}" for cell in cells) + f"   {pays}".rstrip())
    for mode in plan["not_coded"]:
        print(f"{mode:>9}  does not code {size.format}")
    print("\ntotal = encode + put + the larger of get and decode + a frame's share of the smaller")
    print(f"codec 'auto' would take {auto!r} here")
    if prompt_s is not None:
        chosen = next(row for row in rows if row.mode == auto).seconds.load
        verdict = "less" if chosen < prompt_s else "not less"
        print(
            f"loading as {auto!r} takes {chosen:.4g} s, {verdict} than {prompt_s:.4g} s of prefill"
        )
