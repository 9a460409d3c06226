"""A store that is down, slow, or comes back: calls miss at once, one warning, and nothing leaks."""

import logging
import os
import socket
import threading
import time

import pytest

from storage_helpers import (
    MIB,
    BlackHole,
    content,
    free_port,
    get,
    idle_within,
    key,
    lm_server,
    opened,
    put,
    redis_server,
    wait_for,
)
from vllm_splitzip.storage.breaker import Breaker


def messages(caplog, level: int) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("vllm_splitzip") and record.levelno == level
    ]


@pytest.fixture(autouse=True)
def _log(caplog):
    caplog.set_level(logging.INFO, "vllm_splitzip")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_breaker_waits_longer_after_each_failed_try_and_says_so_once(caplog):
    clock = Clock()
    breaker = Breaker("store x", "calls miss", clock)
    breaker.failed(breaker.enter(), "refused")
    for wait_s in (1, 2, 4, 8, 16, 30, 30):
        clock.now += wait_s - 0.01
        assert breaker.enter() is None
        clock.now += 0.02
        ticket = breaker.enter()
        assert ticket is not None
        assert breaker.enter() is None  # one at a time
        breaker.failed(ticket, "refused")
    clock.now += 31
    breaker.succeeded(breaker.enter())
    assert breaker.enter() is not None
    breaker.failed(breaker.enter(), "again")
    clock.now += 1.01
    assert breaker.enter() is not None
    assert messages(caplog, logging.WARNING) == [
        "store x failed (refused); calls miss until it is back, next try in 1 s",
        "store x failed (again); calls miss until it is back, next try in 1 s",
    ]
    assert messages(caplog, logging.INFO) == ["store x is back"]


def test_breaker_takes_timeouts_of_hurried_callers_with_patience():
    breaker = Breaker("store x", "calls miss")
    breaker.timed_out(breaker.enter(), 0.05)
    breaker.timed_out(breaker.enter(), 0.05)
    breaker.succeeded(breaker.enter())
    breaker.timed_out(breaker.enter(), 0.05)
    breaker.timed_out(breaker.enter(), 0.05)
    assert not breaker.is_open
    breaker.timed_out(breaker.enter(), 0.05)
    assert breaker.is_open
    breaker = Breaker("store x", "calls miss")
    breaker.timed_out(breaker.enter(), 1.0)
    assert breaker.is_open


def test_breaker_does_not_listen_to_calls_from_before_it_opened(caplog):
    clock = Clock()
    breaker = Breaker("store x", "calls miss", clock)
    early = [breaker.enter() for _ in range(4)]
    breaker.failed(early[0], "one")
    breaker.failed(early[1], "two")
    breaker.succeeded(early[2])
    assert breaker.is_open
    clock.now += 1.01
    ticket = breaker.enter()
    breaker.timed_out(early[3], 5.0)
    breaker.abandoned(early[3])
    assert breaker.enter() is None
    breaker.abandoned(ticket)
    breaker.succeeded(breaker.enter())
    assert not breaker.is_open
    assert len(messages(caplog, logging.WARNING)) == 1


def test_breaker_counts_a_hurried_try_that_times_out():
    clock = Clock()
    breaker = Breaker("store x", "calls miss", clock)
    breaker.failed(breaker.enter(), "refused")
    clock.now += 1.01
    breaker.timed_out(breaker.enter(), 0.01)
    clock.now += 1.99
    assert breaker.enter() is None
    clock.now += 0.02
    assert breaker.enter() is not None


@pytest.mark.parametrize("scheme", ["redis", "lm"])
def test_black_hole_is_given_up_within_the_deadline(scheme, caplog):
    hole = BlackHole()
    try:
        with opened({"lmcache.remote_url": f"{scheme}://127.0.0.1:{hole.port}"}) as store:
            began = time.monotonic()
            assert get(store, 1, timeout_s=1.2) is None
            assert 1.1 < time.monotonic() - began < 2.0
            assert store.health == "down"
            began = time.monotonic()
            assert get(store, 1, timeout_s=30) is None
            assert not put(store, 1, b"x", timeout_s=30)
            assert store.contains([key(1), key(2)], 30) == [False, False]
            assert time.monotonic() - began < 0.5
            assert len(messages(caplog, logging.WARNING)) == 1
            assert idle_within(store)
    finally:
        hole.close()


