"""The registry of codec modes and number formats: what a frame may name, and how long it is.

A number format says how one element's bits are laid out, a mode how its streams are. A mode whose
streams have a length that follows from the number of elements states it here, so that a frame can
be checked before anything is decoded.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import UnknownModeError
from .coded import CHUNK, chunks_of

ITEM_BYTES = {"bf16": 2, "fp16": 2, "e5m2": 1, "e4m3": 1, "bytes": 1}
"""Bytes per element of each number format; `bytes` is anything that no mode takes apart."""


@dataclass(frozen=True, slots=True)
class Mode:
    """One codec mode.

    Attributes
    ----------
    name
        What a frame and the setting `codec` call it.
    formats
        Number formats that it codes.
    dense_bytes
        (elements, bytes per element) -> length in bytes of each dense stream.
    tables
        Names of its sparse streams.
    needs_codebook
        Whether its streams are read with a codebook.
    """

    name: str
    formats: frozenset[str]
    dense_bytes: Callable[[int, int], tuple[int, ...]]
    tables: frozenset[str]
    needs_codebook: bool


MODES = {
    mode.name: mode
    for mode in (
        Mode(
            name="raw",
            formats=frozenset(ITEM_BYTES),
            dense_bytes=lambda elements, item: (elements * item,),
            tables=frozenset(),
            needs_codebook=False,
        ),
        Mode(
            name="fast",
            formats=frozenset({"bf16"}),
            dense_bytes=lambda elements, _: (chunks_of(elements) * CHUNK // 2, elements),
            tables=frozenset({"counts", "positions", "exponents"}),
            needs_codebook=True,
        ),
    )
}


def mode_named(name: str) -> Mode:
    """The mode called `name`. Raises UnknownModeError."""
    try:
        return MODES[name]
    except (KeyError, TypeError):
        raise UnknownModeError(f"codec mode {name!r}; known: {', '.join(sorted(MODES))}") from None
