"""What the scheduler half tells the worker half in one step."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

NOT_WANTED = -1
"""In a table: a block that need not be loaded."""


@dataclass(slots=True)
class SaveFrame:
    """One run of units to be stored, all of whose blocks are complete after this step.

    Attributes
    ----------
    key
        Hash of the run's last block, as in `Request.block_hashes`.
    units
        Units in the run.
    tables
        Block ids of the run by KV cache group, in token order. A group whose blocks have
        already left its sliding window is None: its part is not stored.
    """

    key: bytes
    units: int
    tables: tuple[list[int] | None, ...]


@dataclass(slots=True)
class LoadFrame:
    """One stored run and where its blocks go.

    `tables` is as in `SaveFrame`, with NOT_WANTED where a block is already there or outside the
    window. A group with nothing wanted is None.
    """

    key: bytes
    units: int
    tables: tuple[list[int] | None, ...]


@dataclass(slots=True)
class LoadJob:
    """All that one request loads."""

    request_id: str
    frames: list[LoadFrame]


@dataclass(slots=True)
class Step(KVConnectorMetadata):
    """Saves and loads of one scheduler step. Most decode steps carry neither."""

    saves: list[SaveFrame] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)


@dataclass
class LookupAddress(KVConnectorHandshakeMetadata):
    """Where a worker answers what its store holds (a ZeroMQ endpoint)."""

    endpoint: str
