"""Memory: what is full refuses or waits, within the deadline, and everything comes back."""

import threading
import time

import pytest

from storage_helpers import MIB, SMALL_POOL, content, get, idle_within, key, opened, put, wait_for
from vllm_splitzip.storage.budget import PAGE, Budget


def test_budget_waits_for_others_until_the_deadline():
    budget = Budget(10 * PAGE)
    first = budget.reserve(10 * PAGE, time.monotonic())
    assert first is not None
    began = time.monotonic()
    assert budget.reserve(1, began + 0.2) is None
    assert 0.15 < time.monotonic() - began < 1.0
    threading.Timer(0.1, first.release).start()
    second = budget.reserve(1, time.monotonic() + 5.0)
    assert second is not None
    assert budget.in_use == PAGE
    first.release()
    second.release()
    second.release()
    assert budget.in_use == 0
    assert budget.reserve(10 * PAGE + 1, time.monotonic() + 60) is None  # at once


def test_budget_gives_back_what_is_not_needed():
    budget = Budget(10 * PAGE)
    share = budget.reserve(8 * PAGE, time.monotonic())
    share.shrink(PAGE + 1)
    assert budget.in_use == 2 * PAGE
    share.shrink(5 * PAGE)
    assert budget.in_use == 2 * PAGE
    assert not budget.wait_idle(0.01)
    share.release()
    assert budget.wait_idle(0.01)


def test_a_full_pool_misses_and_refuses_within_the_deadline(tmp_path):
    with opened(SMALL_POOL, cache_dir=tmp_path) as store:
        for number in range(4):
            assert put(store, number, content(number, 4 * MIB))
        held = [store.get(key(number), 1.0) for number in range(2)]
        assert None not in held
        began = time.monotonic()
        assert store.get(key(2), 0.3) is None
        assert not put(store, 9, bytes(4 * MIB), timeout_s=0.3)
        assert 0.5 < time.monotonic() - began < 2.0
        assert store.contains([key(2), key(9)], 1.0) == [True, False]
        assert store.health == "up"
        for number, fetched in enumerate(held):
            assert bytes(fetched.data) == content(number, 4 * MIB)
            fetched.release()
        assert get(store, 2) == content(2, 4 * MIB)
        assert idle_within(store)


def test_a_waiting_fetch_goes_on_when_memory_is_given_back(tmp_path):
    with opened(SMALL_POOL, cache_dir=tmp_path) as store:
        for number in range(3):
            assert put(store, number, content(number, 4 * MIB))
        held = [store.get(key(number), 1.0) for number in range(2)]
        threading.Timer(0.2, held[0].release).start()
        assert get(store, 2, timeout_s=5.0) == content(2, 4 * MIB)
        held[1].release()
        assert idle_within(store)


def test_many_threads_on_a_small_pool_lose_nothing(tmp_path):
    with opened(SMALL_POOL, cache_dir=tmp_path) as store:
        for number in range(10):
            assert put(store, number, content(number, 2 * MIB + number))
        wrong = []

        def work(first: int) -> None:
            for turn in range(15):
                number = (first + turn) % 10
                if get(store, number, 20.0) != content(number, 2 * MIB + number):
                    wrong.append(number)
                if not put(store, 100 + 20 * first + turn, bytes(MIB + turn), 20.0):
                    wrong.append(100 + number)

        threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert idle_within(store)


def test_the_hot_cache_makes_room_for_what_is_used(tmp_path):
    extra = {"lmcache.local_cpu": True, "lmcache.max_local_cpu_size": 8 / 1024}
    with opened(extra) as store:
        for number in range(20):
            assert put(store, number, content(number, MIB))
            assert get(store, 0) is not None
        found = store.contains([key(number) for number in range(20)], 1.0)
        assert found == [True] + [False] * 12 + [True] * 7
        for number in (0, *range(13, 20)):
            assert get(store, number) == content(number, MIB)
        assert get(store, 5) is None
        assert idle_within(store)


def test_lent_objects_are_not_evicted_from_the_hot_cache():
    extra = {"lmcache.local_cpu": True, "lmcache.max_local_cpu_size": 8 / 1024}
    with opened(extra) as store:
        for number in range(2):
            assert put(store, number, content(number, 3 * MIB))
        with store.get(key(0), 1.0) as fetched:
            for number in range(2, 12):
                put(store, number, content(number, 3 * MIB), timeout_s=0.1)
            assert bytes(fetched.data) == content(0, 3 * MIB)
        assert idle_within(store)


def test_close_does_not_free_what_somebody_reads(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_splitzip.storage.lmcache_tiers.CLOSE_S", 0.1)
    with opened({}, cache_dir=tmp_path) as store:
        assert put(store, 1, content(1, MIB))
        fetched = store.get(key(1), 5.0)
    assert bytes(fetched.data) == content(1, MIB)
    fetched.release()


@pytest.mark.parametrize("call", ["get", "put", "contains"])
def test_calls_under_way_end_when_the_store_is_closed(tmp_path, call):
    with opened(SMALL_POOL, cache_dir=tmp_path) as store:
        assert put(store, 1, content(1, 4 * MIB))
        held = [store.get(key(1), 1.0) for _ in range(2)]
        results = []
        work = {
            "get": lambda: results.append(get(store, 1, 1.0)),
            "put": lambda: results.append(put(store, 2, bytes(4 * MIB), 1.0)),
            "contains": lambda: results.append(store.contains([key(2)], 1.0)),
        }[call]
        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.1)
        threading.Timer(0.2, lambda: [each.release() for each in held]).start()
    thread.join(5.0)
    assert not thread.is_alive()
    assert results in ([None], [False], [[False]])


def test_sizes_that_are_all_different_do_not_fill_lmcaches_table_of_types(tmp_path):
    from lmcache.v1 import memory_management

    from vllm_splitzip.storage.guards import TYPES

    types = memory_management._get_cached_ubyte_array_type
    with opened({"lmcache.local_cpu": False}, cache_dir=tmp_path) as store:
        for size in range(1, TYPES + 300):
            assert put(store, size, bytes(size))
        assert types.cache_info().currsize <= TYPES + 1
        assert wait_for(lambda: idle_within(store))
