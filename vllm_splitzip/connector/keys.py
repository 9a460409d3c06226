"""From a run's hash to the key that its frame is stored under."""

import hashlib
from dataclasses import dataclass

from ..storage.base import ObjectKey

HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class KeySpace:
    """Keys of one rank of one engine."""

    namespace: str
    rank: int
    world_size: int

    def object_key(self, run_hash: bytes, part: int) -> ObjectKey:
        """The key of a part of the run that ends with the block of this hash."""
        if len(run_hash) != HASH_BYTES:  # vLLM can be told to hash with fewer bits.
            run_hash = hashlib.sha256(run_hash).digest()
        return ObjectKey(self.namespace, run_hash, part, self.rank, self.world_size)

    @staticmethod
    def key_bytes(key: ObjectKey) -> bytes:
        """All of a key, as the frame that is stored under it is bound to."""
        place = f"{key.namespace}/{key.part}/{key.rank}/{key.world_size}/"
        return place.encode() + key.chunk_hash
