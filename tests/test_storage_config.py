"""Settings come from where LMCache's users put them; what cannot work is said at start-up."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from storage_helpers import MIB, get, key, opened, put
from vllm_splitzip.errors import SettingError
from vllm_splitzip.storage import open_store
from vllm_splitzip.storage.quiet import quiet_lmcache


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for name in list(os.environ):
        if name.startswith("LMCACHE_"):
            monkeypatch.delenv(name)


def config(extra, **settings):
    with quiet_lmcache():
        from vllm_splitzip.storage.config import load_config
    return load_config(extra, **{"max_object_bytes": MIB, **settings})


def urls(loaded) -> list[str]:
    return [remote.url for remote in loaded.remotes]


def test_nothing_set_is_a_directory_with_a_modest_pool(tmp_path):
    loaded = config({}, cache_dir=tmp_path)
    assert urls(loaded) == [f"fs://localhost:0{tmp_path}"]
    assert loaded.limit_bytes == 10 << 30
    assert loaded.pool_bytes == 64 * MIB
    assert not loaded.hot
    assert not loaded.disk


def test_the_pool_grows_with_the_objects(tmp_path):
    assert config({}, cache_dir=tmp_path, max_object_bytes=100 * MIB).pool_bytes == 600 * MIB


def test_file_then_variables_then_keys(tmp_path, monkeypatch):
    file = tmp_path / "lmcache.yaml"
    file.write_text(
        "remote_url: fs://h:1/from/file\nmax_local_cpu_size: 1.5\nlocal_cpu: false\n"
        "extra_config:\n  fs_connector_relative_tmp_dir: mine\n"
    )
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    assert urls(config({})) == ["fs://h:1/from/file"]
    assert config({}).pool_bytes == 1536 * MIB
    monkeypatch.setenv("LMCACHE_REMOTE_URL", "fs://h:1/from/variable")
    assert urls(config({})) == ["fs://h:1/from/variable"]
    loaded = config({"lmcache.remote_url": "fs://h:1/from/key", "codec": "fast"})
    assert urls(loaded) == ["fs://h:1/from/key"]
    assert loaded.limit_bytes is None
    assert not loaded.hot
    assert loaded.lmcache.extra_config["fs_connector_relative_tmp_dir"] == "mine"
    assert loaded.lmcache.extra_config["save_chunk_meta"] is True


@pytest.mark.parametrize(
    ("extra", "hot", "disk", "remotes"),
    [
        ({"local_cpu": True}, True, False, 0),
        ({"local_cpu": False}, False, False, 1),
        ({"max_local_cpu_size": 1}, True, False, 1),
        ({"chunk_size": 512}, False, False, 1),
        ({"local_disk": "/d", "max_local_disk_size": 1}, False, True, 0),
        ({"local_cpu": True, "remote_url": "redis://h:1"}, True, False, 1),
        ({"remote_storage_plugins": "redis,fs.mine", "remote_url": "lm://h:1"}, False, False, 3),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_tiers_are_those_that_somebody_asked_for(tmp_path, extra, hot, disk, remotes):
    loaded = config({f"lmcache.{k}": v for k, v in extra.items()}, cache_dir=tmp_path)
    assert (loaded.hot, loaded.disk, len(loaded.remotes)) == (hot, disk, remotes)


def test_local_cpu_has_lmcaches_own_default_size(tmp_path):
    assert config({"lmcache.local_cpu": True}).pool_bytes == 5 << 30


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"lmcache.remote_ulr": "x"}, r"lmcache\.remote_ulr='x'.*Did you mean lmcache\.remote_url"),
        ({"lmcache.max_local_cpu_size": "big"}, r"max_local_cpu_size='big'.*a number"),
        ({"lmcache.max_local_cpu_size": -1}, r"max_local_cpu_size=-1\.0.*greater than 0"),
        ({"lmcache.max_local_cpu_size": float("nan")}, r"max_local_cpu_size=nan"),
        ({"lmcache.max_local_disk_size": -1}, r"max_local_disk_size=-1\.0"),
        ({"lmcache.local_disk": "/d"}, r"local_disk='/d': max_local_disk_size is not given"),
        ({"lmcache.max_local_cpu_size": 1e-4}, r"max_local_cpu_size=0\.0001: one frame"),
        ({"lmcache.remote_url": "ftp://h:1"}, r"remote_url='ftp://h:1'.*no backend.*redis://"),
        ({"lmcache.remote_url": "nonsense"}, r"remote_url='nonsense': no scheme"),
        (
            {"lmcache.remote_storage_plugins": "s3"},
            r"lmcache\.remote_storage_plugins='s3': .*no s",
        ),
        ({"lmcache.remote_storage_plugins": "other.x"}, r"remote_storage_plugins='other\.x'"),
        (
            {"lmcache.remote_url": "audit://h:1"},
            r"remote_url='audit://h:1': extra_config has no audit_actu",
        ),
        (
            {
                "lmcache.remote_storage_plugins": "theirs",
                "lmcache.extra_config": {
                    "remote_storage_plugin.theirs.module_path": "no_such_module",
                    "remote_storage_plugin.theirs.class_name": "Connector",
                },
            },
            r"theirs: no_such_module\.Connector cannot be imported: ModuleNotFoundError",
        ),
        (
            {"lmcache.storage_plugins": "mine"},
            r"lmcache\.storage_plugins='mine': extra_config",
        ),
        ({"lmcache.extra_config": "{"}, r"lmcache\.extra_config='\{'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_said_with_key_value_and_what_is_allowed(extra, message):
    with pytest.raises(SettingError, match=message):
        config(extra)


@pytest.mark.parametrize("nbytes", [0, 1 << 31])
def test_objects_that_lmcache_cannot_describe_are_refused(nbytes):
    with pytest.raises(SettingError, match="smaller chunk_tokens"):
        config({}, max_object_bytes=nbytes)


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), "10", True])
def test_limit_must_be_a_positive_number(value):
    with pytest.raises(SettingError, match="max_store_gib="):
        config({}, max_store_gib=value)


def test_passwords_do_not_reach_the_message():
    with pytest.raises(SettingError) as caught:
        config({"lmcache.remote_url": "azure://me:hunter2@h:1"})
    assert "hunter2" not in str(caught.value)
    loaded = config({"lmcache.remote_url": "redis://me:hunter%2F2@h:1"})
    assert loaded.remotes[0].label == "redis://***@h:1"


WRONG = [
    ("local_cpu", "yes", r"'yes'\. Allowed: true or false"),
    ("local_cpu", "maybe", r"'maybe'\. Allowed: true or false"),
    ("local_cpu", 2, r"2\. Allowed: true or false"),
    ("local_cpu", None, r"None\. Allowed: true or false"),
    ("local_disk", True, r"True\. Allowed: the path of a directory"),
    ("local_disk", 7, r"7\. Allowed: the path of a directory"),
    ("local_disk", ["/a", "/b"], r"\['/a', '/b'\]\. Allowed: the path of a directory"),
    ("max_local_disk_size", True, r"True\. Allowed: a number"),
    ("max_local_cpu_size", "lots", r"'lots' \(.*\)\. Allowed: a number"),
    ("max_local_cpu_size", 10**400, r"1000.*….*\. Allowed: a number"),
    ("chunk_size", "x", r"'x' \(.*\)\. Allowed: a whole number"),
    ("chunk_size", 1.5, r"1\.5\. Allowed: a whole number"),
    ("chunk_size", True, r"True\. Allowed: a whole number"),
    ("chunk_size", None, r"None\. Allowed: a whole number"),
    ("chunk_size", 0, r"0\. Allowed: a number of tokens, at least 1"),
    ("remote_url", True, r"True\. Allowed: text"),
    ("remote_url", ["redis://h:1"], r"\['redis://h:1'\]\. Allowed: text"),
    ("remote_storage_plugins", 5, r"5\. Allowed: a list of text"),
    ("remote_storage_plugins", [5], r"\[5\]\. Allowed: a list of text"),
    ("p2p_init_ports", [1, True], r"\[1, True\]\. Allowed: a list of whole numbers"),
    ("extra_config", 5, r"5\. Allowed: a mapping"),
    ("extra_config", [1], r"\[1\]\. Allowed: a mapping"),
    ("extra_config", "{", r"'\{' \(Expecting .*\)\. Allowed: a mapping"),
    ("extra_config", "[1]", r"'\[1\]'\. Allowed: a mapping"),
    ("extra_config", {"splitzip_page_byte": 5}, r"\.splitzip_page_byte=5.*splitzip_page_bytes\?"),
    ("hidden_states_retrieve_mode", "best", r"'best' \(.*prefix_strict"),
]


@pytest.mark.parametrize(
    ("source", "name", "value", "message"),
    [
        (source, *wrong)
        for wrong in WRONG
        for source in ("file", "variable", "key")
        if source != "variable" or isinstance(wrong[1], str)
    ],
)
def test_a_value_that_lmcache_would_replace_is_refused(
    tmp_path, monkeypatch, source, name, value, message
):
    extra = {}
    if source == "file":
        file = tmp_path / "lmcache.yaml"
        file.write_text(yaml.safe_dump({name: value}))
        monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
        label = f"{file}: {name}"
    elif source == "variable":
        label = f"LMCACHE_{name.upper()}"
        monkeypatch.setenv(label, value)
    else:
        label = f"lmcache.{name}"
        extra = {label: value}
    with pytest.raises(SettingError, match=f"^{re.escape(label)}=?{message}"):
        config(extra)


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("local_cpu", "False", False),
        ("local_cpu", 1, True),
        ("max_local_cpu_size", "1.5", 1.5),
        ("max_local_cpu_size", 2, 2.0),
        ("chunk_size", 512.0, 512),
        ("chunk_size", "512", 512),
        ("lmcache_instance_id", 7, "7"),
        ("remote_storage_plugins", "fs.a, redis", ["fs.a", "redis"]),
        ("remote_storage_plugins", "", []),
        ("p2p_init_ports", 5, [5]),
        ("p2p_init_ports", "5,6", [5, 6]),
        ("blend_thresholds", [1, 0.5], [1.0, 0.5]),
        ("local_disk", None, None),
        ("extra_config", None, {"save_chunk_meta": True}),
        ("extra_config", '{"a": 1}', {"a": 1, "save_chunk_meta": True}),
    ],
)
def test_every_way_of_lmcache_to_write_a_value_is_taken(tmp_path, monkeypatch, name, value, read):
    assert getattr(config({f"lmcache.{name}": value}).lmcache, name) == read
    file = tmp_path / "lmcache.yaml"
    file.write_text(yaml.safe_dump({name: value}))
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    assert getattr(config({}).lmcache, name) == read
    if isinstance(value, str):
        monkeypatch.setenv("LMCACHE_CONFIG_FILE", "")
        monkeypatch.setenv(f"LMCACHE_{name.upper()}", value)
        assert getattr(config({}).lmcache, name) == read


def test_a_path_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with opened({"lmcache.local_disk": "rel", "lmcache.max_local_disk_size": 1}) as store:
        assert put(store, 1, b"data")
    assert len(list((tmp_path / "rel").glob("*.pt"))) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("remote_ulr: redis://h:1", r"remote_ulr='redis://h:1': LMCache has no.*mean remote_url\?"),
        ("lmcache.local_disk: /d", r"Did you mean local_disk\?"),
        ("enable_xpyd: true", r"Did you mean enable_pd\?"),
        ("5: 6", r": 5=6: LMCache has no such setting\.$"),
        ("remote_ulr: redis://me:hunter2@h:1", r"remote_ulr='redis://\*\*\*@h:1'"),
        ("a: [", "cannot be read: .*line 1.*Expected: YAML"),
        (b"\xff\xfe\x00junk", "cannot be read: .*Expected: YAML in UTF-8"),
        (b"a: \xfc", "cannot be read: .*Expected: YAML in UTF-8"),
        (None, "cannot be read: .*No such file"),
        ("- a list", r"holds YAML=\['a list'\]. Expected: .*'name: value'"),
        ("just text", r"holds YAML='just text'. Expected: .*'name: value'"),
    ],
)
def test_a_configuration_file_that_cannot_be_right_is_said(tmp_path, monkeypatch, text, message):
    file = tmp_path / "lmcache.yaml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    with pytest.raises(SettingError, match=message) as caught:
        config({})
    assert str(file) in str(caught.value)


def test_old_names_and_settings_of_other_parts_are_taken(tmp_path, monkeypatch):
    file = tmp_path / "lmcache.yaml"
    file.write_text("ec_local_disk: /d\nec: {local_cpu: true}\nnixl_peer_port: 1\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    monkeypatch.setenv("LMCACHE_PLUGIN_LOCATIONS", "/plugins")
    assert config({}, cache_dir=tmp_path).lmcache.runtime_plugin_locations == ["/plugins"]


def test_an_unknown_variable_is_said_once(monkeypatch, caplog):
    monkeypatch.setenv("LMCACHE_REMOTE_ULR", "redis://me:hunter2@h:1")
    for _ in range(3):
        config({})
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "LMCACHE_REMOTE_ULR is not used: LMCache has no such setting. "
        "Did you mean LMCACHE_REMOTE_URL?"
    ]


def test_no_variable_that_lmcache_reads_is_called_unknown(monkeypatch, caplog):
    config({})  # imports what looks at some of them
    import lmcache

    found = set()
    for file in Path(lmcache.__file__).parent.rglob("*.py"):
        found |= set(re.findall(r"""["'](LMCACHE_[A-Z0-9_]*[A-Z0-9])["']""", file.read_text()))
    assert "LMCACHE_TRACK_USAGE" in found
    for name in found - {"LMCACHE_CONFIG_FILE"}:
        monkeypatch.setenv(name, "1")
    config({})
    assert not caplog.records


def test_what_lmcache_itself_refuses_is_said():
    with pytest.raises(SettingError, match=r"LMCache refuses.*controller_pull_url is required"):
        config({"lmcache.enable_controller": True, "lmcache.lmcache_instance_id": "a"})


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("fs://relative/path", "fs:///PATH"),
        ("fs://", "fs:///PATH"),
        ("lm://", "lm://HOST:PORT"),
        ("lm://h", "lm://HOST:PORT"),
        ("lm://h:99999", "lm://HOST:PORT"),
        ("resp://", "resp://HOST:PORT"),
        ("valkey://h", "valkey://HOST:PORT"),
        ("s3://", "s3://BUCKET"),
        ("unix://", "unix:///PATH"),
        ("unix://relative.sock", "unix:///PATH"),
    ],
)
def test_an_address_with_a_part_missing_is_refused(url, allowed):
    with pytest.raises(SettingError, match=rf"lmcache\.remote_url='{url}': not a.*ed: {allowed}"):
        config({"lmcache.remote_url": url})
    audited = {"audit_actual_remote_url": url}
    with pytest.raises(SettingError, match=r"audit_actual_remote_url='.*': not a whole address"):
        config({"lmcache.remote_url": "audit://h:1", "lmcache.extra_config": audited})


