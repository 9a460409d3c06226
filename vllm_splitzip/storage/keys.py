"""How an object is called in LMCache."""

from __future__ import annotations

from typing import Any

import torch
from lmcache.utils import CacheEngineKey

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
