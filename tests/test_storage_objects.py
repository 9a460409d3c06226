"""Every tier gives back exactly the bytes that were put, whatever their number."""

import numpy as np
import pytest

from storage_helpers import (
    MIB,
    content,
    get,
    idle_within,
    key,
    lm_server,
    mooncake,
    mooncake_master,
    opened,
    put,
    redis_server,
    s3,
    s3_server,
)
from vllm_splitzip.errors import StoreError
from vllm_splitzip.storage import ObjectKey

SIZES = [1, 2, 3, 7, 4095, 4096, 4097, 8191, 65_537, 1_000_003, 4 * MIB]


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory):
    server = redis_server(tmp_path_factory.mktemp("redis"), "--requirepass", "not/secret")
    yield server.port
    server.kill()


@pytest.fixture(scope="module")
def open_redis_port(tmp_path_factory):
    server = redis_server(tmp_path_factory.mktemp("redis"))
    yield server.port
    server.kill()


@pytest.fixture(scope="module")
def lm_port(tmp_path_factory):
    server = lm_server(tmp_path_factory.mktemp("lm"))
    yield server.port
    server.kill()


@pytest.fixture(scope="module")
def s3_port(tmp_path_factory):
    server = s3_server(tmp_path_factory.mktemp("s3"))
    yield server.port
    server.kill()


@pytest.fixture(scope="module")
def mooncake_port(tmp_path_factory):
    server = mooncake_master(tmp_path_factory.mktemp("mooncake"))
    yield server.port
    server.kill()


TIERS = ["default", "fs", "fs-two-paths", "cpu", "disk", "disk-fs", "cpu-disk-fs"]
TIERS += ["redis", "lm", "s3", "resp", "valkey", "mooncakestore"]


@pytest.fixture(params=TIERS)
def store(request, tmp_path):
    port_of = {
        "redis": "redis_port",
        "resp": "redis_port",
        "valkey": "open_redis_port",
        "lm": "lm_port",
        "s3": "s3_port",
        "mooncakestore": "mooncake_port",
    }
    server = port_of.get(request.param)
    port = request.getfixturevalue(server) if server else 0
    fs = {"lmcache.remote_url": f"fs://host:0{tmp_path}/fs"}
    cpu = {"lmcache.local_cpu": True, "lmcache.max_local_cpu_size": 0.1}
    disk = {"lmcache.local_disk": f"file://{tmp_path}/disk/", "lmcache.max_local_disk_size": 1}
    extra = {
        "default": {},
        "fs": fs,
        "fs-two-paths": {"lmcache.remote_url": f"fs://host:0{tmp_path}/one,{tmp_path}/two"},
        "cpu": cpu,
        "disk": disk,
        "disk-fs": disk | fs,
        "cpu-disk-fs": cpu | disk | fs,
        "redis": {"lmcache.remote_url": f"redis://:not%2Fsecret@127.0.0.1:{port}/0"},
        "lm": {"lmcache.remote_url": f"lm://127.0.0.1:{port}"},
        "s3": s3(port, splitzip_page_bytes=64 * 1024),
        "resp": {
            "lmcache.remote_url": f"resp://127.0.0.1:{port}",
            "lmcache.extra_config": {"username": "default", "password": "not/secret"},
        },
        "valkey": {"lmcache.remote_url": f"valkey://127.0.0.1:{port}"},
        "mooncakestore": mooncake(port),
    }[request.param]
    with opened(extra, cache_dir=tmp_path / "cache") as store:
        yield store


def test_exact_bytes(store):
    for number, size in enumerate(SIZES):
        assert put(store, number, content(number, size)), size
    for number, size in enumerate(SIZES):
        assert get(store, number) == content(number, size), size
    assert get(store, len(SIZES)) is None
    found = store.contains([key(n) for n in range(len(SIZES) + 1)], 10.0)
    assert found == [True] * len(SIZES) + [False]
    assert store.health == "up"
    assert idle_within(store)


