"""What the interpreted tests change about the kernels.

The kernels are imported only where a test runs: the interpreter is chosen before Triton is.
"""

import pytest


@pytest.fixture
def _never_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small and difficult inputs are coded all the same."""
    from vllm_splitzip.kernels import dense_encode, max_encode

    from vllm_splitzip.codec.device import dense as device_dense

    limit = dense_encode.entry_limit
    monkeypatch.setattr(dense_encode, "entry_limit", lambda *a: max(limit(*a), a[0] + 256))
    monkeypatch.setattr(device_dense, "pays", lambda coded, size: True)
    monkeypatch.setattr(max_encode, "escape_bytes_limit", lambda elements, *_: 2 * elements + 4096)


@pytest.fixture
def _with_ptx(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of the kernels that NVIDIA's GPUs run."""
    import ptx
    from triton.runtime.interpreter import InterpreterBuilder
    from vllm_splitzip.kernels import dense_decode, dense_encode, max_decode, max_encode

    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", ptx.inline_asm)
    for module in (dense_encode, dense_decode, max_encode, max_decode):
        monkeypatch.setattr(module, "has_ptx", lambda device: True)
