"""Number formats: how the bits of one KV cache element divide, and which format a cache holds.

vLLM keeps FP8 in `uint8` tensors, next to formats that only look like it (NVFP4, packed MLA), so
that the tensor's dtype does not tell what an element's bits mean: the cache dtype does.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A floating-point format: from the top a sign, the exponent, the mantissa.

    Attributes
    ----------
    name
        What a frame calls it.
    item
        Bytes per element.
    exponent
        Bits of the exponent.
    origin, shift
        Where the window bases that one byte can name begin; they are ``1 << shift`` apart.
    """

    name: str
    item: int
    exponent: int
    origin: int
    shift: int

    @property
    def bits(self) -> int:
        """Bits per element."""
        return 8 * self.item

    @property
    def mantissa(self) -> int:
        """Bits of the mantissa."""
        return self.bits - 1 - self.exponent

    @property
    def magnitudes(self) -> int:
        """Number of bit patterns without the sign; all arithmetic on magnitudes is modulo this."""
        return 1 << (self.bits - 1)


# For BF16 the bases are a quarter of a binade apart, from 2**-32 to 2**32.
FORMATS = {
    number_format.name: number_format
    for number_format in (
        NumberFormat("bf16", item=2, exponent=8, origin=95 << 7, shift=5),
        NumberFormat("fp16", item=2, exponent=5, origin=0, shift=7),
        NumberFormat("e5m2", item=1, exponent=5, origin=0, shift=0),
        NumberFormat("e4m3", item=1, exponent=4, origin=0, shift=0),
    )
}

ITEM_BYTES = {name: known.item for name, known in FORMATS.items()} | {"bytes": 1}
"""Bytes per element of each number format; `bytes` is anything that no mode takes apart."""

_BY_CACHE_DTYPE = {"fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
_BY_DTYPE = {
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float8_e4m3fn": "e4m3",
    "torch.float8_e5m2": "e5m2",
}


def number_format(dtype: "torch.dtype", cache_dtype: str = "auto") -> str:
    """Number format of a tensor, a key of `ITEM_BYTES`; `bytes` where no mode takes it apart.

    Parameters
    ----------
    cache_dtype
        vLLM's name for what the tensor holds.
    """
    by_dtype = _BY_DTYPE.get(str(dtype), "bytes")
    if str(dtype) == "torch.uint8":
        return _BY_CACHE_DTYPE.get(cache_dtype, "bytes")
    if cache_dtype in _BY_CACHE_DTYPE and by_dtype != _BY_CACHE_DTYPE[cache_dtype]:
        return "bytes"
    return by_dtype
