"""mooncakestore:// with a real Mooncake master and real Mooncake clients, over TCP."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from storage_helpers import (
    MIB,
    content,
    free_port,
    get,
    idle_within,
    key,
    mooncake,
    mooncake_master,
    opened,
    put,
    wait_for,
)
from vllm_splitzip.errors import SettingError
from vllm_splitzip.storage import open_store
from vllm_splitzip.storage.quiet import quiet_lmcache

with quiet_lmcache():
    from vllm_splitzip.storage.mooncake import fill_in


@pytest.fixture(scope="module")
def master(tmp_path_factory):
    server = mooncake_master(tmp_path_factory.mktemp("mooncake"))
    yield server
    server.kill()


def test_another_process_gets_what_this_one_holds(master):
    code = """
import sys
from storage_helpers import *
with opened(mooncake(int(sys.argv[1]), mooncake_global_segment_size=0)) as store:
    for number in range(10):
        assert get(store, number) == content(number, 1_000_000 + number), number
    assert get(store, 99) is None
print("done")
"""
    with opened(mooncake(master.port)) as store:
        for number in range(10):
            assert put(store, number, content(number, 1_000_000 + number))
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, str(master.port)],
            capture_output=True,
            text=True,
            timeout=100,
            env={"PYTHONPATH": str(Path(__file__).parent), "PATH": "/usr/bin:/bin"},
        )
        assert run.stdout.endswith("done\n"), run.stderr
        assert store.health == "up"
        assert idle_within(store)


def test_master_restarted_in_the_middle_of_a_run(tmp_path):
    server = mooncake_master(tmp_path)
    wrong: list[object] = []
    stop = threading.Event()

    def work(first: int) -> None:
        turn = 0
        while not stop.is_set():
            number = first + turn % 20
            try:
                data = get(store, number, 2.0)
                if data is None:
                    put(store, number, content(number, 50_000 + number), 2.0)
                elif data != content(number, 50_000 + number):
                    wrong.append(number)
            except BaseException as error:
                wrong.append(error)
            turn += 1

    try:
        with opened(mooncake(server.port)) as store:
            threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(3)]
            for thread in threads:
                thread.start()
            assert wait_for(lambda: store.stats.hits.get("remote", 0) > 50)
            server.kill()
            assert wait_for(lambda: store.health == "down")
            server.start()
            assert wait_for(lambda: store.health == "up", 40)
            hits = store.stats.hits["remote"]
            assert wait_for(lambda: store.stats.hits["remote"] > hits + 50, 20)
            stop.set()
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive()
            assert wrong == []
            assert idle_within(store)
    finally:
        stop.set()
        server.kill()


def test_master_that_is_not_there_at_start_up_is_used_when_it_comes(tmp_path):
    server = mooncake_master(tmp_path)
    server.kill()
    began = time.monotonic()
    with opened(mooncake(server.port)) as store:
        assert time.monotonic() - began < 10
        assert get(store, 1, 5.0) is None
        assert not put(store, 1, b"x", 5.0)
        assert store.health == "down"
        server.start()
        try:
            assert wait_for(lambda: put(store, 1, b"x"), 30)
            assert get(store, 1) == b"x"
            assert store.health == "up"
        finally:
            server.kill()


def test_an_object_whose_owner_is_gone_is_a_miss(master):
    with opened(mooncake(master.port, mooncake_global_segment_size=0)) as store:
        with opened(mooncake(master.port)) as owner:
            assert put(owner, 700, content(700, 100_000))
            assert get(store, 700) == content(700, 100_000)
        assert get(store, 700, 10.0) is None
        assert store.contains([key(700)], 10.0) == [False]
        assert idle_within(store)


def test_a_store_that_is_full_evicts_and_never_gives_other_bytes(master):
    with opened(mooncake(master.port, mooncake_global_segment_size=32 * MIB)) as store:
        for number in range(800, 840):
            put(store, number, content(number, 2 * MIB), 5.0)
        for number in range(800, 840):
            assert get(store, number) in (None, content(number, 2 * MIB))
        assert store.health in ("up", "read-only")
        assert idle_within(store)


def filled(extra: dict[str, object], url: str = "mooncakestore://127.0.0.1:50051") -> dict:
    fill_in(extra, url, url)
    return extra


def test_the_url_is_enough():
    assert filled({}) == {
        "mooncake_master_server_addr": "127.0.0.1:50051",
        "mooncake_metadata_server": "P2PHANDSHAKE",
        "mooncake_local_hostname": "127.0.0.1",
    }


def test_rdma_and_what_lmcaches_users_wrote_before_reach_mooncake():
    from lmcache.v1.storage_backend.connector.mooncakestore_connector import MooncakeStoreConfig

    extra = filled(
        {
            "mooncake_protocol": "rdma",
            "mooncake_device_name": "mlx5_0",
            "master_server_address": "10.0.0.1:50051",
            "metadata_server": "http://10.0.0.1:8080/metadata",
            "local_hostname": "10.0.0.2",
        }
    )
    setup = MooncakeStoreConfig._build_setup_dict(extra)
    assert setup["protocol"] == "rdma"
    assert setup["rdma_devices"] == "mlx5_0"
    assert setup["master_server_addr"] == "10.0.0.1:50051"
    assert setup["metadata_server"] == "http://10.0.0.1:8080/metadata"
    assert setup["local_hostname"] == "10.0.0.2"


def test_rdma_that_this_machine_has_not_is_a_store_that_is_down(master, monkeypatch):
    monkeypatch.setenv("MC_STORE_CLIENT_SETUP_RETRIES", "1")  # Mooncake's own, 20
    extra = mooncake(master.port, mooncake_protocol="rdma", mooncake_device_name="mlx5_0")
    with opened(extra) as store:
        assert get(store, 1, 5.0) is None
        assert not put(store, 1, b"data", 5.0)
        assert store.health == "down"


@pytest.mark.parametrize(
    "url",
    [
        "mooncakestore://",
        "mooncakestore://host",
        "mooncakestore://host:x/",
        "mooncakestore://host:99999",
    ],
)
def test_a_master_that_is_not_named_is_said(url):
    with pytest.raises(SettingError, match=r"no master.*HOST:PORT"):
        open_store({"lmcache.remote_url": url}, max_object_bytes=MIB)


def test_a_configuration_file_that_mooncake_would_not_understand_is_said(tmp_path, monkeypatch):
    file = tmp_path / "mooncake.json"
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    url = {"lmcache.remote_url": f"mooncakestore://127.0.0.1:{free_port()}"}
    for text in (None, "[", json.dumps({"master_server_address": "127.0.0.1:1"})):
        if text is not None:
            file.write_text(text)
        with pytest.raises(SettingError, match="MOONCAKE_CONFIG_PATH="):
            open_store(url, max_object_bytes=MIB)


def test_a_configuration_file_is_used(tmp_path, monkeypatch, master):
    file = tmp_path / "mooncake.json"
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    file.write_text(
        json.dumps(
            {
                "mooncake_master_server_addr": f"127.0.0.1:{master.port}",
                "local_hostname": "127.0.0.1",
                "metadata_server": "P2PHANDSHAKE",
                "global_segment_size": 32 * MIB,
                "local_buffer_size": 32 * MIB,
            }
        )
    )
    with opened({"lmcache.remote_url": "mooncakestore://elsewhere:1"}) as store:
        assert put(store, 900, content(900, 70_000))
        assert get(store, 900) == content(900, 70_000)
