"""The worker half's counts on their way to vLLM's log line and its Prometheus endpoint."""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from .counters import CODEC_IN_USE, GAUGES, HELD, NAMES


@dataclass
class SplitZipStats(KVConnectorStats):
    """Counts by name (as in `counters`), summed over steps and ranks."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def is_empty(self) -> bool:
        return not any(amount for name, amount in self.data.items() if name not in GAUGES)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0.0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        reduced: dict[str, int | float] = {
            name: round(amount, 6)
            for name, amount in self.data.items()
            if amount and name not in GAUGES
        }
        stored = self.data.get("stored_bytes_saved", 0.0)
        if stored:
            reduced["ratio"] = round(self.data["raw_bytes_saved"] / stored, 4)
        return reduced


class SchedulerStats(SplitZipStats):
    """Changes of the scheduler half's gauges. vLLM passes on what is not empty."""

    def is_empty(self) -> bool:
        return not any(self.data.values())


class SplitZipPromMetrics(KVConnectorPromMetrics):
    """One counter per name, as `vllm:splitzip_<name>_total`, and gauges.

    These are `vllm:splitzip_<name>` for what is held on to now, and `vllm:splitzip_codec` with
    the label `codec`: how many ranks store in that codec now.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(
                    name=f"vllm:splitzip_{name}",
                    documentation=f"SplitZip: {name.replace('_', ' ')}.",
                    labelnames=self._labelnames,
                ),
                self.per_engine_labelvalues,
            )
            for name in NAMES
        }
        gauge = self._gauge_cls(
            name="vllm:splitzip_codec",
            documentation="SplitZip: ranks that store KV cache in this codec now.",
            labelnames=[*self._labelnames, "codec"],
            multiprocess_mode="sum",
        )
        self._now: dict[tuple[str, int], float] = {}
        self._gauges = {
            name: create_metric_per_engine(
                gauge,
                {engine: [*v, mode] for engine, v in self.per_engine_labelvalues.items()},
            )
            for name, mode in CODEC_IN_USE.items()
        } | {
            name: create_metric_per_engine(
                self._gauge_cls(
                    name=f"vllm:splitzip_{name}",
                    documentation=f"SplitZip: {name.replace('_', ' ')} now.",
                    labelnames=self._labelnames,
                    multiprocess_mode="sum",
                ),
                self.per_engine_labelvalues,
            )
            for name in HELD
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            if amount and name in GAUGES:
                place = name, engine_idx  # Ray's gauges know no `inc`.
                self._now[place] = self._now.get(place, 0.0) + amount
                self._gauges[name][engine_idx].set(self._now[place])
            elif amount:
                self._counters[name][engine_idx].inc(amount)
