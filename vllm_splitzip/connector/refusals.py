"""What the connector cannot serve losslessly yet, refused at start-up with the reason."""

from typing import TYPE_CHECKING

from ..errors import UnsupportedModelError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def refuse_unsupported(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
    """Raise UnsupportedModelError, one sentence per reason, if this engine cannot be served."""
    reasons = [*_engine_reasons(vllm_config), *_cache_reasons(kv_cache_config)]
    if reasons:
        raise UnsupportedModelError(
            f"SplitZipConnector cannot serve {vllm_config.model_config.model}: "
            + "; ".join(reasons)
        )


def _engine_reasons(vllm_config: "VllmConfig") -> list[str]:
    parallel = vllm_config.parallel_config
    reasons = []
    if parallel.decode_context_parallel_size > 1:
        reasons.append("decode context parallelism spreads a block over ranks")
    if parallel.prefill_context_parallel_size > 1:
        reasons.append("prefill context parallelism spreads a block over ranks")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.use_eagle_block_drop():
        reasons.append(
            f"speculative decoding with {speculative.method!r} recomputes the last block of "
            "every hit for its draft layers, which is not supported yet"
        )
    return reasons


def _cache_reasons(kv_cache_config: "KVCacheConfig") -> list[str]:
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )

    served = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
    reasons = []
    if not kv_cache_config.kv_cache_groups:
        reasons.append("it keeps no KV cache")
    if kv_cache_config.host_group_ids:
        reasons.append("part of its KV cache lives in host memory (HiSparse)")
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        specs = (
            list(spec.kv_cache_specs.values())
            if isinstance(spec, UniformTypeKVCacheSpecs)
            else [spec]
        )
        kinds = {type(s).__name__ for s in specs if type(s) not in served}
        if kinds:
            reasons.append(
                f"layers such as {group.layer_names[0]} keep state of kind "
                f"{', '.join(sorted(kinds))}, and only full and sliding-window attention "
                "(MLA included) are supported yet"
            )
        elif not group.enable_kv_transfer or not spec.prefix_cacheable:
            reasons.append(f"vLLM does not let layers such as {group.layer_names[0]} be cached")
    return reasons