@pytest.mark.parametrize("url", ["fs://{path}", "fs://host:0{path}", "fs://host:7/{path}"])
def test_every_way_to_write_a_path(tmp_path, url):
    extra = {"lmcache.remote_url": url.format(path=tmp_path / "store")}
    with opened(extra) as store:
        assert put(store, 1, b"data")
        assert len(list((tmp_path / "store").glob("*.data"))) == 1


def test_fs_as_a_plugin(tmp_path):
    extra = {
        "lmcache.remote_storage_plugins": ["fs.near", "fs.far"],
        "lmcache.extra_config": {
            "remote_storage_plugin.fs.near.base_path": str(tmp_path / "near"),
            "remote_storage_plugin.fs.far.base_path": f"{tmp_path}/far1,{tmp_path}/far2",
        },
    }
    with opened(extra) as store:
        assert put(store, 1, b"data")
        assert get(store, 1) == b"data"
        assert [path.parent.name for path in sorted(tmp_path.rglob("*.data"))] == ["far2", "near"]
        store.remove(key(1))
        assert not list(tmp_path.rglob("*.data"))


def test_a_path_that_cannot_be_made_stops_start_up(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="LMCache cannot use it: NotADirectoryError"):
        open_store({"lmcache.remote_url": f"fs://h:0{tmp_path}/file/below"}, max_object_bytes=MIB)
    extra = {"lmcache.local_disk": f"{tmp_path}/file/below", "lmcache.max_local_disk_size": 1}
    with pytest.raises(SettingError, match=r"local_disk='.*below': LMCache cannot use it: NotADi"):
        open_store(extra, max_object_bytes=MIB)
    for path in ("/proc/below", f"{tmp_path}/{'x' * 300}"):
        with pytest.raises(SettingError, match=r"LMCache cannot use it: (FileNotFound|OS)Error"):
            open_store({"lmcache.remote_url": f"fs://h:0{path}"}, max_object_bytes=MIB)
    with pytest.raises(SettingError, match="no path"):
        open_store({"lmcache.remote_url": "fs://h:0"}, max_object_bytes=MIB)