@pytest.mark.parametrize("scheme", ["redis", "lm"])
def test_black_hole_does_not_keep_what_is_put(scheme):
    hole = BlackHole()
    try:
        with opened({"lmcache.remote_url": f"{scheme}://127.0.0.1:{hole.port}"}) as store:
            began = time.monotonic()
            assert not put(store, 1, bytes(4 * MIB), timeout_s=1.0)
            assert time.monotonic() - began < 2.0
            assert idle_within(store)
    finally:
        hole.close()


def test_a_call_that_never_ends_gives_its_memory_back_with_its_connection(monkeypatch):
    monkeypatch.setattr("vllm_splitzip.storage.remote.STUCK_S", 0.5)
    hole = BlackHole()
    try:
        with opened({"lmcache.remote_url": f"redis://127.0.0.1:{hole.port}"}) as store:
            assert not put(store, 1, bytes(4 * MIB), timeout_s=0.2)
            assert store.health == "up"  # one caller in a hurry proves nothing
            assert store._budget.in_use > 0
            assert idle_within(store)
    finally:
        hole.close()


@pytest.mark.parametrize("kind", ["redis", "lm"])
def test_server_that_is_not_there_at_start_up_is_used_when_it_comes(kind, tmp_path, caplog):
    starter = {"redis": redis_server, "lm": lm_server}[kind]
    server = starter(tmp_path)
    server.kill()
    with opened({"lmcache.remote_url": f"{kind}://127.0.0.1:{server.port}"}) as store:
        assert get(store, 1) is None
        assert not put(store, 1, b"x")
        server.start()
        try:
            assert wait_for(lambda: put(store, 1, b"x"), 15)
            assert get(store, 1) == b"x"
            assert store.health == "up"
            assert len(messages(caplog, logging.WARNING)) == 1
            assert len([m for m in messages(caplog, logging.INFO) if m.endswith("is back")]) == 1
        finally:
            server.kill()


def test_host_that_swallows_the_connection_attempt_does_not_hold_up_start_up(monkeypatch):
    monkeypatch.setattr("vllm_splitzip.storage.remotes.OPEN_S", 0.5)
    # A listener whose queue is full: the kernel drops further attempts, which then wait.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        waiting = [socket.socket() for _ in range(8)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", port))
        began = time.monotonic()
        with opened({"lmcache.remote_url": f"lm://127.0.0.1:{port}"}) as store:
            assert time.monotonic() - began < 5
            assert store.health == "down"
            began = time.monotonic()
            assert get(store, 1, timeout_s=5) is None
            assert time.monotonic() - began < 0.5
        for each in waiting:
            each.close()


@pytest.mark.parametrize("kind", ["redis", "lm"])
def test_server_killed_and_restarted_under_load(kind, tmp_path, caplog):
    if kind == "redis":
        server = redis_server(tmp_path, "--requirepass", "not/secret")
        url = f"redis://:not%2Fsecret@127.0.0.1:{server.port}"
    else:
        server = lm_server(tmp_path)
        url = f"lm://127.0.0.1:{server.port}"
    wrong: list[int] = []
    failed: list[BaseException] = []
    stop = threading.Event()

    def work(first: int) -> None:
        turn = 0
        try:
            while not stop.is_set():
                number = first + turn % 20
                data = get(store, number, 2.0)
                if data is None:
                    put(store, number, content(number, 50_000 + number), 2.0)
                elif data != content(number, 50_000 + number):
                    wrong.append(number)
                if turn % 5 == 0:
                    store.contains([key(number), key(10_000 + number)], 2.0)
                turn += 1
        except BaseException as error:
            failed.append(error)

    try:
        with opened({"lmcache.remote_url": url}) as store:
            threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
            for thread in threads:
                thread.start()
            for _ in range(3):
                time.sleep(0.7)
                hits = store.stats.hits.get("remote", 0)
                server.kill()
                assert wait_for(lambda: store.health == "down", 10)
                time.sleep(0.3)
                server.start()
                assert wait_for(lambda: store.health == "up", 40)
                assert wait_for(lambda hits=hits: store.stats.hits.get("remote", 0) > hits, 10)
            stop.set()
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive()
            assert wrong == []
            assert failed == []
            assert idle_within(store)
            assert store.stats.bytes_fetched > 0
    finally:
        stop.set()
        server.kill()


