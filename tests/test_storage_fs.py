"""The default store: a directory that survives restarts, is shared, limited, and never torn."""

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from storage_helpers import MIB, content, get, idle_within, key, opened, put, wait_for
from vllm_splitzip.storage import open_store

FILE = "sz1-0123456789abcdef@1@0@{:x}@uint8.data"


def sizes(directory: Path) -> list[int]:
    return [path.stat().st_size for path in directory.glob("sz1-*.data")]


def in_process(code: str, *args: object) -> subprocess.Popen[str]:
    """Runs `code` in a new process, with the helpers, and LMCache imported."""
    prelude = "import os, sys, time; sys.path.insert(0, sys.argv[1])\n"
    prelude += "from pathlib import Path\nfrom storage_helpers import *\n"
    prelude += "import vllm_splitzip.storage.lmcache_tiers\n"
    command = [sys.executable, "-W", "ignore", "-c", prelude + code, str(Path(__file__).parent)]
    return subprocess.Popen(
        [*command, *map(str, args)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "LMCACHE_LOG_LEVEL": "ERROR"},
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return out


def test_default_directory_is_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    with opened({}) as store:
        assert put(store, 1, b"x")
        assert (tmp_path / "xdg/vllm-splitzip" / FILE.format(1)).exists()
        assert store.describe() == f"fs://localhost:0{tmp_path}/xdg/vllm-splitzip (10 GiB)"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with opened({}) as store:
        assert put(store, 1, b"x")
        assert (tmp_path / "home/.cache/vllm-splitzip" / FILE.format(1)).exists()


def test_objects_survive_a_restart(tmp_path):
    with opened({}, cache_dir=tmp_path) as store:
        assert put(store, 1, content(1, 100_001))
    with opened({}, cache_dir=tmp_path) as store:
        assert store.contains([key(1)], 5.0) == [True]
        assert get(store, 1) == content(1, 100_001)
    assert [path.name for path in tmp_path.iterdir()] == [FILE.format(1)]


def test_local_disk_survives_a_restart_and_is_shared(tmp_path):
    extra = {"lmcache.local_disk": str(tmp_path), "lmcache.max_local_disk_size": 1}
    with opened(extra) as first, opened(extra) as second:
        assert put(first, 1, content(1, 100_001))
        assert get(second, 1) == content(1, 100_001)
        first.remove(key(1))
        assert second.contains([key(1)], 5.0) == [False]
        assert get(second, 1) is None
        assert put(second, 1, content(2, 50))
        assert get(first, 1) == content(2, 50)
    with opened(extra) as store:
        assert get(store, 1) == content(2, 50)


def test_two_processes_share_the_directory(tmp_path):
    code = """
with opened({}, cache_dir=Path(sys.argv[2])) as store:
    for number in range(20):
        assert put(store, number, content(number, 10_000 + number))
"""
    finish(in_process(code, tmp_path))
    with opened({}, cache_dir=tmp_path) as store:
        for number in range(20):
            assert get(store, number) == content(number, 10_000 + number)


def test_processes_that_write_the_same_keys_never_show_a_torn_file(tmp_path):
    # Sizes differ, so that any mixture of two writers' bytes would be seen.
    code = """
def write(me):
    with opened(SMALL_POOL, cache_dir=Path(sys.argv[2])) as store:
        for turn in range(150):
            number = turn % 3
            store.remove(key(number))
            put(store, number, bytes([me]) * (400_000 + 1000 * me))

assert all([succeeded(pid) for pid in [fork(write, me) for me in (1, 2, 3)]])
"""
    writers = in_process(code, tmp_path)
    seen = 0
    with opened({}, cache_dir=tmp_path) as store:
        while writers.poll() is None:
            for number in range(3):
                data = get(store, number)
                if data is not None:
                    seen += 1
                    assert len(data) == 400_000 + 1000 * data[0]
                    assert data == data[:1] * len(data)
    finish(writers)
    assert seen > 0
    assert not list(tmp_path.glob("sz1-tmp-*/*"))


def test_threads_that_write_the_same_key_write_it_once(tmp_path):
    with opened({}, cache_dir=tmp_path) as store:
        results = []

        def write() -> None:
            results.append(put(store, 1, content(1, 2 * MIB)))

        threads = [threading.Thread(target=write) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [True] * 12
        assert get(store, 1) == content(1, 2 * MIB)
        assert idle_within(store)


def test_the_limit_holds_and_the_least_recently_used_go(tmp_path):
    limit = 1 * MIB
    with opened({}, cache_dir=tmp_path, max_store_gib=limit / 2**30) as store:
        assert put(store, 0, content(0, 100_000))
        for number in range(1, 60):
            assert put(store, number, content(number, 100_000))
            assert get(store, 0) is not None  # used all the time
            assert wait_for(store._remotes[0]._janitor._thread.submit(_nothing()).done)
            assert sum(sizes(tmp_path)) <= limit
        found = store.contains([key(number) for number in range(60)], 5.0)
        newest = found.index(True, 1)
        assert found == [True] + [False] * (newest - 1) + [True] * (60 - newest)
        assert 5 <= sum(found) <= 10
        assert store.stats.evicted == 60 - sum(found)
        assert not put(store, 99, bytes(limit + 1))
        assert sum(sizes(tmp_path)) <= limit


async def _nothing() -> None:
    pass


def test_two_processes_respect_the_limit_together(tmp_path):
    limit = 4 * MIB
    code = """
def write(first):
    with opened(SMALL_POOL, cache_dir=Path(sys.argv[2]), max_store_gib=4 / 1024) as store:
        for number in range(300):
            put(store, first + number, bytes(100_000))

assert all([succeeded(pid) for pid in [fork(write, first) for first in (0, 1000)]])
"""
    writers = in_process(code, tmp_path)
    most = 0
    while writers.poll() is None:
        try:
            most = max(most, sum(sizes(tmp_path)))
        except FileNotFoundError:  # deleted between listing and looking
            continue
    finish(writers)
    assert limit // 2 < most <= limit


def test_local_disk_respects_its_limit_over_restarts(tmp_path):
    extra = {"lmcache.local_disk": str(tmp_path), "lmcache.max_local_disk_size": 1 / 1024}
    for start in (0, 100, 200):
        with opened(extra) as store:
            for number in range(start, start + 15):
                assert put(store, number, bytes(100_000))
                total = sum(path.stat().st_size for path in tmp_path.glob("sz1-*"))
                assert total <= 1 * MIB
            assert store.contains([key(start + 14)], 5.0) == [True]


def test_a_smaller_limit_takes_effect_at_the_next_start(tmp_path):
    with opened({}, cache_dir=tmp_path) as store:
        for number in range(20):
            assert put(store, number, bytes(100_000))
    with opened({}, cache_dir=tmp_path, max_store_gib=1 / 1024):
        assert wait_for(lambda: sum(sizes(tmp_path)) <= MIB)


def test_foreign_files_are_never_touched(tmp_path):
    names = [
        "notes.txt",
        "sz1-notes.data",
        "sz2-0123@1@0@ab@uint8.data",
        "meta-llama@1@0@abcd@bfloat16.data",
        "sz1-abc@1@0@ab@uint8.data.bak",
        "sz1-tmp-mine",
    ]
    for name in names:
        (tmp_path / name).write_bytes(bytes(300_000))
        os.utime(tmp_path / name, (1, 1))
    directory = tmp_path / "sz1-abc@1@0@ab@uint8.data"
    directory.mkdir()
    stale = tmp_path / "sz1-tmp-1-0123abcd"
    stale.mkdir()
    (stale / "precious").write_text("not ours")
    os.utime(stale, (1, 1))
    with opened({}, cache_dir=tmp_path, max_store_gib=1 / 1024) as store:
        for number in range(30):
            assert put(store, number, bytes(100_000))
    assert all((tmp_path / name).stat().st_size == 300_000 for name in names)
    assert directory.is_dir()
    assert (stale / "precious").exists()


def test_what_crashed_writers_left_is_removed_when_it_is_old(tmp_path):
    old, young = tmp_path / "sz1-tmp-1-0123abcd", tmp_path / "sz1-tmp-2-0123abcd"
    for directory in (old, young):
        directory.mkdir(parents=True)
        (directory / FILE.format(7)).write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    with opened({}, cache_dir=tmp_path) as store:
        assert put(store, 1, b"x")
        assert not old.exists()
        assert (young / FILE.format(7)).exists()


def test_writers_killed_at_any_moment_leave_whole_objects(tmp_path):
    code = """
def write(first, ready):
    with opened(SMALL_POOL, cache_dir=Path(sys.argv[2])) as store:
        os.write(ready, b"x")
        for number in range(first, first + 1000):
            put(store, number, content(number, 500_000))

for turn in range(25):
    started, ready = os.pipe()
    pid = fork(write, 1000 * turn, ready)
    os.read(started, 1)
    time.sleep(0.003 * turn)
    os.kill(pid, 9)
    assert not succeeded(pid)
"""
    finish(in_process(code, tmp_path))
    numbers = [int(path.name.split("@")[3], 16) for path in tmp_path.glob("sz1-*.data")]
    assert len(numbers) > 25
    with opened({}, cache_dir=tmp_path) as store:
        for number in numbers:
            assert get(store, number) == content(number, 500_000)


@pytest.mark.parametrize(
    "damage",
    ["empty", "short metadata", "short", "random metadata", "huge", "zero", "other dtype", "gone"],
)
def test_a_damaged_file_is_a_miss_and_goes(tmp_path, damage):
    with opened({}, cache_dir=tmp_path) as store:
        assert put(store, 1, content(1, 10_000))
        path = tmp_path / FILE.format(1)
        raw = bytearray(path.read_bytes())
        assert len(raw) == 28 + 10_000
        damaged = {
            "empty": b"",
            "short metadata": raw[:20],
            "short": raw[:-1],
            "random metadata": os.urandom(28) + raw[28:],
            "huge": raw[:12] + (2**31 - 1).to_bytes(4, "little") + raw[16:],
            "zero": raw[:12] + bytes(16) + raw[28:],
            "other dtype": raw[:8] + (3).to_bytes(4, "little") + raw[12:],
            "gone": None,
        }[damage]
        if damaged is None:
            path.unlink()
        else:
            path.write_bytes(damaged)
            os.utime(path, (time.time() - 5,) * 2)
        assert get(store, 1) is None
        assert wait_for(lambda: not path.exists(), 2.0)
        assert store.health == "up"
        assert idle_within(store)
        assert put(store, 1, content(1, 10_000))
        assert get(store, 1) == content(1, 10_000)


@pytest.mark.parametrize("tier", ["fs", "local_disk"])
def test_a_directory_in_the_place_of_a_frame_is_one_miss_and_said_once(tmp_path, caplog, tier):
    extra = {"lmcache.local_disk": str(tmp_path), "lmcache.max_local_disk_size": 1}
    with opened({} if tier == "fs" else extra, cache_dir=tmp_path) as store:
        assert put(store, 1, content(1, 5000))
        (path,) = tmp_path.glob("sz1-*@uint8.*")
        path.unlink()
        path.mkdir()
        assert get(store, 1) is None
        assert wait_for(lambda: put(store, 1, content(1, 5000)))  # an empty one goes
        assert get(store, 1) == content(1, 5000)

        path.unlink()
        path.mkdir()
        (path / "somebody's").write_text("work")
        caplog.clear()
        for _ in range(5):
            assert get(store, 1) is None
            assert wait_for(lambda: store.contains([key(1)], 5.0) == [False])
        if tier == "fs":
            assert len([r for r in caplog.records if r.name.startswith("vllm_splitzip")]) == 1
        assert not put(store, 1, content(1, 5000))
        assert put(store, 2, content(2, 5000))  # it is no failure of the store
        assert store.health == "up"
        assert (path / "somebody's").read_text() == "work"
        shutil.rmtree(path)
        assert wait_for(lambda: put(store, 1, content(1, 5000)))
        assert get(store, 1) == content(1, 5000)
        assert idle_within(store)


def test_a_file_that_is_too_large_for_any_object_goes_from_local_disk(tmp_path):
    extra = {"lmcache.local_disk": str(tmp_path), "lmcache.max_local_disk_size": 1}
    with opened(extra, max_object_bytes=MIB) as store:
        assert put(store, 1, b"data")
        (path,) = tmp_path.glob("*.pt")
        path.write_bytes(bytes(MIB + 1))
        assert get(store, 1) is None
        assert store.contains([key(1)], 5.0) == [False]
        assert not path.exists()


@pytest.mark.parametrize("damage", ["short", "long", "empty", "gone"])
def test_a_damaged_file_on_local_disk_is_no_object_of_another_length(tmp_path, damage):
    extra = {"lmcache.local_disk": str(tmp_path), "lmcache.max_local_disk_size": 1}
    with opened(extra) as store:
        assert put(store, 1, content(1, 10_000))
        (path,) = tmp_path.glob("*.pt")
        raw = path.read_bytes()
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes({"short": raw[:-1], "long": raw + b"x", "empty": b""}[damage])
        # The file has no length of its own but its size; the frame's checksum tells the rest.
        expected = {"short": raw[:-1], "long": raw + b"x"}.get(damage)
        assert get(store, 1) == expected
        store.remove(key(1))
        assert put(store, 1, content(1, 10_000))
        assert get(store, 1) == content(1, 10_000)
        assert idle_within(store)


def test_a_full_disk_refuses_puts_and_still_serves(tmp_path, monkeypatch, caplog):
    real = os.replace
    full = True

    def replace(*args: object) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args)

    with opened({}, cache_dir=tmp_path) as store:
        assert put(store, 1, content(1, 5000))
        monkeypatch.setattr(os, "replace", replace)
        monkeypatch.setattr("aiofiles.os.replace", _asynchronous(replace))
        for number in range(2, 12):
            assert not put(store, number, content(number, 5000))
        assert store.health == "read-only"
        assert get(store, 1) == content(1, 5000)
        warnings = [record for record in caplog.records if record.name.startswith("vllm_splitzip")]
        assert len(warnings) == 1
        assert "No space left on device" in warnings[0].getMessage()
        full = False
        assert wait_for(lambda: put(store, 2, content(2, 5000)), 5.0)
        assert store.health == "up"
        assert get(store, 2) == content(2, 5000)
        assert idle_within(store)


@pytest.mark.parametrize("tier", ["fs", "local_disk"])
def test_a_disk_smaller_than_the_limit_is_not_filled(tmp_path, monkeypatch, tier):
    size = 10 * MIB

    def disk_usage(path: str) -> shutil._ntuple_diskusage:
        used = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
        return shutil._ntuple_diskusage(size, used, size - used)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    extra = {
        "fs": {},
        "local_disk": {"lmcache.local_disk": str(tmp_path), "lmcache.max_local_disk_size": 5},
    }[tier]
    with opened(extra, cache_dir=tmp_path) as store:
        for number in range(25):
            assert put(store, number, bytes(MIB - 1000))
            assert 0.05 * size <= disk_usage("").free
        found = store.contains([key(number) for number in range(25)], 5.0)
        assert found == sorted(found)
        assert 7 <= sum(found) <= 9
        (tmp_path / "somebody else's").write_bytes(bytes(size - 100_000))
        assert not put(store, 30, bytes(MIB - 1000))
        assert store.health == "read-only"


def _asynchronous(act):
    async def call(*args):
        return act(*args)

    return call


def test_a_file_too_large_for_the_system_is_a_failed_put(tmp_path):
    code = """
import resource
for extra in ({}, {"lmcache.local_disk": sys.argv[2] + "/disk", "lmcache.max_local_disk_size": 1}):
    with opened(extra, cache_dir=Path(sys.argv[2])) as store:
        assert put(store, 1, b"small")
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        assert not put(store, 2, bytes(200_000))
        assert store.contains([key(1), key(2)], 5.0) == [True, False]
        assert get(store, 1) == b"small"
        assert idle_within(store)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert wait_for(lambda: put(store, 2, bytes(200_000)))
        assert get(store, 2) == bytes(200_000)
print("done")
"""
    assert finish(in_process(code, tmp_path)) == "done\n"
    assert not [path for path in tmp_path.rglob("*.tmp") if path.is_file()]


def test_a_directory_that_disappears_is_made_again(tmp_path):
    directory = tmp_path / "cache"
    with opened({}, cache_dir=directory) as store:
        assert put(store, 1, b"one")
        for path in sorted(directory.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        directory.rmdir()
        assert get(store, 1) is None
        assert wait_for(lambda: put(store, 2, b"two"), 5.0)
        assert get(store, 2) == b"two"


def test_a_file_that_was_put_meanwhile_is_not_deleted_by_a_slow_reader(tmp_path):
    from vllm_splitzip.storage.janitor import _is_removed, identity

    path, other = tmp_path / FILE.format(1), tmp_path / "new"
    path.write_bytes(b"damage")
    seen = identity(path)
    other.write_bytes(b"object")
    os.utime(other, ns=(seen[2],) * 2)
    other.replace(path)
    assert _is_removed(path, seen)
    assert path.read_bytes() == b"object"
    assert _is_removed(path, identity(path))
    assert not path.exists()


def test_a_put_after_a_damaged_file_was_found_is_kept(tmp_path):
    with opened({}, cache_dir=tmp_path) as store:
        path = tmp_path / FILE.format(1)
        for turn in range(60):
            assert put(store, 1, content(turn, 5000))
            path.write_bytes(path.read_bytes()[: 40 * (turn % 3)])
            assert get(store, 1) is None
            assert put(store, 1, content(turn, 5000))
            assert get(store, 1) == content(turn, 5000)
            if turn % 2:  # what was to be done in the background has been done
                store._remotes[0]._janitor._thread.submit(_nothing()).result(5.0)
            assert get(store, 1) == content(turn, 5000)
            store.remove(key(1))
        assert store.health == "up"
        assert idle_within(store)


@pytest.mark.parametrize("obstacle", ["full directory", "empty directory", "fifo", "loop", "zero"])
@pytest.mark.parametrize("first", ["get", "put"])
def test_an_obstacle_in_the_place_of_a_frame_is_one_miss(tmp_path, obstacle, first):
    path = tmp_path / FILE.format(1)
    with opened({}, cache_dir=tmp_path) as store:
        if "directory" in obstacle:
            path.mkdir()
            if obstacle.startswith("full"):
                (path / "somebody's").touch()
        elif obstacle == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to(path if obstacle == "loop" else "/dev/zero")
        assert store.contains([key(1)], 5.0) == [False]
        if first == "get":
            assert get(store, 1, timeout_s=2.0) is None
        stored = put(store, 1, content(1, 5000), timeout_s=2.0)
        assert stored == (get(store, 1) == content(1, 5000))
        assert store.health == "up"
        assert put(store, 2, content(2, 5000))
        if obstacle.startswith("full"):
            assert not stored
            assert (path / "somebody's").exists()
            shutil.rmtree(path)
        assert wait_for(lambda: put(store, 1, content(1, 5000)))
        assert get(store, 1) == content(1, 5000)
        assert idle_within(store)


def test_two_stores_in_one_process_do_not_disturb_each_other(tmp_path):
    first = open_store({}, max_object_bytes=MIB, cache_dir=tmp_path)
    second = open_store({}, max_object_bytes=MIB, cache_dir=tmp_path)
    try:
        for number in range(10):
            assert put(first, number, content(number, 1000))
            assert put(second, number, content(number, 1000))
        first.close()
        assert get(second, 3) == content(3, 1000)
        assert put(second, 11, content(11, 1000))
    finally:
        first.close()
        second.close()
