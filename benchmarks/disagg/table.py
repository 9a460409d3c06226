"""Medians, table and plot of what `benchmarks.disagg` measured."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.disagg.link import bits_per_second

UNSHAPED = "unshaped"
BASE = "raw"
"""Arm that speed-ups are against."""


@dataclass(frozen=True)
class Row:
    """Medians of the repeats of one arm.

    Attributes
    ----------
    ttft_s, decode_ttft_s
        Seconds to the first token: at the client, and at the decode server from the request's
        arrival there.
    link_bytes, link_s
        What crossed the link in both directions, and how long it took.
    codec_s
        Seconds of encoding and decoding, those of several threads added up.
    rps
        Requests per second when several were asked at once; None if that was not measured.
    tokens_equal
        In all repeats, but for differences that start at a tie.
    spread
        Least and greatest of the repeats, by name.
    """

    arm: str
    model: str
    link: str
    prompt_tokens: int
    repeats: int
    ttft_s: float
    decode_ttft_s: float
    link_bytes: float
    link_s: float
    codec_s: float
    rps: float | None
    tokens_equal: bool
    tokens_identical: bool
    spread: dict[str, tuple[float, float]]


_MEASURED = ("ttft_s", "decode_ttft_s", "link_bytes", "link_s", "codec_s")


def rows(measurements: Iterable[Mapping[str, Any]]) -> list[Row]:
    """One row for each (model, prompt, link, arm), in the order of their first measurement."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for each in measurements:
        key = each["model"], each["prompt_tokens"], each["link"], each["arm"]
        groups.setdefault(key, []).append(each)
    return [_row(group) for _, group in sorted(groups.items(), key=lambda item: _order(*item[0]))]


def line(measured: Mapping[str, Any]) -> str:
    """One measurement, for the eye."""
    rps = f"  {measured['rps']:.3f} requests/s" if measured.get("rps") else ""
    tokens = "" if measured["tokens_equal"] else "  other tokens"
    failed = f"  {measured['frames_failed']:.0f} frames failed" if measured["frames_failed"] else ""
    return (
        f"{measured['link']:>8} {measured['prompt_tokens']:5} {measured['arm']:5} "
        f"ttft {measured['ttft_s']:6.2f} s  decode {measured['decode_ttft_s']:6.2f} s  "
        f"link {measured['link_bytes'] / 1e6:6.2f} MB {measured['link_s']:6.2f} s  "
        f"codec {measured['codec_s']:5.3f} s{rps}{tokens}{failed}"
    )


