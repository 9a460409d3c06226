"""What the storage tests share: keys, contents, and the real servers they run against."""

import contextlib
import ctypes
import gc
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_splitzip.storage import ObjectKey, Store, open_store

MIB = 1 << 20
NAMESPACE = "sz1-0123456789abcdef"
SMALL_POOL = {"lmcache.local_cpu": False, "lmcache.max_local_cpu_size": 8 / 1024}  # 8 MiB


def key(number: int, part: int = 0, rank: int = 0, world_size: int = 1) -> ObjectKey:
    return ObjectKey(NAMESPACE, number.to_bytes(32, "big"), part, rank, world_size)


def content(number: int, nbytes: int) -> bytes:
    """Bytes that belong to the object of this number and to no other."""
    return random.Random(number).randbytes(nbytes)


def put(store: Store, number: int, data: bytes, timeout_s: float = 10.0) -> bool:
    return store.put(key(number), [data], len(data), timeout_s)


def get(store: Store, number: int, timeout_s: float = 10.0) -> bytes | None:
    fetched = store.get(key(number), timeout_s)
    if fetched is None:
        return None
    with fetched:
        return bytes(fetched.data)


@contextlib.contextmanager
def opened(
    extra: dict[str, object], max_object_bytes: int = 4 * MIB, **settings
) -> Iterator[Store]:
    """A store that is closed afterwards, with all of its memory back where it belongs."""
    store = open_store(extra, max_object_bytes=max_object_bytes, **settings)
    try:
        yield store
    finally:
        store.close()


def idle_within(store: Store, seconds: float = 5.0) -> bool:
    """Whether nothing of the staging pool is in use any more, the hot cache apart."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        held = sum(obj.get_physical_size() for obj in store._pool.hot_cache.values())
        free = store._pool.free_bytes() + held
        if store._budget.in_use == 0 and free == store._config.pool_bytes:
            return True
        time.sleep(0.01)
        if deadline - time.monotonic() < seconds / 2:
            gc.collect()  # what a cancelled call of LMCache's held comes back with its frame
    return False


def wait_for(condition, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def fork(work: Callable[..., None], *args: object) -> int:
    """Runs `work` in a copy of this process, which must have no threads yet. Returns its id.

    A new process would spend seconds on importing LMCache.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work(*args)
            status = 0
        finally:
            os._exit(status)
    return pid


def succeeded(pid: int) -> bool:
    """Waits for a forked process."""
    return os.waitpid(pid, 0)[1] == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A subprocess that listens on a port of loopback. May be killed and started again."""

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        self._command = command
        self._log = log
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), 1),
            ):
                return
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"{self._command} does not listen:\n{self._log.read_text()}")

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


def redis_server(directory: Path, *options: str) -> Server:
    binary = shutil.which("redis-server")
    if binary is None:
        raise RuntimeError("redis-server is missing: apt-get install redis-server")
    port = free_port()
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory)]
    command += ["--save", "", "--appendonly", "no", *options]
    return Server(command, port, directory / f"redis-{port}.log")


def lm_server(directory: Path) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port)]
    return Server(command, port, directory / f"lm-{port}.log")


def s3_server(directory: Path) -> Server:
    port = free_port()
    script = Path(__file__).parent / "s3_server.py"
    command = [sys.executable, str(script), str(port), "kv-cache"]
    return Server(command, port, directory / f"s3-{port}.log")


def s3(port: int, **more: object) -> dict[str, object]:
    """Settings of the store that is the bucket of `s3_server`."""
    extra_config = {
        "s3_region": "us-east-1",
        "disable_tls": True,
        "s3_prefer_http2": False,
        "s3_num_io_threads": 4,
        "aws_access_key_id": "key",
        "aws_secret_access_key": "secret",
        **more,
    }
    return {"lmcache.remote_url": f"s3://127.0.0.1:{port}", "lmcache.extra_config": extra_config}


def mooncake_master(directory: Path) -> Server:
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        raise RuntimeError(
            "Mooncake needs libibverbs.so.1, which is missing: apt-get install libibverbs1"
        ) from error
    from mooncake import __file__ as package

    port = free_port()
    command = [str(Path(package).parent / "mooncake_master"), "--rpc_address=127.0.0.1"]
    command += [f"--rpc_port={port}", f"--metrics_port={free_port()}"]
    return Server(command, port, directory / f"mooncake-{port}.log")


def mooncake(port: int, **more: object) -> dict[str, object]:
    """Settings of a store with memory of this process, and that master."""
    extra_config = {
        "mooncake_global_segment_size": 64 * MIB,
        "mooncake_local_buffer_size": 32 * MIB,
        **more,
    }
    return {
        "lmcache.remote_url": f"mooncakestore://127.0.0.1:{port}",
        "lmcache.extra_config": extra_config,
    }


class BlackHole:
    """Accepts connections and never says a word."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])

    def close(self) -> None:
        self._socket.close()
