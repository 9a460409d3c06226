"""LMCache's own list of backends: each one works with frames, or says at start-up why it cannot.

What works is run against real servers in the other storage tests. Here nothing may be missing: a
backend that a later LMCache brings makes these tests fail until somebody has decided about it.
"""

import ast
import importlib
import logging
import re
import time
from pathlib import Path

import pytest
import yaml

from storage_helpers import MIB, content, free_port, get, opened, put, redis_server, wait_for
from vllm_splitzip.errors import SettingError
from vllm_splitzip.storage import open_store
from vllm_splitzip.storage.quiet import quiet_lmcache
from vllm_splitzip.storage.schemes import (
    PAGED,
    REFUSED,
    REFUSED_EXTRA,
    REFUSED_SETTINGS,
    SUPPORTED,
    TRIED,
    UNTRIED,
)

with quiet_lmcache():
    from lmcache.v1 import storage_backend
    from lmcache.v1.storage_backend.connector import ConnectorAdapter
    from lmcache.v1.utils.subclass_discovery import discover_subclasses

    ADAPTERS = [
        found()
        for found in discover_subclasses(
            "lmcache.v1.storage_backend.connector",
            ConnectorAdapter,
            module_filter=lambda name: name.endswith("_adapter"),
            require_defined_in_module=False,
        )
    ]

    from vllm_splitzip.storage.config import load_config

LMCACHE_SOURCE = "".join(
    path.read_text() for path in Path(storage_backend.__file__).parent.rglob("*.py")
)

# Schemes that LMCache's adapters take beside the one in their `schema`.
MORE = {"RedisConnectorAdapter": ("rediss", "unix"), "BigtableConnectorAdapter": ("bigtable",)}
PLUGIN_TYPES = ("fs", "redis", "mooncakestore", "hf3fs", "bigtable", "hfbucket")


def schemes_of(adapter) -> set[str]:
    """Those that it can parse, found by asking it."""
    own = adapter.schema.partition("://")[0]
    candidates = {own, *MORE.get(type(adapter).__name__, ()), *SUPPORTED, *REFUSED}
    return {name for name in candidates - {"plugin"} if adapter.can_parse(f"{name}://")}


def test_every_scheme_that_an_adapter_of_lmcaches_takes_is_decided():
    assert ADAPTERS
    known = {name for adapter in ADAPTERS for name in schemes_of(adapter)}
    # hfbucket has an adapter for plugin:// only.
    assert known | {"hfbucket"} == {*SUPPORTED, *REFUSED}
    for adapter in ADAPTERS:
        plugins = [name for name in PLUGIN_TYPES if adapter.can_parse(f"plugin://{name}")]
        assert schemes_of(adapter) or plugins, adapter


