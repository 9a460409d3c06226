"""Which number format a KV cache holds, from its cache dtype and not from its tensor's alone.

vLLM keeps FP8 in `uint8` tensors, next to formats that only look like it (NVFP4, packed MLA), so
that the tensor's dtype does not tell what an element's bits mean.
"""

import torch


def number_format(dtype: torch.dtype) -> str:
    """Number format of a tensor, a key of `ITEM_BYTES`; `bytes` where no mode takes it apart."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "bytes")
