"""LMCache's log: at INFO it tells every user of this package about parts they do not use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_LEVEL = "LMCACHE_LOG_LEVEL"


@contextmanager
def quiet_lmcache() -> Iterator[None]:
    """Modules of LMCache that are first imported within the block log errors only.

    Each of them makes its own logger, with the level that this variable has at that moment;
    there is no parent logger to set. Whoever has set the variable gets what they asked for, and
    modules that somebody imported before keep their level.
    """
    if _LEVEL in os.environ:
        yield
        return
    os.environ[_LEVEL] = "ERROR"
    try:
        yield
    finally:
        os.environ.pop(_LEVEL, None)
