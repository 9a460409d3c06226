"""Words in the registers of one warp, a row for each lane: side by side, apart, and exchanged."""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

LANES: tl.constexpr = tl.constexpr(32)


@triton.jit
def side_by_side(first, second):
    """[32, 2] and [32, 2] as [32, 4]. Nothing moves between lanes."""
    return tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (LANES, 4))


@triton.jit
def apart(words):
    """The inverse of `side_by_side`."""
    return tl.split(tl.permute(tl.reshape(words, (LANES, 2, 2)), (0, 2, 1)))


@triton.jit
def from_lane(words, lane):
    """Each lane's row of words from the lane that it names: a shuffle for each word."""
    return tl.gather(words, tl.broadcast_to(lane[:, None], words.shape), axis=0)


@triton.jit
def exchange(words, WIDE: tl.constexpr):
    """Neighbouring lanes exchange vectors, where units are: each gets every other one of the four.

    An access to the cache by all lanes then fills whole sectors of 32 bytes.
    """
    if not WIDE:
        return words
    lane = tl.arange(0, LANES)
    odd = (lane % 2 == 1)[:, None]
    first, second = apart(words)
    got = from_lane(tl.where(odd, first, second), lane ^ 1)
    return side_by_side(tl.where(odd, got, first), tl.where(odd, second, got))


@triton.jit
def columns_of(words):
    """The four columns of [32, 4]."""
    first, second = apart(words)
    first, second = tl.split(first), tl.split(second)
    return first[0], first[1], second[0], second[1]
