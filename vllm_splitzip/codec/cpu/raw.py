"""Mode `raw` on a CPU: the bytes of a run of blocks, gathered and scattered."""

# numba and llvmlite are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from functools import partial

from ...errors import FrameLayoutError
from ..coded import Blocks, Coded
from . import memory
from .compiling import compiled
from .fast_loops import AHEAD, WORD_BYTES, copy_bytes, put
from .memory import STREAM_BYTES, Pages, Stream
from .pool import ALIGNMENT, aligned_bytes
from .threads import DEFAULT_THREADS, run, spans
from .vector import LANES, fence, load, pointer64, prefetch

WIDTHS = (1, 2)

JOB_BYTES = 1 << 21


def encode_raw(blocks: Blocks, threads: int = DEFAULT_THREADS) -> Coded:
    """Gather a run of blocks as they are. Pages of uint8 or uint16.

    Raises
    ------
    IndexError
        When the table names a block that does not exist.
    """
    pages = memory.source(blocks, WIDTHS)
    flat = aligned_bytes(blocks.elements * blocks.pages.itemsize)
    _copy(blocks, pages, flat.ctypes.data, threads, into_pages=False)
    return Coded(mode="raw", elements=blocks.elements, dense=(flat,))


def decode_raw(coded: Coded, blocks: Blocks, threads: int = DEFAULT_THREADS) -> None:
    """Scatter a run of blocks; those with a negative id are passed over.

    Raises
    ------
    FrameLayoutError
        When there are more or fewer bytes than the blocks have. Nothing has been written then.
    """
    pages = memory.target(blocks, WIDTHS)
    if coded.elements != blocks.elements or len(coded.dense) != 1:
        raise FrameLayoutError(
            f"{coded.elements} elements in {len(coded.dense)} dense streams, "
            f"expected {blocks.elements} in 1"
        )
    flat = Stream("raw", coded.dense[0], blocks.elements * blocks.pages.itemsize)
    _copy(blocks, pages, flat.address, threads, into_pages=True)


def _copy(blocks: Blocks, pages: Pages, flat: int, threads: int, into_pages: bool) -> None:
    size = pages.row * blocks.pages.itemsize
    aligned = size % ALIGNMENT == 0 and (pages.aligned or not into_pages)
    streaming = aligned and size * pages.table.size >= STREAM_BYTES

    def copy(begin: int, end: int) -> None:
        copy_rows(
            pages.address, pages.stride, pages.ids, size, begin, end,
            flat, int(into_pages), int(streaming),
        )  # fmt: skip

    least = max(1, JOB_BYTES // max(size, 1))
    run([partial(copy, *span) for span in spans(pages.table.size, least, threads)], threads)


@compiled
def copy_vectors(source, target, size, following, streaming):
    """Copy a multiple of 64 bytes; `following` is where the next ones will be."""
    for i in range(0, size, LANES):
        soon = i + AHEAD * WORD_BYTES
        prefetch(source + soon if soon < size else following + soon - size)
        put(target + i, load(source + i), streaming)


@compiled
def copy_rows(pages, stride, table, size, begin, end, flat, into_pages, streaming):
    """Copy rows `begin` to `end` of the run from or to `flat`."""
    ids = pointer64(table)
    for i in range(begin, end):
        if ids[i] >= 0:
            there, here = pages + ids[i] * stride, flat + i * size
            following = here + size if into_pages else pages + ids[min(i + 1, end - 1)] * stride
            source, target = (here, there) if into_pages else (there, here)
            if size % LANES == 0:
                copy_vectors(source, target, size, following, streaming)
            else:
                copy_bytes(source, target, size)
    if streaming:
        fence()
