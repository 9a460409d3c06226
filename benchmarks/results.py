"""The results page, out of what the other benchmarks left in build/.

``python -m benchmarks.results`` writes benchmarks/results.md and copies the pictures beside it. The
page keeps what it says of a benchmark that has left nothing in build/.
"""

import json
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.once import REPO_ROOT

BUILD = REPO_ROOT / "build"
PAGE = REPO_ROOT / "benchmarks" / "results.md"
FIGURES = REPO_ROOT / "benchmarks" / "figures"

Lines = Iterable[str]

HEAD = """# Results

Written by `python -m benchmarks.results` from the files that the benchmarks leave in `build/`.
Every figure was measured by the command named above it, on the machine named there. Compression is
proven bit-exact in the same run before a speed is reported. Speeds on a CPU are GB/s of input,
medians over rounds that interleave everything compared; the machine is a shared virtual one, so the
quotient by `copy_` of the same run says more than the GB/s. [kernels.md](kernels.md) has the
machine code of the GPU kernels.
"""


def main() -> None:
    FIGURES.mkdir(exist_ok=True)
    earlier = sections(PAGE.read_text()) if PAGE.exists() else {}
    page = [HEAD]
    for title, name, command, show in SECTIONS:
        path = BUILD / name
        if path.exists():
            taken = time.strftime("%Y-%m-%d", time.gmtime(path.stat().st_mtime))
            lines = (f"`{command}`", f"{taken}, {machine()}.", *show(json.loads(path.read_text())))
            text = "\n\n".join(lines)
        else:
            text = earlier.get(title, f"`{command}`\n\nNot run.")
        page.append(f"## {title}\n\n{text}")
    PAGE.write_text("\n\n".join(page) + "\n")
    print(f"wrote {PAGE.relative_to(REPO_ROOT)}")


def sections(page: str) -> dict[str, str]:
    """What a page says under each of its headings, by heading."""
    _, *found = page.split("\n## ")
    return {title: text.strip() for title, _, text in (each.partition("\n") for each in found)}


