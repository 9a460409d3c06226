"""The modes with windows as Triton's interpreter runs them: from a cache and into one."""

from typing import Any

import torch
from caches import a_table, cache, memory, write

from bits import assert_bits_equal, assert_same_streams
from vllm_splitzip.codec.coded import Coded
from vllm_splitzip.codec.device.dense import DenseBuffers, decode_dense, encode_dense
from vllm_splitzip.codec.device.max import MaxBuffers, decode_max, encode_max
from vllm_splitzip.codec.device.memory import Pending
from vllm_splitzip.codec.packing import channels
from vllm_splitzip.codec.reference import dense as reference_dense
from vllm_splitzip.codec.reference import max as reference_max
from vllm_splitzip.codec.scheme import DENSE, FAST, MAX
from windowed import Coder


class DeviceCoder(Coder):
    """A mode in one number format, on the device and in the reference."""

    def expected(self, rows: Any, shape: tuple[int, int, int]) -> Coded:
        """What the reference makes of a run of blocks."""
        elements, known = rows.reshape(-1), channels("tokens", shape)
        if self.mode == "max":
            return reference_max.encode(elements, self.scheme, known)
        return reference_dense.encode(elements, self.scheme, known, self.mode)

    def encode_from(self, view: torch.Tensor, table: Any, buffers: Any = None) -> Pending:
        """Code the blocks of a table."""
        if self.mode == "max":
            return encode_max(view, table, self.scheme, buffers)
        return encode_dense(view, table, self.scheme, self.mode, buffers)

    def decode_into(self, coded: Coded, view: torch.Tensor, table: Any) -> None:
        """Write a coded run into the blocks of a table."""
        (decode_max if self.mode == "max" else decode_dense)(coded, self.scheme, view, table)

    def buffers(self, elements: int, number: int) -> Any:
        """Memory for runs of up to `elements` elements in `number` channels."""
        kind = MaxBuffers if self.mode == "max" else DenseBuffers
        item, packed = self.scheme.number_format.item, self.scheme.packed
        return kind.allocate(elements, number, item, packed, torch.device("cpu"))

    def round_trip(self, layout: Any, shape: tuple[int, int, int], rows: Any) -> Coded:
        """Encode is the reference's, decode changes the run's blocks and nothing else."""
        table, item = a_table(len(rows)), rows.dtype.itemsize
        view = cache(layout, len(rows) + 2, shape, item, fill=0xAD)
        write(view, table, rows)
        expected = self.expected(rows, shape)
        coded = self.encode_from(view, table).result()
        assert coded.mode == self.mode
        assert_same_streams(coded, expected)

        decoded, wanted = (cache(layout, len(rows) + 2, shape, item, fill=0xBE) for _ in range(2))
        write(wanted, table, rows)
        self.decode_into(expected, decoded, table)
        assert_bits_equal(memory(decoded), memory(wanted))
        return coded


DENSE_CODERS = [
    *(DeviceCoder("dense", scheme) for scheme in DENSE.values()),
    *(DeviceCoder("fast", scheme) for scheme in FAST.values()),
]
MAX_CODERS = [DeviceCoder("max", scheme) for scheme in MAX.values()]
DENSE_BF16, MAX_BF16 = DeviceCoder("dense", DENSE["bf16"]), DeviceCoder("max", MAX["bf16"])