def test_a_pool_that_cannot_be_had_stops_start_up():
    extra = {"lmcache.local_cpu": True, "lmcache.max_local_cpu_size": 1e8}
    with pytest.raises(SettingError, match=r"max_local_cpu_size=100000000\.0: LMCache cannot"):
        open_store(extra, max_object_bytes=MIB)


def test_another_codec_of_lmcaches_is_left_out_and_said(caplog):
    config({"lmcache.remote_serde": "cachegen"})
    assert "remote_serde='cachegen' is not used" in caplog.text


def test_a_backend_whose_package_is_missing_stops_start_up():
    with pytest.raises(SettingError, match=r"infinistore://h:1: LMCache cannot use it: .*Error"):
        open_store({"lmcache.remote_url": "infinistore://h:1"}, max_object_bytes=MIB)


def test_audit_shows_what_goes_to_another_backend(tmp_path):
    extra = {
        "lmcache.remote_url": "audit://h:1",
        "lmcache.extra_config": {"audit_actual_remote_url": f"fs://h:0{tmp_path}"},
    }
    with opened(extra) as store:
        assert put(store, 1, b"data")
        assert get(store, 1) == b"data"
        assert len(list(tmp_path.glob("*.data"))) == 1


@pytest.mark.parametrize("level", [None, "INFO"])
def test_lmcaches_log_is_quiet_unless_somebody_asks(tmp_path, level):
    code = """
from storage_helpers import *
from pathlib import Path
with opened({}, cache_dir=Path(sys.argv[1])) as store:
    put(store, 1, b"data")
    get(store, 1)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    if level is not None:
        environment["LMCACHE_LOG_LEVEL"] = level
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    lines = [line for line in run.stderr.splitlines() if "LMCache" in line]
    assert bool(lines) == (level is not None)
    assert run.stdout == ""


def test_loggers_of_lmcache_that_exist_keep_their_level(tmp_path):
    mine = logging.getLogger("lmcache.v1.config")
    before = mine.level
    with opened({}, cache_dir=tmp_path):
        pass
    assert mine.level == before
    assert "LMCACHE_LOG_LEVEL" not in os.environ
