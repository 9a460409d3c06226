"""Build a file or directory once, however many processes ask for it."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parent.parent


def build_root(variable: str, default: str) -> Path:
    """Directory named by the environment variable, else ``build/<default>`` in the repository."""
    return Path(os.environ.get(variable) or REPO_ROOT / "build" / default).absolute()


def build_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Return ``target``, having let ``make(scratch)`` write it if it was not there.

    ``target`` appears complete or not at all: ``make`` fills a scratch directory beside it, which
    is renamed when ``make`` returns. A second process waits for the first; the lock goes with the
    process that held it, and what a killed one left is removed by the next.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f".{target.name}.lock")):
        if target.exists():
            return target
        scratch = target.with_name(f".{target.name}.building")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            make(scratch)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
