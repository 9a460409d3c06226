"""A picture of one request on two servers: what was computed, coded, sent and decoded when.

``python -m benchmarks.timeline`` starts a prefill and a decode server on either side of a shaped
link, as `benchmarks.disagg` does, both with a trace (`trace_dir`), sends warm-up requests and then
one more, and draws that one from the timestamps that both sides wrote. `--store decode` puts the
store on the decode server's side, where frames cross the link while the prefill still computes.

Needs root. Writes build/timeline-CODEC-LINK-STORE.png, and prints how much of the transfer and of
the decoding went on while something else did.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks import models, texts
from benchmarks.disagg.client import Answer, Prompt, ask
from benchmarks.disagg.link import DECODE, PREFILL, Link, LinkError, Traffic
from benchmarks.disagg.servers import BUILD, CODECS, Fleet, Setup, end_tidily

TRACES = BUILD / "disagg-traces"
WARM_UP_REQUESTS = 3
RATE_WINDOW_S = 0.02

PREFILL_ROWS = ("forward", "encode", "pack", "put")
DECODE_ROWS = ("wait", "get", "verify", "decode", "forward")


@dataclass(frozen=True)
class Span:
    """One bar: seconds since the request was sent, and what it was about."""

    name: str
    start: float
    end: float
    thread: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Timeline:
    """Everything about one request. Times are seconds since the client sent it."""

    prefill: list[Span]
    decode: list[Span]
    link: list[tuple[float, float]]  # (time, Mbit/s)
    prefilled_s: float
    first_token_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Timeline of one request on two servers.")
    parser.add_argument("--model", default="smollm2-135m", choices=models.SOURCES)
    parser.add_argument("--codec", default="fast", choices=CODECS)
    parser.add_argument("--link", default="200mbit", help="as tc writes it, or 'unshaped'")
    parser.add_argument("--prompt", type=int, default=1900, help="tokens")
    parser.add_argument("--step-tokens", type=int, default=512, help="tokens prefilled at once")
    parser.add_argument("--store", default="prefill", choices=["prefill", "decode"])
    options = parser.parse_args()
    end_tidily()
    try:
        timeline = record(options)
    except LinkError as error:
        sys.exit(str(error))
    name = f"timeline-{options.codec}-{options.link}-{options.store}"
    title = (
        f"{options.model}, {options.prompt:,} tokens, {options.codec}, {options.link}, "
        f"store beside the {options.store} server"
    )
    draw(timeline, BUILD / f"{name}.png", title)
    print(BUILD / f"{name}.png")
    for line in summary(timeline):
        print(line)


def record(options: argparse.Namespace) -> Timeline:
    """Run one request with traces on both sides. Raises LinkError."""
    model = models.ensure(options.model)
    shutil.rmtree(TRACES, ignore_errors=True)
    prompts = texts.prompts(
        AutoTokenizer.from_pretrained(model), [options.prompt] * (WARM_UP_REQUESTS + 1)
    )
    setup = Setup(
        model,
        step_tokens=options.step_tokens,
        store_at=PREFILL if options.store == "prefill" else DECODE,
        trace_dir=TRACES,
    )
    origin = time.time() - time.monotonic()
    with Link() as link, Fleet([options.codec], setup) as fleet:
        url = fleet.pairs[options.codec].url
        for place, prompt in enumerate(prompts):
            if place == WARM_UP_REQUESTS:
                link.shape(None if options.link == "unshaped" else options.link)
                time.sleep(1)
            with link.watch() as traffic:
                [answer] = ask(url, model.name, [Prompt(prompt, f"timeline-{place}")], 4)
        time.sleep(1)  # The last puts, and the traces of both.
    return timeline_of(TRACES, traffic, answer, origin)


def timeline_of(traces: Path, traffic: Traffic, answer: Answer, origin: float) -> Timeline:
    """Put the traces of both sides together. `origin`: wall clock minus monotonic clock."""
    spans = {
        role: [
            span
            for path in sorted((traces / role).glob("*.json"))
            for span in read_trace(path, origin + answer.sent_at)
            if span.end > 0
        ]
        for role in ("prefill", "decode")
    }
    waits = [span for span in spans["decode"] if span.name == "wait"]
    return Timeline(
        spans["prefill"],
        [span for span in spans["decode"] if span.start < answer.ttft_s],
        _rates(traffic, answer.sent_at),
        min((span.start for span in waits), default=0.0),
        answer.ttft_s,
    )


def read_trace(path: Path, origin: float) -> list[Span]:
    """Spans of one file, in seconds since `origin` (wall clock, seconds)."""
    events = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    return [
        Span(
            event["name"],
            event["ts"] / 1e6 - origin,
            (event["ts"] + event["dur"]) / 1e6 - origin,
            event["tid"],
            event["args"],
        )
        for event in events
        if event["ph"] == "X"
    ]


def overlap_s(one: Iterable[Span], other: Iterable[Span]) -> float:
    """Seconds in which something of both was going on."""
    first, second = _merged(one), _merged(other)
    return sum(
        max(0.0, min(a_end, b_end) - max(a_start, b_start))
        for a_start, a_end in first
        for b_start, b_end in second
    )


def busy_s(spans: Iterable[Span]) -> float:
    """Seconds in which at least one of them was going on."""
    return sum(end - start for start, end in _merged(spans))


def summary(timeline: Timeline) -> list[str]:
    """What the picture shows, in numbers."""
    prefill = {name: _named(timeline.prefill, name) for name in PREFILL_ROWS}
    decode = {name: _named(timeline.decode, name) for name in DECODE_ROWS}
    decoding = [*decode["verify"], *decode["decode"]]
    lines = [
        f"first token after {timeline.first_token_s:.3f} s, prefilled and asked for on the decode "
        f"side after {timeline.prefilled_s:.3f} s"
    ]
    if prefill["forward"]:
        end = max(span.end for span in prefill["forward"] if span.start < timeline.first_token_s)
        early = sum(span.end <= end for span in prefill["put"])
        lines.append(
            f"prefill: {busy_s(prefill['forward']):.3f} s in {len(prefill['forward'])} steps, "
            f"encoding {busy_s(prefill['encode']):.3f} s of it, puts {busy_s(prefill['put']):.3f} "
            f"s, of which {overlap_s(prefill['put'], prefill['forward']):.3f} s while a step "
            f"computed; {early} of {len(prefill['put'])} frames stored before the last step ended"
        )
    if decode["get"]:
        lines.append(
            f"decode: fetching {busy_s(decode['get']):.3f} s, verifying and decoding "
            f"{busy_s(decoding):.3f} s, of which {overlap_s(decoding, decode['get']):.3f} s while "
            f"another frame was fetched; last fetch to first token "
            f"{timeline.first_token_s - max(span.end for span in decode['get']):.3f} s"
        )
    return lines


def draw(timeline: Timeline, path: Path, title: str) -> None:
    """Draw it into a PNG file."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, middle, below) = plt.subplots(
        3, 1, figsize=(13, 8), sharex=True, height_ratios=(4, 2, 5)
    )
    _bars(above, timeline.prefill, PREFILL_ROWS, "prefill server")
    middle.fill_between(*zip(*timeline.link, strict=True), step="pre", color="C7", alpha=0.6)
    middle.set_ylabel("link, Mbit/s")
    middle.set_ylim(bottom=0)
    _bars(below, timeline.decode, DECODE_ROWS, "decode server")
    below.set_xlabel("seconds since the client sent the request")
    for axes in (above, middle, below):
        axes.axvline(timeline.prefilled_s, color="grey", ls=":", lw=1)
        axes.axvline(timeline.first_token_s, color="red", lw=1)
        axes.grid(axis="x", alpha=0.3)
    above.set_title(f"{title}\nred: first token; dotted: the decode server has the request")
    below.set_xlim(0, timeline.first_token_s * 1.02)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(axes: Any, spans: Sequence[Span], names: Sequence[str], label: str) -> None:
    """A row per name, of fetches per thread; bars of one frame have one colour everywhere."""
    threads = sorted({span.thread for span in spans if span.name == "get"})
    by_row = [
        [span for span in spans if span.name == name and thread in (None, span.thread)]
        for name in names
        for thread in (threads if name == "get" else [None])
    ]
    rows = [row for row in by_row if row]
    frames = list(dict.fromkeys(s.arguments["frame"] for s in spans if "frame" in s.arguments))
    for height, row in enumerate(rows):
        for place, span in enumerate(row):
            frame = span.arguments.get("frame")
            color = f"C{frames.index(frame) % 10}" if frame else ("0.45", "0.65")[place % 2]
            axes.barh(height, span.end - span.start, left=span.start, color=color, height=0.8)
    axes.set_yticks(range(len(rows)), [row[0].name for row in rows])
    axes.invert_yaxis()
    axes.set_ylabel(label)


def _rates(traffic: Traffic, sent_at: float) -> list[tuple[float, float]]:
    """Mbit/s in windows of `RATE_WINDOW_S`, both directions."""
    result = []
    last_time, last_bytes = traffic.times[0], 0
    for moment, received, sent in zip(traffic.times, traffic.received, traffic.sent, strict=True):
        if moment - last_time >= RATE_WINDOW_S:
            rate = (received + sent - last_bytes) * 8 / (moment - last_time) / 1e6
            result.append((moment - sent_at, rate))
            last_time, last_bytes = moment, received + sent
    return result or [(0.0, 0.0)]


def _named(spans: Iterable[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def _merged(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Stretches in which at least one span was going on."""
    merged: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda each: each.start):
        if merged and span.start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], span.end)
        else:
            merged.append((span.start, span.end))
    return merged


if __name__ == "__main__":
    main()
