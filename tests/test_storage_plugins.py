"""A third party's package on disk, loaded as LMCache loads it: a backend, and two connectors."""

import shutil
import time
from pathlib import Path

import pytest

from storage_helpers import MIB, content, get, idle_within, key, opened, put, wait_for
from vllm_splitzip.errors import SettingError
from vllm_splitzip.storage import open_store

THIRD_PARTY = Path(__file__).parent / "third_party_store"


@pytest.fixture(autouse=True)
def _installed(tmp_path, monkeypatch):
    """The package where pip would have put it."""
    shutil.copytree(THIRD_PARTY, tmp_path / "site" / "third_party_store")
    monkeypatch.syspath_prepend(tmp_path / "site")


def storage_plugin(directory: Path, class_name: str = "Backend", **more: object) -> dict:
    return {
        "lmcache.storage_plugins": ["theirs"],
        "lmcache.extra_config": {
            "storage_plugin.theirs.module_path": "third_party_store.backend",
            "storage_plugin.theirs.class_name": class_name,
            "theirs.directory": str(directory),
            **more,
        },
    }


def remote_plugin(directory: Path, class_name: str = "Connector") -> dict:
    return {
        "lmcache.remote_storage_plugins": ["theirs.first"],
        "lmcache.extra_config": {
            "remote_storage_plugin.theirs.first.module_path": "third_party_store.connector",
            "remote_storage_plugin.theirs.first.class_name": class_name,
            "theirs.directory": str(directory),
        },
    }


@pytest.mark.parametrize(
    ("settings", "class_name"),
    [(storage_plugin, "Backend"), (remote_plugin, "Connector"), (remote_plugin, "Adapter")],
)
def test_objects_come_back_exactly_from_another_ones_store(tmp_path, settings, class_name):
    extra = settings(tmp_path / "objects", class_name)
    with opened(extra) as store:
        for number, size in enumerate([1, 4095, 100_001, 4 * MIB]):
            assert put(store, number, content(number, size))
        assert get(store, 1) == content(1, 4095)
        assert store.stats.hits == {"remote": 1}
        assert store.health == "up"
    assert len(list((tmp_path / "objects").iterdir())) == 4
    with opened(extra) as store:
        assert store.contains([key(3), key(4)], 10.0) == [True, False]
        assert get(store, 3) == content(3, 4 * MIB)
        assert get(store, 4) is None
        store.remove(key(3))
        assert store.contains([key(3)], 10.0) == [False]
        assert idle_within(store)
        assert "theirs" in store.describe()


def test_a_storage_plugin_comes_after_the_other_tiers(tmp_path):
    extra = storage_plugin(tmp_path / "objects") | {
        "lmcache.local_disk": str(tmp_path / "disk"),
        "lmcache.max_local_disk_size": 1,
        "lmcache.remote_url": f"fs://h:0{tmp_path}/fs",
    }
    with opened(extra) as store:
        assert store.describe().split(", then ")[1:] == [
            f"fs://h:0{tmp_path}/fs",
            "storage-plugin://theirs",
        ]
        assert put(store, 1, content(1, 5000))
        shutil.rmtree(tmp_path / "disk")
        shutil.rmtree(tmp_path / "fs")
        assert get(store, 1) == content(1, 5000)


@pytest.mark.parametrize("behaviour", ["raises", "forgets"])
def test_a_storage_plugin_that_fails_costs_hits(tmp_path, behaviour):
    with opened(storage_plugin(tmp_path / "objects", **{"theirs.behaviour": behaviour})) as store:
        assert not put(store, 1, content(1, 5000))
        assert get(store, 1) is None
        assert store.contains([key(1)], 5.0) == [False]
        assert store.health == {"raises": "down", "forgets": "read-only"}[behaviour]
        assert idle_within(store)


def test_a_storage_plugin_that_gives_back_another_kind_of_object_is_a_miss(tmp_path):
    extra = storage_plugin(tmp_path / "objects", **{"theirs.behaviour": "reshapes"})
    with opened(extra) as store:
        assert put(store, 1, content(1, 5000))
        assert get(store, 1) is None
        assert store.contains([key(1)], 5.0) == [False]
        assert store.health == "up"
        assert idle_within(store)


def test_a_storage_plugin_that_hangs_is_given_up_within_the_deadline(tmp_path):
    directory = tmp_path / "objects"
    with opened(storage_plugin(directory, **{"theirs.behaviour": "waits"})) as store:
        began = time.monotonic()
        assert get(store, 1, 1.1) is None
        assert time.monotonic() - began < 3.0
        assert store.health == "down"
        (directory / "go on").touch()
        assert wait_for(lambda: put(store, 1, content(1, 5000), 5.0), 20.0)
        assert get(store, 1) == content(1, 5000)
        assert idle_within(store)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"storage_plugin.theirs.class_name": None}, r"storage_plugins='theirs': extra_config"),
        ({"storage_plugin.theirs.module_path": "no_such"}, r"no_such\.Backend cannot be imported"),
        ({"storage_plugin.theirs.class_name": "Nobody"}, r"Nobody cannot be imported: Attribute"),
        (
            {"theirs.directory": None},
            r"storage_plugins='theirs': LMCache cannot make .*directory",
        ),
    ],
    ids=["no class", "no module", "other class", "constructor"],
)
def test_a_storage_plugin_that_cannot_be_made_stops_start_up(tmp_path, extra, message):
    with pytest.raises(SettingError, match=message):
        open_store(storage_plugin(tmp_path, **extra), max_object_bytes=MIB)
