"""The Triton kernels, run by Triton's interpreter.

Each test is a process of its own: the interpreter is chosen before Triton is imported, for good.
It works on one core, so that there are as many at a time as there are cores.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vllm_splitzip.codec.scheme import SCHEMES

HERE = Path(__file__).parent


def interpreted(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=HERE.parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def runs(request):
    """The processes of all modules whose tests were selected, from the first test on."""
    modules = [
        item.callspec.params["module"]
        for item in request.session.items
        if item.originalname == test_under_the_interpreter.__name__
    ]
    options = ["-p", "no:cacheprovider", "-q", "--no-header"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            module: pool.submit(
                interpreted, "pytest", *options, str(HERE / "interpreted" / f"{module}.py")
            )
            for module in modules
        }


@pytest.mark.parametrize("module", ["both", "kernels", "dense", "max", "connector"])
def test_under_the_interpreter(runs, module):
    print(runs[module].result())


def test_gpu_check_rehearsed(tmp_path):
    out = tmp_path / "gpu_check.json"
    # A slow machine rehearses all of it too.
    print(interpreted("benchmarks.gpu_check", "--tiny", "--seconds", "3600", "--out", str(out)))
    report = json.loads(out.read_text())
    assert all(row["exact"] for row in report["exact"])
    sections = {"sizes", "windowed modes", "escapes", "layouts", "codebooks", "chunks per program"}
    assert sections < report.keys()
    coded = {(row["mode"], row["format"]) for row in report["windowed modes"]}
    assert coded == {(mode, name) for mode, schemes in SCHEMES.items() for name in schemes}
    assert all(row["ratio"] > 1 for row in report["windowed modes"])
