"""Times on a device: mode `fast` beside a plain copy and the paper's two-pass algorithm."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from vllm_splitzip.kernels import fast_decode, fast_encode
from vllm_splitzip.kernels.fast_encode import EncodeBuffers

from vllm_splitzip.codec.codebook import Codebook
from vllm_splitzip.codec.device.fast import device_book

from . import two_pass
from .bits import Different
from .data import Layout, kv_like, read, write

BYTES_MOVED = 3.5
"""Per element, in either direction: 2 in the cache, 1 and a half in the streams."""

_FLUSH_BYTES = 256 << 20
_HEAD_START_CYCLES = 400_000
"""How long the device is kept busy while the host prepares the launches that are timed."""


@dataclass(frozen=True)
class Time:
    """Milliseconds of several runs, the L2 cache flushed before each."""

    median: float
    fastest: float
    slowest: float

    def rate(self, size: int) -> float:
        """GB/s, of a number of bytes."""
        return size / self.median / 1e6

    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (self.slowest - self.fastest) / self.median


def timed(run: Callable[[], object], repeats: int, device: torch.device) -> Time:
    if device.type == "cpu":  # a rehearsal
        started = perf_counter()
        run()
        return Time(*[1e3 * (perf_counter() - started)] * 3)
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    run()
    times = []
    for _ in range(repeats):
        flush.zero_()
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    times.sort()
    return Time(times[len(times) // 2], times[0], times[-1])


class Case:
    """A run of blocks in a cache, coded: all that its encode and decode need."""

    def __init__(
        self,
        size: int,
        layout: Layout,
        block: tuple[int, int, int],
        book: Codebook,
        escapes: float,
        device: torch.device,
    ) -> None:
        blocks = size // 2 // (block[0] * block[1] * block[2])
        self.ids = torch.randperm(blocks, device=device, dtype=torch.int32)
        self.view = layout((blocks, *block), device)
        self.size = 2 * self.view.numel()
        self.book = device_book(book, device)
        write(self.view, self.ids, kv_like(self.view.numel(), book, escapes, device))
        self.buffers = EncodeBuffers.allocate(self.view.numel(), device)
        self.target = layout((blocks, *block), device)
        self.encode()
        self._compact()

    def encode(self) -> None:
        fast_encode.fast_encode(self.view, self.ids, self.book, self.buffers)

    def decode(self) -> None:
        buffers = self.buffers
        fast_decode.fast_decode(
            self.target, self.ids, self.book, buffers.codes, buffers.rests, *self.sparse
        )

    def _compact(self) -> None:
        """The escapes in the order of the stream."""
        numbers = (self.buffers.counts.int() & 0xFFFF).long()
        ends = numbers.cumsum(0)
        firsts = torch.cat([ends.new_zeros(1), ends]).int()
        begins = self.buffers.starts - (ends - numbers)
        self.escapes = int(ends[-1])
        order = torch.repeat_interleave(begins, numbers)
        order += torch.arange(self.escapes, device=order.device)
        self.sparse = firsts, self.buffers.positions[order], self.buffers.exponents[order]

    def check(self) -> None:
        """No time is taken of what is not exact."""
        self.decode()
        if not torch.equal(self.target.view(torch.int16), self.view.view(torch.int16)):
            raise Different("decoded is not what was encoded")

    def measure(self, repeats: int) -> dict[str, float]:
        self.check()
        device = self.view.device
        encode, decode = timed(self.encode, repeats, device), timed(self.decode, repeats, device)
        return {
            "bytes": self.size,
            "escape_rate": self.escapes / self.view.numel(),
            "encode_gbs": encode.rate(self.size),
            "encode_spread": encode.spread(),
            "decode_gbs": decode.rate(self.size),
            "decode_spread": decode.spread(),
        }


def measure_copy(size: int, repeats: int, device: torch.device) -> dict[str, float]:
    """Device to device, contiguous: GB/s of input, and what that lets a codec reach."""
    source = torch.zeros(size // 2, dtype=torch.int16, device=device)
    target = torch.empty_like(source)
    copy = timed(lambda: target.copy_(source), repeats, device)
    return {
        "copy_gbs": copy.rate(size),
        "copy_spread": copy.spread(),
        "limit_gbs": copy_bound(copy.rate(size), BYTES_MOVED),
    }


def copy_bound(copy_gbs: float, moved: float, item: int = 2) -> float:
    """GB/s of input of what moves so many bytes per element, if as many a second as a copy does."""
    return copy_gbs * 2 * item / moved


def measure_two_pass(case: Case, book: Codebook, repeats: int) -> dict[str, float]:
    """On the same elements, contiguous: it knows no paged cache."""
    words = read(case.view, case.ids)
    words = words[: words.numel() // two_pass.CHUNK * two_pass.CHUNK]
    encoding, decoding = two_pass.tables(book, words.device)
    streams, target = two_pass.encode(words, encoding), torch.empty_like(words)
    two_pass.decode(streams, decoding, target)
    if not torch.equal(words, target):
        raise Different("two passes: decoded is not what was encoded")
    encode = timed(lambda: two_pass.encode(words, encoding), repeats, words.device)
    decode = timed(lambda: two_pass.decode(streams, decoding, target), repeats, words.device)
    size = 2 * words.numel()
    return {
        "two_pass_encode_gbs": encode.rate(size),
        "two_pass_decode_gbs": decode.rate(size),
    }
