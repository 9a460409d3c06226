"""The registry of codec modes: what a frame may name, and how long its streams are.

A mode codes some number formats, and for each has streams of its own. Those whose length follows
from the number of elements are stated here, so that a frame can be checked before anything is
decoded.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from ..errors import UnknownModeError
from . import scheme
from .coded import CHUNK, chunks_of
from .formats import ITEM_BYTES

__all__ = ["ITEM_BYTES", "MODES", "Mode", "Streams", "mode_for", "mode_named"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Streams:
    """What a mode makes of one number format.

    Attributes
    ----------
    dense_bytes
        Number of elements -> length in bytes of each dense stream.
    tables
        Names of its sparse streams and tables, in the order in which a frame holds them.
    needs_codebook
        Whether its streams are read with a codebook.
    """

    dense_bytes: Callable[[int], tuple[int, ...]]
    tables: tuple[str, ...] = ()
    needs_codebook: bool = False


@dataclass(frozen=True, slots=True)
class Mode:
    """One codec mode.

    Attributes
    ----------
    name
        What a frame and the setting `codec` call it.
    streams
        Its streams, by the number formats that it codes.
    """

    name: str
    streams: Mapping[str, Streams]


def _raw(item: int) -> Streams:
    return Streams(lambda elements: (elements * item,))


def _top16(elements: int) -> tuple[int, ...]:
    return chunks_of(elements) * CHUNK // 2, elements


def _windowed(schemes: Mapping[str, scheme.Scheme], *tables: str) -> dict[str, Streams]:
    names = ("windows", *tables)
    return {name: Streams(each.dense_bytes, names) for name, each in schemes.items()}


_ESCAPES = ("counts", "positions", "exponents")
_ENTRIES = ("counts", "positions", "kinds", "others")

MODES = {
    mode.name: mode
    for mode in (
        Mode("raw", {name: _raw(item) for name, item in ITEM_BYTES.items()}),
        Mode(
            "fast",
            {"bf16": Streams(_top16, _ESCAPES, needs_codebook=True)}
            | _windowed(scheme.FAST, *_ENTRIES),
        ),
        Mode("dense", _windowed(scheme.DENSE, *_ENTRIES)),
        Mode("max", _windowed(scheme.MAX, "sizes", "escapes")),
    )
}


def mode_named(name: str) -> Mode:
    """The mode called `name`. Raises UnknownModeError."""
    try:
        return MODES[name]
    except (KeyError, TypeError):
        raise UnknownModeError(f"codec mode {name!r}; known: {', '.join(sorted(MODES))}") from None


@cache
def mode_for(name: str, format_name: str) -> str:
    """Mode `name` if it codes the format, else `raw`, of which the log is told once."""
    if format_name in mode_named(name).streams:
        return name
    logger.warning(
        "mode %s does not code KV cache of format %s, which is stored as it is", name, format_name
    )
    return "raw"
