"""What LMCache's engine does for its backends, and has to be done here in its place."""

from __future__ import annotations

from typing import Any

from lmcache.v1 import memory_management, protocol

from ..errors import StoreError

ONE_GROUP_BYTES = 28  # of RemoteMetadata: length, format, and one group's dtype and four sizes
TYPES = 1024


def check_metadata_format() -> None:
    """LMCache's header of a stored object has a format that is global to the process.

    Raises
    ------
    StoreError
        Another LMCache engine in this process has set it to another one.
    """
    size = protocol.REMOTE_METADATA_BYTES
    if size is not None and size != ONE_GROUP_BYTES:
        raise StoreError(
            f"another LMCache engine in this process uses objects of {(size - 8) // 20} groups; "
            f"LMCache has one format per process, and frames need the one for 1 group"
        )


def forget_types() -> None:
    """LMCache makes a ctypes type for every size that an object ever had, about 3 kB each, and
    keeps them all. Its own objects have few sizes; compressed frames each have their own."""
    types = memory_management._get_cached_ubyte_array_type
    if types.cache_info().currsize > TYPES:
        types.cache_clear()


def without_statistics(policy: Any) -> None:
    """LMCache's LRU policy remembers the time of every key that was ever put, and the reporter
    that empties its other lists is run by the engine only."""
    if hasattr(policy, "update_chunk_hash_dict"):
        policy.update_chunk_hash_dict = _forget


def _forget(_: Any) -> None:
    pass
