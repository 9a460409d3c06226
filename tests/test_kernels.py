"""The Triton kernels, run by Triton's interpreter.

Each test is a process of its own: the interpreter is chosen before Triton is imported, for good.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_splitzip.codec.scheme import SCHEMES

HERE = Path(__file__).parent


def interpreted(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=HERE.parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["kernels", "dense", "max", "connector"])
def test_under_the_interpreter(module):
    options = ["-p", "no:cacheprovider", "-q", "--no-header"]
    print(interpreted("pytest", *options, str(HERE / "interpreted" / f"{module}.py")))


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
