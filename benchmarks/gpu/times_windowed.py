"""Times on a device of the windowed modes: of all that is launched, choosing windows included."""

from collections.abc import Callable

import torch
from vllm_splitzip.kernels import dense_decode, dense_encode, max_decode, max_encode
from vllm_splitzip.kernels.dense_encode import DenseBuffers
from vllm_splitzip.kernels.max_encode import MaxBuffers

from vllm_splitzip.codec.device.windowed import window_rule
from vllm_splitzip.codec.scheme import SCHEMES

from .bits import Different
from .data import as_integers, channels_like
from .times import copy_bound, timed


class WindowedCase:
    """A run of blocks in a cache, coded: all that its encode and decode need."""

    def __init__(
        self,
        size: int,
        layout: str,
        block: tuple[int, int, int],
        mode: str,
        number_format: str,
        device: torch.device,
    ) -> None:
        self.mode, self.format, self.scheme = mode, number_format, SCHEMES[mode][number_format]
        heads, states, content = block
        self.item = self.scheme.number_format.item
        blocks = max(1, size // self.item // (heads * states * content))
        self.view = as_integers(layout, blocks, block, self.item, device)
        self.target = as_integers(layout, blocks, block, self.item, device)
        self.ids = torch.randperm(blocks, device=device, dtype=torch.int32)
        self.view[:] = channels_like(self.scheme, blocks, block, 0.0, device).view(self.view.shape)
        self.elements, self.channels = self.view.numel(), heads * content
        self.rule = window_rule(self.scheme, blocks, states)
        sizes = self.elements, self.channels, self.item, self.scheme.packed
        make = self._max if mode == "max" else self._dense
        self.limit, self.encode, self.decode, self.coded = make(*sizes, device)

    def _dense(
        self, elements: int, channels: int, item: int, packed: int, device: torch.device
    ) -> tuple[int, Callable[[], None], Callable[[], None], int]:
        limit = dense_encode.entry_limit(elements, item, packed, channels)
        buffers = DenseBuffers.allocate(elements, channels, item, packed, device)

        def encode() -> None:
            dense_encode.dense_encode(self.view, self.ids, self.rule, limit, buffers)

        encode()
        firsts = buffers.ends - buffers.numbers
        entries = int(buffers.ends[-1])

        def decode() -> None:
            dense_decode.dense_decode(
                self.target, self.ids, packed, buffers.bases, buffers.low,
                (buffers.plane4, buffers.plane2, buffers.plane1),
                buffers.counts, firsts, *buffers.entries,
            )  # fmt: skip

        # An entry is a position and a kind; others of it are left out here.
        coded = sum(self.scheme.dense_bytes(elements)) + channels + buffers.counts.numel()
        return limit - entries, encode, decode, coded + entries * 5 // 4

    def _max(
        self, elements: int, channels: int, item: int, packed: int, device: torch.device
    ) -> tuple[int, Callable[[], None], Callable[[], None], int]:
        limit = max_encode.escape_bytes_limit(elements, item, packed, channels)
        buffers = MaxBuffers.allocate(elements, channels, item, packed, device)

        def encode() -> None:
            max_encode.max_encode(self.view, self.ids, self.rule, limit, buffers)

        encode()
        firsts = torch.cat([buffers.ends.new_zeros(1), buffers.ends])
        size = int(buffers.ends[-1])
        lists = torch.empty(max_decode.lists_bytes(elements), dtype=torch.uint8, device=device)

        def decode() -> None:
            max_decode.max_decode(
                self.target, self.ids, packed, buffers.bases, buffers.low,
                (buffers.plane4, buffers.plane2, buffers.plane1), firsts, buffers.escapes,
                lists,
            )  # fmt: skip

        coded = sum(self.scheme.dense_bytes(elements)) + channels + 2 * buffers.sizes.numel()
        return limit - size, encode, decode, coded + size

    def measure(self, repeats: int) -> dict[str, float | str]:
        if self.limit < 0:
            raise Different("left to mode raw")
        self.decode()
        if not torch.equal(self.target, self.view):
            raise Different("decoded is not what was encoded")
        device, size = self.view.device, self.item * self.elements
        source, copied = torch.zeros(2, size, dtype=torch.uint8, device=device)
        copy = timed(lambda: copied.copy_(source), repeats, device)
        encode, decode = timed(self.encode, repeats, device), timed(self.decode, repeats, device)
        limit = copy_bound(copy.rate(size), self.item + self.coded / self.elements, self.item)
        return {
            "mode": self.mode,
            "format": self.format,
            "bytes": size,
            "ratio": size / self.coded,
            "encode_gbs": encode.rate(size),
            "encode_spread": encode.spread(),
            "decode_gbs": decode.rate(size),
            "decode_spread": decode.spread(),
            "copy_gbs": copy.rate(size),
            "limit_gbs": limit,
            "encode_of_limit": encode.rate(size) / limit,
            "decode_of_limit": decode.rate(size) / limit,
        }
