"""Spreading a codec's work over threads that are started once.

Not numba's own `parallel=True`: its threading layers may not be entered from several threads at
once, and they bring a second OpenMP beside vLLM's.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

Job = Callable[[], None]


def usable_cpus() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


DEFAULT_THREADS = min(4, usable_cpus())
"""Four threads saturate a memory controller, and vLLM wants the other cores."""


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(usable_cpus(), thread_name_prefix="splitzip-codec")


# A forked child has the pool object but none of its threads, and would wait for them forever.
os.register_at_fork(after_in_child=_pool.cache_clear)


def run(jobs: list[Job], threads: int) -> None:
    """Run all jobs on up to `threads` threads, the calling one among them."""
    queue = iter(jobs)
    helpers = [_pool().submit(_drain, queue) for _ in range(min(threads, len(jobs)) - 1)]
    try:
        _drain(queue)
    finally:
        # A helper that never got its turn has nothing left to do; the others must be waited for
        # even after an error, since they write to the caller's memory.
        started = [helper for helper in helpers if not helper.cancel()]
        errors = [helper.exception() for helper in started]
    for error in errors:
        if error is not None:
            raise error


def _drain(queue: Iterator[Job]) -> None:
    for job in queue:
        job()


def spans(size: int, least: int, threads: int) -> list[tuple[int, int]]:
    """`size` items as (begin, end) of jobs: a few per thread, so that a slow one can be helped."""
    step = max(least, -(-size // (4 * threads)))
    return [(begin, min(begin + step, size)) for begin in range(0, size, step)]
