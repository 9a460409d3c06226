"""What each codec mode makes of KV cache, frame by frame, tables included."""

import numpy as np
import numpy.typing as npt

from ..codec import host
from ..codec.codebook import Codebook
from ..codec.coded import Blocks
from ..codec.packing import channels
from ..errors import SplitZipError

BLOCK_TOKENS = 16
FRAME_TOKENS = 256
MODES = ("fast", "dense", "max")


class FrameSizes:
    """Adds up the bytes of BF16 KV cache in every mode."""

    def __init__(self) -> None:
        self._sizes = dict.fromkeys(("raw", *MODES), 0)

    def add(
        self, keys: npt.NDArray[np.uint16], values: npt.NDArray[np.uint16], book: Codebook
    ) -> None:
        """Count one layer's whole frames; what is left over is not counted.

        Parameters
        ----------
        keys, values
            Shape of each: (heads, tokens, head dimension).
        book
            Of mode `fast`.
        """
        if keys.shape != values.shape:
            raise SplitZipError(f"keys {keys.shape} and values {values.shape} differ in shape")
        heads, tokens, dims = keys.shape
        shape = (heads, BLOCK_TOKENS, 2 * dims)
        both = np.concatenate([keys, values], axis=2)[:, : tokens // FRAME_TOKENS * FRAME_TOKENS]
        blocks = both.reshape(heads, -1, BLOCK_TOKENS, 2 * dims).transpose(1, 0, 2, 3)
        pages = np.ascontiguousarray(blocks).reshape(-1, heads * BLOCK_TOKENS * 2 * dims)
        known = channels("tokens", shape)
        per_frame = FRAME_TOKENS // BLOCK_TOKENS
        for start in range(0, len(pages), per_frame):
            run = Blocks(pages, np.arange(start, start + per_frame), "bf16", known)
            self._sizes["raw"] += 2 * run.elements
            for mode in MODES:
                coded = host.encode(run, mode, book if mode == "fast" else None)
                self._sizes[mode] += coded.nbytes

    @property
    def ratios(self) -> dict[str, float]:
        """KV cache by its frames, by mode; none while nothing was counted."""
        if not self._sizes["raw"]:
            return {}
        return {mode: self._sizes["raw"] / self._sizes[mode] for mode in MODES}
