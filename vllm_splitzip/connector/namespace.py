"""The namespace of stored frames: a digest of everything that changes what their bytes mean.

vLLM's block hashes say which tokens a block holds (LoRA, images and cache salt included). They do
not say which model computed it, in which precision, or how its bytes are packed. Two engines
share frames exactly if all of that is the same.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from ..frame import header
from .geometry import Geometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NO_MEANING = ("_name_or_path", "transformers_version")
"""Keys of a model's configuration that may differ between hosts that run the same model."""

SAMPLES = 64
SAMPLE_BYTES = 1 << 16


def namespace_of(
    vllm_config: "VllmConfig", geometry: Geometry, layers: Iterable[tuple[Any, ...]], packing: str
) -> str:
    """The namespace, ``sz1-`` and 16 hexadecimal digits.

    Parameters
    ----------
    layers
        What tells one layer's cache from another's: name, format, shape, group.
    packing
        How the attention kernels lay elements out inside a block.
    """
    import vllm

    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    facts = {
        "frame": header.VERSION,
        "vllm": vllm.__version__.split(".")[:2],
        "model": _model_identity(vllm_config),
        "dtype": str(model.dtype),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "quantization": str(model.quantization),
        "packing": packing,
        "geometry": repr(geometry),
        "layers": sorted(map(repr, layers)),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return f"sz1-{digest[:16]}"


def _model_identity(vllm_config: "VllmConfig") -> dict[str, str]:
    """The model's configuration, and its weights: by revision, or by content if a directory."""
    model = vllm_config.model_config
    content = model.hf_config.to_dict()
    for key in NO_MEANING:
        content.pop(key, None)
    directory = Path(model.model)
    if vllm_config.load_config.load_format == "dummy":
        weights = f"dummy {model.seed}"
    elif directory.is_dir():
        # By content, so that hosts may keep the model under different paths.
        weights = _weights_digest(directory)
    else:
        commit = getattr(model.hf_config, "_commit_hash", None)
        weights = f"{model.model} {model.revision} {commit}"
    return {"config": json.dumps(content, sort_keys=True, default=str), "weights": weights}


def _weights_digest(directory: Path) -> str:
    """Digest of the weight files' names, sizes, and 64 evenly spaced samples of each."""
    digest = xxhash.xxh3_128()
    files = [
        path
        for path in sorted(directory.iterdir())
        if path.suffix in {".safetensors", ".bin", ".pt", ".gguf"}
    ]
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // max(1, SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