def text(table: Sequence[Row]) -> str:
    """The table as Markdown, speed-ups against the arm `raw` of the same link and prompt."""
    base = {(row.model, row.prompt_tokens, row.link): row for row in table if row.arm == BASE}
    lines = [
        "| model | tokens | link | arm | first token, s | at decode, s | link, MB | link, s "
        "| codec, s | requests/s | first token against raw | bytes against raw | tokens |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in table:
        raw = base.get((row.model, row.prompt_tokens, row.link))
        rps = "-" if row.rps is None else f"{row.rps:.3f}"
        faster = "-" if raw is None else f"{raw.ttft_s / row.ttft_s:.2f} x"
        smaller = "-"
        if raw is not None and row.link_bytes > raw.link_bytes / 10:
            smaller = f"1/{raw.link_bytes / row.link_bytes:.3f}"
        tokens = "identical" if row.tokens_identical else "tie" if row.tokens_equal else "differ"
        lines.append(
            f"| {row.model} | {row.prompt_tokens:,} | {row.link} | {row.arm} "
            f"| {_spread(row, 'ttft_s')} | {_spread(row, 'decode_ttft_s')} "
            f"| {row.link_bytes / 1e6:.2f} | {row.link_s:.2f} | {row.codec_s:.3f} | {rps} "
            f"| {faster} | {smaller} | {tokens} |"
        )
    return "\n".join(lines)


def predicted_ttft_s(unshaped: Row, rate: float) -> float:
    """Seconds to the first token over a link of `rate` bits per second, if nothing of what an
    unshaped link needs overlaps with the transfer."""
    return unshaped.ttft_s + unshaped.link_bytes * 8 / rate


def plot(table: Sequence[Row], result: Path) -> None:
    """One picture per model beside the result, STEM-MODEL.png: speed-up over `raw` by link rate."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    for model in dict.fromkeys(row.model for row in table):
        prompts = list(dict.fromkeys(row.prompt_tokens for row in table if row.model == model))
        figure, panels = plt.subplots(
            1, len(prompts), figsize=(7 * len(prompts), 5.5), squeeze=False, sharey=True
        )
        for panel, tokens in zip(panels[0], prompts, strict=True):
            _draw(
                panel, [row for row in table if (row.model, row.prompt_tokens) == (model, tokens)]
            )
            panel.set_title(f"{model}, {tokens:,} tokens")
            # Computing anew is many times as fast on a slow link here, and codecs 1.2 to 1.5 times.
            panel.set_yscale("log")
            ticks = (0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.5, 2, 3, 5, 10)
            panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
            panel.minorticks_off()
        panels[0][0].set_ylabel("first token, times as fast as raw")
        handles, labels = panels[0][-1].get_legend_handles_labels()
        panels[0][-1].legend(handles, labels, fontsize=8)
        figure.tight_layout()
        figure.savefig(result.with_name(f"{result.stem}-{model}.png"), dpi=120)
        plt.close(figure)


def _draw(panel: Any, table: Sequence[Row]) -> None:
    by = {(row.link, row.arm): row for row in table}
    shaped = sorted({row.link for row in table if row.link != UNSHAPED}, key=bits_per_second)
    arms = [arm for arm in dict.fromkeys(row.arm for row in table) if arm != BASE]
    raw_unshaped = by.get((UNSHAPED, BASE))
    low, high = 10e6, 2e9
    rates = [low * (high / low) ** (step / 60) for step in range(61)]
    for place, arm in enumerate(arms):
        points = [
            (bits_per_second(link) / 1e6, by[link, BASE].ttft_s / by[link, arm].ttft_s)
            for link in shaped
            if (link, arm) in by and (link, BASE) in by
        ]
        panel.plot(
            *zip(*points, strict=True) if points else ([], []), "o", c=f"C{place}", label=arm
        )
        unshaped = by.get((UNSHAPED, arm))
        if unshaped is not None and raw_unshaped is not None:
            panel.plot(
                [rate / 1e6 for rate in rates],
                [
                    predicted_ttft_s(raw_unshaped, rate) / predicted_ttft_s(unshaped, rate)
                    for rate in rates
                ],
                c=f"C{place}",
                lw=1,
                label=f"{arm}, predicted",
            )
    panel.axhline(1, c="grey", lw=0.5)
    panel.set_xscale("log")
    panel.set_xlim(low / 1e6, high / 1e6)
    panel.set_xlabel("link, Mbit/s")
    panel.grid(alpha=0.3)


def _row(group: Sequence[Mapping[str, Any]]) -> Row:
    first = group[0]
    values = {name: [each[name] for each in group] for name in _MEASURED}
    rps = [each["rps"] for each in group if each.get("rps")]
    return Row(
        arm=first["arm"],
        model=first["model"],
        link=first["link"],
        prompt_tokens=first["prompt_tokens"],
        repeats=len(group),
        rps=statistics.median(rps) if rps else None,
        tokens_equal=all(each["tokens_equal"] for each in group),
        tokens_identical=all(each["tokens_identical"] for each in group),
        spread={name: (min(each), max(each)) for name, each in values.items()},
        **{name: statistics.median(each) for name, each in values.items()},
    )


def _order(model: str, tokens: int, link: str, arm: str) -> tuple[Any, ...]:
    from benchmarks.disagg.servers import ARMS

    rate = float("inf") if link == UNSHAPED else bits_per_second(link)
    return model, tokens, rate, ARMS.index(arm)


def _spread(row: Row, name: str) -> str:
    low, high = row.spread[name]
    return f"{getattr(row, name):.2f} ({low:.2f}-{high:.2f})"
