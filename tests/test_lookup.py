"""The channel between the halves: real sockets, several ranks, slow and silent ones."""

import time

import pytest

from vllm_splitzip.connector.hits import NO_HIT, Hit
from vllm_splitzip.connector.lookup import LookupClient, LookupServer

HASHES = [bytes([i]) * 32 for i in range(20)]


@pytest.fixture
def channel():
    """(function that starts a server for each `find` and returns a connected client)."""
    opened = []

    def connect(*finds, timeout_s=5.0):
        servers = [LookupServer(find) for find in finds]
        client = LookupClient(timeout_s)
        client.connect([server.endpoint for server in servers])
        opened.extend([client, *servers])
        return client

    yield connect
    for end in opened:
        end.close()


def answer(client, request_id, limit=20):
    """Ask until there is an answer, as vLLM's scheduler does step by step."""
    deadline = time.monotonic() + 20
    while (hit := client.ask(request_id, HASHES, limit)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return hit


def test_the_hashes_and_the_limit_arrive(channel):
    seen = []

    def find(hashes, limit):
        seen.append((hashes, limit))
        return Hit(7, 8)

    assert answer(channel(find), "a", 19) == Hit(7, 8)
    assert seen == [(HASHES, 19)]


def test_the_worst_health_of_all_stores_comes_with_the_answers():
    health = ["up", "up"]
    servers = [
        LookupServer(lambda hashes, limit: Hit(4, 4), lambda rank=rank: health[rank])
        for rank in range(2)
    ]
    client = LookupClient(5.0)
    client.connect([server.endpoint for server in servers])
    try:
        for health[:], worst in (
            (["up", "up"], "up"),
            (["up", "read-only"], "read-only"),
            (["down", "read-only"], "down"),
            (["up", "up"], "up"),
        ):
            assert answer(client, "a") == Hit(4, 4)
            assert client.store_health == worst
    finally:
        for end in (client, *servers):
            end.close()


def test_ranks_that_disagree_are_asked_again_for_what_all_of_them_may_have(channel):
    def first(hashes, limit):
        return Hit(min(16, limit), min(16, len(hashes)))

    def second(hashes, limit):
        # Has frames that end at 8 and at 4, and its window needs both for 8.
        return Hit(8, 8) if len(hashes) > 8 else Hit(4, 4)

    assert answer(channel(first, second), "a") == Hit(4, 4)


def test_one_rank_without_anything_means_a_miss(channel):
    assert answer(channel(lambda h, n: Hit(16, 16), lambda h, n: NO_HIT), "a") == NO_HIT


def test_a_silent_rank_means_a_miss_after_the_timeout(channel):
    def silent(hashes, limit):
        raise RuntimeError("this rank is broken")

    client = channel(lambda h, n: Hit(16, 16), silent, timeout_s=0.2)
    begin = time.monotonic()
    assert answer(client, "a") == NO_HIT
    assert 0.2 <= time.monotonic() - begin < 5
    assert client.store_health == "down"


def test_asking_never_waits_for_a_slow_store(channel):
    def slow(hashes, limit):
        time.sleep(0.5)
        return Hit(3, 3)

    client = channel(slow)
    waits = []
    while True:
        begin = time.perf_counter()
        hit = client.ask("a", HASHES, 20)
        waits.append(time.perf_counter() - begin)
        if hit is not None:
            break
        time.sleep(0.001)
    assert hit == Hit(3, 3)
    assert len(waits) > 20
    assert max(waits) < 0.3


def test_late_answers_of_a_forgotten_request_do_not_reach_another(channel):
    def slow(hashes, limit):
        time.sleep(0.1)
        return Hit(limit, limit)

    client = channel(slow)
    assert client.ask("a", HASHES, 5) is None
    client.forget("a")
    assert answer(client, "a", 9) == Hit(9, 9)
    assert answer(client, "b", 7) == Hit(7, 7)


def test_without_workers_everything_is_a_miss():
    client = LookupClient(1.0)
    assert client.ask("a", HASHES, 20) == NO_HIT
    client.close()
