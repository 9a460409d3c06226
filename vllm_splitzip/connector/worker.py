"""The worker half: owns a rank's KV cache pages and its store, and does what a `Step` says."""

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..codec import host
from ..codec.codebook import Codebook
from ..codec.shipped import load_codebook, measured_ratios, shipped_name_for
from ..errors import CodebookError, SettingError, UnsupportedModelError
from ..settings import AUTO, Settings
from ..storage import Health, Store, open_store
from .auto import AutoCodec
from .counters import Counters
from .geometry import Geometry
from .hits import Hit, Run, longest_hit
from .keys import KeySpace
from .loader import Finished, Loader
from .lookup import LookupServer
from .measured import MeasuredStore, round_trip_s
from .messages import Step
from .namespace import namespace_of
from .pages import Pages, host_pages
from .reports import LinkReports
from .saver import Saver
from .speeds import measure_like
from .streams import Backlog, DeviceStreams, HostStreams, Streams
from .trace import OFF, Trace
from .writer import Writer

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

WAITING_FRAMES = 8
"""Frames that may wait to be stored, beside those of one step; in units of the largest one."""

FRAME_OVERHEAD = 1 << 16

DEVICE_BACKLOG_BYTES = 256 << 20
"""KV cache whose coded streams may be in a GPU's memory at once, beside vLLM's own."""

LOOKUP_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 60.0


