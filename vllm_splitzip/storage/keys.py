"""How an object, and the model it belongs to, are called in LMCache."""

from __future__ import annotations

from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.metadata import LMCacheMetadata

from .base import ObjectKey


def lmcache_key(key: ObjectKey) -> Any:
    """A CacheEngineKey, as a string at most 119 characters long (lm:// takes 150).

    LMCache's key has no place for the part; rank and part together make its worker id.
    """
    return CacheEngineKey(
        model_name=key.namespace,
        world_size=key.world_size,
        worker_id=key.rank + key.world_size * key.part,
        chunk_hash=int.from_bytes(key.chunk_hash, "big"),
        dtype=torch.uint8,
    )


def lmcache_metadata(chunk_size: int, max_object_bytes: int) -> LMCacheMetadata:
    """LMCache wants to know a model. Its backends use this one's sizes for objects without
    metadata, of which there are none here, and for slots that must hold a whole chunk: no object
    is greater than `max_object_bytes`."""
    return LMCacheMetadata(
        model_name="splitzip",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.uint8,
        kv_shape=(1, 1, chunk_size, 1, -(-max_object_bytes // chunk_size)),
        chunk_size=chunk_size,
        role="worker",
    )