def backend_classes() -> dict[str, str]:
    """Class and file of each storage backend in LMCache's package, read from its source: some
    cannot be imported here."""
    found = {}
    root = Path(storage_backend.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            bases = [ast.unparse(base) for base in getattr(node, "bases", [])]
            if any(base.endswith(("BackendInterface", "PluginInterface")) for base in bases):
                found[node.name] = str(path.relative_to(root))
    return found


# What switches each of them on, in LMCache's configuration.
BACKENDS = {
    "LocalCPUBackend": "local_cpu",
    "LocalDiskBackend": "local_disk",
    "RemoteBackend": "remote_url",
    "DaxBackend": "storage_plugins",
    "RustRawBlockBackend": "storage_plugins",
    "GdsBackend": "gds_path",
    "MaruBackend": "maru_path",
    "P2PBackend": "enable_p2p",
    "PDBackend": "enable_pd",
    "PDBackendAsync": "enable_pd",
    "NixlStorageBackend": "enable_nixl_storage",
    "AuditBackend": "audit_backend_enabled",
}
INTERFACES = {"AllocatorBackendInterface", "StoragePluginInterface"}
WORK = {"local_cpu", "local_disk", "remote_url", "storage_plugins"}


def test_every_storage_backend_of_lmcaches_is_decided():
    assert set(backend_classes()) - INTERFACES == set(BACKENDS)
    assert set(BACKENDS.values()) - WORK <= {*REFUSED_SETTINGS, *REFUSED_EXTRA}


@pytest.mark.parametrize("scheme", sorted(REFUSED))
def test_a_scheme_that_cannot_hold_frames_is_refused_with_the_reason(scheme):
    with pytest.raises(SettingError) as caught:
        open_store({"lmcache.remote_url": f"{scheme}://host:1/x"}, max_object_bytes=MIB)
    message = str(caught.value)
    assert message.startswith(f"lmcache.remote_url='{scheme}://host:1/x': LMCache's {scheme} backe")
    assert "Allowed: fs://" in message


@pytest.mark.parametrize("name", sorted(set(PLUGIN_TYPES) & set(REFUSED)))
def test_a_plugin_type_that_cannot_hold_frames_is_refused_with_the_reason(name):
    with pytest.raises(SettingError, match=rf"remote_storage_plugins='{name}\.a': LMCache's"):
        open_store({"lmcache.remote_storage_plugins": f"{name}.a"}, max_object_bytes=MIB)


@pytest.mark.parametrize("name", sorted(REFUSED_SETTINGS))
def test_a_setting_of_lmcaches_engine_alone_is_refused_with_the_reason(name):
    value = {"enable_pd": True, "enable_p2p": True, "retrieve_locations": ["LocalDiskBackend"]}
    extra = {f"lmcache.{name}": value.get(name, "/somewhere")}
    with pytest.raises(SettingError, match=rf"^lmcache\.{name}=.*alone uses this, and it.*Leave"):
        open_store(extra, max_object_bytes=MIB)


@pytest.mark.parametrize("name", sorted(REFUSED_EXTRA))
def test_an_extra_setting_of_lmcaches_engine_alone_is_refused_with_the_reason(name):
    with pytest.raises(SettingError, match=rf"^lmcache\.extra_config\.{name}: .*Leave it out$"):
        open_store({"lmcache.extra_config": {name: True}}, max_object_bytes=MIB)


MISSING_PACKAGE = {"infinistore": "infinistore", "hf3fs": "hf3fs_fuse", "eic": "eic"}


@pytest.mark.parametrize("scheme", UNTRIED)
def test_a_scheme_that_nobody_has_tried_is_said_and_costs_hits_at_most(scheme, caplog):
    caplog.set_level(logging.WARNING, "vllm_splitzip")
    path = {"hf3fs": "/3fs", "sagemaker-hyperpod": "/a"}
    extra = {"lmcache.remote_url": f"{scheme}://127.0.0.1:{free_port()}{path.get(scheme, '')}"}
    package = MISSING_PACKAGE.get(scheme)
    if package is not None:
        with pytest.raises(ImportError):
            importlib.import_module(package)
        with pytest.raises(SettingError, match=rf"{scheme}://.*LMCache cannot use it: .*Error"):
            open_store(extra, max_object_bytes=MIB)
    else:
        with opened(extra) as store:
            began = time.monotonic()
            assert get(store, 1, 2.0) is None
            assert not put(store, 1, b"data", 2.0)
            assert time.monotonic() - began < 6.0
    assert f"has not been run with LMCache's {scheme} backend" in caplog.text


def test_a_tried_scheme_is_not_warned_about(caplog, tmp_path):
    assert not set(UNTRIED) & {*TRIED, *PAGED}
    with opened({"lmcache.remote_url": f"fs://h:0{tmp_path}"}):
        assert "has not been run" not in caplog.text


def test_redis_on_a_unix_socket(tmp_path):
    server = redis_server(tmp_path, "--unixsocket", str(tmp_path / "redis.sock"))
    try:
        with opened({"lmcache.remote_url": f"unix://{tmp_path}/redis.sock"}) as store:
            assert put(store, 1, content(1, 100_001))
            assert get(store, 1) == content(1, 100_001)
            assert get(store, 2) is None
    finally:
        server.kill()


def test_redis_cluster(tmp_path):
    import redis

    server = redis_server(tmp_path, "--cluster-enabled", "yes")
    try:
        with redis.Redis(port=server.port) as client:
            client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
            assert wait_for(lambda: client.cluster("INFO")["cluster_state"] == "ok")
        with opened({"lmcache.remote_url": f"redis-cluster://127.0.0.1:{server.port}"}) as store:
            for number in range(20):
                assert put(store, number, content(number, 50_000 + number))
            for number in range(20):
                assert get(store, number) == content(number, 50_000 + number)
            assert get(store, 99) is None
            assert store.health == "up"
            server.kill()
            assert wait_for(lambda: get(store, 1, 2.0) is None and store.health == "down")
    finally:
        server.kill()


def test_lmcaches_own_plugin_for_memory_that_is_mapped(tmp_path):
    # Its slots are as large as a whole chunk: as the greatest frame.
    with open(tmp_path / "dax", "wb") as file:
        file.truncate(64 * MIB)
    extra = {
        "lmcache.storage_plugins": ["dax"],
        "lmcache.extra_config": {
            "storage_plugin.dax.module_path": "lmcache.v1.storage_backend.plugins.dax_backend",
            "storage_plugin.dax.class_name": "DaxBackend",
            "dax.device_path": str(tmp_path / "dax"),
            "dax.max_dax_size": 1 / 16,
        },
    }
    with opened(extra) as store:
        for number, size in enumerate([1, 4097, 4 * MIB]):
            assert put(store, number, content(number, size))
            assert get(store, number) == content(number, size)
        assert get(store, 9) is None
        assert store.health == "up"


def test_external_loads_a_connector_by_its_module(tmp_path):
    url = "external://host:0/third_party_store.connector/?connector_name=Connector"
    extra = {"lmcache.remote_url": url, "lmcache.extra_config": {"theirs.directory": str(tmp_path)}}
    with opened(extra) as store:
        assert put(store, 1, content(1, 100_001))
        assert get(store, 1) == content(1, 100_001)


@pytest.mark.parametrize("target", ["s3://b", "mooncakestore://h:1", "audit://h:1"])
def test_what_cannot_be_behind_audit_is_said(target):
    extra = {
        "lmcache.remote_url": "audit://h:1",
        "lmcache.extra_config": {"audit_actual_remote_url": target},
    }
    with pytest.raises(SettingError, match="cannot be behind audit://"):
        open_store(extra, max_object_bytes=MIB)


@pytest.mark.parametrize(
    ("scheme", "name", "message"),
    [
        ("valkey", "valkey_password", r"extra_config\.valkey_password: LMCache .*redis://"),
        ("resp", "password", r"extra_config\.password: .*Add extra_config\.username"),
    ],
)
def test_a_password_that_lmcache_would_not_hand_over_is_said(scheme, name, message):
    extra = {"lmcache.remote_url": f"{scheme}://h:1", "lmcache.extra_config": {name: "x"}}
    with pytest.raises(SettingError, match=message):
        open_store(extra, max_object_bytes=MIB)


EXAMPLES = sorted((Path(__file__).parent.parent / "examples" / "lmcache").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_a_configuration(path, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "vllm_splitzip")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(path))
    loaded = load_config({}, max_object_bytes=MIB)
    written = yaml.safe_load(path.read_text())
    assert set(written) <= set(loaded.lmcache._config_definitions)
    for key, value in written.get("extra_config", {}).items():
        assert loaded.lmcache.extra_config[key] == value
        assert (
            key in LMCACHE_SOURCE
            or key.startswith(("mooncake_", "splitzip_", "theirs."))
            or ("plugin." in key)
        )
    tiers = (loaded.hot, loaded.disk, [remote.scheme for remote in loaded.remotes])
    assert tiers == EXAMPLE_TIERS[path.stem]
    assert "vllm_splitzip" not in caplog.text


EXAMPLE_TIERS = {
    "local_cpu": (True, False, []),
    "local_disk": (False, True, []),
    "disk_and_remote": (True, True, ["redis"]),
    "fs": (False, False, ["fs"]),
    "lm": (False, False, ["lm"]),
    "redis": (False, False, ["redis"]),
    "resp": (False, False, ["resp"]),
    "valkey": (False, False, ["valkey"]),
    "s3": (False, False, ["s3"]),
    "mooncake": (False, False, ["mooncakestore"]),
    "mooncake_rdma": (False, False, ["mooncakestore"]),
    "remote_plugin": (False, False, ["plugin"]),
    "storage_plugin": (False, False, ["storage-plugin"]),
}


def test_there_is_an_example_for_each_remote_that_has_been_tried():
    assert {path.stem for path in EXAMPLES} == set(EXAMPLE_TIERS)
    shown = {scheme for _, _, schemes in EXAMPLE_TIERS.values() for scheme in schemes}
    alike = {"redis-cluster", "unix"}  # as redis
    assert shown | alike >= {*TRIED, *PAGED} - {"audit", "external"}


BACKENDS_PAGE = (Path(__file__).parent.parent / "docs" / "backends.md").read_text()


def test_the_documentation_tables_every_backend():
    row = r"^\| `([\w-]+)(?:://)?` \| (works|untried|refused) "
    rows = dict(re.findall(row, BACKENDS_PAGE, re.MULTILINE))
    verdicts = {"works": (*TRIED, *PAGED), "untried": UNTRIED, "refused": REFUSED}
    expected = {name: verdict for verdict, names in verdicts.items() for name in names}
    expected |= dict.fromkeys((*REFUSED_SETTINGS, *REFUSED_EXTRA), "refused")
    expected |= dict.fromkeys(
        ("local_cpu", "local_disk", "remote_storage_plugins", "storage_plugins"), "works"
    )
    assert rows == expected


def test_every_refusal_names_another_way():
    for why in (*REFUSED.values(), *REFUSED_SETTINGS.values(), *REFUSED_EXTRA.values()):
        assert any(word in why for word in ("Use ", "Start ", "Write ", "Configure ", "or use "))


def test_a_scheme_is_in_one_list_only():
    assert len({*SUPPORTED, *REFUSED}) == len(SUPPORTED) + len(REFUSED)
