"""SplitZipConnector: vLLM's hooks, each handed on to the half that does the work.

vLLM builds one instance in its scheduler and one in every worker. An instance has one half only.
"""

import logging
import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from ..errors import SplitZipError
from ..settings import Settings
from .geometry import geometry_of
from .logs import log_with_vllm
from .lookup import LookupClient
from .messages import LookupAddress, Step
from .refusals import refuse_unsupported
from .scheduler import SchedulerHalf
from .stats import SchedulerStats, SplitZipPromMetrics, SplitZipStats
from .trace import open_trace
from .worker import LOOKUP_TIMEOUT_S, WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


logger = logging.getLogger(__name__)


class SplitZipConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores KV cache losslessly compressed, and loads it instead of computing it again.

    Raises
    ------
    SettingError
        When a key of `kv_connector_extra_config` is unknown or has a value that is not allowed.
    UnsupportedModelError
        When the model or the engine's configuration cannot be served.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_with_vllm()
        transfer = self._kv_transfer_config
        try:
            settings = Settings.from_extra_config(transfer.kv_connector_extra_config)
            refuse_unsupported(vllm_config, kv_cache_config)
            geometry = geometry_of(vllm_config, kv_cache_config, settings.chunk_tokens)
            self._trace = open_trace(settings.trace_dir, role.name.lower())
        except SplitZipError as error:
            logger.error("%s", error)  # noqa: TRY400  vLLM prints tracebacks enough
            raise
        # A store is a cache: what it fails to deliver is computed, and no request fails for it.
        transfer.kv_load_failure_policy = "recompute"
        self._groups = len(kv_cache_config.kv_cache_groups)
        if role == KVConnectorRole.SCHEDULER:
            self._lookup = LookupClient(LOOKUP_TIMEOUT_S)
            self._scheduler_half = SchedulerHalf(
                geometry,
                self._lookup,
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
                wait_s=settings.load_timeout_s,
                engine_id=transfer.engine_id,
                trace=self._trace,
            )
        else:
            self._worker_half = WorkerHalf(
                vllm_config, kv_cache_config, geometry, settings, self._trace
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A frame that was not stored is a future miss, nothing that a request must wait for."""
        return False

    # Scheduler side

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        addresses = [metadata[rank] for rank in sorted(metadata)]
        self._lookup.connect([a.endpoint for a in addresses if isinstance(a, LookupAddress)])

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler_half.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        self._scheduler_half.after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self._scheduler_half.build_step(scheduler_output)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler_half.request_finished(request)

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker_half.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return LookupAddress(self._worker_half.endpoint)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._bound_at = time.monotonic()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        self._worker_half.start_loads(self._step)
        if forward_context.attn_metadata is not None:
            self._trace.between("forward", self._bound_at)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: vLLM runs no forward pass on blocks that are still loading."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,
    ) -> None:
        self._worker_half.save_layer(layer_name, self._step)

    def wait_for_save(self) -> None:
        self._worker_half.finish_saves(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        finished = self._worker_half.take_finished()
        # Block ids are unique within a KV cache group only, so that with several groups vLLM
        # wants failed requests, and with one the blocks, which spares it what did arrive.
        if self._groups == 1:
            self._failed_blocks = finished.blocks
            return KVConnectorTransferResults(finished_recving=set(finished.requests))
        return KVConnectorTransferResults(
            finished_recving=set(finished.requests), failed_recving=set(finished.failed)
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def get_kv_connector_stats(self) -> SplitZipStats | None:
        if self.role == KVConnectorRole.SCHEDULER:
            changes = self._scheduler_half.take_counts()
            return None if changes is None else SchedulerStats(data=changes)
        counts = self._worker_half.take_counts()
        return None if counts is None else SplitZipStats(data=counts)

    # Both sides

    def shutdown(self) -> None:
        for name in ("_scheduler_half", "_worker_half"):
            half = getattr(self, name, None)
            if half is not None:
                half.close()
                self._trace.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> SplitZipStats:
        return SplitZipStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> SplitZipPromMetrics:
        return SplitZipPromMetrics(*args)

    _failed_blocks: set[int] = set()  # noqa: RUF012  replaced, never mutated

    @property
    def _step(self) -> Step:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        return step
