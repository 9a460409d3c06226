"""Makes the repository's `benchmarks` and the tests' own helpers importable; shared fixtures."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]


@pytest.fixture(params=["cached", "streamed", "no-compress"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small inputs through the stores for large ones, and as on lesser processors."""
    from vllm_splitzip.codec.cpu import dense, max

    for module in (dense, max):
        monkeypatch.setattr(module, "JOB_TILES", 3)
        if request.param == "streamed":
            monkeypatch.setattr(module, "STREAM_BYTES", 0)
        if request.param == "no-compress":
            monkeypatch.setattr(module, "COMPRESSES", False)
