"""The demo's results as a person reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

NOTES = """\
from store  vLLM caches whole blocks of {block} tokens and always computes a prompt's
            last token, so that a few tokens are left to compute.
TTFT        From a request's arrival to its first token, in an engine that had
            answered another prompt before. The store's files had just been
            written: they came from memory, not from the disk.
output      {generated} tokens, compared with what the first engine answers from its own
            prefix cache: the same last few tokens are computed from the same KV
            cache. To compute a whole prompt at once rounds BF16 in another
            order, which can tip the choice between two almost equal tokens{tipped}."""


@dataclass(frozen=True)
class PromptResult:
    """One prompt, computed and stored by one engine and retrieved by another.

    Attributes
    ----------
    name
        Of the text that the prompt was taken from.
    retrieved_tokens, expected_tokens
        Tokens that the second engine had from the store, and the first from its prefix cache.
    failed_frames
        Frames that the second engine found but could not load.
    raw_bytes, stored_bytes
        KV cache that this prompt added to the store, before coding and in the store's files.
    ttft_cold_s, ttft_warm_s
        Seconds to the first token, computed and retrieved.
    identical
        Whether the second engine answered what the first did from its own prefix cache.
    identical_to_cold
        Whether it also answered what the first did when it computed the whole prompt.
    text
        The second engine's answer.
    """

    name: str
    tokens: int
    retrieved_tokens: int
    expected_tokens: int
    failed_frames: int
    raw_bytes: int
    stored_bytes: int
    ttft_cold_s: float
    ttft_warm_s: float
    identical: bool
    identical_to_cold: bool
    text: str

    @property
    def ratio(self) -> float:
        """Bytes before coding by bytes stored; 0 if nothing was stored."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else 0.0


def total_ratio(results: Sequence[PromptResult]) -> float:
    """Ratio over all prompts' bytes together."""
    stored = sum(result.stored_bytes for result in results)
    return sum(result.raw_bytes for result in results) / stored if stored else 0.0


def problems(results: Sequence[PromptResult]) -> list[str]:
    """What went wrong, one sentence each; empty when everything was retrieved and is the same."""
    found = []
    for result in results:
        if not result.stored_bytes:
            found.append(f"{result.name}: nothing was stored")
        if result.failed_frames:
            found.append(f"{result.name}: {result.failed_frames} frames could not be loaded")
        if result.retrieved_tokens != result.expected_tokens:
            found.append(
                f"{result.name}: {result.retrieved_tokens} tokens were retrieved, "
                f"{result.expected_tokens} could have been"
            )
        if not result.identical:
            found.append(f"{result.name}: the output differs")
    return found


def print_results(
    console: Console, results: Sequence[PromptResult], *, block: int, generated: int
) -> None:
    """Table, answers and notes."""
    table = Table(box=box.SIMPLE_HEAD, show_footer=True, show_edge=False, padding=0)
    raw = sum(result.raw_bytes for result in results)
    stored = sum(result.stored_bytes for result in results)
    cold = sum(result.ttft_cold_s for result in results)
    warm = sum(result.ttft_warm_s for result in results)
    columns = {
        "\nprompt": "all",
        "\ntokens": f"{sum(result.tokens for result in results):,}",
        "from\nstore": f"{sum(result.retrieved_tokens for result in results):,}",
        "KV\nMB": _megabytes(raw),
        "stored\nMB": _megabytes(stored),
        "\nratio": f"{total_ratio(results):.3f}",
        "TTFT\ncomputed": _seconds(cold),
        "TTFT\nloaded": _seconds(warm),
        "\nfaster": f"{cold / warm:.1f} x",
        "\noutput": "",
    }
    for index, (title, total) in enumerate(columns.items()):
        justify: Literal["left", "right"] = "right" if 0 < index < len(columns) - 1 else "left"
        table.add_column(title, total, justify=justify, no_wrap=True)
    for result in results:
        table.add_row(
            result.name,
            f"{result.tokens:,}",
            f"{result.retrieved_tokens:,}",
            _megabytes(result.raw_bytes),
            _megabytes(result.stored_bytes),
            f"{result.ratio:.3f}",
            _seconds(result.ttft_cold_s),
            _seconds(result.ttft_warm_s),
            f"{result.ttft_cold_s / result.ttft_warm_s:.1f} x",
            "[green]identical[/]" if result.identical else "[bold red]DIFFERS[/]",
        )
    console.print(table)
    console.print()
    width = max(len(result.name) for result in results)
    for result in results:
        excerpt = " ".join(result.text.split())[:60]
        console.print(f"{result.name:{width}} … {excerpt}", highlight=False, markup=False)
    console.print()
    tipped = [result.name for result in results if not result.identical_to_cold]
    notes = NOTES.format(
        block=block,
        generated=generated,
        tipped=f"\n            (it did for {', '.join(tipped)})" if tipped else "",
    )
    console.print(notes, style="dim", highlight=False)


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