def test_server_that_answers_too_late_leaks_nothing(tmp_path):
    server = redis_server(tmp_path)
    proxy = SlowProxy(server.port)
    try:
        with opened({"lmcache.remote_url": f"redis://127.0.0.1:{proxy.port}"}) as store:
            assert put(store, 1, content(1, MIB))
            proxy.delay_s = 0.4
            assert get(store, 1, timeout_s=0.1) is None
            assert get(store, 1, timeout_s=0.1) is None
            assert idle_within(store)  # what came late has been given back
            assert store.health == "up"
            assert get(store, 1, timeout_s=0.1) is None
            assert store.health == "down"
            proxy.delay_s = 0.0
            assert wait_for(lambda: get(store, 1) == content(1, MIB), 5)
            assert idle_within(store)
    finally:
        proxy.close()
        server.kill()


def test_redis_may_take_as_long_as_the_caller_allows(tmp_path):
    server = redis_server(tmp_path)
    proxy = SlowProxy(server.port)
    try:
        with opened({"lmcache.remote_url": f"redis://127.0.0.1:{proxy.port}"}) as store:
            assert put(store, 1, content(1, MIB))
            proxy.delay_s = 5.5  # redis-py's own limit is 5 s
            assert get(store, 1, timeout_s=20) == content(1, MIB)
            assert store.describe() == f"redis://127.0.0.1:{proxy.port}"
    finally:
        proxy.close()
        server.kill()


