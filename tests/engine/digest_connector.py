"""SplitZipConnector that also writes down a digest of every block it saves and loads.

The digests are taken from vLLM's own tensors, not through the package's view of them.
"""

import json
import os
from pathlib import Path

import torch
import xxhash

from vllm_splitzip.connector.facade import SplitZipConnector
from vllm_splitzip.connector.messages import NOT_WANTED


class DigestConnector(SplitZipConnector):
    """Writes one JSON line per frame: {"event", "key", "layers": {name: [digest per block]}}."""

    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        self.caches = kv_caches
        self.loading = {}
        self.group_of = {
            name: index
            for index, group in enumerate(self._kv_cache_config.kv_cache_groups)
            for name in group.layer_names
        }
        rank = self._vllm_config.parallel_config.rank
        self.path = Path(f"{os.environ['SPLITZIP_TEST_DIGESTS']}.{rank}")

    def wait_for_save(self):
        for save in self._step.saves:
            self.write("saved", save.key, save.tables)
        super().wait_for_save()

    def start_load_kv(self, forward_context, **kwargs):
        for job in self._step.loads:
            self.loading[job.request_id] = job
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids):
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving:
            job = self.loading.pop(request_id)
            if not self._failed_blocks and request_id not in results.failed_recving:
                for frame in job.frames:
                    self.write("loaded", frame.key, frame.tables)
        return results

    def write(self, event, key, tables):
        layers = {}
        for name, group in self.group_of.items():
            if tables[group] is not None:
                layers[name] = [self.digest(name, block) for block in tables[group]]
        with self.path.open("a") as file:
            file.write(json.dumps({"event": event, "key": key.hex(), "layers": layers}) + "\n")

    def digest(self, name, block):
        if block == NOT_WANTED:
            return None
        cache = self.caches[name]
        split = cache.shape[0] // self._kv_cache_config.num_blocks
        blocks = cache[block * split : (block + 1) * split].contiguous()
        return xxhash.xxh3_128_hexdigest(blocks.view(-1).view(torch.uint8).numpy())
