"""The Triton kernels, run by Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_interpreted():
    """In a process of its own: the interpreter is chosen before Triton is imported, for good."""
    arguments = ["-p", "no:cacheprovider", "-q", "--no-header", "--durations=5"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, str(HERE / "interpreted/kernels.py")],
        cwd=HERE.parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
