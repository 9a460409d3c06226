"""What the connector sees of a store: keys, fetched objects, and the operations on them."""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np

from ..errors import StoreError

Buffer = bytes | bytearray | memoryview | np.ndarray[Any, Any]
"""Anything contiguous that `memoryview` takes."""

Health = Literal["up", "read-only", "down"]

_NAMESPACE = re.compile(r"sz1-[a-z0-9-]{1,28}")


class DamagedError(StoreError):
    """A backend has something under a key that is no object of this store."""


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """Names one object. Equal keys name the same bytes, whoever stored them.

    Raises
    ------
    StoreError
        The namespace is not `sz1-` and at most 28 of [a-z0-9-] (the janitor deletes
        nothing whose name does not start so), or a number is out of range.
    """

    namespace: str
    chunk_hash: bytes  # 32 bytes
    part: int = 0  # which layer set (attention kind) of the run of tokens
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not _NAMESPACE.fullmatch(self.namespace):
            raise StoreError(f"namespace {self.namespace!r} is not sz1-[a-z0-9-]{{1,28}}")
        if len(self.chunk_hash) != 32:
            raise StoreError(f"chunk_hash has {len(self.chunk_hash)} bytes, expected 32")
        if not 0 <= self.rank < self.world_size <= 10_000 or not 0 <= self.part < 10_000:
            raise StoreError(
                f"rank {self.rank}, world_size {self.world_size}, part {self.part}: expected "
                f"0 <= rank < world_size <= 10000 and 0 <= part < 10000"
            )


class Fetched:
    """The bytes of one object, lent until the `with` block ends.

    `data` is a read-only view into the staging pool. Using it, or anything made from it without
    a copy, after the block reads whatever the pool holds by then.
    """

    __slots__ = ("_give_back", "data")

    def __init__(self, data: memoryview, give_back: Callable[[], None]) -> None:
        self.data = data
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        """Returns the memory to the pool; a second call does nothing."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            with contextlib.suppress(BufferError):  # something was made of it
                self.data.release()
            give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(slots=True)
class StoreStats:
    """Counts since the store was opened. Bytes are those of the objects, without overhead."""

    hits: dict[str, int] = field(default_factory=dict)  # by tier
    misses: int = 0
    puts: int = 0
    puts_failed: int = 0
    bytes_fetched: int = 0
    bytes_stored: int = 0
    evicted: int = 0  # objects that the janitor of an fs:// directory deleted


class Store(ABC):
    """Moves opaque objects. All methods may be called from any thread, and none raises for a
    store that is down, slow, full or damaged: that is a miss, or a put that did not happen.

    Every `timeout_s` is in seconds and bounds the call, not the work behind it: what arrives
    late is released.
    """

    @abstractmethod
    def contains(self, keys: Sequence[ObjectKey], timeout_s: float) -> list[bool]:
        """Which of `keys` are in the store now; unknown counts as absent."""

    @abstractmethod
    def get(self, key: ObjectKey, timeout_s: float) -> Fetched | None:
        """The object's exact bytes, or None when it is absent, or cannot be had in time."""

    @abstractmethod
    def put(self, key: ObjectKey, parts: Sequence[Buffer], nbytes: int, timeout_s: float) -> bool:
        """Stores the concatenation of `parts`, `nbytes` in all.

        True when the object can be fetched from a remote, or where none is configured from the
        last of the local tiers; False when it was not stored, or not within `timeout_s`. An
        empty object is never stored. `parts` may be reused as soon as the call returns.

        Raises
        ------
        StoreError
            `parts` do not hold `nbytes` bytes.
        """

    @abstractmethod
    def remove(self, key: ObjectKey) -> None:
        """Deletes the object from every tier as well as the tiers allow. From this process it
        cannot be fetched again until it is put again."""

    @abstractmethod
    def close(self) -> None:
        """Ends background work and frees the staging pool. A second call does nothing."""

    @property
    @abstractmethod
    def health(self) -> Health:
        """`up`; `read-only` while puts are refused (a full disk); `down` while calls miss."""

    @property
    @abstractmethod
    def stats(self) -> StoreStats:
        """A snapshot of the counts."""

    @abstractmethod
    def describe(self) -> str:
        """One line for the log: the tiers in their order, without passwords."""
