"""What a frame holds: the coded blocks of a run of tokens, for a set of layers of one rank."""

from dataclasses import dataclass

from ..codec.codebook import Codebook
from ..codec.coded import Coded


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's blocks.

    Attributes
    ----------
    name
        The layer's name in the model.
    format
        Number format of its elements, a key of `codec.modes.ITEM_BYTES`.
    shape
        (blocks, heads, states, content), content in elements of the format.
    coded
        Its streams.
    codebook
        What the streams are read with; None where the mode needs none.
    packing
        How attention lays a block's elements out in memory, one of `codec.packing.PACKINGS`.
    """

    name: str
    format: str
    shape: tuple[int, int, int, int]
    coded: Coded
    codebook: Codebook | None = None
    packing: str = "tokens"


@dataclass(frozen=True, slots=True)
class Frame:
    """A run of `tokens` tokens and the layers that cover it."""

    tokens: int
    layers: tuple[Layer, ...]