class SlowProxy:
    """Passes requests on after `delay_s` seconds, and answers at once."""

    def __init__(self, port: int) -> None:
        self.delay_s = 0.0
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        try:
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                for ends in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()
        except OSError:
            pass

    def _pass_on(self, source: socket.socket, target: socket.socket, is_late: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if is_late:
                    time.sleep(self.delay_s)
                target.sendall(data)
        except OSError:
            pass
        source.close()
        target.close()

    def close(self) -> None:
        self._listener.close()


def test_redis_that_is_full_refuses_puts_and_still_serves(tmp_path, caplog):
    server = redis_server(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    try:
        with opened({"lmcache.remote_url": f"redis://127.0.0.1:{server.port}"}) as store:
            assert put(store, 1, content(1, MIB))
            results = [put(store, number, bytes(MIB)) for number in range(2, 20)]
            assert False in results
            assert store.health == "read-only"
            assert get(store, 1) == content(1, MIB)
            assert len(messages(caplog, logging.WARNING)) == 1
            assert "storing into" in messages(caplog, logging.WARNING)[0]
            assert idle_within(store)
    finally:
        server.kill()


def test_redis_that_lost_half_of_an_object_misses_it(tmp_path):
    import redis

    server = redis_server(tmp_path)
    try:
        with opened({"lmcache.remote_url": f"redis://127.0.0.1:{server.port}"}) as store:
            with redis.Redis(port=server.port) as client:
                for number, suffix in ((1, "metadata"), (2, "kv_bytes")):
                    assert put(store, number, content(number, 5000))
                    assert client.delete(_name(number).to_string() + suffix) == 1
                    assert get(store, number) is None
                assert put(store, 3, content(3, 5000))
                client.set(_name(3).to_string() + "kv_bytes", b"short")
                assert store.contains([key(3)], 5) == [True]
                assert get(store, 3) is None
                for number in range(10, 30):  # more than LMCache has workers
                    assert put(store, number, content(number, 5000))
                    client.set(_name(number).to_string() + "kv_bytes", b"short")
                    assert get(store, number) is None
                assert store.contains([key(3)], 5) == [False]
                assert put(store, 3, content(3, 5000))
                assert get(store, 3) == content(3, 5000)
                client.set(_name(3).to_string() + "metadata", b"\xff" * 28)
                assert get(store, 3) is None
                assert store.contains([key(3)], 5) == [False]
            assert store.health == "up"
            assert idle_within(store)
    finally:
        server.kill()


def test_passwords_do_not_reach_the_log(tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "vllm_splitzip")
    url = f"redis://user:hunter2@127.0.0.1:{free_port()}/0"
    with opened({"lmcache.remote_url": url}) as store:
        assert get(store, 1) is None
        assert "hunter2" not in store.describe()
    assert caplog.records
    assert "hunter2" not in caplog.text


def test_local_tiers_serve_while_the_remote_is_down(tmp_path):
    extra = {
        "lmcache.local_cpu": True,
        "lmcache.max_local_cpu_size": 0.1,
        "lmcache.local_disk": str(tmp_path),
        "lmcache.max_local_disk_size": 1,
        "lmcache.remote_url": f"redis://127.0.0.1:{free_port()}",
    }
    with opened(extra) as store:
        assert not put(store, 1, b"data")  # not where other machines would find it
        assert get(store, 1) == b"data"
        assert store.contains([key(1)], 5) == [True]
        assert store.stats.hits == {"local_cpu": 1}
        store._pool.remove(_name(1))
        assert get(store, 1) == b"data"
        assert store.stats.hits == {"local_cpu": 1, "local_disk": 1}
        assert get(store, 1) == b"data"  # and is in the hot cache again
        assert store.stats.hits == {"local_cpu": 2, "local_disk": 1}
        assert store.health == "down"


def _name(number: int):
    from vllm_splitzip.storage.keys import lmcache_key

    return lmcache_key(key(number))


def test_another_engines_metadata_format_is_noticed(tmp_path, monkeypatch, caplog):
    from lmcache.v1 import protocol

    from vllm_splitzip.errors import SettingError

    with opened({}, cache_dir=tmp_path) as store:
        assert put(store, 1, b"data")
        monkeypatch.setattr(protocol, "REMOTE_METADATA_FMT", "i" * 12)
        monkeypatch.setattr(protocol, "REMOTE_METADATA_BYTES", 48)
        assert get(store, 1) is None
        assert not put(store, 2, b"data")
        assert "2 groups" in messages(caplog, logging.WARNING)[0]
        with (
            pytest.raises(SettingError, match="2 groups"),
            opened({}, cache_dir=tmp_path / "other"),
        ):
            pass


def test_a_file_system_that_hangs_keeps_its_memory_until_it_answers(tmp_path, monkeypatch):
    with opened({}, cache_dir=tmp_path) as store:
        for number in (1, 2, 3):
            assert put(store, number, content(number, 50_000))
        path = store._remotes[0].path_of(_name(1))
        whole = path.read_bytes()
        path.unlink()
        os.mkfifo(path)  # to open it waits for a writer
        monkeypatch.setattr("vllm_splitzip.storage.fs._look", lambda _: ((0, 0, 0), True))
        assert get(store, 1, timeout_s=1.1) is None
        assert store.health == "down"
        assert wait_for(lambda: get(store, 2) == content(2, 50_000), 5)
        assert store._budget.in_use > 0  # the thread may yet write to it
        with open(path, "wb") as pipe:
            pipe.write(whole)
        assert idle_within(store)
        assert get(store, 3) == content(3, 50_000)


def test_close_does_not_wait_for_a_file_system_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_splitzip.storage.connection.CLOSE_S", 0.2)
    monkeypatch.setattr("vllm_splitzip.storage.lmcache_tiers.CLOSE_S", 0.2)
    with opened({}, cache_dir=tmp_path) as store:
        assert put(store, 1, b"data")
        path = store._remotes[0].path_of(_name(1))
        whole = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        monkeypatch.setattr("vllm_splitzip.storage.fs._look", lambda _: ((0, 0, 0), True))
        assert get(store, 1, timeout_s=0.1) is None
        began = time.monotonic()
    assert time.monotonic() - began < 3
    with open(path, "wb") as pipe:
        pipe.write(whole)  # into memory that must be there still
    assert wait_for(lambda: store._budget.in_use == 0)
