"""A store that another user of LMCache shares: each finds its own objects, as they were."""

import contextlib
import json
import subprocess
import sys

from storage_helpers import (
    content,
    get,
    key,
    lm_server,
    mooncake,
    mooncake_master,
    opened,
    put,
    redis_server,
)

# LMCache as it is used without this package: ordinary KV cache in BF16, chunks of 256 tokens and
# one that is not full, through its own pool and connector. Layers are in two groups, so that its
# stored metadata have another length than those of frames; LMCache's server knows one group only.
THEIRS = """
import asyncio, json, sys, threading
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import CreateConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()

def call(coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)

def use(act, url, extra):
    groups = 1 if url.startswith("lm") else 2
    config = LMCacheEngineConfig.from_defaults(
        local_cpu=False, max_local_cpu_size=0.05, remote_url=url, extra_config=extra
    )
    metadata = LMCacheMetadata(
        model_name="meta-llama/Llama-3.1-8B", world_size=1, local_world_size=1, worker_id=0,
        local_worker_id=0, kv_dtype=torch.bfloat16, kv_shape=(2, 2, 256, 4, 64), chunk_size=256,
        role="worker",
    )
    metadata.get_num_groups = lambda: groups
    pool = LocalCPUBackend(config, metadata, "cpu")
    connector = CreateConnector(url, loop, pool, config, metadata)
    for number, tokens in enumerate((256, 256, 100)):
        key = CacheEngineKey(metadata.model_name, 1, 0, number, torch.bfloat16)
        shapes = [torch.Size([2, 2, tokens, 256])] * groups
        torch.manual_seed(number)
        wanted = torch.randint(0, 255, (groups * 2 * 2 * tokens * 512,), dtype=torch.uint8)
        if act == "put":
            obj = pool.allocate(shapes, [torch.bfloat16] * groups, MemoryFormat.KV_2LTD)
            obj.raw_data[:wanted.numel()].copy_(wanted)
            call(connector.put(key, obj))
        if connector.support_batched_get():
            (obj,) = call(connector.batched_get([key]))
        else:
            obj = call(connector.get(key))
        assert obj is not None, (url, number)
        assert obj.get_shapes() == shapes, (url, obj.get_shapes())
        assert torch.equal(obj.raw_data[:wanted.numel()], wanted), (url, number)
    return connector

act = sys.argv[1]
used = [use(act, url, extra) for url, extra in json.loads(sys.argv[2])]
print("ok", flush=True)
sys.stdin.read()  # what it holds of Mooncake's memory is part of the store
"""


@contextlib.contextmanager
def theirs(act: str, stores: list[tuple[str, dict[str, object]]]):
    """The other one's process, from when it has put or got all of its objects."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", THEIRS, act, json.dumps(stores)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert "ok\n" in iter(process.stdout.readline, "")
            yield
        finally:
            process.kill()


def test_both_find_what_they_stored(tmp_path):
    with contextlib.ExitStack() as stack:
        redis, lm, master = redis_server(tmp_path), lm_server(tmp_path), mooncake_master(tmp_path)
        for server in (redis, lm, master):
            stack.callback(server.kill)
        remote_urls = (
            f"fs://localhost:0{tmp_path}/store",
            f"redis://127.0.0.1:{redis.port}",
            f"lm://127.0.0.1:{lm.port}",
        )
        settings = [{"lmcache.remote_url": url} for url in remote_urls]
        settings.append(mooncake(master.port))
        shared = [
            (
                str(each["lmcache.remote_url"]),
                {
                    "mooncake_master_server_addr": f"127.0.0.1:{master.port}",
                    "mooncake_metadata_server": "P2PHANDSHAKE",
                    "mooncake_local_hostname": "127.0.0.1",
                    "mooncake_global_segment_size": 1 << 25,
                    "mooncake_local_buffer_size": 1 << 25,
                },
            )
            for each in settings
        ]
        stores = [stack.enter_context(opened(each)) for each in settings]
        for store in stores:
            for number in range(5):
                assert put(store, number, content(number, 10_000 + number))
        with theirs("put", shared):
            for store in stores:
                for number in range(5):
                    assert get(store, number) == content(number, 10_000 + number)
                # Hashes 0 to 2 under their model's name are not ours.
                assert store.contains([key(0), key(5)], 5.0) == [True, False]
                for number in (1, 5, 6):
                    assert put(store, number, content(number, 10_000 + number))
            with theirs("get", shared):
                for store in stores:
                    assert get(store, 6) == content(6, 10_006)
                    assert store.health == "up"
