"""NIXL, the library that vLLM's NixlConnector moves KV cache with, in a directory of its own.

The environment stays as it is: the servers that are to see it get the directory as PYTHONPATH.
"""

import subprocess
import sys
from pathlib import Path

from benchmarks.once import build_once, build_root

# All three: the first picks one of the others by the CUDA bindings that it finds, and none of
# them needs a GPU. What they require in turn is for GPUs.
REQUIREMENTS = ("nixl==1.5.1", "nixl-cu12==1.5.1", "nixl-cu13==1.5.1")


class NixlUnavailableError(RuntimeError):
    """NIXL could not be fetched; the message says why."""


def ensure() -> Path:
    """Directory with NIXL's packages, fetched on the first call. Raises NixlUnavailableError."""
    return build_once(build_root("SPLITZIP_NIXL_DIR", "nixl"), _fetch)


def _fetch(target: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--target", str(target), *REQUIREMENTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise NixlUnavailableError(f"pip could not fetch {', '.join(REQUIREMENTS)}: {last}")
