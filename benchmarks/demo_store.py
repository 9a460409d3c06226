"""What lies in an `fs://` store's directory, read from the files alone."""

import time
from pathlib import Path
from typing import Any

import msgpack

from vllm_splitzip.frame import header

QUIET_S = 0.5
TIMEOUT_S = 30.0
LMCACHE_BYTES = 256  # at most what LMCache writes in front of an object


def sizes(store: Path) -> dict[Path, int]:
    """Bytes of every stored object's file, LMCache's own few in front of it included."""
    return {path: path.stat().st_size for path in store.glob("*.data")}


def wait_for_more(store: Path, before: dict[Path, int]) -> dict[Path, int]:
    """Wait until objects were added to `before` and no more are coming; all of them then.

    Returns `before` when none was added for a long time.
    """
    deadline = time.monotonic() + TIMEOUT_S
    last, since = before, time.monotonic()
    while time.monotonic() < deadline:
        now = sizes(store)
        if now != last:
            last, since = now, time.monotonic()
        elif now != before and time.monotonic() - since > QUIET_S and not _is_writing(store):
            break
        time.sleep(0.05)
    return last


def layer_tokens(path: Path) -> int:
    """Tokens in a stored frame times layers in it."""
    data = path.read_bytes()
    frame = memoryview(data)[data.index(header.MAGIC, 0, LMCACHE_BYTES) :]
    end = header.SIZE + header.parse(frame).metadata_bytes
    metadata: dict[str, Any] = msgpack.unpackb(frame[header.SIZE : end])
    tokens: int = metadata["tokens"]
    return tokens * len(metadata["layers"])


def _is_writing(store: Path) -> bool:
    return any(path.suffix == ".tmp" for path in store.rglob("*"))
