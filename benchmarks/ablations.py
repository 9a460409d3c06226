"""The paper's ablations as sizes: how many codes, how escapes are marked, how fine the codebook.

Counted, not coded: 8 bits of sign and mantissa, the code's bits, and 3 bytes an escape.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import kv
from vllm_splitzip.codec.codebook import Codebook

ESCAPE_BYTES = 3


def exponents(words: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The exponent fields of BF16 bit patterns."""
    return ((words >> 7) & 0xFF).astype(np.uint8)


def escapes(words: npt.NDArray[Any], book: Codebook) -> int:
    """Elements whose exponent is not in the codebook."""
    return int((book.encoding_table()[exponents(words)] == 255).sum())


def rows(model: str, prompts: int) -> list[dict[str, Any]]:
    """One row per variant: {"model", "what", "ratio"}."""
    calibration = kv.capture(model, "calibration")
    by_layer = kv.exponent_histograms(calibration)
    total = by_layer.sum(axis=(0, 1))
    bits = kv.capture(model, "held_out").bits[:prompts]
    held_out = np.bincount(exponents(np.asarray(bits)).reshape(-1), minlength=256)
    elements = int(held_out.sum())

    def top(counts: npt.NDArray[np.int64], k: int) -> npt.NDArray[np.int64]:
        return np.argsort(-counts, kind="stable")[:k]

    def ratio(code_bits: float, escaped: int, table_bytes: int = 0) -> float:
        size = elements * (8 + code_bits) / 8 + ESCAPE_BYTES * escaped + table_bytes
        return 2 * elements / size

    def missed(k: int) -> int:
        return elements - int(held_out[top(total, k)].sum())

    layered = tensor = token = 0
    for layer, kind in np.ndindex(*by_layer.shape[:2]):
        found = exponents(bits[:, layer, kind])
        counts = np.bincount(found.reshape(-1), minlength=256)
        layered += int(found.size - counts[top(by_layer[layer, kind], 16)].sum())
        tensor += int(found.size - counts[top(counts, 16)].sum())
        for row in found.transpose(0, 2, 1, 3).reshape(-1, found.shape[1] * found.shape[3]):
            own = np.bincount(row, minlength=256)
            token += int(row.size - np.partition(own, -16)[-16:].sum())
    tokens = bits.shape[0] * bits.shape[4] * by_layer.shape[0] * by_layer.shape[1]
    variants = {
        "top 16, 4 bits": ratio(4, missed(16)),
        "top 8, 3 bits": ratio(3, missed(8)),
        "top 15 and a sentinel, 4 bits, 1 byte an escape": 2
        * elements
        / (elements * 1.5 + missed(15)),
        "top 16 by layer and K or V, calibrated": ratio(4, layered),
        "top 16 of each tensor itself": ratio(4, tensor, 16 * by_layer.shape[0] * 2),
        "top 16 of each token itself": ratio(4, token, 16 * tokens),
    }
    return [{"model": model, "what": what, "ratio": value} for what, value in variants.items()]
