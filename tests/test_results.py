"""The results page is written from what benchmarks leave, and keeps what it says of the others."""

import json

import pytest

from benchmarks import results

OVERHEAD = {
    "model": "m",
    "prompt_tokens": 1024,
    "max_tokens": 32,
    "median_ratio": 1.01,
    "ratios": [1.0, 1.02],
    "pairs": 2,
}


@pytest.fixture
def build(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "REPO_ROOT", tmp_path)
    for name in ("BUILD", "PAGE", "FIGURES"):
        monkeypatch.setattr(results, name, tmp_path / name.lower())
    (tmp_path / "build").mkdir()
    return tmp_path / "build"


def test_a_benchmark_that_was_not_run_again_keeps_its_figures(build):
    results.main()
    page = build.with_name("page")
    assert page.read_text().count("Not run.") == len(results.SECTIONS)

    (build / "overhead.json").write_text(json.dumps(OVERHEAD))
    results.main()
    with_figures = page.read_text()
    assert "median 1.010 [1.000 to 1.020], 2 pairs." in with_figures
    assert with_figures.count("Not run.") == len(results.SECTIONS) - 1

    (build / "overhead.json").unlink()
    results.main()
    assert page.read_text() == with_figures