class WorkerHalf:
    """Saves and loads one rank's KV cache. Ready once `register` has been called."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        geometry: Geometry,
        settings: Settings,
        trace: Trace = OFF,
    ) -> None:
        self._trace = trace
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._geometry = geometry
        self._settings = settings
        self._counters = Counters()
        self._store: Store | None = None
        # Under micro-batching a layer's hook fires before all of a step's tokens are in.
        self._layerwise = (
            not vllm_config.parallel_config.use_ubatching and vllm_config.speculative_config is None
        )

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take note of the KV cache, open the store, and get everything compiled.

        Raises
        ------
        UnsupportedModelError
            When a layer's cache is missing, or not laid out as the codec needs it.
        """
        pages = self._layer_pages(kv_caches)
        self._keys = self._key_space(pages)
        frame_bytes = max(
            sum(
                layer.block_bytes
                * self._geometry.group_blocks[layer.group]
                * self._geometry.chunk_units
                for layer in pages.values()
                if layer.group in part.groups
            )
            for part in self._geometry.parts
        )
        extra = self._transfer_config.kv_connector_extra_config
        self._store = open_store(
            extra,
            max_object_bytes=frame_bytes + FRAME_OVERHEAD,
            max_store_gib=self._settings.max_store_gib,
        )
        device = next(iter(kv_caches.values())).device
        streams: Streams = HostStreams() if device.type == "cpu" else DeviceStreams(device)
        host.warm_up()
        chunk_tokens = self._geometry.chunk_units * self._geometry.unit_tokens
        step_tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
        waiting_frames = WAITING_FRAMES + step_tokens // chunk_tokens
        book, store, auto, mode = self._codebook(), self._store, None, self._settings.codec
        if mode == AUTO:
            auto = self._auto(kv_caches, pages, book, streams, frame_bytes)
            reports = LinkReports(store, lambda digest: self._keys.object_key(digest, 0))
            store, mode = MeasuredStore(store, auto, reports), auto.mode
        else:
            self._counters.add(**{f"codec_{mode}": 1})
        self._writer = Writer(store, self._counters, waiting_frames * frame_bytes, self._trace)
        self._saver = Saver(
            self._geometry,
            pages,
            self._keys,
            self._writer,
            streams,
            self._counters,
            mode=mode,
            book=book,
            verify=self._settings.verify,
            trace=self._trace,
            auto=auto,
        )
        self._loader = Loader(
            self._geometry,
            pages,
            self._keys,
            store,
            streams,
            self._counters,
            self._settings.load_timeout_s,
            self._trace,
            auto,
        )
        self._lookup = LookupServer(self._longest_hit, self._health)
        logger.info(
            "SplitZip stores KV cache as %r in %s, frames of %d tokens and at most %.1f MB, "
            "namespace %s",
            self._settings.codec,
            self._store.describe(),
            chunk_tokens,
            frame_bytes / 1e6,
            self._keys.namespace,
        )

    @property
    def endpoint(self) -> str:
        """Where the scheduler half asks for hits."""
        return self._lookup.endpoint

    def start_loads(self, step: Step) -> None:
        """Begin this step's loads in the background."""
        for job in step.loads:
            self._loader.submit(job)

    def save_layer(self, name: str, step: Step) -> None:
        """A layer's attention is done for this step."""
        if step.saves and self._layerwise:
            self._saver.save_layer(name, step.saves)

    def finish_saves(self, step: Step) -> None:
        """The step's forward pass is over: read what it completed, before blocks may be reused."""
        if step.saves:
            self._saver.finish(step.saves)

    def take_finished(self) -> Finished:
        """Loads that ended since the last call."""
        return self._loader.take_finished()

    def take_counts(self) -> dict[str, float] | None:
        """What was counted since the last call."""
        return self._counters.take()

    def close(self) -> None:
        """Store what waits to be stored, and let go of everything."""
        store, self._store = self._store, None
        if store is not None:
            self._lookup.close()
            self._loader.close()
            self._writer.close(CLOSE_TIMEOUT_S)
            store.close()

    def _longest_hit(self, hashes: Sequence[bytes], limit: int) -> Hit:
        """Answer the scheduler half, in the lookup server's thread."""
        store = self._store
        if store is None:
            return Hit(0, 0)

        def contains(runs: Sequence[Run]) -> list[bool]:
            keys = [self._keys.object_key(hashes[run.end - 1], run.part) for run in runs]
            with self._trace.span("lookup", frames=len(keys)):
                return store.contains(keys, LOOKUP_TIMEOUT_S)

        return longest_hit(self._geometry, len(hashes), limit, contains)

    def _health(self) -> Health:
        store = self._store
        return "down" if store is None else store.health

    @property
    def _transfer_config(self) -> "KVTransferConfig":
        config = self._vllm_config.kv_transfer_config
        assert config is not None
        return config

    @property
    def _attention(self) -> Mapping[str, Any]:
        """vLLM's attention layers by name."""
        layers: Mapping[str, Any] = self._vllm_config.compilation_config.static_forward_context
        return layers

    def _layer_pages(self, kv_caches: Mapping[str, torch.Tensor]) -> dict[str, Pages]:
        num_blocks = self._kv_cache_config.num_blocks
        backlog = Backlog(DEVICE_BACKLOG_BYTES)
        pages: dict[str, Pages] = {}
        for index, group in enumerate(self._kv_cache_config.kv_cache_groups):
            for name in group.layer_names:
                if name not in kv_caches:
                    raise UnsupportedModelError(f"vLLM registered no KV cache for layer {name}")
                pages[name] = self._pages_of(name, index, kv_caches[name], num_blocks, backlog)
        return pages

    def _pages_of(
        self, name: str, group: int, cache: torch.Tensor, num_blocks: int, backlog: Backlog
    ) -> Pages:
        """A cache of `num_blocks` blocks that is laid out as the layer's."""
        layer = self._attention.get(name)
        dtype = getattr(layer, "kv_cache_dtype", "auto")
        if cache.device.type == "cpu":
            isa = getattr(layer, "isa", None)
            return host_pages(name, group, cache, num_blocks, dtype, isa)
        # Not at the top: it needs Triton, which a CPU build of vLLM does not.
        from .device_pages import device_pages

        return device_pages(name, group, cache, num_blocks, dtype, backlog)

    def _auto(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        pages: Mapping[str, Pages],
        book: Codebook,
        streams: Streams,
        frame_bytes: int,
    ) -> AutoCodec:
        """Measure what `codec: auto` has to know at the start: the codec, and a round trip."""
        assert self._store is not None
        name = max(pages, key=lambda name: pages[name].block_bytes)
        group, cache = pages[name].group, kv_caches[name]
        backlog = Backlog(DEVICE_BACKLOG_BYTES)
        speeds = measure_like(
            cache,
            getattr(self._attention.get(name), "kv_cache_dtype", "auto"),
            cache.shape[0] // self._kv_cache_config.num_blocks,
            self._geometry.group_blocks[group] * self._geometry.chunk_units,
            lambda sample, blocks: self._pages_of(name, group, sample, blocks, backlog),
            book,
            streams,
        )
        return AutoCodec(
            speeds,
            measured_ratios(shipped_name_for(self._model)).get(pages[name].format, {}),
            frame_bytes,
            round_trip_s(self._store, self._keys.object_key(secrets.token_bytes(32), 0)),
            self._counters,
            is_host=cache.device.type == "cpu",
        )

    def _key_space(self, pages: Mapping[str, Pages]) -> KeySpace:
        parallel = self._vllm_config.parallel_config
        layers = [(layer.name, layer.format, layer.shape, layer.group) for layer in pages.values()]
        return KeySpace(
            namespace_of(self._vllm_config, self._geometry, layers, self._packing(pages)),
            rank=parallel.rank,
            world_size=parallel.world_size,
        )

    def _packing(self, pages: Mapping[str, Pages]) -> str:
        """How attention lays elements out in a block: vLLM's CPU kernels differ by processor."""
        layers = self._attention.values()
        isas = {str(isa) for layer in layers if (isa := getattr(layer, "isa", None))}
        return " ".join(sorted({layer.packing for layer in pages.values()} | isas))

    def _codebook(self) -> Codebook:
        if self._settings.codebook != "auto":
            try:
                return load_codebook(self._settings.codebook)
            except CodebookError as error:
                raise SettingError(
                    f"kv_connector_extra_config['codebook'] is {self._settings.codebook!r}: {error}"
                ) from error
        return load_codebook(shipped_name_for(self._model))

    @property
    def _model(self) -> dict[str, Any]:
        """What codebooks tell models by."""
        model = self._vllm_config.model_config
        config = model.hf_text_config
        return {
            "model_type": config.model_type,
            "num_hidden_layers": config.num_hidden_layers,
            "num_key_value_heads": model.get_total_num_kv_heads(),
            "head_dim": model.get_head_size(),
        }
