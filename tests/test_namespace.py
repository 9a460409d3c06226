"""The namespace: the same for engines that mean the same, another for any that does not.

The configurations are stand-ins with just what is read; real ones are behind the engine tests.
"""

from types import SimpleNamespace

import pytest

from vllm_splitzip.connector.geometry import Geometry, Part
from vllm_splitzip.connector.namespace import namespace_of

GEOMETRY = Geometry(32, 32, 8, (1,), (Part(0, None, (0,)),))
LAYERS = [("layer0", "bf16", (3, 32, 128), 0), ("layer1", "bf16", (3, 32, 128), 0)]


class Config:
    _commit_hash = None

    def __init__(self, **values):
        self.values = {"hidden_size": 576, "rope_theta": 10_000, **values}

    def to_dict(self):
        return dict(self.values)


@pytest.fixture
def weights(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    return directory


def engine(model, config=None, **changes):
    values = {
        "dtype": "torch.bfloat16",
        "quantization": None,
        "revision": None,
        "seed": 0,
        "cache_dtype": "auto",
        "load_format": "auto",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        **changes,
    }
    names = SimpleNamespace(**values)
    names.model, names.hf_config = str(model), config or Config()
    return SimpleNamespace(
        model_config=names, cache_config=names, load_config=names, parallel_config=names
    )


def namespace(model, config=None, geometry=GEOMETRY, layers=LAYERS, packing="tokens", **changes):
    return namespace_of(engine(model, config, **changes), geometry, layers, packing)


def test_it_is_short_and_plain(weights):
    name = namespace(weights)
    assert name == namespace(weights)
    assert name.startswith("sz1-")
    assert len(name) == 20


def test_the_same_model_under_another_path_is_the_same(weights, tmp_path):
    other = tmp_path / "elsewhere"
    other.symlink_to(weights)
    config = Config(_name_or_path="/a/b", transformers_version="5.0")
    assert namespace(other, config) == namespace(weights)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "torch.float16"},
        {"cache_dtype": "fp8_e5m2"},
        {"quantization": "awq"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"packing": "cpu-amx"},
        {"config": Config(rope_theta=20_000)},
        {"layers": LAYERS[:1]},
        {"layers": [(*LAYERS[0][:2], (3, 16, 128), 0), LAYERS[1]]},
        {"geometry": Geometry(32, 32, 4, (1,), (Part(0, None, (0,)),))},
        {"load_format": "dummy"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_the_bytes_changes_it(weights, change):
    assert namespace(weights, **change) != namespace(weights)


def test_other_weights_of_the_same_size_change_it(weights):
    before = namespace(weights)
    path = weights / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert namespace(weights) != before


def test_dummy_weights_differ_by_seed(weights):
    names = {namespace(weights, load_format="dummy", seed=seed) for seed in (0, 1)}
    assert len(names) == 2


def test_a_model_of_a_hub_is_named_by_revision():
    names = {namespace("org/model", revision=revision) for revision in (None, "a", "b")}
    assert len(names) == 3