def test_parts_of_any_shape_are_joined(store):
    array = np.arange(600, dtype=np.int16).reshape(20, 30)
    parts = [b"", b"a", bytearray(b"bcd"), array, memoryview(b"xyz")[1:], np.zeros((3, 0))]
    nbytes = 1 + 3 + 1200 + 2
    assert store.put(key(0), parts, nbytes, 10.0)
    assert get(store, 0) == b"abcd" + array.tobytes() + b"yz"


def test_keys_that_differ_in_any_field_name_different_objects(store):
    keys = [
        key(1),
        key(2),
        key(1, part=1),
        key(1, world_size=2),
        key(1, rank=1, world_size=2),
        key(1, part=1, world_size=2),
        key(1, part=1, rank=1, world_size=2),
        ObjectKey("sz1-other", key(1).chunk_hash),
    ]
    for number, each in enumerate(keys):
        assert store.put(each, [content(number, 99)], 99, 10.0)
    for number, each in enumerate(keys):
        with store.get(each, 10.0) as fetched:
            assert bytes(fetched.data) == content(number, 99)


def test_the_longest_key(store):
    longest = ObjectKey("sz1-" + "f" * 28, b"\xff" * 32, 9_999, 9_999, 10_000)
    assert store.put(longest, [content(1, 100_001)], 100_001, 10.0)
    with store.get(longest, 10.0) as fetched:
        assert bytes(fetched.data) == content(1, 100_001)
    assert store.contains([longest], 10.0) == [True]


def test_fetched_bytes_are_read_only_and_lent(store):
    assert put(store, 0, b"lent")
    fetched = store.get(key(0), 10.0)
    assert fetched is not None
    assert fetched.data.readonly
    assert store._budget.in_use > 0
    fetched.release()
    fetched.release()
    with pytest.raises(ValueError, match="released memoryview"):
        fetched.data.tobytes()
    assert idle_within(store)


def test_removed_objects_are_gone_until_put_again(store):
    assert put(store, 0, b"first")
    store.remove(key(0))
    assert get(store, 0) is None
    assert store.contains([key(0)], 10.0) == [False]
    assert put(store, 0, b"second")
    assert get(store, 0) == b"second"
    assert store.contains([key(0)], 10.0) == [True]
    store.remove(key(903))  # never was there


def test_objects_that_cannot_be_stored_are_refused(store):
    assert not put(store, 900, b"")
    assert not put(store, 901, bytes(4 * MIB + 1))
    with pytest.raises(StoreError, match=r"2 parts hold 3 bytes, expected 4"):
        store.put(key(902), [b"ab", b"c"], 4, 10.0)
    assert store.contains([key(900), key(901), key(902)], 10.0) == [False] * 3
    assert idle_within(store)


def test_no_memory_is_lost_over_many_cycles(store):
    for cycle in range(500):
        number, size = cycle % 40, 1 + cycle * 997 % 100_000
        if cycle < 40:
            assert put(store, number, content(number, size))
        else:
            assert get(store, number) is not None
        if cycle % 7 == 0:
            assert get(store, 1000 + cycle) is None
            assert not store.contains([key(1000 + cycle)], 10.0)[0]
    assert idle_within(store)


def test_nothing_is_found_after_close(store):
    assert put(store, 0, b"data")
    store.close()
    store.close()
    assert get(store, 0) is None
    assert not put(store, 1, b"data")


@pytest.mark.parametrize(
    "fields",
    [
        ("sz1-UPPER", bytes(32)),
        ("other-0123", bytes(32)),
        ("sz1-" + "a" * 29, bytes(32)),
        ("sz1-", bytes(32)),
        ("sz1-ok", bytes(31)),
        ("sz1-ok", bytes(32), -1),
        ("sz1-ok", bytes(32), 0, 1, 1),
        ("sz1-ok", bytes(32), 0, 0, 0),
    ],
)
def test_keys_that_a_backend_could_not_hold_are_refused(fields):
    with pytest.raises(StoreError):
        ObjectKey(*fields)


def test_a_key_is_short_enough_for_every_backend():
    from vllm_splitzip.storage.keys import lmcache_key

    longest = lmcache_key(ObjectKey("sz1-" + "f" * 28, b"\xff" * 32, 9_999, 9_999, 10_000))
    assert len(longest.to_string()) <= 150
    assert longest.from_string(longest.to_string()) == longest