def machine() -> str:
    """Processor, memory and versions, in one line."""
    info = dict(
        line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line
    )
    processor = next((text for key, text in info.items() if key.strip() == "model name"), "?")
    cores = Path("/proc/cpuinfo").read_text().count("processor\t")
    total = int(Path("/proc/meminfo").read_text().split()[1]) / (1 << 20)
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "numba", "lmcache"))
    return (
        f"{cores} vCPU ({processor.strip()}), {total:.0f} GB, no GPU; "
        f"Python {platform.python_version()}, {packages}"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def picture(name: str, text: str) -> str:
    """A picture out of build/, copied to where the page can show it."""
    shutil.copyfile(BUILD / name, FIGURES / name)
    return f"![{text}](figures/{name})"


def ratios(data: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"KV cache by bytes of whole frames of {data['tokens']} tokens, everything in them "
        "counted, on text that nothing was calibrated on."
    )
    yield table(
        ("model", "format", "mode", "packing", "ratio", "bits per element", "asked for"),
        (
            (
                row["model"], row["format"], f"`{row['mode']}`", row["packing"],
                f"{row['ratio']:.4f}", f"{row['bits']:.3f}", row["bar"] or "",
            )
            for row in data["rows"]
        ),
    )  # fmt: skip


def codec(data: Mapping[str, Any]) -> Iterator[str]:
    rows = [row for row in data["rows"] if row["threads"]]
    yield "Calls of one layer of 12,288 tokens, blocks in order. In brackets: of `copy_`."
    yield picture("codec.png", "ratio over decode speed")
    for threads in sorted({row["threads"] for row in rows}, reverse=True):
        yield f"{threads} thread{'s' if threads > 1 else ''}:"
        yield table(
            ("model", "what", "format", "ratio", "encode", "decode", "`copy_`", "exact"),
            (_codec_row(row) for row in rows if row["threads"] == threads),
        )
    yield "Ablations, ratio without framing:"
    yield _by_model(data["ablations"], "what", "ratio")
    counted = ", ".join(
        f"{row['model']} {row['ratio']:.4f}" for row in data["rows"] if not row["threads"]
    )
    yield f"Top-16 as the paper's public artifact counts it, 7 bytes an escape: {counted}."


def _codec_row(row: Mapping[str, Any]) -> Sequence[object]:
    speeds = [
        f"{row[key]:.2f} [{row[key] / row['copy_gbs']:.2f}]" if row[key] else ""
        for key in ("encode_gbs", "decode_gbs")
    ]
    return (
        row["model"], row["name"], row["format"], f"{row['ratio']:.4f}", *speeds,
        f"{row['copy_gbs']:.2f}" if row["copy_gbs"] else "", "yes" if row["exact"] else "no",
    )  # fmt: skip


def _by_model(rows: Sequence[Mapping[str, Any]], what: str, figure: str) -> str:
    """Rows by `what`, a column per model."""
    names = sorted({row["model"] for row in rows})
    values = {(row[what], row["model"]): row[figure] for row in rows}
    whats = dict.fromkeys(row[what] for row in rows)
    return table(
        (what, *names), ((one, *(f"{values[one, name]:.4f}" for name in names)) for one in whats)
    )


def cpu_codec(data: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "Runs of one layer: of all prompts together, of 2,048 tokens, and of the 256 of a frame. "
        "Each thread codes runs of its own, as the connector's do. In brackets: the median "
        "quotient by `copy_` of the same round."
    )
    yield table(
        ("model", "blocks", "tokens", "threads", "mode", "`copy_`", "encode", "decode"),
        (
            (
                row["model"], row["blocks"], f"{row['tokens']:,}", row["threads"],
                f"`{row['mode']}`", f"{row['copy_gbs']:.2f}",
                *(f"{row[f'{name}_gbs']:.2f} [{row[f'{name}_by_copy']:.2f}]"
                  for name in ("encode", "decode")),
            )
            for row in data["rows"]
        ),
    )  # fmt: skip


def analysis(data: Mapping[str, Any]) -> Iterator[str]:
    yield picture("analyze.png", "entropy, coverage, ratios and generalisation")
    figures: list[tuple[str, Callable[[Mapping[str, Any]], float]]] = [
        ("entropy of the exponent, bits", lambda layer: layer["entropy"]),
        *(
            (f"covered by the {n} most frequent", lambda layer, n=n: layer[f"top{n}"])  # type: ignore[misc]
            for n in (4, 8, 16)
        ),
    ]
    rows = []
    for kind in ("K", "V"):
        layers = [layer for layer in data["layers"] if layer["kind"] == kind]
        for what, figure in figures:
            values = [figure(layer) for layer in layers]
            rows.append((kind, what, *(f"{f(values):.4f}" for f in (min, median, max))))
    yield table(("", "of each layer", "least", "median", "most"), rows)
    shares = [share for row in data["escapes"].values() for share in row.values()]
    yield (
        "Escapes in percent, a codebook of one text on each other text: "
        f"{100 * min(shares):.3f} to {100 * max(shares):.3f}."
    )


def overhead(data: Mapping[str, Any]) -> Iterator[str]:
    values = sorted(data["ratios"])
    yield (
        f"{data['model']}, {data['prompt_tokens']} prompt tokens, {data['max_tokens']} output "
        "tokens, a request without a hit, with the connector by without it: median "
        f"{data['median_ratio']:.3f} [{values[0]:.3f} to {values[-1]:.3f}], {data['pairs']} pairs."
    )


def two_servers(data: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "Two vLLM servers in network namespaces with a shaped link between them, the store beside "
        "the prefill server, vLLM's own `toy_proxy_server.py` in front. Medians; least and "
        "greatest in brackets. *At decode*: from the request's arrival at the decode server to "
        "its first token. *Tokens*: those of a server alone, `equal` but for differences that "
        "start at a tie in BF16. Arms take turns as far as memory holds their servers: with codecs "
        "and without one after the other, Gemma's in pairs. NixlConnector's engine and worker "
        "poll: when they waited longest here, they were seen to keep both cores busy."
    )
    yield from disagg(data, "disagg")
    for served in sorted(BUILD.glob("disagg-bench-serve-*.txt")):
        arm = served.stem.removeprefix("disagg-bench-serve-")
        yield f"`vllm bench serve` through the proxy, {arm}:"
        yield f"```\n{served.read_text().strip()}\n```"
    for drawn in sorted(BUILD.glob("timeline-*.png")):
        yield f"A request, from both sides' traces (`python -m benchmarks.timeline`), {drawn.stem}:"
        yield picture(drawn.name, drawn.stem)


def two_servers_without_bf16(data: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "The same on a processor that has AVX-512 but no instructions for BF16: vLLM prefills "
        "there at a fraction of the speed, so that links, and what is saved on them, are a smaller "
        "part of a first token. Where *tokens* says no, it does so of `raw` too: a server without "
        "a connector answers likewise after a prefix from its own cache, two steps of BF16 away."
    )
    yield from disagg(data, "disagg-no-bf16")


def disagg(data: Mapping[str, Any], stem: str) -> Iterator[str]:
    """Figures of one run. `stem`: of its file, and of its pictures."""
    shaped = dict.fromkeys(row["model"] for row in data["rows"] if row["link"] != "unshaped")
    for model in shaped:
        yield picture(f"{stem}-{model}.png", "speed-up over raw by link rate")
    if shaped:
        yield (
            "How many times as few bytes and seconds as with `raw`, by medians. *Beyond unshaped*: "
            "at the decode server, without what the same arm waits there for an unshaped link."
        )
        yield table(
            (
                "model", "prompt", "link", "arm", "bytes over link", "on link", "first token",
                "at decode", "beyond unshaped",
            ),
            _against_raw(data["rows"]),
        )  # fmt: skip
    yield (
        "Unshaped, where there is nothing to gain: the first token with `auto` against that with "
        "`raw`. *Quotient*: of the two in one repeat, median and quartiles. `none` computes the "
        "prompt again on the decode server."
    )
    yield table(
        ("model", "prompt", "repeats", "`auto`, s", "`raw`, s", "`none`, s", "quotient"),
        _unshaped(data["rows"], data["measurements"]),
    )
    yield "All of it:"
    yield table(
        (
            "model", "prompt", "link", "arm", "runs", "first token, s", "at decode, s",
            "over link, MB", "on link, s", "codec, s", "requests/s", "tokens",
        ),
        (
            (
                row["model"], f"{row['prompt_tokens']:,}", row["link"], f"`{row['arm']}`",
                row["repeats"], _spread(row, "ttft_s"), _spread(row, "decode_ttft_s"),
                f"{row['link_bytes'] / 1e6:.2f}", _spread(row, "link_s"), f"{row['codec_s']:.3f}",
                "" if row["rps"] is None else f"{row['rps']:.2f}",
                _tokens(row),
            )
            for row in data["rows"]
        ),
    )  # fmt: skip


def _against_raw(rows: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[object]]:
    """Rows of arms that move KV cache over shaped links."""
    by = {
        (row["model"], row["prompt_tokens"], row["link"], row["arm"]): row
        for row in rows
        if row["arm"] != "none"
    }
    for (model, tokens, link, arm), row in by.items():
        raw = by.get((model, tokens, link, "raw"))
        idle, raw_idle = (by.get((model, tokens, "unshaped", each)) for each in (arm, "raw"))
        if link == "unshaped" or raw is None or raw is row:
            continue
        beyond = ""
        if idle is not None and raw_idle is not None:
            here, there = (
                slow["decode_ttft_s"] - fast["decode_ttft_s"]
                for slow, fast in ((row, idle), (raw, raw_idle))
            )
            beyond = f"{there / here:.2f}" if min(here, there) > 0 else ""
        names = ("link_bytes", "link_s", "ttft_s", "decode_ttft_s")
        quotients = (f"{raw[name] / row[name]:.2f}" for name in names)
        yield model, f"{tokens:,}", link, f"`{arm}`", *quotients, beyond


def _unshaped(
    rows: Sequence[Mapping[str, Any]], measurements: Sequence[Mapping[str, Any]]
) -> Iterator[Sequence[object]]:
    """Of each model and prompt: `auto` on a link without a rate, and what it is held against."""
    unshaped = [row for row in rows if row["link"] == "unshaped"]
    by = {(row["model"], row["prompt_tokens"], row["arm"]): row["ttft_s"] for row in unshaped}
    for model, tokens in dict.fromkeys((row["model"], row["prompt_tokens"]) for row in unshaped):
        here = {
            (each["repeat"], each["arm"]): each["ttft_s"]
            for each in measurements
            if (each["model"], each["prompt_tokens"], each["link"]) == (model, tokens, "unshaped")
        }
        repeats = sorted(
            repeat for repeat, arm in here if arm == "auto" and (repeat, "raw") in here
        )
        if len(repeats) < 2:
            continue
        low, middle, high = quantiles(here[each, "auto"] / here[each, "raw"] for each in repeats)
        seconds = (by.get((model, tokens, arm)) for arm in ("auto", "raw", "none"))
        yield (
            model, f"{tokens:,}", len(repeats),
            *("" if each is None else f"{each:.2f}" for each in seconds),
            f"{middle:.3f} [{low:.3f} - {high:.3f}]",
        )  # fmt: skip


def _tokens(row: Mapping[str, Any]) -> str:
    if row["tokens_identical"]:
        return "identical"
    return "equal" if row["tokens_equal"] else "no"


def _spread(row: Mapping[str, Any], name: str) -> str:
    """Median, least and greatest."""
    least, greatest = row["spread"][name]
    return f"{row[name]:.2f} [{least:.2f} - {greatest:.2f}]"


def memory(data: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{data['prompts']} prompts of {data['prompt_tokens']} tokens at once, "
        f"{data['in_flight_bytes'] / 1e6:.0f} MB of KV cache in flight, codec `{data['codec']}`. "
        "*Over*: more than the worker without a connector, by KV cache in flight."
    )
    yield table(
        ("worker", "idle, MB", "peak, MB", "idle over", "peak over"),
        (
            (
                row["server"], f"{row['idle_bytes'] / 1e6:.0f}", f"{row['peak_bytes'] / 1e6:.0f}",
                f"{row['idle_over']:.2f}", f"{row['peak_over']:.2f}",
            )
            for row in data["rows"]
        ),
    )  # fmt: skip


Show = Callable[[Mapping[str, Any]], Lines]

SECTIONS: tuple[tuple[str, str, str, Show], ...] = (
    ("How small", "ratios.json", "python -m benchmarks.ratios", ratios),
    ("Beside other compressors", "codec.json", "python -m benchmarks.codec", codec),
    (
        "The CPU codec by length of run",
        "cpu_codec.json",
        "python -m benchmarks.cpu_codec",
        cpu_codec,
    ),
    (
        "What the KV cache is like",
        "analyze.json",
        "vllm-splitzip analyze --model build/models/smollm2-135m …",
        analysis,
    ),
    ("A request without a hit", "overhead.json", "python -m benchmarks.overhead", overhead),
    ("A worker's memory", "memory.json", "python -m benchmarks.memory", memory),
    (
        "Prefill and decode on two machines",
        "disagg.json",
        "python -m benchmarks.disagg",
        two_servers,
    ),
    (
        "Two machines whose processor has no BF16 instructions",
        "disagg-no-bf16.json",
        "python -m benchmarks.disagg --out build/disagg-no-bf16.json",
        two_servers_without_bf16,
    ),
)

if __name__ == "__main__":
    main()
