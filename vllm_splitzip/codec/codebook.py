"""The 16 exponents that get a 4-bit code (SplitZip, section 3: Top-16 exponent coding)."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from ..errors import CodebookError

ENTRIES = 16


@dataclass(frozen=True, slots=True)
class Codebook:
    """An ordered set of 16 distinct BF16 exponents; an exponent's code is its index.

    Raises
    ------
    CodebookError
        When `exponents` is not 16 distinct bytes.
    """

    exponents: bytes

    def __post_init__(self) -> None:
        if len(self.exponents) != ENTRIES:
            raise CodebookError(
                f"a codebook has {ENTRIES} exponents, this one has {len(self.exponents)}"
            )
        if len(set(self.exponents)) != ENTRIES:
            raise CodebookError(
                f"a codebook's exponents are distinct, these are not: {list(self.exponents)}"
            )

    @classmethod
    def from_histogram(cls, counts: npt.NDArray[np.int64]) -> Self:
        """Top-16 of an exponent histogram, ascending. Shape: (256,). Ties go to the larger."""
        if counts.shape != (256,):
            raise CodebookError(f"an exponent histogram has shape (256,), this {counts.shape}")
        order = np.lexsort((-np.arange(256), -counts))
        return cls(bytes(sorted(order[:ENTRIES].tolist())))

    @property
    def window(self) -> tuple[int, bool] | None:
        """(base, zero) if codes can be computed instead of looked up, else None.

        Without `zero` code = exponent - base. With it, code 0 stands for exponent 0 and
        code = exponent - base + 1 otherwise, which real codebooks need since exact zeros are
        frequent and far below all other exponents.
        """
        book = self.exponents
        zero = book[0] == 0 and book[1] != 1
        first = 1 if zero else 0
        base = book[first]
        if all(e == base + k for k, e in enumerate(book[first:])):
            return base, zero
        return None

    def encoding_table(self) -> npt.NDArray[np.uint8]:
        """Shape: (256,). Exponent -> code; 255 marks an escape."""
        table = np.full(256, 255, np.uint8)
        table[np.frombuffer(self.exponents, np.uint8)] = np.arange(ENTRIES, dtype=np.uint8)
        return table

    def decoding_table(self) -> npt.NDArray[np.uint8]:
        """Shape: (16,). Code -> exponent."""
        return np.frombuffer(self.exponents, np.uint8)
