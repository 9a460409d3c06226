"""`vllm-splitzip analyze`: why a model's KV cache can be made smaller, in figures and one picture.

Reproduces SplitZip's characterisation (arXiv 2605.01708, section 2) for a model at hand: entropy
and coverage of the exponents by layer, for K and V; how far a codebook from one text carries to
another; and the ratio of every mode.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..codec.codebook import Codebook
from ..errors import SplitZipError
from .capture import cached_bits, load_model, prompts_of
from .files import check_output, check_picture, check_texts, names_of
from .sizes import FRAME_TOKENS, FrameSizes

KINDS = ("K", "V")

Histogram = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LayerRow:
    """Exponents of one layer's keys or values: entropy in bits, coverage as shares."""

    layer: int
    kind: str
    entropy: float
    top4: float
    top8: float
    top16: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--model", required=True, help="name or directory of a HF model")
    parser.add_argument("--text", required=True, nargs="+", type=Path, help="text files to read")
    parser.add_argument(
        "--tokens", type=int, default=2048, help="tokens of each text (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--picture", type=Path, help="write a picture to this file (PNG, SVG, PDF)")


def run(options: argparse.Namespace) -> int:
    """Print the figures, and write what was asked for."""
    if options.tokens < FRAME_TOKENS:
        raise SplitZipError(f"--tokens is {options.tokens}; allowed: {FRAME_TOKENS} or more")
    check_texts("--text", options.text)
    files = names_of("--text", options.text)
    check_output("--json", options.json)
    check_picture("--picture", options.picture)
    model, tokenizer = load_model(options.model)
    by_text: dict[str, npt.NDArray[np.int64]] = {}
    books: dict[str, Codebook] = {}
    sizes, tokens = FrameSizes(), 0
    for name, file in files.items():
        ids = next(prompts_of(tokenizer, [file], options.tokens), [])
        if len(ids) < FRAME_TOKENS:
            raise SplitZipError(f"{file} has {len(ids)} tokens; at least {FRAME_TOKENS} are needed")
        layers = list(cached_bits(model, ids))
        counts = np.array([[_histogram(bits) for bits in layer] for layer in layers])
        by_text[name] = counts
        books[name] = Codebook.from_histogram(counts.sum(axis=(0, 1)))
        # The book of the text before, so that but for the first no text is coded with its own.
        other = books[list(by_text)[max(0, len(by_text) - 2)]]
        for keys, values in layers:
            sizes.add(keys, values, other)
        tokens += len(ids)
        print(f"{name}: {len(ids)} tokens", flush=True)

    rows = _layer_rows(sum(by_text.values()))  # type: ignore[arg-type]
    ratios = sizes.ratios
    carried = {
        book_text: {text: _escape_rate(book, counts) for text, counts in by_text.items()}
        for book_text, book in books.items()
    }
    _print(rows, ratios, carried)
    if options.json:
        content = {
            "model": Path(options.model).name,
            "format": "bf16",
            "tokens": tokens,
            "layers": [asdict(row) for row in rows],
            "ratios": ratios,
            "escapes": carried,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.picture:
        _draw(options.picture, Path(options.model).name, rows, ratios, carried)
    return 0


def _histogram(bits: npt.NDArray[np.uint16]) -> Histogram:
    return np.bincount(((bits >> 7) & 0xFF).reshape(-1), minlength=256)


def _layer_rows(counts: npt.NDArray[np.int64]) -> list[LayerRow]:
    rows = []
    for layer, kind in np.ndindex(counts.shape[0], counts.shape[1]):
        share = counts[layer, kind] / counts[layer, kind].sum()
        top = np.sort(share)[::-1].cumsum()
        present = share[share > 0]
        entropy = float(-(present * np.log2(present)).sum())
        rows.append(
            LayerRow(layer, KINDS[kind], entropy, float(top[3]), float(top[7]), float(top[15]))
        )
    return rows


def _escape_rate(book: Codebook, counts: npt.NDArray[np.int64]) -> float:
    total = counts.sum(axis=(0, 1))
    return float(1 - total[list(book.exponents)].sum() / total.sum())


def _print(
    rows: list[LayerRow], ratios: dict[str, float], carried: dict[str, dict[str, float]]
) -> None:
    print("\nlayer  kind  entropy  top 4   top 8   top 16   (exponents; bits, shares)")
    for row in rows:
        print(
            f"{row.layer:5}  {row.kind:4}  {row.entropy:7.3f}  {row.top4:.4f}  {row.top8:.4f}  "
            f"{row.top16:.5f}"
        )
    own = [rates[text] for text, rates in carried.items()]
    foreign = [r for book, rates in carried.items() for text, r in rates.items() if text != book]
    print(f"\nescapes with a text's own codebook: {min(own):.5f} to {max(own):.5f}")
    if foreign:
        print(f"escapes with another text's:        {min(foreign):.5f} to {max(foreign):.5f}")
    print("\nratio  " + "   ".join(f"{mode} {ratio:.4f}" for mode, ratio in ratios.items()))


def _draw(
    path: Path,
    model: str,
    rows: list[LayerRow],
    ratios: dict[str, float],
    carried: dict[str, dict[str, float]],
) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    figure.suptitle(f"Exponents of {model}'s KV cache", fontsize=14)
    colours = {"K": "#3465a4", "V": "#e9803a"}
    for kind in KINDS:
        chosen = [row for row in rows if row.kind == kind]
        layers = [row.layer for row in chosen]
        axes[0, 0].plot(
            layers, [r.entropy for r in chosen], "o-", ms=3, c=colours[kind], label=kind
        )
        for name, style in (("top4", ":"), ("top8", "--"), ("top16", "-")):
            label = f"{kind}, {name.replace('top', 'top ')}"
            shares = [100 * getattr(row, name) for row in chosen]
            axes[0, 1].plot(layers, shares, style, c=colours[kind], label=label)
    axes[0, 0].set(title="Entropy by layer", xlabel="layer", ylabel="bits of 8", ylim=(0, 4))
    axes[0, 0].legend()
    axes[0, 1].set(title="Covered by the most frequent exponents", xlabel="layer", ylabel="%")
    axes[0, 1].legend(ncols=2, fontsize=8)
    axes[1, 0].set(title="KV cache made smaller by", ylabel="ratio", ylim=(1, 1.6))
    bars = axes[1, 0].bar(list(ratios), list(ratios.values()), color="#4e9a06", width=0.55)
    axes[1, 0].bar_label(bars, fmt="%.3f")
    table = np.array([list(rates.values()) for rates in carried.values()]) * 100
    axes[1, 1].imshow(table, cmap="YlOrRd", vmin=0, vmax=2 * table.max())
    for row, column in np.ndindex(table.shape):
        axes[1, 1].text(
            column, row, f"{table[row, column]:.3f}", ha="center", va="center", fontsize=7
        )
    names = [name if len(name) <= 20 else f"{name[:19]}…" for name in carried]
    axes[1, 1].set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=7)
    axes[1, 1].set_yticks(range(len(names)), names, fontsize=7)
    axes[1, 1].set(title="Escapes, % (row's codebook on column's text)")
    figure.savefig(path, dpi=130)
    plt.close(figure)
